"""``weight=``: replicas that do not count the same, for every reducer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose

import jaxcomp
from tests.helpers.hlo import collectives
from tests.helpers.leaves import SMALL, all_finite, all_nan, close, equal, random_grads, zeros
from tests.helpers.reducers import allreduce, reducer
from tests.helpers.runners import AXIS, lower_update, updated

# Of three steps. Over their mean they are powers of two, by which no product is rounded.
WEIGHTS = np.array([(1, 1, 0, 2), (4, 2, 1, 1), (0, 0, 0, 8)], np.float32)
# All have one door, which multiplies their gradients: of each kind one, and one of a user's own.
KINDS = ["allreduce", "allreduce-fp16", "powersgd", "powersgd-int8", "batched", "int8"]
KINDS += ["feedback-int8", "feedback-late", "own"]


def gradients(seed=0):
    """Draws one step of four replicas: ``(4, *shape)``."""
    return {name: x[:, 0] for name, x in random_grads(SMALL, 4, 1, seed=seed).items()}


@functools.cache
def step_of(tx, weighed=True):
    """Compiles an update of all replicas; what leaves it without an axis is the same on each."""

    def step(grads, weight, state):
        if weighed:
            return tx.update(grads, state, weight=weight)
        return tx.update(grads, state)

    axes = jaxcomp.state_axes(tx.init(zeros(SMALL)))
    return jax.jit(jax.vmap(step, (0, 0, axes), (None, axes), axis_name=AXIS))


def start(tx):
    return jaxcomp.stack_replicas(tx.init(zeros(SMALL)), 4)


@pytest.mark.parametrize("name", KINDS)
def test_a_step_is_that_of_gradients_in_proportion_to_their_weights(name):
    """Repeats gradients by their weight; every other test says what comes out then."""
    tx = reducer(name)
    weighed = plain = start(tx)
    # A value within rounding of the middle of two levels may go to the other side.
    level = 1 / 127 if "int8" in name else 1e-6
    for seed, weights in enumerate(WEIGHTS):
        grads = gradients(seed)
        share = weights / weights.mean()
        scaled = {k: np.einsum("n,n...->n...", share, x) for k, x in grads.items()}
        expected, plain = step_of(tx, weighed=False)(scaled, weights, plain)
        grads["dense"][weights == 0] = np.nan
        grads["norm"][weights == 0] = np.inf
        found, weighed = step_of(tx)(grads, weights, weighed)
        close(found, expected, rtol=0, atol=level * max(np.abs(x).max() for x in scaled.values()))
    assert all_finite(weighed)


WITHOUT_A_MEAN = [(0, 0, 0, 0), (1, -1, 1, 1), (1, np.nan, 1, 1)]
WITHOUT_A_MEAN += [(2e38, 2e38, 1, 1), (3e38, 1, 0, 0), (1e-38, 1e-38, 1e-38, 1e-38)]


@pytest.mark.parametrize("name", KINDS)
def test_weights_without_a_mean_leave_no_trace(name):
    tx = reducer(name)
    grads = gradients()
    _, state = step_of(tx)(grads, WEIGHTS[0], start(tx))
    for weights in WITHOUT_A_MEAN:
        outputs, after = step_of(tx)(grads, np.array(weights, np.float32), state)
        assert all_nan(outputs)
        equal(after, state)


def test_a_misspelt_weight_is_refused_with_the_right_name():
    """Tests only that a reducer asks; training/test_misuse.py tests the names."""
    for tx in (reducer("powersgd"), optax.chain(reducer("own"), optax.sgd(0.1))):
        with pytest.raises(ValueError, match="no argument `weights`"):
            updated(tx, gradients(), weights=2.0)


def test_other_extra_arguments_are_for_other_links():
    updated(allreduce(), gradients(), weight_decay=0.1, value=1.0, key=None)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_no_wire_rounds_a_weight(dtype):
    tx = allreduce(comm_dtype=dtype)
    weights = np.array([257, 1, 1e-3, 4095], np.float32)  # too long for the significand of either
    step = lambda g, w: tx.update(g, tx.init(g), weight=w)[0]  # noqa: E731
    means = jax.vmap(step, axis_name=AXIS)(jnp.ones((4, 3)), weights)
    # Each product is rounded by half a unit at most, and the sum of the weights not at all.
    assert_allclose(means, 1, rtol=float(jnp.finfo(dtype).eps) / 2)


@pytest.mark.parametrize("name", ["allreduce-bf16", "powersgd", "powersgd-int8", "int8"])
def test_one_all_reduce_of_a_scalar_is_added(name):
    def program(weight):
        lowered = lower_update(reducer(name), zeros(SMALL), 4, weight=weight)
        return collectives(lowered.compile().as_text())

    weighed = program(np.float32(2))
    weighed.remove(("all-reduce", "f32", 1))
    assert weighed == program(None)


def test_a_uniform_number_needs_no_array():
    means = updated(allreduce(), gradients(), weight=3)
    assert_allclose(means["norm"][0], gradients()["norm"].mean(0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (WEIGHTS[0], r"`weight` must be one number for this replica.*\(4,\)"),
        (jnp.complex64(1), "complex64"),
        ([1, 2], "`weight` must be one number for this replica"),
        ("3", "`weight` must hold real numbers, got a str"),
    ],
)
def test_weights_that_are_no_number_of_this_replica_are_refused(weight, message):
    with pytest.raises(ValueError, match=message):
        updated(allreduce(), gradients(), weight=weight)


def test_the_weighted_mean_of_float64_gradients_has_their_precision():
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(8, 5))
    weights = rng.uniform(size=8)
    mesh = jax.make_mesh((4,), (AXIS,), devices=jax.devices()[:4])
    value_and_grad = jaxcomp.value_and_grad(
        lambda w, rows: jnp.mean(rows @ w), jaxcomp.allreduce(axis_name=AXIS), mesh=mesh
    )
    with jax.enable_x64(True):
        w = jnp.ones(5)
        (loss, means), _ = value_and_grad(value_and_grad.init(w), w, rows, weight=weights)
    # Both rows of a replica have its weight.
    of_replicas = weights.reshape(4, 2).sum(1).repeat(2)
    expected = np.average(rows, axis=0, weights=of_replicas)
    assert_allclose(means, expected, rtol=0, atol=1e-14)
    assert_allclose(loss, expected.sum(), rtol=0, atol=1e-14)
