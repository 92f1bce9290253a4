"""Orthogonalises the columns of many factors at once.

A PowerSGD step calls `orthonormal_bases` twice, for the old right factors and for the averaged left
factors. All replicas have the same columns and must get the same bases, bit for bit.

With ``eps=0`` and all `ROUNDS`, the resulting columns are orthonormal for any finite input: zeros,
repeated columns, values near either end of the float range. A column that is (almost) in the span
of the columns before it is called lost. It is replaced by a fixed dense column, because the power
iteration could never recover the direction from a column of zeros.

CPU: Gram-Schmidt for one or two columns, Householder QR for more. On GPU both would be many small
kernels, one matrix after the other. So all matrices of one rank take rounds of Cholesky QR
together. A round computes the Gram matrix of each block of rows, sums them over the blocks of a
matrix, inverts the Cholesky factors of all matrices at once, and multiplies the matrices with
these.

A Gram matrix holds squares, so one round in float32 resolves directions down to about a thousandth
of a column's length. To keep the factorisation stable, correlations are made a little smaller
("shifted CholeskyQR", Fukaya et al. 2020). A smaller direction is then not resolved but enlarged,
and the next round resolves it. A column that is close to the span of others even after two rounds
is lost.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomp._base.checks import answers_other_names, check_number
from jaxcomp._base.leaves import alike, is_floating, put_at
from jaxcomp._base.typing import Array
from jaxcomp._lowrank.matrices import exact_einsum, factors_of

# torch's hook uses Gram-Schmidt up to rank 2 and QR above.
_GRAM_SCHMIDT_RANK = 2
# A column is lost if projection leaves less than this fraction of its length.
_COLLINEAR = 1e-6
# Rounds after which any float32 columns are orthonormal to rounding; and rounds after which
# ordinary columns are orthonormal and no columns are close to each other, which suffices to span a
# space.
ROUNDS = 6
ROUNDS_TO_SPAN = 2
# Correlations are divided by 1 + this shift up to this rank; above it the shift grows with the
# rank. It is about ten times the rounding of a Gram matrix, and the smallest possible pivot.
_SHIFT, _SHIFT_RANK = 1e-5, 64
_LARGE_SHIFT = 1e-2
# The third round finds lost columns: their pivot is below this. Each of the two rounds before makes
# the difference of a column from the span of the others about two hundred times larger. The rounds
# after it orthogonalise the columns that replace lost ones.
_LEAST_PIVOT = 1e-2
# Largest distance (Frobenius norm) of the second round's Gram matrix from the identity for which no
# further round is needed. The shift then leaves an error of `_SHIFT` times this, which is rounding.
_FAR = 5e-2
# Columns are scaled to a largest entry of 1, so only a column of zeros has a smaller squared
# length.
_ZERO = 1e-30
# Possible numbers of rows in a block; the largest is used whose padding costs less than an eighth.
_BLOCK_ROWS = (8, 16, 32, 64, 128, 256, 512)
_PADDING = 1.125


@answers_other_names
def orthogonalize(matrix: Array, eps: float | Array = 0.0) -> Array:
    """Returns an orthonormal basis of the columns (Vogels et al. 2019, Algorithm 1, line 4).

    Args:
      matrix: ``(*batch, n, r)`` with ``r <= n``, float32 or wider, finite.
      eps: Added to the norm of a column before Gram-Schmidt divides by it, as torch's
        ``orthogonalization_epsilon``. Like torch, QR does not use it.

    Returns:
      ``(*batch, n, r)`` with ``P^T P = I`` to rounding (for ``eps=0``).

    Raises:
      ValueError: If `matrix` is something else, or `eps` is negative.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomp import extend
      >>> columns = jnp.array([[3.0, 3.0, 0.0], [4.0, 4.0, 0.0], [0.0, 5.0, 0.0]])  # one is zero
      >>> basis = extend.orthogonalize(columns)
      >>> bool(jnp.allclose(basis.T @ basis, jnp.eye(3), atol=1e-5))
      True
    """
    is_matrix = isinstance(matrix, (jax.Array, np.ndarray)) and is_floating(matrix)
    if not is_matrix or np.ndim(matrix) < 2 or matrix.shape[-1] > matrix.shape[-2]:
        kind = getattr(matrix, "dtype", type(matrix).__name__)
        raise ValueError(
            "`matrix` must be a floating array of shape (*batch, n, r) with r <= n, got a "
            f"{kind} of shape {np.shape(matrix)}."
        )
    return orthonormal_bases([matrix], check_number("eps", eps, 0))[0]


def orthonormal_bases(
    factors: Sequence[Array], eps: float | Array = 0.0, rounds: int = ROUNDS
) -> list[Array]:
    """Orthogonalises every factor: factors of one shape together on CPU, of one rank elsewhere.

    Args:
      factors: Arrays ``(*batch, n, r)`` with ``r <= n``, float32 or wider, finite.
      eps: Added to norms in Gram-Schmidt, as in `orthogonalize`.
      rounds: The number of rounds of Cholesky QR, if it is used: `ROUNDS` or `ROUNDS_TO_SPAN`.
    """
    if not factors:
        return []
    # eps = 0 takes another path; a traced eps may have any value, so it takes torch's path.
    torchs_eps: Any = eps
    if isinstance(eps, (int, float)) and eps == 0:
        torchs_eps = None

    def on_cpu(stacks: Sequence[Array]) -> list[Array]:
        return [_column_by_column(stack, torchs_eps) for stack in stacks]

    def elsewhere(stacks: Sequence[Array]) -> list[Array]:
        # The barrier makes each stack once: else every operation on a stack reads all its factors,
        # and jaxlib 0.10 fails in Gram-Schmidt: "'scf.if' op along control flow edge".
        bases = lax.optimization_barrier(list(stacks))
        for positions in alike([(x.shape[-1], x.dtype) for x in stacks]):
            of_rank = [bases[i] for i in positions]
            if torchs_eps is None or of_rank[0].shape[-1] > _GRAM_SCHMIDT_RANK:
                of_rank = cholesky_bases(of_rank, rounds)
            else:
                # torch's eps needs Gram-Schmidt, one column after the other.
                of_rank = on_cpu(of_rank)
            put_at(bases, positions, of_rank)
        return bases

    groups = alike([(x.shape, x.dtype) for x in factors])
    stacks = []
    for positions in groups:
        stacks.append(jnp.stack([factors[i] for i in positions]))
    stacks = lax.platform_dependent(stacks, cpu=on_cpu, default=elsewhere)
    bases = list(factors)
    for positions, stack in zip(groups, stacks, strict=True):
        put_at(bases, positions, factors_of(stack))
    return bases


def _column_by_column(matrix: Array, eps: float | Array | None) -> Array:
    """Returns a basis of the columns of each matrix in a batch: Gram-Schmidt or Householder QR."""
    n, rank = matrix.shape[-2:]
    scale = jnp.abs(matrix).max(axis=-2, keepdims=True)
    zero = scale == 0
    # Dividing by the largest entry keeps squares inside the float range: the sum of squares of a
    # column is then between 1 and n.
    scaled = matrix / jnp.where(zero, 1, scale)
    spare = jnp.broadcast_to(spare_directions(n, rank, matrix.dtype), matrix.shape)
    if rank <= _GRAM_SCHMIDT_RANK:
        if eps is not None:
            eps = jnp.asarray(eps, matrix.dtype) / scale  # infinite for columns of zeros (lost)
        return _gram_schmidt(scaled, spare, eps)
    # jaxlib's CPU kernel splits a batch over the threads that it runs on, and waits for them: with
    # several devices in one process, this can deadlock (seen with jaxlib 0.10.2). A single matrix
    # is not split, and one matrix after the other takes no longer.
    flat = jnp.where(zero, spare, scaled).reshape(-1, n, rank)
    bases = lax.map(lambda m: jnp.linalg.qr(m)[0], flat)
    return bases.reshape(matrix.shape)


def _gram_schmidt(matrix: Array, spare: Array, eps: Array | None) -> Array:
    """Orthogonalises one column after the other, each projected twice (Giraud et al. 2005).

    With `eps`, ``(*batch, 1, r)``, it does what torch does: one projection, onto columns that are a
    little shorter than 1. Only a column that is replaced by a spare one is projected twice.
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
            shorter = column / (length + eps[..., 0, j, None])
            unit = jnp.where(lost, unit, shorter)
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
    """Orthogonalises factors of one rank and dtype by Cholesky QR, traced once for given shapes.

    All factors take two rounds. If `rounds` is larger, the further rounds follow only if the first
    round left the columns of any matrix far from orthonormal; the first of these replaces lost
    columns. Replicas have equal factors, so they all take the same branch.
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

        def further(stacks: Sequence[Array]) -> list[Array]:
            columns, _, lost = _round(stacks, _LEAST_PIVOT)
            for i, spare in enumerate(spares):
                columns[i] = jnp.where(lost[i][:, None, None], spare, columns[i])
            for _ in range(ROUNDS_TO_SPAN + 1, rounds):
                columns, _, _ = _round(columns)
            return columns

        identity = jnp.eye(gram.shape[-1], dtype=gram.dtype)
        deviation = gram - identity[None]  # JAX may refuse to promote ranks
        far = jnp.max(jnp.sum(deviation * deviation, axis=(-2, -1)))
        stacks = lax.cond(far <= _FAR**2, list, further, stacks)
    bases = []
    for x, blocks in zip(factors, stacks, strict=True):
        # Keep the batch axis, even of length 1: else XLA copies a large leaf on GPUs.
        matrices = blocks.reshape(*x.shape[:-2], -1, x.shape[-1])
        bases.append(matrices[..., : x.shape[-2], :])
    return bases


def _scaled_blocks(factors: Array) -> tuple[Array, Array]:
    """Cuts ``(*batch, n, r)`` into blocks of rows, and scales each column to a largest entry of 1.

    Returns:
      Blocks ``(matrices, blocks, size, r)``, in which spare columns replace columns of zeros; and
      the spare columns of one matrix.
    """
    n, rank = factors.shape[-2:]
    size = _BLOCK_ROWS[0]
    for rows in _BLOCK_ROWS:  # the largest with little padding
        if n + -n % rows <= _PADDING * n:
            size = rows

    def cut(x: Array) -> Array:
        matrices = x.reshape(-1, n, rank)
        padded = jnp.pad(matrices, ((0, 0), (0, -n % size), (0, 0)))
        return padded.reshape(len(padded), -1, size, rank)

    spare = cut(spare_directions(n, rank, factors.dtype))
    x = cut(factors)
    # Dividing by the largest entry keeps squares inside the float range. It takes two steps,
    # because XLA may multiply by the reciprocal, and the reciprocal of a very large number is 0.
    largest = jnp.abs(x).max(axis=(1, 2), keepdims=True)
    sixteenth = jnp.asarray(1 / 16, x.dtype)
    step = jnp.where(largest > 1, sixteenth, jnp.ones([], x.dtype))
    x = x * step
    x = x / jnp.where(largest == 0, 1, largest * step)
    return jnp.where(largest == 0, spare, x), spare


def _round(
    stacks: Sequence[Array],
    lost_below: float = -1.0,  # no pivot is so small: only columns of zeros are lost
) -> tuple[list[Array], Array, list[Array]]:
    """Takes one round of Cholesky QR.

    Returns:
      The new columns; the Gram matrices of the old columns, ``(matrices, r, r)``; and for each
      stack which columns are lost, bool ``(matrices, r)``.
    """
    grams = []
    for x in stacks:
        # Summed in a fixed order, so that every replica gets the same bits.
        grams.append(jnp.sum(exact_einsum("mbni,mbnj->mbij", x, x), axis=1))
    gram = jnp.concatenate(grams)
    inverse, lost = inverse_factors(gram, jnp.asarray(lost_below, gram.dtype))
    ends = np.cumsum(list(map(len, stacks)))[:-1]
    columns = []
    for x, lower in zip(stacks, jnp.split(inverse, ends), strict=True):
        columns.append(exact_einsum("mbni,mji->mbnj", x, lower))
    return columns, gram, jnp.split(lost, ends)


@jax.jit
def inverse_factors(gram: Array, lost_below: Array) -> tuple[Array, Array]:
    """Returns triangular matrices that orthogonalise columns with these Gram matrices.

    This is one batched factorisation and one batched solve: two library calls on a GPU, at any
    rank.

    Args:
      gram: ``(number, r, r)``, symmetric.
      lost_below: A column is lost if at most this fraction of its squared length lies outside of
        the span of the columns before it.

    Returns:
      Lower triangular matrices ``(number, r, r)``, whose transposes are to multiply from the right,
      with zeros for lost columns; and which columns are lost, bool ``(number, r)``.
    """
    rank = gram.shape[-1]
    unit = jnp.eye(rank, dtype=bool)
    diagonal = jnp.diagonal(gram, axis1=-2, axis2=-1)
    positive = diagonal > _ZERO
    squared_lengths = jnp.where(positive, diagonal, 1)
    norm = jnp.where(positive, lax.rsqrt(squared_lengths), 0)
    # Correlations of columns scaled to length 1, divided by 1 + shift. So the pivot of a column in
    # the span of others is positive, and larger than the rounding.
    correlations = gram * norm[..., :, None]
    correlations = correlations * norm[..., None, :]
    shift = _SHIFT * max(1, rank / _SHIFT_RANK)
    shrinkage = 1 / (1 + shift)
    correlations = jnp.where(unit, 1, correlations * shrinkage)
    # If the rounding exceeds the shift, for example if all columns are multiples of one column, the
    # factorisation fails. Then a larger shift is used, which resolves fewer directions.
    shrinkage = 1 / (1 + _LARGE_SHIFT)
    shrunk = jnp.where(unit, 1, correlations * shrinkage)
    # Both in one batched call, because a second one after a failure would need a branch.
    both = jnp.stack([correlations, shrunk])
    factors = lax.linalg.cholesky(both, symmetrize_input=False)
    finite = jnp.isfinite(factors[0])  # a factorisation that fails returns NaN
    failed = ~finite.all(axis=(-2, -1), keepdims=True)
    factor = jnp.where(failed, factors[1], factors[0])
    # Made from the factor and not by jnp.eye, so that it has the batch and the type of the factor.
    identity = jnp.where(unit, jnp.ones_like(factor), jnp.zeros_like(factor))
    inverse = lax.linalg.triangular_solve(factor, identity, left_side=True, lower=True)
    diagonal = jnp.diagonal(factor, axis1=-2, axis2=-1)
    pivots = jnp.square(diagonal)
    # A column that is a multiple of another has a pivot of twice the shift.
    pivots -= jnp.where(failed[..., 0], 2 * _LARGE_SHIFT, 0)
    lost = (pivots <= lost_below) | (norm == 0)
    inverse = jnp.where(lost[..., None], 0, inverse)
    return norm[..., None, :] * inverse, lost


def spare_directions(n: int, rank: int, dtype: Any) -> Array:
    """Hashes positions to dense columns ``(n, rank)``, with a structure that no gradient has.

    Values lie in [-0.5, 0.5). The columns for a smaller `n` are the first rows of the columns for a
    larger `n`.
    """
    # Two rounds of multiply and xor-shift (Knuth's and Murmur3's multipliers).
    rows = jnp.arange(n, dtype=jnp.uint32)
    rows = rows * jnp.uint32(2654435761)
    cols = jnp.arange(1, rank + 1, dtype=jnp.uint32)
    cols = cols * jnp.uint32(0x9E3779B9)
    bits = rows[:, None] + cols[None]
    for multiplier in (0x85EBCA6B, 0xC2B2AE35):
        mixed = bits ^ (bits >> 15)
        bits = mixed * jnp.uint32(multiplier)
    # The upper 24 bits, which every floating dtype of factors holds exactly.
    fractions = (bits >> 8).astype(dtype) / (1 << 24)
    return fractions - 0.5
