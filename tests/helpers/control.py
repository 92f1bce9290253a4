"""Tolerances for whole runs, from controls: the same run, started with values one rounding apart.

Training enlarges rounding errors, differently on each processor. So no constant can say how far two
correct runs differ, and a tolerance from arithmetic holds for a step, but not for a run.
"""

import jax
import jax.numpy as jnp
import numpy as np

from tests.helpers.rounding import rounding

# Two correct runs round in every operation of every step, a control only at one place, and the
# difference of one control is partly chance. A wrong run differs by thousands of controls.
FACTOR = 10


def apart(tree, seed=0):
    """Changes every floating-point value of a tree to the next larger or smaller one, at random."""
    rng = np.random.default_rng(seed)

    def moved(leaf):
        values = np.asarray(leaf)
        if not jnp.issubdtype(values.dtype, jnp.floating):
            return leaf
        signs = rng.integers(2, size=values.shape) * 2 - 1
        return np.nextafter(values, signs.astype(values.dtype) * np.asarray(np.inf, values.dtype))

    return jax.tree.map(moved, tree)


def distance(tree, other):
    """Returns the largest absolute difference between two trees."""

    def largest(a, b):
        return float(np.abs(np.subtract(a, b, dtype=np.float64)).max())

    return max(jax.tree.leaves(jax.tree.map(largest, tree, other)))


def record(difference, allowed):
    """Does nothing; `tests.perturb` replaces it, to record how much of each tolerance is used."""


def assert_no_further(values, expected, *controls, terms=100, level=0.0):
    """Asserts that a run differs from another no more than controls of that run allow.

    Args:
      values: The run's results: an array, or a tree of arrays.
      expected: The other run's results.
      *controls: The other run's results after a change by one rounding, see `apart`.
      terms: The number of terms that are summed for one value, for rounding in the first step,
        which training has not enlarged.
      level: The distance between neighbouring values on a narrow wire, which may round two nearly
        equal values to different sides.
    """
    furthest = max(distance(control, expected) for control in controls)
    largest = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(expected))
    allowed = FACTOR * furthest + rounding(terms, largest=largest) + level
    difference = distance(values, expected)
    record(difference, allowed)
    assert difference <= allowed, (
        f"{difference:.1e} apart where controls are {furthest:.1e}, which allows {allowed:.1e}"
    )
