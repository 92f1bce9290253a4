"""jaxcomp.value_and_grad in a jit loop: the losses of the shard_map form, and its states."""

import collections
import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import jaxcomp
from tests.helpers.autoencoder import loss, new_params, parameters
from tests.helpers.classifier import KINDS, close, grid, placed, stepped
from tests.helpers.reducers import reducer
from tests.helpers.runners import over_replicas, start
from tests.helpers.xla import users_program

P = jax.P


def batches(mesh, steps=6, size=16):
    x = np.random.default_rng(1).normal(size=(steps, size, 32)).astype(np.float32)
    return [placed(mesh, row, P("data")) for row in x]


def typed_loss(params, x):
    """Computes it beside a second axis that is Explicit: whole weights of FSDP, or a sum."""
    if jax.typeof(params["up"]).sharding.spec[0]:
        whole = {k: jax.sharding.reshard(w, P(*[None] * w.ndim)) for k, w in params.items()}
        return loss(whole, x)
    hidden = jnp.tanh(x @ params["up"] + params["bias"])
    rows = jax.typeof(x).sharding.spec[0]
    out = jnp.einsum("bi,io->bo", hidden, params["down"], out_sharding=P(rows, None))
    return jnp.mean((out - x) ** 2)


def jit_loop(value_and_grad, params, data):
    """Returns losses, parameters and the reducer's state."""
    optimizer = optax.sgd(0.3, momentum=0.9)
    state = value_and_grad.init(params)
    opt_state = optimizer.init(params)

    @jax.jit
    def step(params, opt_state, state, x):
        (value, grads), state = value_and_grad(state, params, x)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, state, value

    losses = []
    for x in data:
        params, opt_state, state, value = step(params, opt_state, state, x)
        losses.append(float(value))
    return losses, params, state


@functools.cache
def shard_map_losses(name):
    """Trains by one shard_map around the whole step, on an Auto mesh."""
    tx = optax.chain(reducer(name), optax.sgd(0.3, momentum=0.9))
    params = new_params()
    losses = []
    state, specs = start("shard_map", tx.init(params), 4)

    def step(x, state, params):
        value, grads = jaxcomp.local_value_and_grad(loss, "data")(params, x)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), jax.lax.pmean(value, "data")), state

    mapped = over_replicas("shard_map", step, 4, specs, shared=1)
    for x in batches(grid(4)):
        (params, value), state = mapped(x.reshape(4, -1, 32), state, params)
        losses.append(float(value))
    return losses


@functools.cache
def with_powersgd(replicas, kind):
    """Returns the gradient function, and a step that is compiled once for all states."""
    run = jaxcomp.value_and_grad(loss, reducer("powersgd"), mesh=grid(replicas, kind))
    return run, jax.jit(run)


@functools.cache
def trained(kind):
    """Returns parameters and PowerSGD's state after the loop, and the gradients that come next."""
    mesh = grid(4, kind)
    value_and_grad, step = with_powersgd(4, kind)
    _, params, state = jit_loop(value_and_grad, parameters(mesh), batches(mesh))
    (_, grads), _ = step(state, params, batches(mesh)[5])
    return params, state, grads


NAMES = ("powersgd", "powersgd-late", "feedback-int8", "allreduce", "batched")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "auto") for name in NAMES),
        ("powersgd-late", "explicit"),
        ("feedback-int8", "explicit"),
    ],
)
def test_losses_are_those_of_the_shard_map_form(name, kind):
    mesh = grid(4, kind)
    value_and_grad = jaxcomp.value_and_grad(loss, reducer(name), mesh=mesh)
    losses, _, _ = jit_loop(value_and_grad, parameters(mesh), batches(mesh))
    np.testing.assert_allclose(losses, shard_map_losses(name), rtol=1e-6)
    assert losses[-1] < losses[0] or name == "batched"  # too few steps for one matrix of all


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("layout", "name", "given"),
    [("tensor", "powersgd", True), ("fsdp", "powersgd", True), ("tensor", "powersgd-late", False)],
    ids=["tensor", "fsdp", "mesh of the context"],
)
def test_beside_sharded_weights_residuals_are_sharded_alike(layout, name, given, kind):
    mesh = grid(4, kind, model=2)
    fun = typed_loss if kind == "explicit" else loss
    with contextlib.nullcontext() if given else jax.set_mesh(mesh):
        run = jaxcomp.value_and_grad(fun, reducer(name), mesh=mesh if given else None)
        params = parameters(mesh, layout)
        run.init(jax.device_get(params))  # which say nothing of a mesh
        losses, after, state = jit_loop(run, params, batches(mesh))
    np.testing.assert_allclose(losses, shard_map_losses(name), rtol=1e-5)
    for name, leaf in state.residual.items():
        if name != "bias":
            assert leaf.sharding.spec[0] == "data"
            assert leaf.addressable_shards[0].data.size == params[name].size // 2
            assert after[name].sharding.is_equivalent_to(params[name].sharding, 2)


