"""Tolerances for whole runs: what a control shows, the same run begun one rounding apart.

Training enlarges what is rounded, on each processor another way: no constant can say how far two
right runs part, and a tolerance from arithmetic holds for a step, not for a run.
"""

import jax
import jax.numpy as jnp
import numpy as np

from tests.helpers.rounding import rounding

# Two right runs round in every operation of every step, a control only where it is told to; and
# how far one control parts is a matter of luck. A wrong one parts by thousands of controls.
FACTOR = 10


def apart(tree, seed=0):
    """Moves every floating value of a tree to one of its neighbours, up or down at random."""
    rng = np.random.default_rng(seed)

    def moved(leaf):
        values = np.asarray(leaf)
        if not jnp.issubdtype(values.dtype, jnp.floating):
            return leaf
        signs = rng.integers(2, size=values.shape) * 2 - 1
        return np.nextafter(values, signs.astype(values.dtype) * np.asarray(np.inf, values.dtype))

    return jax.tree.map(moved, tree)


def distance(tree, other):
    """Returns the largest difference of any value."""

    def largest(a, b):
        return float(np.abs(np.subtract(a, b, dtype=np.float64)).max())

    return max(jax.tree.leaves(jax.tree.map(largest, tree, other)))


def record(difference, allowed):
    """Does nothing; `tests.perturb` sets what notes how much of a tolerance is used."""


def assert_no_further(values, expected, *controls, terms=100, level=0.0):
    """Asserts that a run ends as near to another as controls of it do.

    Args:
      values: What the run gives: an array, or a tree of them.
      expected: What the other one gives.
      *controls: What the other one gives where it is moved by one rounding, see `apart`.
      terms: How many terms a value is a sum of, in all; for values that are rounded already in the
        first step, before anything is enlarged.
      level: How far two values are apart that a narrow wire rounds to different sides.
    """
    furthest = max(distance(control, expected) for control in controls)
    largest = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(expected))
    allowed = FACTOR * furthest + rounding(terms, largest=largest) + level
    difference = distance(values, expected)
    record(difference, allowed)
    assert difference <= allowed, (
        f"{difference:.1e} apart where controls are {furthest:.1e}, which allows {allowed:.1e}"
    )
