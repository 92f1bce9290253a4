"""``weight=``: replicas that do not count the same, for every reducer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hlo import collectives, text
from leaves import random_grads, zeros
from rounding import rounding
from runners import AXIS, mesh_of

import jaxcomp

WEIGHTS = np.array([3, 1, 0, 2], np.float32)
# Square, so that one side of rank 8 says all: also the first of two steps of ACP-SGD is exact.
SHAPES = {"w": (8, 8), "bias": (5,)}
FULL = {"rank": 8, "axis_name": AXIS, "start_step": 0, "min_compression_rate": 0.0}
EXACT = {
    "allreduce": jaxcomp.allreduce(axis_name=AXIS),
    "powersgd": jaxcomp.powersgd(**FULL),
    "powersgd-before-start": jaxcomp.powersgd(**FULL | {"start_step": 9}),
    "acp-sgd": jaxcomp.acp_sgd(**FULL),
    "batched": jaxcomp.batched_powersgd(9, axis_name=AXIS, start_step=0),
    "feedback": jaxcomp.error_feedback(jaxcomp.allreduce(axis_name=AXIS)),
}
ROUNDED = {  # with what part of the largest value a value may be off
    "bfloat16": (jaxcomp.allreduce(axis_name=AXIS, comm_dtype=jnp.bfloat16), 2**-7),
    "float16": (jaxcomp.allreduce(axis_name=AXIS, comm_dtype="float16"), 2**-10),
    "powersgd-bfloat16": (jaxcomp.powersgd(**FULL, comm_dtype=jnp.bfloat16), 2**-6),
    "powersgd-int8": (jaxcomp.powersgd(**FULL, comm_dtype=jnp.int8), 3 / 127),
    "int8": (jaxcomp.quantized_allreduce(axis_name=AXIS), 3 / 127),
    "feedback-int8": (
        jaxcomp.error_feedback(jaxcomp.quantized_allreduce(axis_name=AXIS)),
        3 / 127,
    ),
}
LOW = FULL | {"rank": 2}
LOSSY = {
    "low-rank": jaxcomp.powersgd(**LOW),
    "low-rank-acp": jaxcomp.acp_sgd(**LOW),
    "low-rank-int8": jaxcomp.powersgd(**LOW, comm_dtype=jnp.int8),
    "feedback-low-rank": jaxcomp.error_feedback(jaxcomp.powersgd(**LOW, error_feedback=False)),
    "feedback-every": jaxcomp.error_feedback(jaxcomp.quantized_allreduce(axis_name=AXIS), every=3),
    "low-rank-cold": jaxcomp.powersgd(**LOW, warm_start=False),
}
LINEAR = EXACT | {name: tx for name, (tx, _) in ROUNDED.items()}
ALL = LINEAR | LOSSY


def gradients(seed=0):
    """Of four replicas, one step: ``(4, *shape)``."""
    return {name: x[:, 0] for name, x in random_grads(SHAPES, 4, 1, seed=seed).items()}


def weighted_means(grads, weights=WEIGHTS):
    return {name: np.average(x, axis=0, weights=weights) for name, x in grads.items()}


@functools.cache
def step_of(name, weighed=True):
    """One compiled update of four replicas; what leaves it without an axis is the same on all."""
    tx = ALL[name]
    axes = jaxcomp.state_axes(tx.init(zeros(SHAPES)))

    def step(grads, weight, state):
        return tx.update(grads, state, **({"weight": weight} if weighed else {}))

    mapped = jax.vmap(step, in_axes=(0, 0, axes), out_axes=(None, axes), axis_name=AXIS)
    return jax.jit(mapped)


def start(name):
    return jaxcomp.stack_replicas(ALL[name].init(zeros(SHAPES)), 4)


@pytest.mark.parametrize("name", LINEAR)
def test_a_step_equals_one_process_with_those_examples(name):
    grads, tolerance = gradients(), ROUNDED.get(name, (None, 1e-6))[1]
    exact = weighted_means(grads)
    grads["w"][2], grads["bias"][2] = np.nan, np.inf  # who sits out may hold anything
    outputs, state = step_of(name)(grads, WEIGHTS, start(name))
    for leaf, mean in exact.items():
        assert np.abs(np.asarray(outputs[leaf]) - mean).max() < tolerance * np.abs(mean).max()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(jax.device_get(state)))


@pytest.mark.parametrize("name", ["bfloat16", "low-rank", "powersgd-int8", "feedback-int8"])
def test_equal_weights_change_nothing_but_rounding(name):
    """Whatever they are. Right factors may have another length, of which nothing depends."""
    for weight in (1.0, 512.0):
        plain = same = start(name)
        for seed in range(4):
            grads = gradients(seed)
            expected, plain = step_of(name, weighed=False)(grads, WEIGHTS, plain)
            found, same = step_of(name)(grads, np.full(4, weight, np.float32), same)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), found, expected)


WITHOUT_A_MEAN = [(0, 0, 0, 0), (1, -1, 1, 1), (1, np.nan, 1, 1)]
WITHOUT_A_MEAN += [(2e38, 2e38, 1, 1), (1e-38, 1e-38, 1e-38, 1e-38)]


@pytest.mark.parametrize("name", ALL)
def test_weights_without_a_mean_leave_no_trace(name):
    grads = gradients()
    _, state = step_of(name)(grads, WEIGHTS, start(name))
    for weights in WITHOUT_A_MEAN:
        outputs, after = step_of(name)(grads, np.array(weights, np.float32), state)
        assert all(np.isnan(x).all() for x in jax.tree.leaves(jax.device_get(outputs)))
        jax.tree.map(np.testing.assert_array_equal, after, state)


@pytest.mark.parametrize("name", [*LOSSY, "feedback-int8"])
def test_whatever_the_weights_become_nothing_is_lost(name):
    """Outputs and the mean residual, which a checkpoint keeps, add up to what went in."""
    state, step, rng = start(name), step_of(name), np.random.default_rng(0)
    went_in = came_out = np.zeros(SHAPES["w"])
    for seed in range(30):
        grads, weights = gradients(seed), np.float32(rng.integers(1, 2001, 4))
        weights[rng.integers(4)] = rng.choice([0, 1, 2000])
        went_in = went_in + weighted_means(grads, weights)["w"]
        grads["w"][weights == 0] = np.nan
        output, state = step(grads, weights, state)
        came_out = came_out + np.asarray(output["w"], np.float64)
    left = np.asarray(state.residual["w"], np.float64).mean(0)
    assert np.linalg.norm(came_out + left - went_in) < 1e-6 * np.linalg.norm(went_in)
    # And it stays bounded: a few steps' worth of what rank 2 of 8 does not hold.
    assert np.linalg.norm(left) < np.linalg.norm(went_in)


CHANGING = [(3, 1, 0, 2), (3, 1, 0, 2), (1, 3, 2, 0), (0, 0, 5, 1), (9, 1, 1, 1), (1, 1, 1, 7)]


def test_every_step_is_exact_at_full_rank_whatever_the_weights_become():
    """After a checkpoint too, and where residuals cancel in the mean without being zero."""
    shapes = {"wide": (8, 18), "tall": (24, 16), "cube": (8, 6, 3), "bias": (5,)}
    tx = jaxcomp.powersgd(**FULL | {"rank": 24})
    axes = jaxcomp.state_axes(tx.init(zeros(shapes)))
    update = lambda g, w, s: tx.update(g, s, weight=w)  # noqa: E731
    step = jax.jit(jax.vmap(update, (0, 0, axes), (None, axes), axis_name=AXIS))
    state = jaxcomp.stack_replicas(tx.init(zeros(shapes)), 4)
    everything = random_grads(shapes, 4, len(CHANGING), seed=1)
    heaviest = max(max(weights) / np.mean(weights) for weights in CHANGING)
    for i, weights in enumerate(CHANGING):
        grads = {name: np.array(x[:, i]) for name, x in everything.items()}
        exact = weighted_means(grads, weights)
        for x in grads.values():
            x[np.equal(weights, 0)] = np.nan
        outputs, state = step(grads, np.array(weights, np.float32), state)
        for leaf, mean in exact.items():
            # The mean, the products with the two factors of 24 rows, and theirs of 18 columns.
            allowed = rounding(4, 24, 24, 18, largest=heaviest * everything[leaf])
            np.testing.assert_allclose(outputs[leaf], mean, rtol=0, atol=allowed)
        if i == 2:
            state = jaxcomp.stack_replicas(jaxcomp.consolidate(state), 4)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_no_wire_rounds_a_weight(dtype):
    tx = jaxcomp.allreduce(axis_name=AXIS, comm_dtype=dtype)
    weights = np.array([257, 1, 1e-3, 4095], np.float32)  # too long for the significand of either
    step = lambda g, w: tx.update(g, tx.init(g), weight=w)[0]  # noqa: E731
    means = jax.vmap(step, axis_name=AXIS)(jnp.ones((4, 3)), weights)
    # Each product is rounded by half a unit at most, and the sum of the weights not at all.
    np.testing.assert_allclose(means, 1, rtol=float(jnp.finfo(dtype).eps) / 2)


@pytest.mark.parametrize("name", ["allreduce", "bfloat16", "powersgd", "powersgd-int8", "int8"])
def test_one_all_reduce_of_a_scalar_is_added(name):
    tx = ALL[name]
    state = jaxcomp.shard_state(tx.init(zeros(SHAPES)), mesh_of(4), AXIS)
    specs = jaxcomp.state_specs(state, AXIS)

    def program(weighed):
        def step(grads, weight, state):
            grads = jax.tree.map(lambda x: x[0], grads)
            return tx.update(grads, state, **({"weight": weight} if weighed else {}))

        mapped = jax.shard_map(
            step,
            mesh=mesh_of(4),
            in_specs=(jax.P(AXIS), jax.P(AXIS), specs),
            out_specs=(jax.P(), specs),
        )
        return collectives(text(mapped, gradients(), WEIGHTS, state))

    plain, weighed = program(False), program(True)
    weighed.remove(("all-reduce", "f32", 1))
    assert weighed == plain


def test_a_mean_by_which_quotients_would_be_rounded_away_is_none():
    step = lambda w: ALL["allreduce"].update(jnp.ones(3), optax.EmptyState(), weight=w)[0]  # noqa: E731
    assert np.isnan(jax.vmap(step, axis_name=AXIS)(np.array([3e38, 1], np.float32))).all()


def test_a_uniform_number_needs_no_array():
    means = mapped_update(ALL["allreduce"], 3)[0]
    np.testing.assert_allclose(means["w"][0], gradients()["w"].mean(0), rtol=1e-5, atol=1e-6)


def mapped_update(tx, weight):
    step = lambda g, w: tx.update(g, tx.init(g), weight=w)  # noqa: E731
    return jax.vmap(step, axis_name=AXIS, in_axes=(0, None))(gradients(), weight)


def test_weights_that_are_no_number_of_this_replica_are_refused():
    with pytest.raises(ValueError, match=r"`weight` must be one number for this replica.*\(4,\)"):
        mapped_update(ALL["allreduce"], WEIGHTS)
    with pytest.raises(ValueError, match="complex64"):
        mapped_update(ALL["allreduce"], jnp.complex64(1))
    step = lambda g, w: ALL["allreduce"].update(g, optax.EmptyState(), weight=w)  # noqa: E731
    for wrong in ([1, 2], "3"):
        with pytest.raises(ValueError, match="`weight` must be one number for this replica"):
            jax.vmap(lambda g: step(g, wrong), axis_name=AXIS)(gradients())  # noqa: B023


def test_a_bfloat16_gradient_loses_nothing_to_its_weight():
    """It reaches a reducer with a residual in float32, and the outputs are bfloat16."""
    tx = jaxcomp.error_feedback(jaxcomp.allreduce(axis_name=AXIS))
    grads = {k: x.astype(jnp.bfloat16) for k, x in gradients().items()}
    axes = jaxcomp.state_axes(tx.init(zeros(SHAPES)))
    update = lambda g, w, s: tx.update(g, s, weight=w)  # noqa: E731
    step = jax.vmap(update, (0, 0, axes), (None, axes), axis_name=AXIS)
    state = jaxcomp.stack_replicas(tx.init(zeros(SHAPES)), 4)
    outputs, _ = step(grads, WEIGHTS, state)
    exact = weighted_means({k: np.asarray(x, np.float64) for k, x in grads.items()})
    for leaf, mean in exact.items():
        assert outputs[leaf].dtype == jnp.bfloat16
        found = np.asarray(outputs[leaf], np.float64)
        np.testing.assert_allclose(found, np.broadcast_to(mean, found.shape), rtol=2**-8)


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_value_and_grad_equals_one_process_with_the_examples_that_there_are(kind):
    """The last batch of an epoch: padded, with as many weights as replicas."""
    mesh = jax.make_mesh((4,), (AXIS,), axis_types=(kind,), devices=jax.devices()[:4])
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=(8, 8)), jnp.float32), "bias": jnp.zeros(8)}
    x = rng.normal(size=(12, 8)).astype(np.float32)

    def loss(params, x, here):
        """The mean over the examples that there are, and what they are like."""
        each = jnp.mean((x @ params["w"] + params["bias"] - 1) ** 2, axis=-1)
        mean = jnp.sum(jnp.where(here, each, 0)) / jnp.sum(here, dtype=jnp.float32)
        return mean, {"largest": jnp.max(jnp.where(here, each, 0))}

    here = np.arange(12) % 3 < np.repeat(WEIGHTS, 3)  # 3, 1, 0 and 2 of three examples
    tx = jaxcomp.powersgd(**FULL)
    value_and_grad = jaxcomp.value_and_grad(loss, tx, mesh=mesh, has_aux=True, aux="stack")
    state = value_and_grad.init(params)
    call = lambda s, p, x, h, w: value_and_grad(s, p, x, h, weight=w)  # noqa: E731
    ((value, aux), grads), state = jax.jit(call)(state, params, x, here, WEIGHTS)
    whole = jax.value_and_grad(lambda p: loss(p, x[here], np.ones(6, bool))[0])
    expected, exact = whole(params)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), grads, exact)
    assert aux["largest"].shape == (4,)
    with pytest.raises(ValueError, match=r"`weight` must have shape \(4,\)"):
        value_and_grad(state, params, x, here, weight=np.ones(3))


@pytest.mark.parametrize(
    "make",
    [
        lambda: jaxcomp.powersgd(1, axis_name=AXIS, start_step=0),
        lambda: jaxcomp.batched_powersgd(1, axis_name=AXIS, start_step=0),
        lambda: jaxcomp.error_feedback(jaxcomp.allreduce(axis_name=AXIS)),
    ],
    ids=["powersgd", "batched", "feedback"],
)
@pytest.mark.parametrize("weighed", [False, True])
def test_a_float16_mean_that_overflows_is_a_bad_step(make, weighed):
    tx = make()
    params = {"w": jnp.zeros((16, 16), jnp.float16), "b": jnp.zeros(3, jnp.float16)}
    state = tx.init(params)
    large = jax.tree.map(lambda x: jnp.full(x.shape, 4e4, x.dtype), state.residual)
    state = jaxcomp.stack_replicas(state._replace(residual=large), 2)
    axes = jaxcomp.state_axes(state)
    grads = {"w": jnp.full((2, 16, 16), 4e4, jnp.float16), "b": jnp.ones((2, 3), jnp.float16)}
    update = lambda g, w, s: tx.update(g, s, **({"weight": w} if weighed else {}))  # noqa: E731
    step = jax.jit(jax.vmap(update, (0, 0, axes), (None, axes), axis_name=AXIS))
    outputs, after = step(grads, np.ones(2, np.float32), state)
    assert all(np.isnan(np.asarray(x, np.float32)).all() for x in outputs.values())
    jax.tree.map(np.testing.assert_array_equal, after, state)


def test_data_parallel_weighs_a_chain_along_all_axes():
    kinds = {"axis_types": (jax.sharding.AxisType.Auto,) * 2, "devices": jax.devices()[:4]}
    mesh = jax.make_mesh((2, 2), (AXIS, "fast"), **kinds)
    plain = optax.GradientTransformation(
        lambda params: optax.EmptyState(),
        lambda g, s, params=None: (jax.tree.map(lambda x: jax.lax.pmean(x, (AXIS, "fast")), g), s),
    )
    chain = optax.chain(jaxcomp.allreduce(axis_name="fast"), jaxcomp.powersgd(**FULL))
    x = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    params = {"w": jnp.ones((8, 8))}

    def loss(params, x):
        return jnp.mean((x @ params["w"]) ** 2)

    parts = [jax.grad(loss)(params, rows)["w"] for rows in x.reshape(4, 2, 8)]
    x[4:6] = np.nan  # who sits out may hold anything
    for reducer in (chain, plain):
        axes = {"axis_name": (AXIS, "fast"), "check_vma": False}
        dp = jaxcomp.data_parallel(jax.value_and_grad(loss), reducer, mesh=mesh, **axes)
        step = jax.jit(lambda w, dp=dp: dp(dp.init(params), params, x, weight=w))
        for weights in (WEIGHTS, np.array([0, 0, 0, 2], np.float32)):
            (_, grads), _ = step(weights)
            exact = np.average(parts, axis=0, weights=weights)
            np.testing.assert_allclose(grads["w"], exact, rtol=1e-4, atol=1e-5)
