"""`batched_powersgd`: PowerSGD of one square matrix, as in the documentation of torch's hook."""

import math

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose

from tests.helpers.leaves import random_grads, zeros_of_one
from tests.helpers.reducers import batched
from tests.helpers.reference import Reference
from tests.helpers.runners import MAPPINGS, simulate

SHAPES = {"bias": (7,), "dense": (9, 5), "kernel": (2, 3, 4, 3)}


def flat(tree, keep):
    """Concatenates leaves in float64, of which the first `keep` axes stay."""
    parts = [np.float64(x).reshape(*x.shape[:keep], -1) for x in jax.tree.leaves(tree)]
    return np.concatenate(parts, axis=-1)


@pytest.mark.parametrize(("mapping", "rank"), [("vmap", 1), *((m, 3) for m in MAPPINGS)])
def test_equals_the_nine_steps(mapping, rank):
    """Pads a square with zeros first and cuts it off last; between them is PowerSGD.

    The residual is the replica's own, as everywhere in this package; outputs do not depend on it.
    """
    n = 3
    steps = 4
    grads = random_grads(SHAPES, n, steps)
    tx = batched(rank)
    state = tx.init(zeros_of_one(grads))
    vectors = flat(grads, 2)
    size = vectors.shape[-1]
    side = math.ceil(math.sqrt(size))
    padded = np.pad(vectors, ((0, 0), (0, 0), (0, side**2 - size)))
    reference = Reference(n, side, side, state.q)
    outputs, final = simulate(mapping, tx, grads, state)
    for t in range(steps):
        expected = reference.step(padded[:, t].reshape(n, side, side)).ravel()[:size]
        assert_allclose(flat(outputs, 1)[t], expected, atol=2e-5)
    assert_allclose(final.residual, reference.residual, atol=2e-5)
