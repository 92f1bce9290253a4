"""jaxcomp.data_parallel: any gradient function; auxiliary outputs as in a loop without it."""

import contextlib
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomp
from tests.helpers.classifier import (
    AUX,
    CLASSES,
    KINDS,
    LENGTH,
    WIDTH,
    bare_loss,
    batch,
    close,
    grid,
    loss_fn,
    new_params,
    placed,
    stepped,
)
from tests.helpers.leaves import by_layer
from tests.helpers.reducers import powersgd, reducer
from tests.helpers.runners import MAPPINGS, over_replicas, sharded, start

P = jax.P
PARAMS = new_params()
DATA = batch()


@pytest.mark.parametrize("replicas", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_auxiliary_outputs_are_those_of_the_loop_without_replicas(replicas, kind):
    mesh = grid(replicas, kind)
    expected = jax.value_and_grad(loss_fn, has_aux=True)(PARAMS, *DATA)
    run = jaxcomp.value_and_grad(loss_fn, reducer("allreduce"), mesh=mesh, has_aux=True, aux=AUX)
    found = stepped(run, placed(mesh, PARAMS), *placed(mesh, DATA, P("data")))
    close(found, expected)
    assert found[0][1]["hits"].dtype == jnp.bool_


def test_value_auxiliary_and_gradients_may_also_come_as_three():
    mesh = grid(2)
    pair = jax.value_and_grad(loss_fn, has_aux=True)

    def three(params, *data):
        (value, aux), grads = pair(params, *data)
        return value, aux, grads

    run = jaxcomp.data_parallel(three, reducer("allreduce"), mesh=mesh, aux=AUX)
    close(stepped(run, PARAMS, *DATA), pair(PARAMS, *DATA))


@pytest.mark.parametrize(
    ("weighted", "kind"),
    [("mask", "auto"), ("counts", "auto"), ("replicas", "auto"), ("mask", "explicit")],
)
def test_weights_may_be_a_mask_or_counts_of_the_batch(weighted, kind):
    """Equals one process with the examples that there are, as in the last batch of an epoch."""
    mesh = grid(4, kind)
    x, y = DATA
    params = placed(mesh, PARAMS)
    mask = np.random.default_rng(3).integers(0, 2, size=y.shape)
    mask[:4] = 0  # the first replica sits out
    mask = mask.astype(np.float32)

    def fun(params, x, y, mask):
        losses = loss_fn(params, x, y)[1]["time_first"].T
        mean = (losses * mask).sum() / jnp.maximum(mask.sum(), 1)
        return mean, {"loss": mean}

    weight = {"mask": mask, "counts": mask.sum(1), "replicas": mask.reshape(4, -1).sum(1)}
    run = jaxcomp.value_and_grad(fun, reducer("allreduce"), mesh=mesh, has_aux=True, aux="mean")
    found = stepped(run, params, x, y, mask, weight=weight[weighted])
    close(found, jax.value_and_grad(fun, has_aux=True)(PARAMS, x, y, mask))
    with pytest.raises(ValueError, match=r"must have shape \(4,\), .* or 16 along axis 0 as the b"):
        stepped(run, params, x, y, mask, weight=np.ones(7))


@pytest.mark.parametrize("known", ["explicit", "outside of jit", "batch_specs"])
def test_a_batch_is_split_as_its_sharding_says(known):
    mesh = grid(4, "explicit" if known == "explicit" else "auto")
    params = placed(mesh, PARAMS)
    x, y = DATA
    x, y = (placed(mesh, jnp.swapaxes(a, 0, 1), P(None, "data")) for a in (x, y))
    specs = P(None, "data") if known == "batch_specs" else None
    # Time lies first, and "flat" has the rows of one time after the other: of no one axis.
    aux = {**AUX, "logits": 1, "hits": 1, "time_first": 0, "flat": "stack", "per_example": "stack"}
    run = jaxcomp.value_and_grad(
        jax.jit(loss_fn), reducer("allreduce"), mesh=mesh, has_aux=True, batch_specs=specs, aux=aux
    )
    step = run if known == "outside of jit" else jax.jit(run)
    mask = np.ones((LENGTH, 16))
    found, _ = step(run.init(params), params, x, y, weight=mask)
    arguments = jax.device_get((params, x, y))
    (value, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(*arguments)
    close((found[0][0], found[1]), (value, grads))
    for name in ("logits", "hits", "time_first", "statistics"):
        close(found[0][1][name], aux[name])


def test_two_labels_are_not_taken_for_a_key():
    mesh = grid(2)
    params = {"w": jnp.ones(2)}

    def fun(p, x, y):
        return jnp.mean((p["w"] * x).sum(-1) * y.astype(jnp.float32))

    x = np.ones((2, 2), np.float32)
    y = np.array([1, 3], np.uint32)
    make = functools.partial(jaxcomp.value_and_grad, reducer=reducer("allreduce"), mesh=mesh)
    with pytest.raises(ValueError, match=r"argument 2 is uint32 of shape \(2,\): a key of .*, or"):
        stepped(make(fun), params, x, y)
    told = stepped(make(fun, batch_specs=P("data")), params, x, y)
    close(told, jax.value_and_grad(fun)(params, x, y))
    # With four examples two numbers can only be a key.
    four = np.ones((4, 2), np.float32)

    def key(p, x, key):
        return jnp.mean(p["w"] * x) * key[0].astype(jnp.float32)

    close(stepped(make(key), params, four, y), jax.value_and_grad(key)(params, four, y))


def accumulated(params, x, y, steps=4):
    """Averages gradients of micro-batches, one after the other."""

    def one(carry, batch):
        return jax.tree.map(jnp.add, carry, jax.value_and_grad(bare_loss)(params, *batch)), None

    parts = jax.tree.map(lambda a: a.reshape(steps, -1, *a.shape[1:]), (x, y))
    zeros = jax.tree.map(jnp.zeros_like, params)
    start = (jnp.zeros_like(x.ravel()[0]), zeros)
    total, _ = jax.lax.scan(one, start, parts)
    return jax.tree.map(lambda t: t / steps, total)


def clipped(params, x, y):
    one = jax.value_and_grad(lambda p, x, y: bare_loss(p, x[None], y[None]))
    values, grads = jax.vmap(one, (None, 0, 0))(params, x, y)
    return values.mean(), jax.tree.map(lambda g: g.clip(-0.01, 0.01).mean(0), grads)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("grad_fn", [accumulated, clipped])
def test_any_gradient_function(grad_fn, kind):
    """Averages over the replicas what each makes of its part."""
    mesh = grid(4, kind)
    rows = jax.tree.map(lambda a: a.reshape(4, 4, *a.shape[1:]), DATA)
    each = jax.vmap(grad_fn, (None, 0, 0))(PARAMS, *rows)
    expected = jax.tree.map(lambda x: x.mean(0), each)
    run = jaxcomp.data_parallel(grad_fn, reducer("allreduce"), mesh=mesh)
    found = stepped(run, placed(mesh, PARAMS), *placed(mesh, DATA, P("data")))
    close(found, expected, rtol=1e-4)


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_inside_a_mapped_function_it_needs_no_mesh(mapping):
    tx = reducer("powersgd")
    run = jaxcomp.value_and_grad(loss_fn, tx, has_aux=True, aux=AUX)
    outside = jaxcomp.value_and_grad(loss_fn, tx, has_aux=True, aux=AUX, mesh=grid(4))
    expected, after = jax.jit(outside)(outside.init(PARAMS), PARAMS, *DATA)

    def step(rows, state):
        ((value, aux), grads), state = run(state, PARAMS, *rows)
        return ((value, grads), aux["logits"]), state

    rows = jax.tree.map(lambda a: a.reshape(4, 4, *a.shape[1:]), DATA)
    state, specs = start(mapping, tx.init(PARAMS), 4)
    mapped = over_replicas(mapping, step, 4, specs, out=(P(), P("data")))
    (found, logits), state = mapped(rows, state)
    close(np.reshape(logits, (16, LENGTH, CLASSES)), expected[0][1]["logits"])
    # What is whole vmap and pmap leave for each replica, the same for all.
    wanted = (expected[0][0], expected[1]), after
    each = jax.tree.map(lambda x, y: np.broadcast_to(y, np.shape(x)), (found, state), wanted)
    close((found, state), each if mapping != "shard_map" else wanted)


def test_accumulation_takes_the_memory_of_a_scan_written_by_hand():
    """Takes for sixteen micro-batches at most 1.2 times the temporary memory, and equal flops."""
    mesh = grid(4)
    wide = {"up": np.ones((WIDTH, 1024), "f4"), "down": np.ones((1024, CLASSES), "f4")}
    params = placed(mesh, wide)
    data = placed(mesh, batch(size=16 * 4 * 4), P("data"))
    grad_fn = functools.partial(accumulated, steps=16)
    run = jaxcomp.data_parallel(grad_fn, reducer("powersgd"), mesh=mesh)
    state = run.init(params)
    specs = jaxcomp.state_specs(state, "data")

    def by_hand(state, params, *data):
        value, grads = grad_fn(jaxcomp.as_local(params, "data"), *data)
        grads, state = reducer("powersgd").update(grads, state)
        return (jax.lax.pmean(value, "data"), grads), state

    def cost(step):
        program = jax.jit(step, donate_argnums=0).lower(state, params, *data).compile()
        return program.memory_analysis().temp_size_in_bytes, program.cost_analysis()["flops"]

    memory, flops = cost(run)
    hand_memory, hand_flops = cost(
        sharded(mesh, by_hand, (specs, P(), P("data"), P("data")), (P(), specs))
    )
    assert memory <= 1.2 * hand_memory
    assert flops <= 1.001 * hand_flops


def test_stacked_layers_are_noticed_once_with_the_line_to_write():
    mesh = grid(2)
    layers = {"kernel": jnp.zeros((6, 32, 32)), "bias": jnp.zeros((6, 32))}
    run = jaxcomp.data_parallel(accumulated, reducer("powersgd"), mesh=mesh)
    with pytest.warns(UserWarning, match=r"matrix_dims=jaxcomp\.stacked\('blocks'\)") as found:
        run.init({"blocks": layers, "head": jnp.zeros((32, 8))})
    assert len(found) == 1
    # One layer's leaves, and a stack that is compressed layer by layer, are nothing to notice.
    run.init({"dense": {"kernel": jnp.zeros((32, 32)), "bias": jnp.zeros(32)}})
    layer_by_layer = powersgd(2, matrix_dims=by_layer)
    jaxcomp.data_parallel(accumulated, layer_by_layer, mesh=mesh).init({"blocks": layers})

    # Without norms or biases the shapes alone do not tell, but flax's metadata may.
    def boxed(*names):
        return {"blocks": [nn.Partitioned(layers["kernel"], names)]}

    with pytest.warns(UserWarning, match=r"of 6, called 'layers', .*jaxcomp\.stacked\('blocks'\)"):
        run.init(boxed("layers", "embed", "mlp"))
    run.init(boxed("experts", "embed", "mlp"))


def test_stacked_layers_too_thin_to_compress_are_named():
    thin = powersgd(2, matrix_dims=jaxcomp.stacked("blocks"), min_compression_rate=2)
    params = {"blocks": {"kernel": jnp.zeros((64, 64, 2)), "bias": jnp.zeros((64, 2))}}
    with pytest.warns(UserWarning, match=r"nothing of \['blocks'\]\['kernel'\] of shape \(64, 64"):
        jaxcomp.data_parallel(accumulated, thin, mesh=grid(2)).init(params)


def two_level(kind):
    """Makes a mesh of two hosts with four devices each, and parameters and examples."""
    mesh = jax.make_mesh((2, 4), ("slow", "fast"), axis_types=(KINDS[kind],) * 2)
    rng = np.random.default_rng(5)
    params = {"w": rng.normal(size=(24, 16)).astype(np.float32)}
    return mesh, params, rng.normal(size=(32, 24)).astype(np.float32)


def squares(params, x):
    return jnp.mean((x @ params["w"]) ** 2)


EXACT = jaxcomp.allreduce(axis_name="fast")


def slow_powersgd(rank):
    return jaxcomp.powersgd(rank, axis_name="slow", start_step=0, min_compression_rate=0.1)


def on_two_levels(mesh, *links):
    chain = optax.chain(*links)
    return jaxcomp.value_and_grad(squares, chain, mesh=mesh, axis_name=("slow", "fast"))


@pytest.mark.parametrize("context", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_an_exact_average_within_hosts_and_a_compressed_one_between_them(kind, context):
    """Equals two replicas of twice the batch each; there is one residual for each host."""
    mesh, params, x = two_level(kind)
    with jax.set_mesh(mesh) if context else contextlib.nullcontext():
        run = on_two_levels(None if context else mesh, EXACT, slow_powersgd(2))
        step = jax.jit(run)
        state = run.init(params)
        assert state[1].residual["w"].shape == (2, 24, 16)
        for _ in range(3):
            found, state = step(state, params, x)
        found = jax.device_get(found)
        restored = run.restore(jax.device_get(jaxcomp.consolidate(state)), params)
        there = restored[1].residual["w"]
        here = state[1].residual["w"]
        assert there.sharding.is_equivalent_to(here.sharding, here.ndim)
    hosts = jaxcomp.powersgd(2, axis_name="data", start_step=0, min_compression_rate=0.1)
    other = jaxcomp.value_and_grad(squares, hosts, mesh=grid(2))
    after = other.init(params)
    for _ in range(3):
        expected, after = jax.jit(other)(after, params, x)
    close(found, jax.device_get(expected), rtol=1e-4, atol=1e-5)
    close(jax.device_get(state[1].residual), jax.device_get(after.residual), atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_chain_of_two_levels_weighs_along_both(kind):
    """Gives at full rank the weighted mean of all eight replicas."""
    mesh, params, x = two_level(kind)
    run = on_two_levels(mesh, EXACT, slow_powersgd(16))
    weight = np.arange(8.0, dtype=np.float32)
    (_, grads), _ = jax.jit(lambda s: run(s, params, x, weight=weight))(run.init(params))
    each = jax.vmap(jax.grad(squares), (None, 0))(params, x.reshape(8, 4, 24))
    expected = np.average(each["w"], axis=0, weights=weight)
    close(jax.device_get(grads["w"]), expected, rtol=1e-4, atol=1e-5)


def test_a_chain_of_two_levels_accumulates_behind_the_exact_one():
    mesh, params, x = two_level("auto")
    slow = jaxcomp.powersgd(2, axis_name="slow")
    around = on_two_levels(mesh, jaxcomp.accumulate(optax.chain(EXACT, slow), 2))
    with pytest.raises(ValueError, match="or accumulate, along the slow one behind it"):
        around.init(params)
    run = on_two_levels(mesh, EXACT, jaxcomp.accumulate(slow, 2))
    state = run.init(params)
    assert state[1].acc_grads["w"].shape == (2, 24, 16)
    (_, first), state = jax.jit(run)(state, params, x)
    (_, second), state = jax.jit(run)(state, params, x)
    assert not np.any(first["w"])
    close(second["w"], jax.grad(squares)(params, x)["w"], rtol=1e-4)


def test_chains_that_compress_before_they_have_averaged_are_refused():
    mesh, params, _ = two_level("auto")
    fast = jaxcomp.error_feedback(jaxcomp.quantized_allreduce(axis_name="fast"))
    slow = slow_powersgd(2)
    for links in ((fast, slow), (slow, EXACT)):
        with pytest.raises(ValueError, match="Average exactly along the fast axis first"):
            on_two_levels(mesh, *links).init(params)
