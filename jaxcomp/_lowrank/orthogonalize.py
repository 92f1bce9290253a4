"""Orthonormal bases of the columns of many factors at once.

Whatever goes in (zeros, repeated columns, values near either end of the float range), the columns
that come out are orthonormal, with ``eps=0`` and all `ROUNDS`. A column without a direction of its
own is replaced by a fixed dense one: were it left at zero, the power iteration could never pick
that direction up again.

On CPU: Gram-Schmidt for few columns, Householder QR for more. On GPU both are many small kernels,
one matrix after the other. There all matrices of one rank are cut into blocks of rows that lie
behind each other, and rounds of Cholesky QR take all of them together: Gram matrices of the blocks,
their sums over the blocks of a matrix, the inverse Cholesky factors, and the blocks times these.

One such round in float32 resolves directions down to some thousandth of a column's length, since a
Gram matrix holds squares. So correlations are taken for a little smaller than they are ("shifted
CholeskyQR", Fukaya et al. 2020): what lies below is only made larger by that factor, and the next
round resolves it. A column that is close to the span of others even after two rounds had no
direction of its own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomp._base.typing import Array
from jaxcomp._lowrank.matrices import exact_einsum

# torch's hook uses Gram-Schmidt up to rank 2 and QR above.
_GRAM_SCHMIDT_RANK = 2
# A column of which less than this share is left after projection has no direction of its own.
_COLLINEAR = 1e-6
# Rounds until columns of float32 are orthonormal to rounding whatever they were; and until ordinary
# ones are, and no others are close to each other, which is enough for what only spans a space.
ROUNDS = 6
ROUNDS_TO_SPAN = 2
# By so much correlations are shrunk, up to this rank and in proportion above it: some ten times the
# rounding of a Gram matrix, and the least pivot that there can be.
_SHIFT, _SHIFT_RANK = 1e-5, 64
_LARGE_SHIFT = 1e-2
# The third round looks for columns without a direction of their own: this is the least pivot of
# those that have one. Each round before makes what tells a column from the others some two hundred
# times larger; those after it orthogonalise what takes the place of the rest.
_LEAST_PIVOT = 1e-2
# As far from the identity, in the Frobenius norm, may the Gram matrix be that the second round
# begins with. What shrinks correlations then leaves at most `_SHIFT` of that, which is rounding.
_FAR = 5e-2
# Columns come in with entries up to 1; nothing but zeros gets a squared length of this.
_ZERO = 1e-30
# Rows in a block, of which the largest is taken whose padding costs less than an eighth.
_BLOCK_ROWS = (512, 256, 128, 64, 32, 16, 8)
_PADDING = 1.125


def orthogonalize(matrix: Array, eps: float | Array = 0.0) -> Array:
    """Makes an orthonormal basis of the columns (Vogels et al. 2019, Algorithm 1, line 4).

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
    factors: Sequence[Array], eps: float | Array = 0.0, rounds: int = ROUNDS
) -> list[Array]:
    """Orthogonalises every factor: those of one shape together on CPU, of one rank elsewhere.

    Args:
      factors: Arrays ``(*batch, n, r)`` with ``r <= n``, float32 or wider, finite.
      eps: As in `orthogonalize`.
      rounds: Of Cholesky QR, where that is what runs: `ROUNDS`, or `ROUNDS_TO_SPAN`.
    """
    if not factors:
        return []
    # XLA's form for eps = 0 is another one: a number that is traced may be anything.
    torchs_eps = None if isinstance(eps, (int, float)) and eps == 0 else eps

    def on_cpu(factors: Sequence[Array]) -> list[Array]:
        return _map_by(lambda x: (x.shape, x.dtype), of_shape, factors)

    def elsewhere(factors: Sequence[Array]) -> list[Array]:
        return _map_by(lambda x: (x.shape[-1], x.dtype), of_rank, factors)

    def of_shape(factors: Sequence[Array]) -> Array:
        return _column_by_column(jnp.stack(factors), torchs_eps)

    def of_rank(factors: Sequence[Array]) -> list[Array]:
        if torchs_eps is None or factors[0].shape[-1] > _GRAM_SCHMIDT_RANK:
            return cholesky_bases(list(factors), rounds)
        # torch's eps is defined by columns that are taken one after the other. Without the barrier
        # jaxlib 0.10 fails for GPUs: "'scf.if' op along control flow edge" (see commit 4b578c6).
        return on_cpu([lax.optimization_barrier(x) for x in factors])

    return lax.platform_dependent(list(factors), cpu=on_cpu, default=elsewhere)


