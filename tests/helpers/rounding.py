"""Tolerances from arithmetic, which hold on every processor."""

import math

import jax.numpy as jnp


def rounding(*sums, largest=1.0, dtype="float32", condition=1):
    r"""Returns the tolerance for a value after a chain of sums, or of matrix products.

    With `n` terms in total the error is at most :math:`\lambda \sqrt{n} u` times the largest value,
    in any order of the terms, except for a share :math:`2 e^{-\lambda^2 / 2}` of the values (Higham
    and Mary, "A new approach to probabilistic rounding error analysis", 2019). `lambda` is six, so
    one value in thirty million exceeds it.

    Args:
        *sums: The number of terms of each sum: replicas of a mean, columns of a product.
        largest: The largest magnitude of the inputs, or an array with it. A residual and a weight
            count as inputs; in a product with orthonormal columns only the other factor counts.
        dtype: The narrowest dtype of any result.
        condition: The factor by which the problem enlarges errors of its inputs: the condition
            number of an orthogonalised matrix, if a basis is compared and not its span.

    Returns:
        An absolute tolerance.

    >>> rounding(16) / jnp.finfo("float32").eps
    12.0
    """
    unit = float(jnp.finfo(dtype).eps) / 2
    return 6 * unit * math.sqrt(sum(sums)) * condition * float(jnp.max(jnp.abs(largest)))
