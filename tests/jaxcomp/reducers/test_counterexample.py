"""Where PowerSGD does not converge (`benchmarks.counterexample.problem`), and which options do."""

import jax.numpy as jnp
import numpy as np
import pytest
from runners import simulate

from benchmarks.counterexample.cases import CASES, powersgd
from benchmarks.counterexample.problem import REPLICAS, Problem

APART = Problem(size=16)


def worst_of_the_end(name, problem=APART, rank=1, steps=1500):
    case = CASES[name]
    losses, _ = problem.descend(case.build(rank + case.more), steps)
    return losses[-steps // 4 :].max()


def test_the_warm_factor_goes_blind_and_the_residual_grows_without_a_bound():
    steps = 600
    losses, state = APART.descend(powersgd(1), steps)
    assert losses[-1] > 0.999
    # Exactly zero where the gradient is, so nothing that the residual holds can bring it back.
    assert not state.q[:-1].any()
    assert abs(state.q[-1, 0]) > 50
    kept = np.diagonal(state.residual.mean(0))
    np.testing.assert_allclose(kept[:-1], -steps, rtol=1e-4)
    assert abs(kept[-1]) < 1


def test_a_rotation_keeps_a_rounding_error_from_which_the_residual_comes_back():
    losses, state = Problem(size=16, rotated=True).descend(powersgd(1), 1500)
    assert losses[-375:].max() < 0.5
    assert np.abs(state.residual.mean(0)).max() < 700


@pytest.mark.parametrize("name", ["feedback", "start", "every", "decay"])
def test_what_does_not_help(name):
    assert worst_of_the_end(name) > 0.1


@pytest.mark.parametrize(
    ("name", "at_most"),
    [("rank", 1e-8), ("cold", 1e-4), ("cold-int8", 1e-3), ("refresh-10", 0.1)],
)
def test_what_does(name, at_most):
    assert worst_of_the_end(name) < at_most


def test_one_fresh_column_is_enough_for_noise_of_the_whole_rank():
    problem = Problem(size=16, noisy=2)
    assert worst_of_the_end("one-fresh", problem, 2) < 1e-4


def test_a_factor_orthogonal_to_the_gradient_is_no_trap():
    grads = np.zeros((REPLICAS, 2, 16, 16), np.float32)
    grads[..., :2, :2] = np.random.default_rng(0).standard_normal((REPLICAS, 1, 2, 2))
    tx = powersgd(2)
    state = tx.init(jnp.zeros((16, 16)))
    state = state._replace(q=jnp.zeros((16, 2)).at[2, 0].set(1.0).at[3, 1].set(1.0))
    outputs, after = simulate("vmap", tx, grads, state)
    # M Q is zero: the first update multiplies with spare directions and finds the plane; the
    # second sends all that there is.
    assert np.abs(outputs[0]).max() > 0.01
    assert not after.q[2:].any()
    np.testing.assert_allclose(outputs.sum(0), grads.mean(0).sum(0), atol=1e-5)