def _map_by(
    kind_of: Callable[[Array], Any],
    function: Callable[[list[Array]], Sequence[Array] | Array],
    arrays: Sequence[Array],
) -> list[Array]:
    """Applies `function` to the arrays of each kind; results in the order of all of them."""
    kinds: dict[Any, list[int]] = {}
    for i, x in enumerate(arrays):
        kinds.setdefault(kind_of(x), []).append(i)
    results = {}
    for positions in kinds.values():
        of_kind = function([arrays[i] for i in positions])
        for i, result in zip(positions, of_kind, strict=True):
            results[i] = result
    return [results[i] for i in range(len(arrays))]


def _column_by_column(matrix: Array, eps: float | Array | None) -> Array:
    """Makes a basis of the columns of each matrix of a batch: Gram-Schmidt, or Householder QR."""
    n, rank = matrix.shape[-2:]
    scale = jnp.abs(matrix).max(axis=-2, keepdims=True)
    zero = scale == 0
    # Dividing by the largest entry keeps squares inside the float range; a sum of the quotient's
    # squares lies between 1 and n.
    scaled = matrix / jnp.where(zero, 1, scale)
    spare = jnp.broadcast_to(spare_directions(n, rank, matrix.dtype), matrix.shape)
    if rank <= _GRAM_SCHMIDT_RANK:
        if eps is not None:
            eps = jnp.asarray(eps, matrix.dtype) / jnp.where(zero, 1, scale)
        return _gram_schmidt(scaled, spare, eps)
    # jaxlib's CPU kernel splits a batch over the very threads that it runs on, and waits for them:
    # with several devices in one process, all of them can wait for ever (seen with jaxlib 0.10.2).
    # A single matrix it does on the spot, and one after the other takes no longer.
    flat = jnp.where(zero, spare, scaled).reshape(-1, n, rank)
    return lax.map(lambda m: jnp.linalg.qr(m)[0], flat).reshape(matrix.shape)


def _gram_schmidt(matrix: Array, spare: Array, eps: Array | None) -> Array:
    """Takes columns one after the other, each projected twice (Giraud et al. 2005).

    With `eps`, ``(*batch, 1, r)``, it is torch's: one projection, onto columns that are a little
    shorter than 1, except for a column that takes a spare direction.
    """
    columns: list[Array] = []
    for j in range(matrix.shape[-1]):
        before = matrix[..., j]
        column = _project_out(before, columns)
        length = _norm(column)
        lost = length <= _COLLINEAR * _norm(before)
        column = jnp.where(lost, spare[..., j], column)
        if eps is None:
            column = _project_out(column, columns)
            columns.append(column / _norm(column))
        else:
            fresh = _project_out(column, columns)
            shrunk = column / (length + jnp.where(lost, 1, eps[..., 0, j, None]))
            columns.append(jnp.where(lost, fresh / _norm(fresh), shrunk))
    return jnp.stack(columns, axis=-1)


def _project_out(column: Array, basis: Sequence[Array]) -> Array:
    for other in basis:
        column = column - jnp.sum(other * column, axis=-1, keepdims=True) * other
    return column


def _norm(column: Array) -> Array:
    return jnp.sqrt(jnp.sum(column * column, axis=-1, keepdims=True))


class _Blocks(NamedTuple):
    """The matrices that blocks of rows belong to, and what takes the place of columns of zeros."""

    matrix: np.ndarray  # uint32 (blocks,): the matrix of each block
    counts: np.ndarray  # int32 (matrices,): the blocks of each matrix
    spare: Array  # (blocks, size, r)


