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
from tests.helpers.runners import MAPPINGS, over_replicas, start

P = jax.P


@pytest.mark.parametrize("replicas", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_auxiliary_outputs_are_those_of_the_loop_without_replicas(replicas, kind):
    mesh, params, data = grid(replicas, kind), new_params(), batch()
    expected = jax.value_and_grad(loss_fn, has_aux=True)(params, *data)
    run = jaxcomp.value_and_grad(loss_fn, reducer("allreduce"), mesh=mesh, has_aux=True, aux=AUX)
    found = stepped(run, placed(mesh, params), *placed(mesh, data, P("data")))
    close(found, expected)
    assert found[0][1]["hits"].dtype == jnp.bool_


def test_value_auxiliary_and_gradients_may_also_come_as_three():
    mesh, params, data = grid(2), new_params(), batch()
    pair = jax.value_and_grad(loss_fn, has_aux=True)

    def three(params, *data):
        (value, aux), grads = pair(params, *data)
        return value, aux, grads

    def outputs(grad_fn):
        run = jaxcomp.data_parallel(grad_fn, reducer("allreduce"), mesh=mesh, aux=AUX)
        return stepped(run, params, *data)

    close(outputs(pair), outputs(three))


@pytest.mark.parametrize(
    ("weighted", "kind"),
    [("mask", "auto"), ("counts", "auto"), ("replicas", "auto"), ("mask", "explicit")],
)
def test_weights_may_be_a_mask_or_counts_of_the_batch(weighted, kind):
    """Equal to one process with the examples that there are, as in the last batch of an epoch."""
    mesh, (x, y) = grid(4, kind), batch()
    params = placed(mesh, new_params())
    mask = np.random.default_rng(3).integers(0, 2, size=y.shape)
    mask[:4] = 0  # the first replica sits out
    mask = mask.astype(np.float32)

    def fun(params, x, y, mask):
        losses = optax.softmax_cross_entropy_with_integer_labels(
            jnp.tanh(x @ params["up"]) @ params["down"], y
        )
        mean = (losses * mask).sum() / jnp.maximum(mask.sum(), 1)
        return mean, {"loss": mean}

    weight = {"mask": mask, "counts": mask.sum(1), "replicas": mask.reshape(4, -1).sum(1)}
    run = jaxcomp.value_and_grad(fun, reducer("allreduce"), mesh=mesh, has_aux=True, aux="mean")
    found = stepped(run, params, x, y, mask, weight=weight[weighted])
    close(found, jax.value_and_grad(fun, has_aux=True)(new_params(), x, y, mask))
    with pytest.raises(ValueError, match=r"must have shape \(4,\), .* or 16 along axis 0 as the b"):
        stepped(run, params, x, y, mask, weight=np.ones(7))


@pytest.mark.parametrize("known", ["explicit", "outside of jit", "batch_specs"])
def test_a_batch_is_split_as_its_sharding_says(known):
    mesh = grid(4, "explicit" if known == "explicit" else "auto")
    params, (x, y) = placed(mesh, new_params()), batch()
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
    mesh, params = grid(2), {"w": jnp.ones(2)}
    fun = lambda p, x, y: jnp.mean((p["w"] * x).sum(-1) * y.astype(jnp.float32))  # noqa: E731
    x, y = np.ones((2, 2), np.float32), np.array([1, 3], np.uint32)
    make = functools.partial(jaxcomp.value_and_grad, reducer=reducer("allreduce"), mesh=mesh)
    with pytest.raises(ValueError, match=r"argument 2 is uint32 of shape \(2,\): a key of .*, or"):
        stepped(make(fun), params, x, y)
    told = stepped(make(fun, batch_specs=P("data")), params, x, y)
    close(told, jax.value_and_grad(fun)(params, x, y))
    # With four examples two numbers can only be a key.
    four = np.ones((4, 2), np.float32)
    key = lambda p, x, key: jnp.mean(p["w"] * x) * key[0].astype(jnp.float32)  # noqa: E731
    close(stepped(make(key), params, four, y), jax.value_and_grad(key)(params, four, y))


def accumulated(params, x, y, steps=4):
    """Mean gradients of micro-batches, one after the other."""

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
    """Compares with the mean over the replicas of what each makes of its part."""
    mesh, params, data = grid(4, kind), new_params(), batch()
    each = [grad_fn(params, *(a[i : i + 4] for a in data)) for i in range(0, 16, 4)]
    expected = jax.tree.map(lambda *xs: sum(xs) / 4, *each)
    run = jaxcomp.data_parallel(grad_fn, reducer("allreduce"), mesh=mesh)
    found = stepped(run, placed(mesh, params), *placed(mesh, data, P("data")))
    close(found, expected, rtol=1e-4)


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_inside_a_mapped_function_it_needs_no_mesh(mapping):
    params, data, tx = new_params(), batch(), reducer("powersgd")
    run = jaxcomp.value_and_grad(loss_fn, tx, has_aux=True, aux=AUX)
    outside = jaxcomp.value_and_grad(loss_fn, tx, has_aux=True, aux=AUX, mesh=grid(4))
    expected, after = jax.jit(outside)(outside.init(params), params, *data)

    def step(rows, state):
        ((value, aux), grads), state = run(state, params, *rows)
        return ((value, grads), aux["logits"]), state

    rows = jax.tree.map(lambda a: a.reshape(4, 4, *a.shape[1:]), data)
    state, specs = start(mapping, tx.init(params), 4)
    mapped = over_replicas(mapping, step, 4, specs, out=(P(), P("data")))
    (found, logits), state = mapped(rows, state)
    close(np.reshape(logits, (16, LENGTH, CLASSES)), expected[0][1]["logits"])
    # What is whole vmap and pmap leave for each replica, the same for all.
    wanted = (expected[0][0], expected[1]), after
    each = jax.tree.map(lambda x, y: np.broadcast_to(y, np.shape(x)), (found, state), wanted)
    close((found, state), each if mapping != "shard_map" else wanted)


def test_accumulation_takes_the_memory_of_a_scan_written_by_hand():
    """Sixteen micro-batches: temporary memory at most 1.2 times, flops equal."""
    mesh, wide = grid(4), 1024
    params = placed(
        mesh, {"up": np.ones((WIDTH, wide), "f4"), "down": np.ones((wide, CLASSES), "f4")}
    )
    data = placed(mesh, batch(size=16 * 4 * 4), P("data"))
    grad_fn = functools.partial(accumulated, steps=16)
    run = jaxcomp.data_parallel(grad_fn, reducer("powersgd"), mesh=mesh)
    state = run.init(params)
    specs = jaxcomp.state_specs(state, "data")

    def by_hand(state, params, *data):
        value, grads = grad_fn(jaxcomp.as_local(params, "data"), *data)
        grads, state = reducer("powersgd").update(grads, state)
        return (jax.lax.pmean(value, "data"), grads), state

    hand = jax.shard_map(
        by_hand, mesh=mesh, in_specs=(specs, P(), P("data"), P("data")), out_specs=(P(), specs)
    )
    ours, theirs = (
        jax.jit(f, donate_argnums=0).lower(state, params, *data).compile() for f in (run, hand)
    )
    temporary = [c.memory_analysis().temp_size_in_bytes for c in (ours, theirs)]
    assert temporary[0] <= 1.2 * temporary[1]
    assert ours.cost_analysis()["flops"] <= 1.001 * theirs.cost_analysis()["flops"]


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
    boxed = lambda *names: {"blocks": [nn.Partitioned(layers["kernel"], names)]}  # noqa: E731
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


def chain_of(rank):
    slow = jaxcomp.powersgd(rank, axis_name="slow", start_step=0, min_compression_rate=0.1)
    return optax.chain(jaxcomp.allreduce(axis_name="fast"), slow)


@pytest.mark.parametrize("context", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_an_exact_average_within_hosts_and_a_compressed_one_between_them(kind, context):
    """As two replicas of twice the batch each; there is one residual for each host."""
    mesh, params, x = two_level(kind)
    given = None if context else mesh
    with jax.set_mesh(mesh) if context else contextlib.nullcontext():
        run = jaxcomp.value_and_grad(squares, chain_of(2), mesh=given, axis_name=("slow", "fast"))
        step = jax.jit(run)
        state = run.init(params)
        assert state[1].residual["w"].shape == (2, 24, 16)
        for _ in range(3):
            found, state = step(state, params, x)
        found = jax.device_get(found)
        restored = run.restore(jax.device_get(jaxcomp.consolidate(state)), params)
        there, here = restored[1].residual["w"], state[1].residual["w"]
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
    """At full rank the weighted mean of all eight replicas."""
    mesh, params, x = two_level(kind)
    run = jaxcomp.value_and_grad(squares, chain_of(16), mesh=mesh, axis_name=("slow", "fast"))
    weight = np.arange(8.0, dtype=np.float32)
    (_, grads), _ = jax.jit(lambda s: run(s, params, x, weight=weight))(run.init(params))
    each = jax.vmap(jax.grad(squares), (None, 0))(params, x.reshape(8, 4, 24))
    expected = np.average(each["w"], axis=0, weights=weight)
    close(jax.device_get(grads["w"]), expected, rtol=1e-4, atol=1e-5)


def test_a_chain_of_two_levels_accumulates_behind_the_exact_one():
    mesh, params, x = two_level("auto")
    exact, slow = jaxcomp.allreduce(axis_name="fast"), jaxcomp.powersgd(2, axis_name="slow")
    make = functools.partial(jaxcomp.value_and_grad, squares, mesh=mesh, axis_name=("slow", "fast"))
    around = make(jaxcomp.accumulate(optax.chain(exact, slow), 2))
    with pytest.raises(ValueError, match="Average along the fast axis before what accumulates"):
        around.init(params)
    run = make(optax.chain(exact, jaxcomp.accumulate(slow, 2)))
    state = run.init(params)
    assert state[1].acc_grads["w"].shape == (2, 24, 16)
    (_, first), state = jax.jit(run)(state, params, x)
    (_, second), state = jax.jit(run)(state, params, x)
    assert not np.any(first["w"])
    close(second["w"], jax.grad(squares)(params, x)["w"], rtol=1e-4)


def test_chains_that_compress_before_they_have_averaged_are_refused():
    mesh, params, _ = two_level("auto")
    fast = jaxcomp.error_feedback(jaxcomp.quantized_allreduce(axis_name="fast"))
    slow = jaxcomp.powersgd(2, axis_name="slow", start_step=0)
    for links in (fast, slow), (slow, jaxcomp.allreduce(axis_name="fast")):
        run = jaxcomp.value_and_grad(
            squares, optax.chain(*links), mesh=mesh, axis_name=("slow", "fast")
        )
        with pytest.raises(ValueError, match="Average exactly along the fast axis first"):
            run.init(params)
