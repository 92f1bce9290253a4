"""Gradients at the edges of the float range, and steps that must leave no trace."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from tests.helpers.leaves import SHAPES, equal, random_grads
from tests.helpers.reducers import allreduce, powersgd, quantized, reducer
from tests.helpers.runners import simulate

SPOILED = {"bias": (8,), "dense": (12, 8)}
NOT_FINITE = ("nan", "inf", "-inf", "overflow", "all")
# Finite gradients of which a sum or a norm in float32, or what goes on the wire, is not. Of factors
# what the wire does not hold goes out later.
FAULTS = {
    "feedback-fp16": (*NOT_FINITE, "3e38", "1e6"),
    "powersgd": (*NOT_FINITE, "3e38", "norm", "opposite"),
    "powersgd-fp16": (*NOT_FINITE, "3e38", "1e6"),
    "powersgd-int8": (*NOT_FINITE, "norm", "opposite"),
    "batched": (*NOT_FINITE, "3e38"),
    "int8": NOT_FINITE,
    "feedback-int8": NOT_FINITE,
}


def spoil(grads, kind, leaf, step):
    """Makes the gradients of one step such that they cannot be averaged, in place."""
    x = grads[leaf][1, step]
    if kind == "overflow":  # a loss scale that is too large: the larger half of the values
        x[np.abs(x) >= np.median(np.abs(x))] *= np.inf
    elif kind == "all":
        for every in grads.values():
            every[1, step] = np.nan
    elif kind in ("3e38", "1e6"):  # whose sum ends float32's range; float16's ends at 65 504
        grads["bias"][:, step] = float(kind)
    elif kind == "norm":
        grads["dense"][:, step] = 1.7e38
    elif kind == "opposite":  # of which the mean is zero, and only the residuals are large
        grads["dense"][:, step] = np.array([1.7e38, -1.7e38, 0])[:, None, None]
    else:
        x[5] = float(kind)


@pytest.mark.parametrize("name", FAULTS)
def test_steps_that_cannot_be_averaged_leave_no_trace(name):
    """Every second one of a run is spoilt, by every fault in one leaf after the other."""
    faults = [(kind, leaf) for leaf in SPOILED for kind in FAULTS[name]]
    clean = random_grads(SPOILED, 3, 2 * len(faults))
    grads = jax.tree.map(np.array, clean)
    bad = np.arange(0, 2 * len(faults), 2)
    for (kind, leaf), step in zip(faults, bad, strict=True):
        spoil(grads, kind, leaf, step)
    tx = reducer(name, 3)
    outputs, final = simulate("vmap", tx, grads, optimised=True)
    good = jax.tree.map(lambda x: x[:, 1::2], clean)
    skipped, expected = simulate("vmap", tx, good, optimised=True)
    for leaf in SPOILED:
        assert np.isnan(outputs[leaf][bad]).all()
        equal(outputs[leaf][1::2], skipped[leaf])
    equal(final, expected)


def test_a_leaf_of_zeros_recovers():
    grads = random_grads(SHAPES, 3, 6)
    grads["dense"][:, :3] = 0
    outputs, _ = simulate("vmap", powersgd(4), grads)
    assert not np.any(outputs["dense"][:3])
    # Directions were not lost for ever: what comes out has full rank.
    assert np.linalg.matrix_rank(outputs["dense"][5]) == 4


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
        assert_allclose(outputs["dense"][0].astype(jnp.float32), value, rtol=4e-3)