@functools.partial(jax.jit, static_argnames="rounds")
def cholesky_bases(factors: Sequence[Array], rounds: int = ROUNDS) -> list[Array]:
    """Computes `orthonormal_bases` of factors of one rank and dtype together, traced once for each.

    Two rounds are taken of all columns. The others, where `rounds` asks for them, only follow if
    the first left columns of any matrix far from orthonormal. Replicas have the same factors, so
    all of them decide alike.
    """
    # Matrices of as many rows follow each other: all of them have as many blocks.
    order = sorted(range(len(factors)), key=lambda i: factors[i].shape[-2])
    ordered = [factors[i] for i in order]
    x, blocks = _scaled_blocks(ordered)
    x, _, _ = _round(x, blocks, jnp.asarray(-1, x.dtype))
    x, gram, _ = _round(x, blocks, jnp.asarray(-1, x.dtype))
    if rounds > ROUNDS_TO_SPAN:
        identity = jnp.eye(gram.shape[-1], dtype=gram.dtype)
        deviation = gram - identity[None]  # of every matrix, without a rank being promoted
        far = jnp.max(jnp.sum(deviation * deviation, axis=(-2, -1)))
        further = functools.partial(_further_rounds, blocks=blocks, rounds=rounds)
        x = lax.cond(far <= _FAR**2, lambda x: x, further, x)
    bases = dict(zip(order, _joined(x, ordered), strict=True))
    return [bases[i] for i in range(len(factors))]


