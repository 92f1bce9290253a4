"""Products of a leaf with its thin factors, without a transpose of the leaf.

A `MatrixView` tells how the leaf is a ``(rows, cols)`` matrix ``M``; ``P`` is ``(rows, r)`` and
``Q`` is ``(cols, r)``, each with the leading batch axes of the view.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxcomp._base.typing import Array
from jaxcomp._lowrank.cholesky_qr import ROUNDS
from jaxcomp._lowrank.matricize import MatrixView
from jaxcomp._lowrank.orthogonalize import orthonormal_bases
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


class Leafwise:
    """The same for lists of leaves, one after the other: for every device and transformation.

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