def by_axis(compiled):
    """Counts bytes in terms of an all-reduce along each axis."""
    sent = collections.Counter()
    for collective in jaxcomp.collectives(compiled):
        for name in collective.axes:
            sent[name] += collective.as_all_reduce
    return sent


# Of tensor parallelism activations cross the axis, a language model's worth of tokens; of FSDP the
# weights, whatever the batch.
@pytest.mark.parametrize(
    ("layout", "rows", "examples"),
    [("tensor", P("data"), 4 * 1024), ("fsdp", P(("data", "model")), 32)],
)
@pytest.mark.parametrize("kind", KINDS)
def test_the_other_axis_carries_at_most_a_twentieth_more_than_without_compression(
    layout, rows, examples, kind
):
    mesh = grid(4, kind, model=2)
    fun = typed_loss if kind == "explicit" else loss
    params = parameters(mesh, layout, 256)
    x = placed(mesh, np.ones((examples, 256), "f4"), rows)
    tx = jaxcomp.powersgd(4, axis_name="data", start_step=0)
    compressed = jaxcomp.value_and_grad(fun, tx, mesh=mesh)
    with jax.set_mesh(mesh):
        exact = by_axis(users_program(jax.jit(jax.value_and_grad(fun)).lower(params, x)))
        lowered = jax.jit(compressed).lower(compressed.init(params), params, x)
        ours = by_axis(users_program(lowered))
    assert 0 < ours["model"] <= 1.05 * exact["model"]
    # Half of the factors on each device of a replica, and the loss.
    assert ours["data"] <= tx.bytes(params).bytes_after / 2 + 8
    assert exact["data"] >= sum(leaf.nbytes for leaf in params.values()) / 2


@pytest.mark.parametrize("kind", KINDS)
def test_init_inside_jit_gives_the_same_state(kind):
    mesh = grid(4, kind)
    value_and_grad, _ = with_powersgd(4, kind)
    params = parameters(mesh)
    outside = value_and_grad.init(params)
    inside = jax.jit(value_and_grad.init)(params)
    jax.tree.map(np.testing.assert_array_equal, outside, inside)
    here = inside.residual["up"]
    there = outside.residual["up"]
    assert here.sharding.is_equivalent_to(there.sharding, here.ndim)


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_a_random_key_is_the_same_for_all_and_no_batch_of_two(make):
    mesh = grid(2)

    def fun(params, x, key, *, other):
        own = jax.random.fold_in(key, jax.lax.axis_index("data"))
        aux = [jax.random.bits(seed) for seed in (key, other, own)]
        return loss(params, x), aux

    tx = reducer("allreduce")
    params = parameters(mesh)
    x = batches(mesh)[0]
    value_and_grad = jaxcomp.value_and_grad(fun, tx, mesh=mesh, has_aux=True, aux="stack")
    (_, (same, by_name, own)), _ = stepped(value_and_grad, params, x, make(5), other=make(6))
    np.testing.assert_array_equal(same, [jax.random.bits(make(5))] * 2)
    np.testing.assert_array_equal(by_name, [jax.random.bits(make(6))] * 2)
    assert own[0] != own[1]