def _scaled_blocks(factors: Sequence[Array]) -> tuple[Array, _Blocks]:
    """Cuts factors into blocks of rows, with columns whose largest entry is 1."""
    dtype = factors[0].dtype
    rows: list[int] = []
    for x in factors:
        rows += [x.shape[-2]] * math.prod(x.shape[:-2])
    size = _rows_of_a_block(np.array(rows))
    counts = -(-np.array(rows, np.int32) // np.int32(size))
    matrix = np.repeat(np.arange(len(rows), dtype=np.uint32), counts)
    spare = spare_directions(max(rows), factors[0].shape[-1], dtype)
    spares = [jnp.broadcast_to(spare[: x.shape[-2]], x.shape) for x in factors]
    x = _cut(factors, size)
    dense = _cut(spares, size)
    # Dividing by the largest entry keeps squares inside the float range; in two steps, because
    # XLA may multiply by the reciprocal, and that of a number near the end of the range is 0.
    largest = _of_matrices(jnp.max, jnp.abs(x).max(axis=1), counts)[matrix][:, None]
    step = jnp.where(largest > 1, dtype.type(1 / 16), dtype.type(1))
    x = (x * step) / jnp.where(largest == 0, 1, largest * step)
    return jnp.where(largest == 0, dense, x), _Blocks(matrix, counts, dense)


def _rows_of_a_block(rows: np.ndarray) -> int:
    """Returns the largest number of rows in a block whose padding is cheap, else the smallest."""
    for size in _BLOCK_ROWS:
        padded = -(-rows // size) * size
        if padded.sum() <= _PADDING * rows.sum():
            return size
    return _BLOCK_ROWS[-1]


def _round(x: Array, blocks: _Blocks, lost_below: Array) -> tuple[Array, Array, Array]:
    """Takes one round of Cholesky QR.

    Returns:
      The new columns; the Gram matrices of the old ones, ``(matrices, r, r)``; and which columns
      have no direction of their own, bool ``(matrices, r)``.
    """
    of_blocks = exact_einsum("bni,bnj->bij", x, x)
    gram = _of_matrices(jnp.sum, of_blocks, blocks.counts)
    inverse, lost = inverse_factors(gram, lost_below)
    return exact_einsum("bni,bij->bnj", x, inverse[blocks.matrix]), gram, lost


def _further_rounds(x: Array, *, blocks: _Blocks, rounds: int) -> Array:
    """Takes the rounds after the first two, the first of which replaces columns that are lost."""
    x, _, lost = _round(x, blocks, jnp.asarray(_LEAST_PIVOT, x.dtype))
    x = jnp.where(lost[blocks.matrix][:, None], blocks.spare, x)
    for _ in range(ROUNDS_TO_SPAN + 1, rounds):
        x, _, _ = _round(x, blocks, jnp.asarray(-1, x.dtype))
    return x


@jax.jit
def inverse_factors(gram: Array, lost_below: Array) -> tuple[Array, Array]:
    """Finds what makes columns with these Gram matrices orthonormal, as far as that can be told.

    One batched factorisation and one batched solve, whatever the rank: two library calls on a GPU.

    Args:
      gram: ``(number, r, r)``, symmetric.
      lost_below: Columns of which at most this share of the squared length lies outside of the span
        of those before them have no direction of their own.

    Returns:
      Upper triangular matrices ``(number, r, r)`` to multiply with from the right, zero in the
      columns that are lost; and which those are, bool ``(number, r)``.
    """
    rank = gram.shape[-1]
    unit = jnp.eye(rank, dtype=bool)
    diagonal = jnp.diagonal(gram, axis1=-2, axis2=-1)
    positive = diagonal > _ZERO
    norm = jnp.where(positive, lax.rsqrt(jnp.where(positive, diagonal, 1)), 0)
    # As if of columns of length 1, and a little smaller than they were, so that a column that is a
    # sum of others is told from them by what rounding could have hidden.
    correlations = gram * norm[..., :, None] * norm[..., None, :]
    shift = _SHIFT * max(1, rank / _SHIFT_RANK)
    correlations = jnp.where(unit, 1, correlations * (1 / (1 + shift)))
    # Where rounding is more than the shift, as between columns that are all multiples of one, the
    # factorisation fails: a larger shift takes its place, and tells less apart.
    shrunk = jnp.where(unit, 1, correlations * (1 / (1 + _LARGE_SHIFT)))
    factors = lax.linalg.cholesky(jnp.stack([correlations, shrunk]), symmetrize_input=False)
    failed = ~jnp.isfinite(factors[0]).all(axis=(-2, -1), keepdims=True)
    factor = jnp.where(failed, factors[1], factors[0])
    identity = jnp.where(unit, jnp.ones_like(factor), jnp.zeros_like(factor))
    inverse = lax.linalg.triangular_solve(factor, identity, left_side=True, lower=True)
    pivots = jnp.square(jnp.diagonal(factor, axis1=-2, axis2=-1))
    # A column that is a multiple of another has a pivot of twice the shift.
    pivots -= jnp.where(failed[..., 0], 2 * _LARGE_SHIFT, 0)
    lost = (pivots <= lost_below) | (norm == 0)
    return norm[..., None] * jnp.where(lost[..., None], 0, inverse).mT, lost


def spare_directions(n: int, rank: int, dtype: Any) -> Array:
    """Hashes positions: dense columns ``(n, rank)`` whose structure no gradient shares.

    In [-0.5, 0.5); of fewer rows the first of these.
    """
    rows, cols = jnp.arange(n, dtype=jnp.uint32), jnp.arange(1, rank + 1, dtype=jnp.uint32)
    # Two rounds of multiply and xor-shift (Knuth's and Murmur3's multipliers).
    bits = rows[:, None] * jnp.uint32(2654435761) + cols[None] * jnp.uint32(0x9E3779B9)
    for multiplier in (0x85EBCA6B, 0xC2B2AE35):
        bits = (bits ^ (bits >> 15)) * jnp.uint32(multiplier)
    return (bits >> 8).astype(dtype) / (1 << 24) - 0.5


def _of_matrices(function: Callable[..., Array], blocks: Array, counts: np.ndarray) -> Array:
    """Reduces ``(blocks, ...)`` to ``(matrices, ...)``, over as many blocks for each as `counts`.

    In a fixed order, as every replica must find the same; and all matrices of as many blocks
    together, since a 0/1 matrix of matrices times blocks would be quadratic (16.9 GiB for the
    28,800 of a mixture of experts).
    """
    lengths, numbers = np.unique(counts, return_counts=True)  # which ascend
    results = []
    start = 0
    for length, number in zip(lengths.tolist(), numbers.tolist(), strict=True):
        run = lax.slice_in_dim(blocks, start, start + length * number)
        results.append(function(run.reshape(number, length, *blocks.shape[1:]), axis=1))
        start += length * number
    return jnp.concatenate(results)


def _cut(factors: Sequence[Array], size: int) -> Array:
    """Cuts matrices into blocks ``(number, size, r)`` behind each other, padded with zeros."""
    parts = []
    for x in factors:
        matrices = x.reshape(-1, *x.shape[-2:])
        padding = -x.shape[-2] % size
        matrices = jnp.pad(matrices, ((0, 0), (0, padding), (0, 0)))
        parts.append(matrices.reshape(-1, size, x.shape[-1]))
    return jnp.concatenate(parts)


def _joined(blocks: Array, like: Sequence[Array]) -> list[Array]:
    """Joins blocks to matrices: the inverse of `_cut`."""
    joined = []
    start = 0
    for x in like:
        matrices = math.prod(x.shape[:-2])
        number = matrices * -(-x.shape[-2] // blocks.shape[1])
        part = lax.slice_in_dim(blocks, start, start + number)
        # With an axis of matrices where there is one, too: else XLA copies a large leaf on GPUs.
        padded = part.reshape(matrices, -1, x.shape[-1])
        joined.append(padded[:, : x.shape[-2]].reshape(x.shape))
        start += number
    return joined
