"""Accumulation: what optax.MultiSteps computes, with collectives at the boundary only."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import jaxcomp
from tests.helpers.leaves import all_finite, close, equal, random_grads, with_value
from tests.helpers.local_runs import NESTEROV, run
from tests.helpers.reducers import allreduce, feedback, powersgd
from tests.helpers.runners import AXIS

SHAPES = {"w": (12, 10), "b": (5,), "scale": ()}
PARAMS = {name: jnp.full(shape, 0.5) for name, shape in SHAPES.items()}


SGD = optax.sgd(0.1, momentum=0.9)
TXS = {
    "allreduce": optax.chain(allreduce(), SGD),
    "powersgd": optax.chain(powersgd(1), SGD),
    "feedback": optax.chain(feedback(allreduce()), SGD),
    "local_sgd": jaxcomp.local_sgd(optax.sgd(0.1), sync_every=2, axis_name=AXIS, outer=NESTEROV),
}


def run_optax(mapping, tx, targets):
    """Runs optax's own MultiSteps, which relies on implicit promotion."""
    with jax.numpy_dtype_promotion("standard"):
        return run(mapping, tx, PARAMS, targets)


@pytest.mark.parametrize(
    ("mapping", "name"),
    [
        ("vmap", "allreduce"),
        ("pmap", "powersgd"),
        ("shard_map", "feedback"),
        ("shard_map", "local_sgd"),
    ],
)
def test_equals_optax(mapping, name):
    targets = random_grads(SHAPES, 2, 7)
    found, state = run(mapping, jaxcomp.accumulate(TXS[name], 3), PARAMS, targets)
    expected, theirs = run_optax("vmap", optax.MultiSteps(TXS[name], 3), targets)
    close(found, expected)
    # Counters may have no axis of replicas.
    close(state.acc_grads, theirs.acc_grads)
    assert np.ravel(state.mini_step)[0] == np.ravel(theirs.mini_step)[0]
    assert np.ravel(state.gradient_step)[0] == np.ravel(theirs.gradient_step)[0]


@pytest.mark.parametrize(
    ("mapping", "reducer"), [("vmap", allreduce()), ("shard_map", powersgd(1))]
)
def test_a_micro_batch_that_is_not_finite_costs_one_step(mapping, reducer):
    targets = random_grads(SHAPES, 2, 6)
    bad = jax.tree.map(lambda x: with_value(x, (1, 2), np.nan), targets)
    rule = optax.apply_if_finite(optax.sgd(0.1), 5)
    tx = jaxcomp.accumulate(optax.chain(reducer, rule), 2)
    params, state = run(mapping, tx, PARAMS, bad)
    assert all_finite((params, state))
    after_one, after_two, after_three = (params["w"][:, step] for step in (1, 3, 5))
    equal(after_two, after_one)
    # The steps before and after are those of a run without the third and fourth micro-batch.
    kept = jax.tree.map(lambda x: np.delete(x, [2, 3], axis=1), targets)
    expected, _ = run("vmap", tx, PARAMS, kept)
    assert_allclose(after_three, expected["w"][:, 3], rtol=1e-5, atol=1e-6)


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="`tx` must be"):
        jaxcomp.accumulate(None, 2)
    with pytest.raises(ValueError, match="every_k=0"):
        jaxcomp.accumulate(optax.sgd(0.1), 0)
    with pytest.raises(ValueError, match=r"`accumulator_dtype` must be one of float32, .*int32"):
        jaxcomp.accumulate(optax.sgd(0.1), 2, accumulator_dtype=jnp.int32)
    with pytest.raises(ValueError, match=r"`accumulator_dtype` must be one of float32, .*'wide'"):
        jaxcomp.accumulate(optax.sgd(0.1), 2, accumulator_dtype="wide")


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_opposite_ends_of_sixteen_bits_have_a_mean(dtype):
    tx = jaxcomp.accumulate(allreduce(), 2, accumulator_dtype=dtype)

    def second(grads):
        _, state = tx.update(grads[0], tx.init(grads[0]))
        return tx.update(grads[1], state)[0]

    grads = jnp.array([[[6e4, 1.0], [-6e4, 3.0]]] * 2, dtype)
    assert_array_equal(jax.vmap(second, axis_name=AXIS)(grads), [[0, 2]] * 2)


def test_what_it_holds_beside_another_networks_reducer_is_each_replicas():
    params = jnp.zeros(3)
    accumulated = jaxcomp.accumulate(TXS["allreduce"], 2).init(params)
    axes = jaxcomp.state_axes({"one": accumulated, "other": powersgd(1).init(params)})
    assert axes["one"].acc_grads == 0


def test_integer_parameters_are_left_alone():
    inner = optax.masked(optax.sgd(0.5), {"w": True, "n": False})
    tx = jaxcomp.accumulate(jaxcomp.local_sgd(inner, sync_every=1, axis_name=AXIS), 2)
    params = {"w": jnp.zeros(2), "n": jnp.array(3)}

    def step(target):
        grads = {"w": -target, "n": np.zeros((), jax.dtypes.float0)}
        nothing, state = tx.update(grads, tx.init(params), params)
        updates, _ = tx.update(grads, state, params)
        return nothing["w"], updates["w"]

    first, second = jax.vmap(step, axis_name=AXIS)(jnp.array([[2.0, 4.0], [4.0, 8.0]]))
    assert_array_equal(first, np.zeros((2, 2)))
    assert_array_equal(second, [[1.5, 3.0]] * 2)
