"""jaxcomp.value_and_grad in a jit loop: the losses of the shard_map form, and its states."""

import collections
import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import jaxcomp
from tests.helpers.autoencoder import loss, new_params, parameters
from tests.helpers.classifier import KINDS, grid, placed, stepped
from tests.helpers.control import apart, assert_no_further
from tests.helpers.leaves import close, equal, normal
from tests.helpers.reducers import reducer
from tests.helpers.runners import over_replicas, start
from tests.helpers.xla import users_program

P = jax.P


def batches(mesh, steps=6, size=16):
    x = normal(steps, size, 32, seed=1)
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
def shard_map_losses(name, change=None):
    """Trains by one shard_map around the whole step, on an Auto mesh; `change` is of parameters."""
    tx = optax.chain(reducer(name), optax.sgd(0.3, momentum=0.9))
    params = new_params()
    if change:
        params = change(params)
    state, specs = start("shard_map", tx.init(params), 4)

    def step(x, state, params):
        value, grads = jaxcomp.local_value_and_grad(loss, "data")(params, x)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), jax.lax.pmean(value, "data")), state

    mapped = over_replicas("shard_map", step, 4, specs, shared=1)
    losses = []
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
    controls = [shard_map_losses(name, functools.partial(apart, seed=seed)) for seed in (0, 1)]
    # A loss near 1 moves by 9e-7 if one int8 value is rounded to the other side.
    level = 1e-5 if name == "feedback-int8" else 0
    assert_no_further(losses, shard_map_losses(name), *controls, level=level)
    assert losses[-1] < losses[0] or name == "batched"  # too few steps for one matrix of all


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("layout", "given"), [("tensor", False), ("fsdp", True)])
def test_beside_sharded_weights_residuals_are_sharded_alike(layout, given, kind):
    """With a mesh that is given, or that of the context."""
    mesh = grid(4, kind, model=2)
    fun = typed_loss if kind == "explicit" else loss
    params = parameters(mesh, layout)
    with contextlib.nullcontext() if given else jax.set_mesh(mesh):
        run = jaxcomp.value_and_grad(fun, reducer("powersgd-late"), mesh=mesh if given else None)
        run.init(jax.device_get(params))  # which say nothing of a mesh
        losses, after, state = jit_loop(run, params, batches(mesh))
    assert_allclose(losses, shard_map_losses("powersgd-late"), rtol=1e-5)
    for name in ("up", "down"):
        residual = state.residual[name]
        assert residual.sharding.spec[0] == "data"
        assert residual.addressable_shards[0].data.size == params[name].size // 2
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
    ("layout", "rows", "examples", "kind", "name"),
    [
        ("tensor", P("data"), 4 * 1024, "auto", "powersgd"),
        ("tensor", P("data"), 4 * 1024, "explicit", "powersgd"),
        ("fsdp", P(("data", "model")), 32, "auto", "powersgd"),
        ("fsdp", P(("data", "model")), 32, "auto", "feedback-fp16"),
    ],
)
def test_the_other_axis_carries_at_most_a_twentieth_more_than_without_compression(
    layout, rows, examples, kind, name
):
    mesh = grid(4, kind, model=2)
    fun = typed_loss if kind == "explicit" else loss
    params = parameters(mesh, layout, 256)
    x = placed(mesh, np.ones((examples, 256), "f4"), rows)
    tx = reducer(name)
    run = jaxcomp.value_and_grad(fun, tx, mesh=mesh)
    with jax.set_mesh(mesh):
        lowered_exact = jax.jit(jax.value_and_grad(fun)).lower(params, x)
        lowered = jax.jit(run).lower(run.init(params), params, x)
    exact = by_axis(users_program(lowered_exact))
    ours = by_axis(users_program(lowered))
    assert 0 < ours["model"] <= 1.05 * exact["model"]
    # Half of the factors on each device of a replica, and the loss.
    assert ours["data"] <= tx.bytes(params).bytes_after / 2 + 8
    assert exact["data"] >= sum(leaf.nbytes for leaf in params.values()) / 2


@pytest.mark.parametrize("replicas", [1, 2])
def test_arrays_of_numpy_are_enough_beside_an_explicit_axis(replicas):
    """Gets the devices from the mesh alone, whatever results are used."""
    params = new_params()
    x = normal(16, 32, seed=1)
    mesh = grid(replicas, "explicit", model=2)
    run = jaxcomp.value_and_grad(loss, reducer("allreduce"), mesh=mesh)
    expected = jax.value_and_grad(loss)(params, x)
    for part in (0, 1):
        found = jax.jit(lambda *args, part=part: run(*args)[0][part])((), params, x)
        close(found, expected[part], rtol=1e-5)


