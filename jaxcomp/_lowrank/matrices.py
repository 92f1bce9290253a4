"""Leaves as matrices, and their products with thin factors.

A leaf is never transposed when a reshape will do: `MatrixView` remembers whether rows or columns
come first in memory, and the products contract the right axis. ``M`` is ``(rows, cols)``, ``P`` is
``(rows, r)`` and ``Q`` is ``(cols, r)``, each with the leading batch axes of the view.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomp._base.typing import Array, MatrixDims
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


@dataclasses.dataclass(frozen=True)
class MatrixView:
    """One leaf seen as a batch of ``(n_rows, n_cols)`` matrices.

    The array that `matricize` returns has shape ``(*batch, n_cols, n_rows)`` if `cols_first`, else
    ``(*batch, n_rows, n_cols)``: whichever is a plain reshape of the leaf.
    """

    shape: tuple[int, ...]
    dims: MatrixDims
    # Whether it is many leaves as one, which are cut out of what is made of it.
    is_stack: bool = False
    batch: tuple[int, ...] = dataclasses.field(init=False)  # sizes of the batch axes
    n_rows: int = dataclasses.field(init=False)  # of one matrix
    n_cols: int = dataclasses.field(init=False)
    cols_first: bool = dataclasses.field(init=False)
    # The axes as `matricize` has them; in ascending order where it moves nothing in memory.
    order: tuple[int, ...] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        """What follows from the two."""
        batch, rows, cols = self.dims
        sizes = [tuple(self.shape[axis] for axis in axes) for axes in self.dims]
        cols_first = batch + rows + cols != tuple(range(len(self.shape)))
        follows = {
            "batch": sizes[0],
            "n_rows": math.prod(sizes[1]),
            "n_cols": math.prod(sizes[2]),
            "cols_first": cols_first,
            "order": batch + cols + rows if cols_first else batch + rows + cols,
        }
        for name, value in follows.items():
            object.__setattr__(self, name, value)

    @property
    def is_reshape(self) -> bool:
        """Whether `matricize` moves nothing in memory; a function of the user may ask for it."""
        return self.order == tuple(range(len(self.shape)))

    def matricize(self, leaf: Array) -> Array:
        """The leaf as a batch of matrices, in the memory order that `cols_first` tells."""
        pair = (self.n_cols, self.n_rows) if self.cols_first else (self.n_rows, self.n_cols)
        leaf = leaf if self.is_reshape else leaf.transpose(self.order)
        return leaf.reshape(*self.batch, *pair)

    def unmatricize(self, matrix: Array) -> Array:
        """The inverse of `matricize`."""
        inverse = tuple(int(axis) for axis in np.argsort(self.order))
        return matrix.reshape([self.shape[axis] for axis in self.order]).transpose(inverse)

    def along(self, axes: tuple[int, ...], values: Array) -> Array:
        """``(*batch, n)``, of rows or of columns, along these axes of the leaf, 1 along others."""
        ordered = tuple(int(i) for i in np.argsort(axes))
        values = values.reshape([self.shape[axis] for axis in axes]).transpose(ordered)
        return values.reshape([n if i in axes else 1 for i, n in enumerate(self.shape)])


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
    # What is fused with the arithmetic around it would be computed anew for each leaf of a stack.
    if rank > _FUSED_OUTER_RANK or view.is_stack:
        first, second = (q, p) if view.cols_first else (p, q)
        return view.unmatricize(_product(first, second))
    batch, rows, cols = view.dims
    products = [
        view.along(batch + rows, p[..., k]) * view.along(batch + cols, q[..., k])
        for k in range(rank)
    ]
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
        # As the row of a state that `jax.shard_map` hands over, whose reshape to the leaf would
        # otherwise be part of the loop, and keep XLA from writing it in the place of the old one.
        rows = [x.reshape(1, *x.shape) for x in (outer(view, p, q), total, old)]
        return function(*rows).reshape(old.shape)

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
