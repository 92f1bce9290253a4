"""The arithmetic of PowerSGD on leaves and their thin factors, for every device and transformation.

Products are taken without a transpose of the leaf: a `MatrixView` tells how it is a ``(rows,
cols)`` matrix ``M``; ``P`` is ``(rows, r)`` and ``Q`` is ``(cols, r)``, each with the leading batch
axes of the view.

Orthonormal bases come from Gram-Schmidt for few columns and Householder QR for more on CPU;
elsewhere, where both are many small kernels, from Cholesky QR of all matrices together
(`cholesky_qr`). Whatever goes in (zeros, repeated columns, values near either end of the float
range), the columns that come out are orthonormal. A column without a direction of its own is
replaced by a fixed dense one: were it left at zero, the power iteration could never pick that
direction up again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxcomp._base.typing import Array
from jaxcomp._lowrank.cholesky_qr import ROUNDS, Factorize, bases_by_rank
from jaxcomp._lowrank.matricize import MatrixView
from jaxcomp._mesh.axes import other_axes, typed_as

# A residual that is exact in float32 needs products that are: no TensorFloat-32 on GPU. With so few
# columns the products are bound by memory, so the precision costs nothing.
_EXACT = lax.Precision.HIGHEST
# Up to this rank a sum of outer products, which XLA fuses with the arithmetic around it, replaces a
# matrix product, whose dense result would be written out and read again. It has the shape of the
# leaf, not of the matrix: a reshape in between would keep XLA from updating the residual in place.
_FUSED_OUTER_RANK = 8
# Above, a product is taken in blocks of so many bytes, of which two stay in a core's cache.
_BLOCK_BYTES = 1 << 20
# torch's hook uses Gram-Schmidt up to rank 2 and QR above.
_GRAM_SCHMIDT_RANK = 2
# A column of which less than this share is left after projection has no direction of its own.
_COLLINEAR = 1e-6


class Leafwise:
    """Products, residuals and bases for lists of leaves, one after the other.

    `grouped` has the same methods in kernels for NVIDIA GPUs.
    """

    def multiply(
        self,
        views: Sequence[MatrixView],
        totals: Sequence[Array],
        factors: Sequence[Array],
        *,
        transposed: bool,
    ) -> list[Array]:
        """``M Q`` of every leaf, or ``M^T P`` if `transposed`."""
        one = transposed_times_p if transposed else times_q
        return [one(*leaf) for leaf in zip(views, totals, factors, strict=True)]

    def outer(
        self,
        views: Sequence[MatrixView],
        p: Sequence[Array],
        q: Sequence[Array],
        dtypes: Sequence[Any],
        finite: Array | None = None,
    ) -> list[Array]:
        """``P Q^T`` of every leaf, in its shape and in these dtypes; NaN unless `finite`."""
        if finite is not None:
            # One NaN in a row of a factor is NaN in the whole row of the product: no second look
            # at what is as large as the gradients.
            p = self.where(finite, p, None)
        zipped = zip(views, p, q, dtypes, strict=True)
        return [outer(view, a, b).astype(dtype) for view, a, b, dtype in zipped]

    def unsent(
        self,
        views: Sequence[MatrixView],
        p: Sequence[Array],
        q: Sequence[Array],
        totals: Sequence[Array],
        olds: Sequence[Array],
        commit: Array,
        kept: Array | None,
        function: Callable[[Array, Array, Array], Array],
    ) -> list[Array]:
        """The new residuals, in the place of the old ones.

        Args:
          views: How each leaf is a matrix.
          p: Left factors.
          q: Right factors.
          totals: What was to be sent, in the leaves' shapes.
          olds: The old residuals.
          commit: Bool scalar: whether the residuals change at all.
          kept: How much of the old residual stays; None for nothing.
          function: All of that for one leaf, from ``P Q^T``, the total and the old residual.
        """
        del commit, kept  # the function knows them
        zipped = zip(views, p, q, totals, olds, strict=True)
        return [replace_by_product(*leaf, function) for leaf in zipped]

    def bases(self, factors: Sequence[Array], eps: Any, rounds: int = ROUNDS) -> list[Array]:
        """Orthonormal bases of all factors, in so many rounds of Cholesky QR."""
        return orthonormal_bases(factors, eps, rounds=rounds)

    def where(
        self, flag: Array, news: Sequence[Array], olds: Sequence[Array] | None
    ) -> list[Array]:
        """`news` if `flag`, else `olds`, or NaN without them."""
        return [
            jnp.where(flag, x, jnp.nan if olds is None else olds[i]) for i, x in enumerate(news)
        ]


def times_q(view: MatrixView, leaf: Array, q: Array) -> Array:
    """``M Q``, shape ``(*batch, rows, r)``."""
    matrix = view.matricize(leaf)
    return _contract_first(matrix, q) if view.cols_first else _contract_last(matrix, q)


def transposed_times_p(view: MatrixView, leaf: Array, p: Array) -> Array:
    """``M^T P``, shape ``(*batch, cols, r)``."""
    matrix = view.matricize(leaf)
    return _contract_last(matrix, p) if view.cols_first else _contract_first(matrix, p)


def outer(view: MatrixView, p: Array, q: Array) -> Array:
    """``P Q^T`` in the shape of the leaf."""
    rank = p.shape[-1]
    if rank > _FUSED_OUTER_RANK:
        first, second = (q, p) if view.cols_first else (p, q)
        return view.unmatricize(_product(first, second))
    products = [view.along_rows(p[..., k]) * view.along_cols(q[..., k]) for k in range(rank)]
    return sum(products[1:], start=products[0])


def replace_by_product(
    view: MatrixView,
    p: Array,
    q: Array,
    total: Array,
    old: Array,
    function: Callable[[Array, Array, Array], Array],
) -> Array:
    """``function(P Q^T, total, old)``, with `old` updated in place where it is donated.

    A product that XLA does not fuse is not written out as a whole: on CPU the blocks of a leaf
    follow each other, and take the place of `old` one by one. On GPU, where each block would be
    several kernels to launch, and beside automatic axes, along which a leaf may be sharded, it is
    one block.

    Args:
      view: How the leaf is a matrix.
      p: Left factor.
      q: Right factor.
      total: An array of the leaf's shape.
      old: Another one, of the dtype of the result.
      function: Elementwise.

    Returns:
      An array of the shape and dtype of `old`.
    """

    def whole() -> Array:
        return function(outer(view, p, q), total, old)

    if p.shape[-1] <= _FUSED_OUTER_RANK or not view.is_reshape or other_axes():
        return whole()
    first, second = (q, p) if view.cols_first else (p, q)
    matrix = view.matricize(total)
    number = min(matrix.size * matrix.dtype.itemsize // _BLOCK_BYTES, matrix.shape[0])
    if number <= 1:
        return whole()
    size, rest = divmod(matrix.shape[0], number)

    def block(start: Array | int, size: int, new: Array) -> Array:
        def cut(x: Array) -> Array:
            return lax.dynamic_slice_in_dim(x, start, size)

        # Only batch axes are common to both factors; the second has all the columns otherwise.
        product = _product(cut(first), cut(second) if view.batch else second)
        value = function(product, cut(matrix), cut(new))
        return lax.dynamic_update_slice_in_dim(new, value, start, axis=0)

    def blocks() -> Array:
        new = view.matricize(typed_as(old, whole))
        # The rest comes first. After the loop, XLA would run it after the loops of other leaves and
        # hold all that it needs till then.
        new = block(number * size, rest, new) if rest else new
        new = lax.fori_loop(0, number, lambda i, new: block(i * size, size, new), new)
        return view.unmatricize(new)

    return lax.platform_dependent(cpu=blocks, default=whole)


def _product(first: Array, second: Array) -> Array:
    return jnp.einsum("...ir,...jr->...ij", first, second, precision=_EXACT)


def _contract_last(x: Array, factor: Array) -> Array:
    return jnp.einsum("...ij,...jr->...ir", x, factor, precision=_EXACT)


def _contract_first(x: Array, factor: Array) -> Array:
    product = jnp.einsum("...ir,...ij->...rj", factor, x, precision=_EXACT)
    # XLA would fold the transpose into the product, and its CPU backend is 10 to 50 times slower at
    # the form that this gives (contraction over the first axis of both).
    return lax.optimization_barrier(product).mT


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
        bases = bases_by_rank(
            [x for x, flag in pairs if not flag], spare_directions, factorize, rounds
        )
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


def spare_directions(rows: Array, rank: int, dtype: Any) -> Array:
    """Dense columns without any structure that a gradient would share: hashed positions.

    Args:
      rows: Row numbers, of any shape and integer dtype.
      rank: How many columns.
      dtype: Of the result.

    Returns:
      ``(*rows.shape, rank)`` in [-0.5, 0.5).
    """
    cols = jnp.arange(1, rank + 1, dtype=jnp.uint32).reshape(*rows.ndim * (1,), rank)
    # Two rounds of multiply and xor-shift (Knuth's and Murmur3's multipliers).
    bits = rows.astype(jnp.uint32)[..., None] * jnp.uint32(2654435761)
    bits += cols * jnp.uint32(0x9E3779B9)
    for multiplier in (0x85EBCA6B, 0xC2B2AE35):
        bits = (bits ^ (bits >> 15)) * jnp.uint32(multiplier)
    return (bits >> 8).astype(dtype) / (1 << 24) - 0.5
