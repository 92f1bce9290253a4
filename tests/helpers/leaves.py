"""The tests' trees: few shapes, so that tests can share compiled programs."""

import jax
import numpy as np

from jaxcomp import MatrixDims
from jaxcomp.extend import default_matrix_dims

SHAPES = {"conv": (3, 3, 4, 12), "dense": (24, 16), "embedding": (40, 10), "bias": (16,)}
COMPRESSED = ("conv", "dense", "embedding")
SMALL = {"dense": (24, 16), "norm": (16,)}


def zeros(shapes=SHAPES, dtype=np.float32):
    return {name: np.zeros(shape, dtype) for name, shape in shapes.items()}


def zeros_of_one(grads):
    """Makes zero parameters for gradients ``(n, steps, *shape)``."""
    return jax.tree.map(lambda g: np.zeros(g.shape[2:], g.dtype), grads)


def normal(*shape, seed=0):
    """Draws normal values in float32."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def random_grads(shapes, n, steps, seed=0):
    """Draws normal gradients ``(n, steps, *shape)``, to all of which one common part is added."""
    rng = np.random.default_rng(seed)
    return {
        name: np.asarray(
            rng.normal(size=(1, 1, *shape)) + rng.normal(size=(n, steps, *shape)), np.float32
        )
        for name, shape in shapes.items()
    }


def with_value(x, index, value):
    """Copies `x`, with another value at `index`."""
    x = np.array(x)
    x[index] = value
    return x


def by_layer(path, leaf):
    """Treats each matrix of a stack separately, and all other leaves by the default rule."""
    if leaf.ndim == 3:
        return MatrixDims(batch=(0,), rows=(2,), cols=(1,))
    return default_matrix_dims(path, leaf)


def as_matrix(name, x):
    """Returns a leaf of SHAPES as a (rows, cols) matrix by the documented rule, without jaxcomp."""
    x = np.asarray(x, np.float64)
    if name == "embedding":
        return x
    lead = {"conv": 36, "dense": 24}[name]
    return x.reshape(*x.shape[: x.ndim - len(SHAPES[name])], lead, -1).swapaxes(-1, -2)


def all_finite(tree):
    """Returns whether every value of a tree is finite."""
    leaves = jax.tree.leaves(jax.device_get(tree))
    return all(np.isfinite(np.asarray(x, np.float32)).all() for x in leaves)


def all_zero(tree):
    """Returns whether every value of a tree is zero."""
    return not any(np.any(leaf) for leaf in jax.tree.leaves(tree))


def all_nan(tree):
    """Returns whether every value of a tree is NaN."""
    leaves = jax.tree.leaves(jax.device_get(tree))
    return all(np.isnan(np.asarray(x, np.float32)).all() for x in leaves)


def close(found, expected, rtol=1e-5, atol=1e-6):
    """Asserts that two trees are equal within tolerances."""

    def compare(one, other):
        np.testing.assert_allclose(one, other, rtol=rtol, atol=atol)

    jax.tree.map(compare, found, expected)


def equal(found, expected):
    """Asserts that two trees are equal bit for bit."""
    jax.tree.map(np.testing.assert_array_equal, found, expected)
