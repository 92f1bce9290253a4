"""``weight=``: replicas that do not count the same, for every reducer, in no more collectives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hlo import collectives, sent_bytes, text
from leaves import random_grads, zeros
from rounding import rounding
from runners import AXIS, mesh_of

import jaxcomp
from jaxcomp import extend

WEIGHTS = np.array([3, 1, 0, 2], np.float32)
# Square, so that one side of rank 8 says all: also the first of two one-sided steps is exact.
SHAPES = {"w": (8, 8), "bias": (5,)}
FULL = {"rank": 8, "axis_name": AXIS, "start_step": 0, "min_compression_rate": 0.0}
EXACT = {
    "allreduce": jaxcomp.allreduce(axis_name=AXIS),
    "powersgd": jaxcomp.powersgd(**FULL),
    "powersgd-before-start": jaxcomp.powersgd(**FULL | {"start_step": 9}),
    "powersgd-alternating": jaxcomp.powersgd(**FULL, alternating=True),
    "batched": jaxcomp.batched_powersgd(9, axis_name=AXIS, start_step=0),
    "feedback": jaxcomp.error_feedback(jaxcomp.allreduce(axis_name=AXIS)),
    "switch": jaxcomp.switch_at(0, jaxcomp.allreduce(axis_name=AXIS), jaxcomp.powersgd(**FULL)),
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
LOSSY = {
    "low-rank": jaxcomp.powersgd(2, axis_name=AXIS, start_step=0, min_compression_rate=0.0),
    "low-rank-alternating": jaxcomp.powersgd(
        2, axis_name=AXIS, start_step=0, min_compression_rate=0.0, alternating=True
    ),
    "low-rank-cold": jaxcomp.powersgd(
        2, axis_name=AXIS, start_step=0, min_compression_rate=0.0, warm_start=False
    ),
    "integers": jaxcomp.error_feedback(jaxcomp.quantized_allreduce(axis_name=AXIS)),
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


@pytest.mark.parametrize("name", ["bfloat16", "low-rank", "powersgd-int8", "integers"])
def test_equal_weights_change_nothing_but_rounding(name):
    """Whatever they are. Right factors may have another length, of which nothing depends."""
    for weight in (1.0, 512.0):
        plain = same = start(name)
        for seed in range(4):
            grads = gradients(seed)
            expected, plain = step_of(name, weighed=False)(grads, WEIGHTS, plain)
            found, same = step_of(name)(grads, np.full(4, weight, np.float32), same)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), found, expected)


@pytest.mark.parametrize("weights", [(0, 0, 0, 0), (1, -1, 1, 1), (1, np.nan, 1, 1)])
@pytest.mark.parametrize("name", ALL)
def test_weights_without_a_mean_leave_no_trace(name, weights):
    grads = gradients()
    _, state = step_of(name)(grads, WEIGHTS, start(name))
    outputs, after = step_of(name)(grads, np.array(weights, np.float32), state)
    assert all(np.isnan(x).all() for x in jax.tree.leaves(jax.device_get(outputs)))
    jax.tree.map(np.testing.assert_array_equal, after, state)


@pytest.mark.parametrize("scale", [1, 512])
@pytest.mark.parametrize("name", ["low-rank", "low-rank-cold"])
def test_whatever_the_weights_become_nothing_is_lost(name, scale):
    """Outputs and the mean residual, which a checkpoint keeps, add up to what went in."""
    state, step, rng = start(name), step_of(name), np.random.default_rng(0)
    went_in = came_out = np.zeros(SHAPES["w"])
    for seed in range(40):
        grads, weights = gradients(seed), scale * rng.integers(0, 4, 4).astype(np.float32)
        weights[seed % 4] = scale
        went_in = went_in + weighted_means(grads, weights)["w"]
        grads["w"][weights == 0] = np.nan
        output, state = step(grads, weights, state)
        came_out = came_out + output["w"]
    left = np.asarray(state.residual["w"]).mean(0)
    np.testing.assert_allclose(came_out + left, went_in, atol=2e-4)
    # And it stays bounded: a few steps' worth of what rank 2 of 8 does not hold.
    assert 0.1 < np.linalg.norm(left) / np.linalg.norm(went_in) < 1


@pytest.mark.parametrize("name", ["low-rank-alternating", "integers"])
def test_what_was_not_sent_is_kept_with_weights_that_stay(name):
    """Outputs and what is left of the residuals add up to what went in, replica by weight."""
    state, step = start(name), step_of(name)
    # Of integers a replica that sits out passes on a share all the same, and keeps its rounding.
    weights = np.where(WEIGHTS == 0, 4, WEIGHTS) if name == "integers" else WEIGHTS
    went_in = came_out = np.zeros(SHAPES["w"])
    for seed in range(6):
        grads = gradients(seed)
        output, state = step(grads, weights, state)
        went_in = went_in + weighted_means(grads, weights)["w"]
        came_out = came_out + output["w"]
    left = weighted_means({"w": state.residual["w"]}, weights)["w"]
    np.testing.assert_allclose(came_out + left, went_in, atol=2e-5)
    assert np.abs(left).max() > 0.01


def test_rounding_of_a_replica_that_counts_little_today_does_not_grow_tomorrow():
    """A ragged last batch: one of four has a single token, another each time."""
    state, step, worst = start("integers"), step_of("integers"), 0.0
    for seed in range(12):
        grads, weights = gradients(seed), np.full(4, 2048, np.float32)
        weights[seed % 4] = 1
        output, state = step(grads, weights, state)
        exact = weighted_means(grads, weights)["w"]
        worst = max(worst, np.abs(np.asarray(output["w"]) - exact).max() / np.abs(exact).max())
    assert worst < 0.1
    assert np.abs(state.residual["w"]).max() < 0.1 * np.abs(grads["w"]).max()


CHANGING = [(3, 1, 0, 2), (3, 1, 0, 2), (1, 3, 2, 0), (0, 0, 5, 1), (9, 1, 1, 1), (1, 1, 1, 7)]


@pytest.mark.parametrize("options", [{}, {"buckets": 2}, {"feedback_every": 2}])
def test_every_step_is_exact_at_full_rank_whatever_the_weights_become(options):
    """After a checkpoint too, and where residuals cancel in the mean without being zero."""
    shapes = {"wide": (8, 18), "tall": (24, 16), "cube": (8, 6, 3), "bias": (5,)}
    tx = jaxcomp.powersgd(**FULL | {"rank": 24}, **options)
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


def test_who_sits_out_a_one_sided_step_keeps_what_it_has_not_sent():
    name = "low-rank-alternating"
    _, state = step_of(name)(gradients(), np.ones(4, np.float32), start(name))
    grads = gradients(1)
    grads["w"][2] = np.nan
    _, after = step_of(name)(grads, WEIGHTS, state)
    before, after = (np.asarray(x.residual["w"]) for x in (state, after))
    np.testing.assert_array_equal(after[2], before[2])
    assert np.all(after[[0, 1, 3]] != before[[0, 1, 3]])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_no_wire_rounds_a_weight(dtype):
    tx = jaxcomp.allreduce(axis_name=AXIS, comm_dtype=dtype)
    weights = np.array([257, 1, 1e-3, 4095], np.float32)  # too long for the significand of either
    step = lambda g, w: tx.update(g, tx.init(g), weight=w)[0]  # noqa: E731
    means = jax.vmap(step, axis_name=AXIS)(jnp.ones((4, 3)), weights)
    # Each product is rounded by half a unit at most, and the sum of the weights not at all.
    np.testing.assert_allclose(means, 1, rtol=float(jnp.finfo(dtype).eps) / 2)


@pytest.mark.parametrize("name", ["allreduce", "bfloat16", "powersgd", "powersgd-int8", "int8"])
def test_no_collective_is_added_and_few_bytes(name):
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
    assert [kind for kind, _, _ in weighed] == [kind for kind, _, _ in plain]
    # A float32; its bytes for each replica, four values that XLA's CPU backend widens; a word for
    # each replica in both of two stages, and one for the share that is gathered.
    assert 4 <= sent_bytes(weighed) - sent_bytes(plain) <= 4 * 4 * 4


def test_fast_axes_are_weighed_too():
    tx = jaxcomp.powersgd(**FULL, reduce_first="fast")
    grads = gradients()
    grads["w"][2] = np.nan
    pairs = jax.tree.map(lambda x: x.reshape(2, 2, *x.shape[1:]), grads)
    state = tx.init(zeros(SHAPES))
    step = lambda g, w: tx.update(g, state, weight=w)[0]  # noqa: E731
    mapped = jax.jit(jax.vmap(jax.vmap(step, axis_name="fast"), axis_name=AXIS))
    # The pair (0, 2) has one that counts; a pair without any sits out together.
    for weights in (WEIGHTS, np.array([0, 0, 0, 2], np.float32)[[0, 1, 2, 3]]):
        outputs = mapped(pairs, weights.reshape(2, 2))
        kept = np.delete(np.arange(4), 2)
        exact = weighted_means({k: x[kept] for k, x in gradients().items()}, weights[kept])
        for leaf, mean in exact.items():
            np.testing.assert_allclose(outputs[leaf][0, 0], mean, atol=1e-5)


def test_a_uniform_number_needs_no_array():
    tx, grads = ALL["allreduce"], gradients()
    step = lambda g: tx.update(g, tx.init(g), weight=3)[0]  # noqa: E731
    means = jax.vmap(step, axis_name=AXIS, out_axes=None)(grads)
    np.testing.assert_allclose(means["w"], grads["w"].mean(0), rtol=1e-5, atol=1e-6)


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


def test_a_weight_that_nobody_would_look_at_is_refused():
    def reduce(updates, state, params=None, **extra_args):
        raise AssertionError("never reached")

    mine = jaxcomp.Reducer(lambda params: optax.EmptyState(), reduce, AXIS)
    for tx in (mine, jaxcomp.error_feedback(mine), jaxcomp.switch_at(1, mine, mine)):
        with pytest.raises(ValueError, match="takes no `weight`"):
            mapped_update(tx, 1.0)
    with pytest.raises(ValueError, match="says along which axis"):
        mapped_update(jaxcomp.error_feedback(optax.identity()), 1.0)
    with pytest.raises(ValueError, match="takes no `weight`"):
        mapped_update(jaxcomp.accumulate(ALL["allreduce"], 2), 1.0)


def test_a_reducer_of_ones_own_takes_weights():
    def reduce(updates, state, params=None, *, weight=None, **extra_args):
        step = extend.open_step(updates, AXIS, weight=weight)
        mean = functools.partial(extend.reduce_mean, axis_name=AXIS, wire_dtype=jnp.float32)
        reduced, _ = extend.weighted_mean(mean, step.arrays, step.weight, AXIS)
        return step.close(reduced.means, state, reduced.finite, sent=reduced.sent, old=state)

    tx = jaxcomp.Reducer(lambda params: optax.EmptyState(), reduce, AXIS)
    grads = gradients()
    step = lambda g, w: tx.update(g, tx.init(g), weight=w)[0]  # noqa: E731
    means = jax.vmap(step, axis_name=AXIS, out_axes=None)(grads, WEIGHTS)
    np.testing.assert_allclose(means["w"], weighted_means(grads)["w"], atol=1e-6)


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
