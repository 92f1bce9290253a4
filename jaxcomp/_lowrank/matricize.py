"""From leaves to matrices: which axes are rows and columns, and which leaves are compressed.

A leaf is never transposed when a reshape will do: `MatrixView` remembers whether rows or columns
come first in memory, and the products in `leafwise` contract the right axis.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp._base.leaves import leaf_dtype, leaf_name
from jaxcomp._base.typing import Array, KeyPath, MatrixDims, MatrixDimsFn, PyTree, RankFn

# Key-path entries under which flax.nnx keeps the array of a variable; they name no parameter.
_ANONYMOUS = frozenset({"value", "raw_value"})


@dataclasses.dataclass(frozen=True)
class MatrixView:
    """One leaf seen as a batch of ``(n_rows, n_cols)`` matrices.

    The array that `matricize` returns has shape ``(*batch, n_cols, n_rows)`` if `cols_first`, else
    ``(*batch, n_rows, n_cols)``: whichever is a plain reshape of the leaf.
    """

    shape: tuple[int, ...]
    dims: MatrixDims

    def _sizes(self, axes: Sequence[int]) -> tuple[int, ...]:
        return tuple(self.shape[axis] for axis in axes)

    @property
    def batch(self) -> tuple[int, ...]:
        """Sizes of the batch axes."""
        return self._sizes(self.dims.batch)

    @property
    def n_rows(self) -> int:
        """Rows of one matrix."""
        return math.prod(self._sizes(self.dims.rows))

    @property
    def n_cols(self) -> int:
        """Columns of one matrix."""
        return math.prod(self._sizes(self.dims.cols))

    @property
    def cols_first(self) -> bool:
        """Whether the matricized array is ``(*batch, n_cols, n_rows)``."""
        batch, rows, cols = self.dims
        return batch + rows + cols != tuple(range(len(self.shape)))

    @property
    def is_reshape(self) -> bool:
        """Whether `matricize` moves nothing in memory; a function of the user may ask for it."""
        return self._order == tuple(range(len(self.shape)))

    @property
    def _order(self) -> tuple[int, ...]:
        batch, rows, cols = self.dims
        return batch + cols + rows if self.cols_first else batch + rows + cols

    def matricize(self, leaf: Array) -> Array:
        """The leaf as a batch of matrices, in the memory order that `cols_first` tells."""
        pair = (self.n_cols, self.n_rows) if self.cols_first else (self.n_rows, self.n_cols)
        return _transpose(leaf, self._order).reshape(*self.batch, *pair)

    def unmatricize(self, matrix: Array) -> Array:
        """The inverse of `matricize`."""
        inverse = tuple(int(axis) for axis in np.argsort(self._order))
        return _transpose(matrix.reshape(self._sizes(self._order)), inverse)

    def along_rows(self, column: Array) -> Array:
        """``(*batch, n_rows)`` along the batch and row axes of the leaf, 1 along the others."""
        return self._along(self.dims.batch + self.dims.rows, column)

    def along_cols(self, row: Array) -> Array:
        """``(*batch, n_cols)`` along the batch and column axes of the leaf."""
        return self._along(self.dims.batch + self.dims.cols, row)

    def _along(self, axes: tuple[int, ...], values: Array) -> Array:
        ordered = tuple(int(i) for i in np.argsort(axes))
        values = _transpose(values.reshape(self._sizes(axes)), ordered)
        return values.reshape([n if i in axes else 1 for i, n in enumerate(self.shape)])


@dataclasses.dataclass(frozen=True)
class LeafPlan:
    """What happens to one leaf. `view` is None and `rank` 0 for a leaf that is not compressed."""

    path: str
    shape: tuple[int, ...]
    dtype: Any
    view: MatrixView | None = None
    rank: int = 0

    @property
    def size(self) -> int:
        """Number of values in the leaf."""
        return math.prod(self.shape)

    @property
    def p_shape(self) -> tuple[int, ...]:
        """Shape ``(*batch, n_rows, r)`` of the left factor."""
        assert self.view is not None
        return (*self.view.batch, self.view.n_rows, self.rank)

    @property
    def q_shape(self) -> tuple[int, ...]:
        """Shape ``(*batch, n_cols, r)`` of the right factor."""
        assert self.view is not None
        return (*self.view.batch, self.view.n_cols, self.rank)

    @property
    def wire_size(self) -> int:
        """Values that this leaf puts on the wire in one step."""
        return self.size if self.view is None else math.prod(self.p_shape) + math.prod(self.q_shape)


def plan_leaves(
    tree: PyTree,
    rank: int | RankFn,
    min_compression_rate: float,
    matrix_dims: MatrixDimsFn | None = None,
) -> list[LeafPlan]:
    """Decides for every leaf of `tree`, in flattening order, whether and how it is compressed.

    Args:
      tree: Arrays, or anything else with ``shape`` and ``dtype``.
      rank: The rank, or a function of (key path, leaf) that gives it; None leaves the leaf alone.
      min_compression_rate: A leaf is compressed iff
        ``(rows + cols) * r * min_compression_rate < rows * cols``, ``r = min(rows, cols, rank)``.
      matrix_dims: A function of (key path, leaf); where it is None, `default_matrix_dims` decides.
        A leaf for which the function returns None is not compressed.

    Returns:
      One plan per leaf.

    Raises:
      ValueError: If `rank` or `matrix_dims` returns something unusable; the message names the leaf.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomp import extend
      >>> params = {"bias": jnp.zeros(64), "kernel": jnp.zeros((3, 3, 32, 64))}
      >>> bias, kernel = extend.plan_leaves(params, rank=4, min_compression_rate=2.0)
      >>> bias.view is None, kernel.p_shape, kernel.q_shape
      (True, (64, 4), (288, 4))
    """
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [_plan(path, leaf, rank, min_compression_rate, matrix_dims) for path, leaf in leaves]


def is_compressed(rows: int, cols: int, rank: int, min_compression_rate: float) -> bool:
    """Whether two factors of a ``(rows, cols)`` matrix are small enough beside it, as in torch.

    Example:
      >>> from jaxcomp import extend
      >>> extend.is_compressed(64, 64, 16, 2.0), extend.is_compressed(64, 64, 15, 2.0)
      (False, True)
    """
    return (rows + cols) * rank * min_compression_rate < rows * cols


def _plan(
    path: KeyPath,
    leaf: Any,
    rank: int | RankFn,
    min_compression_rate: float,
    matrix_dims: MatrixDimsFn | None,
) -> LeafPlan:
    name = leaf_name(path)
    try:
        shape, dtype = tuple(np.shape(leaf)), leaf_dtype(leaf)
    except TypeError as error:
        raise ValueError(
            f"The leaf {name} is a {type(leaf).__name__} and no array. Of an Equinox module pass "
            "eqx.filter(model, eqx.is_inexact_array), of other trees the arrays that are trained."
        ) from error
    plain = LeafPlan(name, shape, dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        return plain
    asked = _asked_rank(path, leaf, rank)
    if asked is None:
        return plain
    dims = (default_matrix_dims if matrix_dims is None else matrix_dims)(path, leaf)
    if dims is None:
        return plain
    view = MatrixView(shape, _checked_dims(dims, shape, name))
    rows, cols = view.n_rows, view.n_cols
    r = min(rows, cols, asked)
    if not is_compressed(rows, cols, r, min_compression_rate) or 0 in view.batch:
        return plain
    return LeafPlan(name, shape, dtype, view, r)


def default_matrix_dims(path: KeyPath, leaf: Any) -> MatrixDims | None:
    """The split of the axes into a leading and a trailing block with the fewest rows + columns.

    Rows are the trailing block, so that a Flax kernel ``(in, out)`` becomes torch's ``(out, in)``
    and ``HWIO`` becomes ``(O, HWI)``; ties go to the later cut. A matrix named ``embedding`` is
    ``(vocab, features)`` with the vocabulary as rows, as in torch. None for fewer than two axes.

    Args:
      path: The key path of the leaf.
      leaf: The leaf, or anything else with a shape.

    Returns:
      Which axes are rows and which are columns; what a `matrix_dims` function returns for a leaf
      without a wish of its own.

    Example:
      >>> import jax
      >>> from jaxcomp import extend
      >>> extend.default_matrix_dims((), jax.ShapeDtypeStruct((3, 3, 16, 32), "float32"))
      MatrixDims(batch=(), rows=(3,), cols=(0, 1, 2))
    """
    shape = tuple(np.shape(leaf))
    ndim = len(shape)
    if ndim < 2:
        return None
    if ndim == 2 and _last_name(path) == "embedding":
        return MatrixDims(rows=(0,), cols=(1,))
    cuts = range(ndim - 1, 0, -1)  # later cuts first: min() keeps the first of equals
    cut = min(cuts, key=lambda k: math.prod(shape[:k]) + math.prod(shape[k:]))
    return MatrixDims(rows=tuple(range(cut, ndim)), cols=tuple(range(cut)))


def stacked_matrix_dims(stacked: Sequence[str], matrix_dims: MatrixDimsFn | None) -> MatrixDimsFn:
    """`matrix_dims` for trees with stacked layers: their leading axis counts the matrices.

    Args:
      stacked: Names of the parts of the tree that hold stacked layers.
      matrix_dims: The rule for one layer, and for leaves elsewhere; None for the default one.
    """
    rule = default_matrix_dims if matrix_dims is None else matrix_dims

    def dims(path: KeyPath, leaf: Any) -> MatrixDims | None:
        names = {getattr(key, "key", getattr(key, "name", None)) for key in path}
        if not names & set(stacked):
            return rule(path, leaf)
        layer = rule(path, jax.ShapeDtypeStruct(np.shape(leaf)[1:], leaf_dtype(leaf)))
        if layer is None:
            return None
        batch, rows, cols = (tuple(axis + 1 if axis >= 0 else axis for axis in x) for x in layer)
        return MatrixDims((0, *batch), rows, cols)

    return dims


def _asked_rank(path: KeyPath, leaf: Any, rank: int | RankFn) -> int | None:
    if not callable(rank):
        return rank
    value = rank(path, leaf)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(
            f"`rank` must return a positive integer or None, got {value!r} for the leaf "
            f"{leaf_name(path)}. Return None for a leaf that shall not be compressed."
        )
    return int(value)


def _checked_dims(dims: MatrixDims, shape: tuple[int, ...], name: str) -> MatrixDims:
    ndim = len(shape)
    try:
        axes = [tuple(axis + ndim if axis < 0 else axis for axis in part) for part in dims]
        batch, rows, cols = axes
    except (TypeError, ValueError):
        batch, rows, cols = (), (), ()
    if not rows or not cols or sorted(batch + rows + cols) != list(range(ndim)):
        raise ValueError(
            f"`matrix_dims` must put each of the {ndim} axes of the leaf {name} with shape {shape} "
            f"into exactly one of batch, rows and cols, with at least one row and one column axis, "
            f"got {dims!r}. Return None for a leaf that shall not be compressed."
        )
    return MatrixDims(batch, rows, cols)


def _last_name(path: KeyPath) -> str:
    for key in reversed(path):
        name = getattr(key, "key", getattr(key, "name", None))
        if isinstance(name, str) and name not in _ANONYMOUS:
            return name
    return ""


def _transpose(x: Array, order: tuple[int, ...]) -> Array:
    return x if order == tuple(range(x.ndim)) else x.transpose(order)