def test_several_argnums_and_batch_specs():
    mesh = grid(4)
    params = parameters(mesh)
    x = batches(mesh)[0]

    def fun(up, x, table, down):
        """Sees the whole table and this replica's columns of x."""
        return jnp.mean((x.T @ table["whole"] @ up @ down) ** 2)

    specs = (P(None, "data"), {"whole": P()})
    value_and_grad = jaxcomp.value_and_grad(
        fun, reducer("allreduce"), mesh=mesh, argnums=(0, 3), batch_specs=specs
    )
    arguments = (params["up"], x.T, {"whole": jnp.eye(32)}, params["down"])
    state = value_and_grad.init((params["up"], params["down"]))
    found, _ = jax.jit(value_and_grad)(state, *arguments)
    close(found, jax.value_and_grad(fun, argnums=(0, 3))(*jax.device_get(arguments)))


def test_a_function_may_map_over_other_axes_itself():
    """Maps as a ring attention or an expert layer does within a model-parallel group."""
    mesh = grid(2, model=4)
    params = parameters(mesh)

    def summed(x, w):
        return jax.lax.psum(x @ w, "model")

    def fun(params, x):
        inner = jax.shard_map(
            summed, in_specs=(P(None, "model"), P("model")), out_specs=P(), axis_names={"model"}
        )
        return jnp.mean(inner(x, params["up"]) ** 2)

    value_and_grad = jaxcomp.value_and_grad(fun, reducer("allreduce"), mesh=mesh)
    x = batches(mesh)[0]
    value, grads = stepped(value_and_grad, params, x)
    expected = jnp.mean((np.asarray(x) @ np.asarray(params["up"])) ** 2)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert float(jnp.abs(grads["up"]).max()) > 0


@pytest.mark.parametrize(
    ("kind", "replicas", "consolidated"),
    [("auto", 2, False), ("auto", 2, True), ("auto", 4, False), ("explicit", 2, False)],
)
def test_a_state_restores_on_any_number_of_replicas(kind, replicas, consolidated):
    """Restores the residuals of four replicas; what matters of them is their mean."""
    there = grid(replicas, kind)
    params, state, expected = trained(kind)
    saved = jax.device_get(jaxcomp.consolidate(state) if consolidated else state)
    moved = placed(there, jax.device_get(params))
    value_and_grad, step = with_powersgd(replicas, kind)
    restored = value_and_grad.restore(saved, moved)
    assert restored.residual["up"].shape == (replicas, 32, 64)
    if replicas == 4 and not consolidated:
        jax.tree.map(np.testing.assert_array_equal, restored, state)
    (_, grads), _ = step(restored, moved, batches(there)[5])
    close(grads, expected, rtol=1e-3, atol=2e-6)


def test_a_call_outside_of_jit_beside_an_explicit_axis_gives_the_same():
    mesh = grid(2, "explicit", model=2)
    params = parameters(mesh, "tensor")
    x = batches(mesh, steps=1)[0]
    run = jaxcomp.value_and_grad(typed_loss, reducer("powersgd"), mesh=mesh)
    state = run.init(params)
    (value, grads), _ = run(state, params, x)
    (expected, means), _ = jax.jit(run)(state, params, x)
    assert value == pytest.approx(float(expected), rel=1e-6)
    close(grads, means)
    assert jax.tree.map(jax.typeof, grads) == jax.tree.map(jax.typeof, means)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("wire", [None, "bfloat16", "int6"])
def test_one_replica_beside_another_axis_is_the_loop_without_replicas(kind, wire):
    """XLA refuses an all-reduce of one replica there, so that none may be in the program."""
    mesh = jax.make_mesh((1, 2), ("data", "model"), axis_types=(kind,) * 2)
    tx = jaxcomp.powersgd(2, axis_name="data", start_step=1, comm_dtype=wire)
    params = {"w": jnp.arange(128.0).reshape(8, 16) / 64, "b": jnp.ones(16)}
    x = jnp.linspace(0, 1, 32).reshape(4, 8)

    def loss(params, x):
        return jnp.mean((x @ params["w"] + params["b"]) ** 2)

    with jax.set_mesh(mesh):
        averaged = jaxcomp.value_and_grad(loss, tx, mesh=mesh)
        (value, gradients), _ = jax.jit(averaged)(averaged.init(params), params, x)
    wanted, wanted_gradients = jax.value_and_grad(loss)(params, x)
    tolerance = 1e-2 if wire == "bfloat16" else 1e-5
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradient, wanted_gradients[name], rtol=tolerance)