def test_an_explicit_axis_beside_an_automatic_one_is_not_gathered():
    """Moves no more than on Auto axes; jax 0.12 itself gathers what such a shard_map takes."""
    moved = {}
    for kind, fun in {"auto": loss, "explicit": typed_loss}.items():
        types = (KINDS["auto"], KINDS[kind])
        devices = jax.devices()[:4]
        mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=types, devices=devices)
        params = parameters(mesh, "tensor")
        run = jaxcomp.value_and_grad(fun, reducer("powersgd"), mesh=mesh)
        x = placed(mesh, np.ones((16, 32), "f4"), P("data"))
        moved[kind] = by_axis(users_program(jax.jit(run).lower(run.init(params), params, x)))
    assert moved["explicit"]["data"] == moved["auto"]["data"]
    # The loss states the sharding of one product more.
    assert moved["explicit"]["model"] <= 1.2 * moved["auto"]["model"]


@pytest.mark.parametrize("kind", KINDS)
def test_init_inside_jit_gives_the_same_state(kind):
    value_and_grad, _ = with_powersgd(4, kind)
    params = parameters(grid(4, kind))
    outside = value_and_grad.init(params)
    inside = jax.jit(value_and_grad.init)(params)
    equal(outside, inside)
    assert jax.tree.map(jax.typeof, outside) == jax.tree.map(jax.typeof, inside)


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_a_random_key_is_the_same_for_all_and_no_batch_of_two(make):
    def fun(params, x, key, *, other):
        own = jax.random.fold_in(key, jax.lax.axis_index("data"))
        return loss(params, x), [jax.random.bits(seed) for seed in (key, other, own)]

    run = jaxcomp.value_and_grad(fun, reducer("allreduce"), mesh=grid(2), has_aux=True, aux="stack")
    (_, aux), _ = stepped(run, new_params(), np.ones((16, 32), "f4"), make(5), other=make(6))
    same, by_name, own = aux
    assert_array_equal(same, [jax.random.bits(make(5))] * 2)
    assert_array_equal(by_name, [jax.random.bits(make(6))] * 2)
    assert own[0] != own[1]


def test_several_argnums_and_batch_specs():
    params = new_params()
    x = normal(32, 16, seed=1)

    def fun(up, x, table, down):
        """Sees the whole table and this replica's columns of x."""
        return jnp.mean((x.T @ table["whole"] @ up @ down) ** 2)

    run = jaxcomp.value_and_grad(
        fun,
        reducer("allreduce"),
        mesh=grid(4),
        argnums=(0, 3),
        batch_specs=(P(None, "data"), {"whole": P()}),
    )
    arguments = (params["up"], x, {"whole": jnp.eye(32)}, params["down"])
    found, _ = jax.jit(run)(run.init((params["up"], params["down"])), *arguments)
    close(found, jax.value_and_grad(fun, argnums=(0, 3))(*arguments))


def test_a_function_may_map_over_other_axes_itself():
    """Maps as a ring attention or an expert layer does within a model-parallel group."""
    x = np.ones((8, 32), np.float32)

    def summed(x, w):
        return jax.lax.psum(x @ w, "model")

    def fun(w, x):
        specs = (P(None, "model"), P("model"))
        inner = jax.shard_map(summed, in_specs=specs, out_specs=P(), axis_names={"model"})
        return jnp.mean(inner(x, w) ** 2)

    run = jaxcomp.value_and_grad(fun, reducer("allreduce"), mesh=grid(2, model=4))
    up = new_params()["up"]
    expected = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(up)
    close(stepped(run, up, x), expected)


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
        equal(restored, state)
    (_, grads), _ = step(restored, moved, batches(there)[5])
    close(grads, expected, rtol=1e-3, atol=2e-6)


def test_a_call_outside_of_jit_beside_an_explicit_axis_gives_the_same():
    mesh = grid(2, "explicit", model=2)
    params = parameters(mesh, "tensor")
    run = jaxcomp.value_and_grad(typed_loss, reducer("powersgd"), mesh=mesh)
    arguments = (run.init(params), params, batches(mesh, steps=1)[0])
    found, _ = run(*arguments)
    expected, _ = jax.jit(run)(*arguments)
    close(found, expected)
    assert jax.tree.map(jax.typeof, found) == jax.tree.map(jax.typeof, expected)
