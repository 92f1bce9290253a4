"""Orthonormal bases of many thin matrices at once, from matrix products: for GPUs.

Householder QR goes matrix by matrix there and Gram-Schmidt column by column, each a kernel to
launch. Here all matrices of one rank are cut into blocks of rows that lie behind each other, and
rounds of Cholesky QR take all of them together: Gram matrices of the blocks, their sums over
the blocks of a matrix, the inverse Cholesky factors, and the blocks times these.

One round in float32 resolves directions down to some thousandth of a column's length, since a Gram
matrix holds squares. So correlations are taken for a little smaller than they are ("shifted
CholeskyQR", Fukaya et al. 2020): what lies below is only made larger by that factor, and the next
round resolves it. A column that is close to the span of others even after two rounds had no
direction of its own; it gives way to a fixed dense one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomp._base.typing import Array
from jaxcomp._mesh.axes import alike

# Rounds until columns of float32 are orthonormal to rounding whatever they were; and until they are
# no longer close to each other, which is enough for what spans a space and is no factor itself.
ROUNDS = 6
ROUNDS_TO_SPAN = 2
# By so much correlations are shrunk, up to this rank and in proportion above it: some ten times the
# rounding of a Gram matrix, and the least pivot that there can be.
_SHIFT, _SHIFT_RANK = 1e-5, 64
_LARGE_SHIFT = 1e-2
# The round that looks for columns without a direction of their own, and the least pivot of those
# that have one. Each round before makes what tells a column from the others some two hundred times
# larger; those after it orthogonalise what takes the place of the rest.
_LOOKS, _LEAST_PIVOT = 2, 1e-2
# Columns come in with entries up to 1; nothing but zeros gets a squared length of this.
_ZERO = 1e-30
# Rows in a block, of which the largest is taken whose padding costs less than an eighth.
_BLOCK_ROWS = (512, 256, 128, 64, 32, 16, 8)
_PADDING = 1.125

Factorize = Callable[[Array, Array], tuple[Array, Array]]
# (row numbers, rank, dtype) -> what takes the place of columns without a direction: (*rows, rank)
Spare = Callable[[Array, int, Any], Array]


def bases_by_rank(
    factors: Sequence[Array],
    spare: Spare,
    factorize: Factorize | None = None,
    rounds: int = ROUNDS,
) -> list[Array]:
    """An orthonormal basis of the columns of every factor, as `orthogonalize` gives.

    Args:
      factors: Arrays ``(*batch, n, r)`` with ``r <= n``, float32 or wider, finite.
      spare: Makes dense columns, for those without a direction of their own. `leafwise` has them,
        for the bases of a CPU too.
      factorize: What takes the place of `inverse_factors`.
      rounds: `ROUNDS` or `ROUNDS_TO_SPAN`.

    Returns:
      Arrays of the same shapes and dtypes.
    """
    results: dict[int, Array] = {}
    for kind in dict.fromkeys((x.shape[-1], x.dtype) for x in factors):
        chosen = [i for i, x in enumerate(factors) if (x.shape[-1], x.dtype) == kind]
        parts = [factors[i] for i in chosen]
        if factorize is None:
            bases = _traced_once(parts, spare, rounds)
        else:
            bases = _bases(parts, spare, factorize, rounds)
        results.update(zip(chosen, bases, strict=True))
    return [results[i] for i in range(len(factors))]


@functools.partial(jax.jit, static_argnames=("spare", "rounds"))
def _traced_once(factors: list[Array], spare: Spare, rounds: int) -> list[Array]:
    """`_bases` in plain JAX, which a program for CPUs is traced with and compiled without."""
    return _bases(factors, spare, jax.jit(inverse_factors), rounds)


def _bases(factors: list[Array], spare: Spare, factorize: Factorize, rounds: int) -> list[Array]:
    rank, dtype = factors[0].shape[-1], factors[0].dtype
    rows = [x.shape[-2] for x in factors for _ in range(math.prod(x.shape[:-2]))]
    size = _block_rows(rows)
    counts = [-(-n // size) for n in rows]
    owner = np.repeat(np.arange(len(rows)), counts)
    members = jnp.asarray(np.arange(len(rows))[:, None] == owner[None], dtype)
    # A matrix's blocks, repeated where it has fewer than another.
    firsts = np.cumsum([0, *counts[:-1]])
    padded = np.minimum(np.arange(max(counts))[None], np.array(counts)[:, None] - 1)
    blocks = _cut(factors, size)
    # Which row of its matrix each row of a block is.
    start = (np.arange(len(owner)) - firsts[owner]) * size
    row = jnp.asarray(start)[:, None] + jnp.arange(size)[None]
    inside = row < jnp.asarray(np.array(rows)[owner])[:, None]
    dense = jnp.where(inside[..., None], spare(row, rank, dtype), 0)
    # Dividing by the largest entry keeps squares inside the float range; in two steps, because
    # XLA may multiply by the reciprocal, and that of a number near the end of the range is 0.
    largest = jnp.abs(blocks).max(axis=1)[firsts[:, None] + padded].max(axis=1)
    largest = largest[owner][:, None]
    step = jnp.where(largest > 1, dtype.type(1 / 16), dtype.type(1))
    x = (blocks * step) / jnp.where(largest == 0, 1, largest * step)
    x = jnp.where(largest == 0, dense, x)
    exact = lax.Precision.HIGHEST
    for turn in range(rounds):
        gram = jnp.einsum("bni,bnj->bij", x, x, precision=exact)
        gram = jnp.matmul(members, gram.reshape(-1, rank * rank), precision=exact)
        gram = gram.reshape(-1, rank, rank)
        lost_below = jnp.asarray(_LEAST_PIVOT if turn == _LOOKS else -1, dtype)
        inverse, lost = factorize(gram, lost_below)
        x = jnp.einsum("bni,bij->bnj", x, inverse[owner], precision=exact)
        if turn == _LOOKS:
            x = jnp.where(lost[owner][:, None], dense, x)
    return _joined(x, factors)


def inverse_factors(gram: Array, lost_below: Array) -> tuple[Array, Array]:
    """What makes columns with these Gram matrices orthonormal, as far as that can be told.

    One batched factorisation and one batched solve, whatever the rank: two library calls on a GPU.

    Args:
      gram: ``(number, r, r)``, symmetric.
      lost_below: Columns of which at most this share of the squared length lies outside of the span
        of those before them have no direction of their own.

    Returns:
      Upper triangular matrices ``(number, r, r)`` to multiply with from the right, zero in the
      columns that are lost; and which those are, bool ``(number, r)``.
    """
    correlations, norm = scaled(gram)
    # Where rounding is more than the shift, as between columns that are all multiples of one, the
    # factorisation fails: a larger shift takes its place, and tells less apart.
    both = jnp.stack([correlations, _shrunk(correlations, _LARGE_SHIFT)])
    factors = lax.linalg.cholesky(both, symmetrize_input=False)
    failed = ~jnp.isfinite(factors[0]).all(axis=(-2, -1), keepdims=True)
    factor = jnp.where(failed, factors[1], factors[0])
    unit = jnp.broadcast_to(jnp.eye(gram.shape[-1], dtype=gram.dtype), gram.shape)
    unit, factor = alike([unit, factor])
    inverse = lax.linalg.triangular_solve(factor, unit, left_side=True, lower=True)
    pivots = jnp.square(jnp.diagonal(factor, axis1=-2, axis2=-1))
    pivots -= jnp.where(failed[..., 0], 2 * _LARGE_SHIFT, 0)
    lost = (pivots <= lost_below) | (norm == 0)
    return norm[..., None] * jnp.where(lost[..., None], 0, inverse).mT, lost


def scaled(gram: Array) -> tuple[Array, Array]:
    """A Gram matrix as one of columns of length 1, kept from being singular.

    Correlations are a little smaller than they were, so that a column that is a sum of others is
    told from them by what rounding could have hidden. Columns that are orthogonal stay so.

    Args:
      gram: ``(..., r, r)``.

    Returns:
      Correlations ``(..., r, r)`` without an eigenvalue below about the shift; and what each column
      was multiplied with, ``(..., r)``, 0 where it is zero.
    """
    diagonal = jnp.where(_unit(gram), gram, 0).sum(axis=-2)
    there = diagonal > _ZERO
    norm = jnp.where(there, lax.rsqrt(jnp.where(there, diagonal, 1)), 0)
    correlations = gram * norm[..., :, None] * norm[..., None, :]
    return _shrunk(correlations, _shift(gram.shape[-1])), norm


def _shrunk(correlations: Array, shift: float) -> Array:
    """Correlations less a share, with ones on the diagonal."""
    return jnp.where(_unit(correlations), 1, correlations * (1 / (1 + shift)))


def _unit(matrices: Array) -> Array:
    """Where their diagonals are; bool, in iotas, which a kernel can make too."""
    row, column = (
        lax.broadcasted_iota(jnp.int32, matrices.shape, matrices.ndim - k) for k in (2, 1)
    )
    return row == column


def inverse_factor(gram: Array, lost_below: Array) -> tuple[Array, Array]:
    """`inverse_factors` of a single matrix ``(r, r)``, without a library: what a kernel can do.

    Gauss's elimination on the matrix beside the identity, row by row, as operations on whole
    matrices: a GPU has no use for a single entry.
    """
    correlations, norm = scaled(gram)
    row = lax.broadcasted_iota(jnp.int32, gram.shape, 0)
    numbers = lax.iota(jnp.int32, gram.shape[0])

    def step(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        left, beside, pivots = carry
        here = jnp.where(row == j, left, 0).sum(axis=0)
        below = jnp.where(row == j, beside, 0).sum(axis=0)
        pivot = jnp.where(numbers == j, here, 0).sum()
        least = _shift(gram.shape[0]) / 2
        root = lax.rsqrt(jnp.maximum(pivot, least))
        here, below = here * root, below * root
        # The matrix stays symmetric: its column is its row. A pivot below the shift is nothing but
        # rounding, which would grow from row to row: nothing is subtracted for it in this round.
        share = jnp.where((numbers > j) & (pivot >= least), here, 0)[:, None]
        beside = jnp.where(row == j, below[None], beside - share * below[None])
        return left - share * here[None], beside, jnp.where(numbers == j, pivot, pivots)

    carry = correlations, _unit(gram).astype(gram.dtype), jnp.zeros_like(norm)
    _, inverse, pivots = lax.fori_loop(0, gram.shape[0], step, tuple(alike(list(carry))))
    lost = (pivots <= lost_below) | (norm == 0)
    # Lower triangular so far. The scaling of the Gram matrix is one of the columns too.
    return norm[:, None] * jnp.where(lost[:, None], 0, inverse).T, lost


def _shift(rank: int) -> float:
    return _SHIFT * max(1, rank / _SHIFT_RANK)


def _block_rows(rows: Sequence[int]) -> int:
    total = sum(rows)
    fitting = [n for n in _BLOCK_ROWS if sum(-(-r // n) * n for r in rows) <= _PADDING * total]
    return fitting[0] if fitting else _BLOCK_ROWS[-1]


def _cut(factors: Sequence[Array], size: int) -> Array:
    """Blocks ``(number, size, r)`` of the matrices behind each other, padded with zeros."""
    rank, parts = factors[0].shape[-1], []
    for x in factors:
        flat = x.reshape(-1, *x.shape[-2:])
        parts.append(jnp.pad(flat, ((0, 0), (0, -x.shape[-2] % size), (0, 0))).reshape(-1))
    return jnp.concatenate(parts).reshape(-1, size, rank)


def _joined(blocks: Array, like: Sequence[Array]) -> list[Array]:
    """The inverse of `_cut`."""
    size, results, start = blocks.shape[1], [], 0
    for x in like:
        n, number = x.shape[-2], math.prod(x.shape[:-2])
        count = number * -(-n // size)
        part = blocks[start : start + count].reshape(number, -1, x.shape[-1])[:, :n]
        results.append(part.reshape(x.shape))
        start += count
    return results
