"""Orthonormal bases of the columns of many factors at once.

Whatever goes in (zeros, repeated columns, values near either end of the float range), the columns
that come out are orthonormal, with ``eps=0`` and all `ROUNDS`. A column without a direction of its
own is replaced by a fixed dense one: were it left at zero, the power iteration could never pick
that direction up again.

On CPU: Gram-Schmidt for few columns, Householder QR for more. On GPU both are many small kernels,
one matrix after the other. So all matrices of one rank take rounds of Cholesky QR together: Gram
matrices of blocks of rows, their sums over the blocks of a matrix, the inverse Cholesky factors of
all matrices at once, and the matrices times these.

One such round in float32 resolves directions down to some thousandth of a column's length, since a
Gram matrix holds squares. So correlations are taken for a little smaller than they are ("shifted
CholeskyQR", Fukaya et al. 2020): what lies below is only made larger by that factor, and the next
round resolves it. A column that is close to the span of others even after two rounds had no
direction of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomp._base.leaves import alike, put_at
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
    torchs_eps: Any = eps
    if isinstance(eps, (int, float)) and eps == 0:
        torchs_eps = None

    def on_cpu(stacks: Sequence[Array]) -> list[Array]:
        return [_column_by_column(stack, torchs_eps) for stack in stacks]

    def elsewhere(stacks: Sequence[Array]) -> list[Array]:
        bases = list(stacks)
        for positions in alike([(x.shape[-1], x.dtype) for x in stacks]):
            of_rank = [stacks[i] for i in positions]
            if torchs_eps is None or of_rank[0].shape[-1] > _GRAM_SCHMIDT_RANK:
                of_rank = cholesky_bases(of_rank, rounds)
            else:
                # torch's eps is defined by columns that are taken one after the other. Without the
                # barrier jaxlib 0.10 fails for GPUs: "'scf.if' op along control flow edge".
                of_rank = on_cpu(lax.optimization_barrier(of_rank))
            put_at(bases, positions, of_rank)
        return bases

    groups = alike([(x.shape, x.dtype) for x in factors])
    stacks = []
    for positions in groups:
        stacks.append(jnp.stack([factors[i] for i in positions]))
    stacks = lax.platform_dependent(stacks, cpu=on_cpu, default=elsewhere)
    bases = list(factors)
    for positions, stack in zip(groups, stacks, strict=True):
        put_at(bases, positions, stack)
    return bases


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
            eps = jnp.asarray(eps, matrix.dtype) / scale  # infinite for zeros, which are lost
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
        again = _project_out(column, columns)
        unit = again / _norm(again)
        if eps is not None:
            unit = jnp.where(lost, unit, column / (length + eps[..., 0, j, None]))
        columns.append(unit)
    return jnp.stack(columns, axis=-1)


def _project_out(column: Array, basis: Sequence[Array]) -> Array:
    for other in basis:
        column = column - jnp.sum(other * column, axis=-1, keepdims=True) * other
    return column


def _norm(column: Array) -> Array:
    return jnp.sqrt(jnp.sum(column * column, axis=-1, keepdims=True))


@functools.partial(jax.jit, static_argnames="rounds")
def cholesky_bases(factors: Sequence[Array], rounds: int = ROUNDS) -> list[Array]:
    """Computes `orthonormal_bases` of factors of one rank and dtype together, traced once for each.

    Two rounds are taken of all columns. The others, where `rounds` asks for them, only follow if
    the first left columns of any matrix far from orthonormal. Replicas have the same factors, so
    all of them decide alike.
    """
    stacks = []
    spares = []
    for x in factors:
        blocks, spare = _scaled_blocks(x)
        stacks.append(blocks)
        spares.append(spare)
    stacks, _, _ = _round(stacks)
    stacks, gram, _ = _round(stacks)
    if rounds > ROUNDS_TO_SPAN:
        identity = jnp.eye(gram.shape[-1], dtype=gram.dtype)
        deviation = gram - identity[None]  # of every matrix, without a rank being promoted
        far = jnp.max(jnp.sum(deviation * deviation, axis=(-2, -1)))
        further = functools.partial(_further_rounds, spares=spares, rounds=rounds)
        stacks = lax.cond(far <= _FAR**2, lambda x: x, further, stacks)
    bases = []
    for x, blocks in zip(factors, stacks, strict=True):
        # With an axis of matrices where there is one, too: else XLA copies a large leaf on GPUs.
        matrices = blocks.reshape(*x.shape[:-2], -1, x.shape[-1])
        bases.append(matrices[..., : x.shape[-2], :])
    return bases


def _scaled_blocks(factors: Array) -> tuple[Array, Array]:
    """Cuts ``(*batch, n, r)`` into blocks of rows, with columns whose largest entry is 1.

    Returns:
      Blocks ``(matrices, blocks, size, r)``, and for one matrix spare directions, which have taken
      the place of columns of zeros.
    """
    n, rank = factors.shape[-2:]
    size = _rows_of_a_block(n)

    def cut(x: Array) -> Array:
        padded = jnp.pad(x.reshape(-1, n, rank), ((0, 0), (0, -n % size), (0, 0)))
        return padded.reshape(len(padded), -1, size, rank)

    spare = cut(spare_directions(n, rank, factors.dtype))
    x = cut(factors)
    # Dividing by the largest entry keeps squares inside the float range; in two steps, because
    # XLA may multiply by the reciprocal, and that of a number near the end of the range is 0.
    largest = jnp.abs(x).max(axis=(1, 2), keepdims=True)
    step = jnp.where(largest > 1, jnp.asarray(1 / 16, x.dtype), jnp.ones([], x.dtype))
    x = (x * step) / jnp.where(largest == 0, 1, largest * step)
    return jnp.where(largest == 0, spare, x), spare


def _rows_of_a_block(n: int) -> int:
    """Returns the largest number of rows in a block whose padding is cheap, else the smallest."""
    for size in _BLOCK_ROWS:  # the largest first
        if n + -n % size <= _PADDING * n:
            return size
    return _BLOCK_ROWS[-1]


def _round(
    stacks: Sequence[Array], lost_below: float = -1.0
) -> tuple[list[Array], Array, list[Array]]:
    """Takes one round of Cholesky QR.

    Returns:
      The new columns; the Gram matrices of the old ones, ``(matrices, r, r)``; and which columns
      have no direction of their own, bool ``(matrices, r)`` of each stack.
    """
    grams = []
    for x in stacks:
        # In a fixed order, as every replica must find the same.
        grams.append(jnp.sum(exact_einsum("mbni,mbnj->mbij", x, x), axis=1))
    gram = jnp.concatenate(grams)
    inverse, lost = inverse_factors(gram, jnp.asarray(lost_below, gram.dtype))
    ends = np.cumsum(list(map(len, stacks)))[:-1]
    columns = []
    for x, upper in zip(stacks, jnp.split(inverse, ends), strict=True):
        columns.append(exact_einsum("mbni,mij->mbnj", x, upper))
    return columns, gram, jnp.split(lost, ends)


def _further_rounds(
    stacks: Sequence[Array], *, spares: Sequence[Array], rounds: int
) -> list[Array]:
    """Takes the rounds after the first two, the first of which replaces columns that are lost."""
    columns, _, lost = _round(stacks, _LEAST_PIVOT)
    for i, spare in enumerate(spares):
        columns[i] = jnp.where(lost[i][:, None, None], spare, columns[i])
    for _ in range(ROUNDS_TO_SPAN + 1, rounds):
        columns, _, _ = _round(columns)
    return columns


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
