"""Gradients at the edges of the float range, and steps that must leave no trace."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers.leaves import SHAPES, all_finite, random_grads, with_value
from tests.helpers.reducers import allreduce, powersgd, quantized, reducer
from tests.helpers.runners import simulate

SPOILED = {"bias": (8,), "dense": (12, 8)}
NOT_FINITE = ("nan", "inf", "-inf", "overflow", "all")
# Finite gradients of which a sum in float32, or what goes on the wire, is not. Of factors what the
# wire does not hold goes out later.
FAULTS = {
    "feedback-fp16": (*NOT_FINITE, "3e38", "1e6"),
    "powersgd": (*NOT_FINITE, "3e38"),
    "powersgd-fp16": (*NOT_FINITE, "3e38", "1e6"),
    "powersgd-int8": NOT_FINITE,
    "batched": NOT_FINITE,
    "int8": NOT_FINITE,
    "feedback-int8": NOT_FINITE,
}


def spoiled(grads, rng, share, kinds):
    """Gradients of which a share of the steps cannot be averaged; and those steps, by kind."""
    grads = {name: np.array(x) for name, x in grads.items()}
    n, steps = grads["bias"].shape[:2]
    bad = {}
    for t in np.flatnonzero(rng.random(steps) < share):
        bad[int(t)] = rng.choice(kinds)
    for t, kind in bad.items():
        replica = rng.integers(n)
        name = rng.choice(list(SPOILED))
        if kind == "overflow":  # a loss scale that is too large: the larger half of the values
            x = grads[name][replica, t]
            x[np.abs(x) >= np.median(np.abs(x))] *= np.inf
        elif kind == "all":
            for x in grads.values():
                x[replica, t] = np.nan
        elif kind in ("3e38", "1e6"):  # whose sum ends float32's range; float16's ends at 65 504
            grads["bias"][:, t] = float(kind)
        else:
            index = [rng.integers(size) for size in SPOILED[name]]
            grads[name][(replica, t, *index)] = float(kind)
    return jax.tree.map(jnp.asarray, grads), bad


@pytest.mark.parametrize("name", FAULTS)
def test_two_hundred_steps_of_which_one_in_ten_cannot_be_averaged(name):
    n, steps = 3, 200
    rng = np.random.default_rng(7)
    clean = random_grads(SPOILED, n, steps)
    grads, faults = spoiled(clean, rng, 0.1, FAULTS[name])
    bad = np.array(list(faults))
    good = np.setdiff1d(np.arange(steps), bad)
    assert 10 < len(bad) < 30
    assert set(faults.values()) == set(FAULTS[name])

    tx = reducer(name, 40)
    outputs, final = simulate("vmap", tx, grads, optimised=True)
    skipped, expected = simulate(
        "vmap", tx, jax.tree.map(lambda x: x[:, good], clean), optimised=True
    )
    for leaf in SPOILED:
        assert np.isnan(outputs[leaf][bad]).all()
        np.testing.assert_array_equal(np.asarray(outputs[leaf])[good], skipped[leaf])
    jax.tree.map(np.testing.assert_array_equal, final, expected)


def test_a_batch_whose_sums_overflow_leaves_no_trace_either():
    grads = jax.tree.map(lambda x: jnp.full_like(x, 3e38), random_grads(SPOILED, 3, 1))
    tx = reducer("batched")
    outputs, final = simulate("vmap", tx, grads)
    assert not any(np.isfinite(x).any() for x in jax.tree.leaves(outputs["dense"]))
    assert int(final.count) == 0
    np.testing.assert_array_equal(jax.tree.leaves(final.residual)[0], 0)


def test_zero_gradients_give_zeros_and_the_leaf_recovers():
    grads = random_grads(SHAPES, 3, 6)
    grads["dense"][:, :3] = 0
    outputs, state = simulate("vmap", powersgd(4), grads)
    assert not np.any(outputs["dense"][:3])
    # Directions were not lost for ever: what goes in comes out or is kept, at full rank.
    assert np.linalg.matrix_rank(outputs["dense"][5]) == 4
    total = outputs["dense"].sum(0) + state.residual["dense"].mean(0)
    np.testing.assert_allclose(total, grads["dense"].mean(0).sum(0), atol=1e-4)


def test_gradients_whose_sum_overflows_have_a_mean():
    for tx, dtype, value in (
        (allreduce(), jnp.float16, 3e4),
        (allreduce(comm_dtype="float16"), jnp.float16, 3e4),
        # A low-rank factor of so large a matrix does not fit float16; its mean does.
        (powersgd(2, start_step=1, comm_dtype="float16"), jnp.float16, 3e4),
        (quantized(), jnp.float32, 3e38),
        (allreduce(), jnp.bfloat16, 3e38),
        (powersgd(1, min_compression_rate=1e9), jnp.bfloat16, 3e38),
    ):
        grads = {"dense": np.full((4, 1, 24, 16), value, dtype)}
        outputs, _ = simulate("vmap", tx, grads)
        np.testing.assert_allclose(outputs["dense"][0].astype(jnp.float32), value, rtol=4e-3)


@pytest.mark.parametrize("wire", [None, jnp.int8, "int6", jnp.bfloat16])
def test_one_step_near_the_end_of_the_range_does_not_spoil_the_next(wire):
    """Sends a finite gradient of 1.7e38 whose norm is not: refused, or it goes out in the end."""
    n, shape, large = 2, (24, 16), np.float32(1.7e38)
    tx = powersgd(2, comm_dtype=wire)
    usual = random_grads({"w": shape}, n, 8)["w"]
    everywhere = large * np.sign(usual[:, 3])
    # Of opposite values the mean is zero, and only the residuals are large.
    opposite = np.stack([np.full(shape, large), np.full(shape, -large)])
    none = np.zeros_like(everywhere)
    one_column = with_value(none, np.s_[:, :, 5], large)
    one_value = with_value(none, np.s_[:, 7, 5], large)
    for bad in (everywhere, opposite, one_column, one_value):
        grads = {"w": with_value(usual, np.s_[:, 3], bad)}
        outputs, state = simulate("vmap", tx, grads)
        assert all_finite([outputs["w"][:3], outputs["w"][4:]])
        assert all_finite(state)
        if bad is not one_value:
            assert np.isnan(outputs["w"][3]).all()
            assert np.abs(outputs["w"][4:]).max() < 100
