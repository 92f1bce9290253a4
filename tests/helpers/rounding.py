"""Tolerances from arithmetic: what rounding may do, never what one processor happened to do."""

import math

import jax.numpy as jnp


def rounding(*sums, largest=1.0, dtype="float32", condition=1):
    r"""Returns how far a value may be off after a chain of sums, or of products of matrices.

    With `n` terms in all it is at most :math:`\lambda \sqrt{n} u` of the largest value, but for a
    share :math:`2 e^{-\lambda^2 / 2}` of the values, whatever the order of the terms (Higham and
    Mary, "A new approach to probabilistic rounding error analysis", 2019). Six for `lambda`: one
    value in thirty million.

    Args:
        *sums: How many terms each of them has: replicas of a mean, columns of a product.
        largest: The largest magnitude, or an array that has it, of what goes in: a residual and a
            weight count; of a product with orthonormal columns it is that of the other factor.
        dtype: The narrowest type that anything is rounded to.
        condition: By how much the problem enlarges what goes in: the condition number of what is
            orthogonalised, where a basis and not its span is compared.

    Returns:
        An absolute tolerance.

    >>> rounding(16) / jnp.finfo("float32").eps
    12.0
    """
    unit = float(jnp.finfo(dtype).eps) / 2
    return 6 * unit * math.sqrt(sum(sums)) * condition * float(jnp.max(jnp.abs(largest)))
