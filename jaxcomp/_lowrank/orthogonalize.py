"""Orthonormal bases for thin matrices.

On CPU Gram-Schmidt for few columns and Householder QR for more; elsewhere, where both are many
small kernels, Cholesky QR of all matrices together (`cholesky_qr`).

Whatever comes in (zeros, repeated columns, values near either end of the float range), the columns
that come out are orthonormal. A column without a direction of its own is replaced by a fixed dense
one: were it left at zero, the power iteration could never pick that direction up again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax import lax

from jaxcomp._base.typing import Array
from jaxcomp._lowrank.cholesky_qr import ROUNDS, Factorize, bases_by_rank, spare_directions

# torch's hook uses Gram-Schmidt up to rank 2 and QR above.
_GRAM_SCHMIDT_RANK = 2
# A column of which less than this share is left after projection has no direction of its own.
_COLLINEAR = 1e-6


def orthogonalize(matrix: Array, eps: float | Array = 0.0) -> Array:
    """An orthonormal basis of the columns (Vogels et al. 2019, Algorithm 1, line 4).

    Args:
      matrix: ``(*batch, n, r)`` with ``r <= n``, float32 or wider, finite.
      eps: Added to the norm of each column that Gram-Schmidt divides by, as torch's
        ``orthogonalization_epsilon``; like torch, it has no part in QR.

    Returns:
      ``(*batch, n, r)`` with ``P^T P = I`` to rounding (for ``eps=0``).

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomp import extend
      >>> columns = jnp.array([[3.0, 3.0, 0.0], [4.0, 4.0, 0.0], [0.0, 5.0, 0.0]])  # one is zero
      >>> basis = extend.orthogonalize(columns)
      >>> bool(jnp.allclose(basis.T @ basis, jnp.eye(3), atol=1e-5))
      True
    """
    return orthonormal_bases([matrix], eps)[0]


def orthonormal_bases(
    factors: Sequence[Array],
    eps: float | Array = 0.0,
    factorize: Factorize | None = None,
    rounds: int = ROUNDS,
) -> list[Array]:
    """`orthogonalize` of every factor: those of one shape together on CPU, of one rank elsewhere.

    Args:
      factors: Arrays ``(*batch, n, r)``.
      eps: As in `orthogonalize`.
      factorize: A kernel for GPUs in the place of `cholesky_qr.inverse_factors`; only a program for
        GPUs gives it.
      rounds: Of Cholesky QR, where that is what runs.
    """
    factors = list(factors)
    # torch's eps is defined by columns that are taken one after the other.
    torchs = [not _is_zero(eps) and x.shape[-1] <= _GRAM_SCHMIDT_RANK for x in factors]

    def one_by_one(factors: Sequence[Array]) -> list[Array]:
        return map_by_shape(lambda x: _column_by_column(x, eps), factors)

    def together(factors: Sequence[Array]) -> list[Array]:
        pairs = list(zip(factors, torchs, strict=True))
        # Without the barrier jaxlib 0.10's compiler for GPUs fails: docs/gpu.md has the fault.
        columns = map_by_shape(
            lambda x: _column_by_column(lax.optimization_barrier(x), eps),
            [x for x, flag in pairs if flag],
        )
        bases = bases_by_rank([x for x, flag in pairs if not flag], factorize, rounds)
        found = iter(columns), iter(bases)
        return [next(found[not flag]) for flag in torchs]

    if not factors:
        return []
    if factorize is not None:
        return together(factors)
    return lax.platform_dependent(factors, cpu=one_by_one, default=together)


def _is_zero(eps: float | Array) -> bool:
    return isinstance(eps, (int, float)) and eps == 0


def _column_by_column(matrix: Array, eps: float | Array) -> Array:
    """A basis of the columns of each matrix of a batch, by Gram-Schmidt or Householder QR."""
    n, rank = matrix.shape[-2:]
    scale = jnp.abs(matrix).max(axis=-2, keepdims=True)
    zero = scale == 0
    # Dividing by the largest entry keeps squares inside the float range; a sum of the quotient's
    # squares lies between 1 and n.
    scaled = matrix / jnp.where(zero, 1, scale)
    spare = jnp.broadcast_to(spare_directions(jnp.arange(n), rank, matrix.dtype), matrix.shape)
    if rank <= _GRAM_SCHMIDT_RANK:
        scaled_eps = (
            None if _is_zero(eps) else jnp.asarray(eps, matrix.dtype) / jnp.where(zero, 1, scale)
        )
        return _gram_schmidt(scaled, spare, scaled_eps)
    return _qr_one_by_one(jnp.where(zero, spare, scaled))


def _qr_one_by_one(matrix: Array) -> Array:
    """The Q of each matrix of a batch in turn.

    jaxlib's CPU kernel splits a batch over the very threads that it runs on, and waits for them:
    with several devices in one process, all of them can wait for ever (seen with jaxlib 0.10.2). A
    single matrix it does on the spot, and one after the other takes no longer.
    """
    flat = matrix.reshape(-1, *matrix.shape[-2:])
    return lax.map(lambda m: jnp.linalg.qr(m)[0], flat).reshape(matrix.shape)


def map_by_shape(function: Callable[[Array], Array], arrays: Sequence[Array]) -> list[Array]:
    """Applies `function`, which treats leading axes as a batch, once for every shape present.

    A model of 200 equal layers so costs one orthogonalisation to compile and to launch, and only
    the thin factors are copied to form the batch.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomp import extend
      >>> def total(stack):  # called for the two of shape (2,), then for the one of shape (3,)
      ...     return stack.sum(-1)
      >>> [int(x) for x in extend.map_by_shape(total, [jnp.ones(2), jnp.ones(3), 5 * jnp.ones(2)])]
      [2, 3, 10]
    """
    results: dict[int, Array] = {}
    for kind in dict.fromkeys((array.shape, array.dtype) for array in arrays):
        chosen = [i for i, array in enumerate(arrays) if (array.shape, array.dtype) == kind]
        mapped = function(jnp.stack([arrays[i] for i in chosen]))
        results.update(zip(chosen, mapped, strict=True))
    return [results[i] for i in range(len(arrays))]


def _gram_schmidt(matrix: Array, spare: Array, eps: Array | None) -> Array:
    """Columns one after the other, each projected twice ("twice is enough", Giraud et al. 2005).

    With `eps`, ``(*batch, 1, r)``, it is torch's: one projection, onto columns that are a little
    shorter than 1, except for a column that takes a spare direction.
    """
    columns: list[Array] = []
    for j in range(matrix.shape[-1]):
        given = matrix[..., j]
        column = _project_out(given, columns)
        left = _norm(column)
        lost = left <= _COLLINEAR * _norm(given)
        column = jnp.where(lost, spare[..., j], column)
        if eps is None:
            column = _project_out(column, columns)
            columns.append(column / _norm(column))
        else:
            fresh = _project_out(column, columns)
            shrunk = column / (left + jnp.where(lost, 1, eps[..., 0, j, None]))
            columns.append(jnp.where(lost, fresh / _norm(fresh), shrunk))
    return jnp.stack(columns, axis=-1)


def _project_out(column: Array, basis: Sequence[Array]) -> Array:
    for other in basis:
        column = column - jnp.sum(other * column, axis=-1, keepdims=True) * other
    return column


def _norm(column: Array) -> Array:
    return jnp.sqrt(jnp.sum(column * column, axis=-1, keepdims=True))
