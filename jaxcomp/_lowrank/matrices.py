"""Leaves as matrices: which are compressed, how, and their products with thin factors.

A leaf is never transposed when a reshape will do: `MatrixView` remembers whether rows or columns
come first in memory, and the products contract the right axis. ``M`` is ``(rows, cols)``, ``P`` is
``(rows, r)`` and ``Q`` is ``(cols, r)``, each with the leading batch axes of the view.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomp._base.checks import is_integer
from jaxcomp._base.leaves import is_floating, key_names, leaf_dtype, leaf_name
from jaxcomp._base.typing import Array, KeyPath, MatrixDims, MatrixDimsFn, PyTree, RankFn
from jaxcomp._mesh.collectives import other_axes, typed_like

# A residual that is exact in float32 needs products that are.
_EXACT = lax.Precision.HIGHEST
# On NVIDIA GPUs that precision keeps products of float32 off the tensor cores. There each factor is
# a sum of three parts in bfloat16, and six products of parts are added up in float32.
_EXACT_ON_TENSOR_CORES = lax.DotAlgorithmPreset.BF16_BF16_F32_X6
# Up to this rank a sum of outer products, which XLA fuses with the arithmetic around it, replaces a
# matrix product, whose dense result would be written out and read again. It has the shape of the
# leaf, not of the matrix: a reshape in between would keep XLA from updating the residual in place.
_FUSED_RANK = 8
# Above, a product is taken in blocks of so many bytes, of which two stay in a core's cache.
_BLOCK_BYTES = 1 << 20
# Key-path entries under which flax.nnx keeps the array of a variable; they name no parameter.
_ANONYMOUS = ("value", "raw_value")

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class MatrixView:
    """One leaf seen as a batch of ``(n_rows, n_cols)`` matrices.

    The array that `matricize` returns has shape ``(*batch, n_cols, n_rows)`` if `cols_first`, else
    ``(*batch, n_rows, n_cols)``: whichever is a plain reshape of the leaf, where one is.
    """

    shape: tuple[int, ...]
    dims: MatrixDims
    # Whether it is many leaves as one, which are cut out of what is made of it.
    is_group: bool = False

    @property
    def batch(self) -> tuple[int, ...]:
        """Returns the sizes of the batch axes."""
        return self.sizes(self.dims.batch)

    @property
    def n_rows(self) -> int:
        """Counts the rows of one matrix."""
        return math.prod(self.sizes(self.dims.rows))

    @property
    def n_cols(self) -> int:
        """Counts the columns of one matrix."""
        return math.prod(self.sizes(self.dims.cols))

    @property
    def cols_first(self) -> bool:
        """Tells whether `matricize` puts columns before rows."""
        batch, rows, cols = self.dims
        return batch + rows + cols != tuple(range(len(self.shape)))

    @property
    def order(self) -> tuple[int, ...]:
        """Returns the axes of the leaf as `matricize` has them."""
        batch, rows, cols = self.dims
        first, second = self.in_order(rows, cols)
        return batch + first + second

    @property
    def is_reshape(self) -> bool:
        """Tells whether `matricize` moves nothing in memory, as by the default rule."""
        return self.order == tuple(range(len(self.shape)))

    def in_order(self, of_rows: T, of_cols: T) -> tuple[T, T]:
        """Returns what belongs to rows and columns in the order of `cols_first`; and back."""
        if self.cols_first:
            return of_cols, of_rows
        return of_rows, of_cols

    def sizes(self, axes: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the sizes of some axes of the leaf."""
        return tuple(self.shape[axis] for axis in axes)

    def matricize(self, leaf: Array) -> Array:
        """Makes a leaf a batch of matrices, in the memory order that `cols_first` tells."""
        pair = self.in_order(self.n_rows, self.n_cols)
        return leaf.transpose(self.order).reshape(*self.batch, *pair)

    def unmatricize(self, matrix: Array) -> Array:
        """Makes a batch of matrices a leaf: the inverse of `matricize`."""
        return matrix.reshape(self.sizes(self.order)).transpose(_inverse(self.order))

    def along(self, axes: tuple[int, ...], values: Array) -> Array:
        """Lays ``(*batch, n)``, of rows or of columns, along axes of the leaf; 1 along others."""
        values = values.reshape(self.sizes(axes)).transpose(_inverse(axes))
        sizes = [1] * len(self.shape)
        for axis in axes:
            sizes[axis] = self.shape[axis]
        return values.reshape(sizes)


def _inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    """Returns where each axis is in an order of axes, or in a part of one."""
    return tuple(np.argsort(order).tolist())


def exact_einsum(subscripts: str, first: Array, second: Array) -> Array:
    """Multiplies two arrays with the rounding of float32, whatever the platform.

    Args:
      subscripts: As in `jnp.einsum`.
      first: Float32 or wider.
      second: An array of the same dtype.
    """
    plain = functools.partial(jnp.einsum, subscripts, precision=_EXACT)
    if first.dtype != jnp.float32 or not _multiplies_parts():
        return plain(first, second)
    of_parts = functools.partial(jnp.einsum, subscripts, precision=_EXACT_ON_TENSOR_CORES)
    return lax.platform_dependent(first, second, cuda=of_parts, default=plain)


def _multiplies_parts() -> bool:
    """Returns whether every NVIDIA GPU that JAX sees has tensor cores for bfloat16.

    XLA refuses the algorithm for those older than Ampere, such as T4 and V100.
    """
    for device in jax.devices():
        capability = str(getattr(device, "compute_capability", ""))
        if device.platform == "gpu" and capability.split(".")[0] in ("5", "6", "7"):
            return False
    return True


def product(view: MatrixView, leaf: Array, factor: Array, *, transposed: bool = False) -> Array:
    """Multiplies a leaf with a thin factor.

    Returns:
      ``M Q``, shape ``(*batch, rows, r)``; transposed ``M^T P``, shape ``(*batch, cols, r)``.
    """
    einsum = exact_einsum
    if factor.shape[-1] == 1:
        # A sum along rows or columns, which XLA fuses with the one that made the leaf.
        einsum = functools.partial(jnp.einsum, precision=_EXACT)
    else:
        leaf = _held(leaf)
        factor = _held(factor)
    matrix = view.matricize(leaf)
    if view.cols_first == transposed:
        return einsum("...ij,...jr->...ir", matrix, factor)
    flipped = einsum("...ir,...ij->...rj", factor, matrix)
    # XLA would fold the transpose into the product, and its CPU backend is 10 to 50 times slower at
    # the form that this gives (contraction over the first axis of both).
    return lax.optimization_barrier(flipped).mT


def _held(x: Array) -> Array:
    """Keeps XLA from fusing what made an array into the products with it, on GPUs.

    Its Triton products of parts cannot be compiled with everything that it fuses into them, such as
    slices of a larger array.
    """
    return lax.platform_dependent(x, cpu=lambda x: x, default=lax.optimization_barrier)


def outer(view: MatrixView, p: Array, q: Array) -> Array:
    """Rebuilds ``P Q^T`` in the shape of the leaf."""
    # What is fused with the arithmetic around it would be computed anew for each leaf of a stack.
    if p.shape[-1] > _FUSED_RANK or view.is_group:
        return view.unmatricize(_dense(*view.in_order(p, q)))
    as_they_lie = functools.partial(_sum_of_outer_products, view)
    column_by_column = functools.partial(_sum_by_columns, view)
    return lax.platform_dependent(p, q, cpu=as_they_lie, default=column_by_column)


def _sum_by_columns(view: MatrixView, p: Array, q: Array) -> Array:
    """Computes `_sum_of_outer_products` from factors that lie in memory as a GPU reads them.

    Threads that are neighbours read one column of the factor along the last axis, whose values are
    `r` apart: up to three times the time of the whole kernel at rank 8. So its columns come behind
    each other first. Only an array of one axis has no other layout that XLA could choose.
    """
    first, last = view.in_order(p, q)
    columns = jnp.moveaxis(last, -1, 0)
    # Held together, the factors of an output and of a residual are not the same to XLA. It would
    # make one kernel of both, which cannot write the output in the place of the sum.
    flat, first = lax.optimization_barrier((columns.reshape(-1), first))
    last = jnp.moveaxis(flat.reshape(columns.shape), 0, -1)
    return _sum_of_outer_products(view, *view.in_order(first, last))


def _sum_of_outer_products(view: MatrixView, p: Array, q: Array) -> Array:
    """Computes `outer` in a form that XLA fuses with the arithmetic around it."""
    batch, rows, cols = view.dims
    products = []
    for k in range(p.shape[-1]):
        left = view.along(batch + rows, p[..., k])
        products.append(left * view.along(batch + cols, q[..., k]))
    return sum(products[1:], start=products[0])


def unsent(
    view: MatrixView,
    dtype: Any,
    p: Array,
    q: Array,
    q_sent: Array,
    total: Array,
    old: Array,
    commit: Array,
) -> Array:
    """Makes the new residual: what is left of `total`, or `old` where not `commit`, in its place.

    This replica has sent ``P Q_w^T``, with its own factor. The mean ``P Q^T`` may be beyond the
    range of float16 even if the gradients are not. Then an output in that `dtype` cannot hold all
    of it: the rest was sent but reached nobody, so it stays, and goes out in later steps.

    A product that XLA does not fuse is not written out as a whole: on CPU the blocks of a leaf
    follow each other, and take the place of `old` one by one. On GPU, where each block would be
    several kernels to launch, and beside automatic axes, along which a leaf may be sharded, it is
    one block.
    """
    if dtype == jnp.float16:
        mean = outer(view, p, q)
        largest = float(jnp.finfo(dtype).max)
        total += mean - jnp.clip(mean, -largest, largest)

    def less(product: Array, total: Array, old: Array) -> Array:
        return jnp.where(commit, (total - product).astype(old.dtype), old)

    def whole() -> Array:
        # With a leading axis of 1, as the state has that `jax.shard_map` hands over: a reshape in
        # between would keep XLA from writing the result in the place of the old one.
        product = outer(view, p, q_sent)
        return less(product[None], total[None], old[None]).reshape(old.shape)

    small = total.size * total.dtype.itemsize < 2 * _BLOCK_BYTES
    if p.shape[-1] <= _FUSED_RANK or small or not view.is_reshape or other_axes():
        return whole()
    old_as_new = typed_like(old, (p, q_sent, total, commit))
    blocks = functools.partial(_in_blocks, view, p, q_sent, total, old_as_new, less)
    return lax.platform_dependent(cpu=blocks, default=whole)


def _in_blocks(
    view: MatrixView,
    p: Array,
    q: Array,
    total: Array,
    old: Array,
    function: Callable[[Array, Array, Array], Array],
) -> Array:
    """``function(P Q^T, total, old)``, elementwise, in blocks of the first axis of the matrix."""
    first, second = view.in_order(p, q)
    matrix = view.matricize(total)
    new = view.matricize(old)
    number = min(matrix.size * matrix.dtype.itemsize // _BLOCK_BYTES, matrix.shape[0])
    size, rest = divmod(matrix.shape[0], number)

    def block(start: Array | int, size: int, new: Array) -> Array:
        def cut(x: Array) -> Array:
            return lax.dynamic_slice_in_dim(x, start, size)

        columns = second
        if view.batch:  # the first axis of both factors; else the second has all the columns
            columns = cut(second)
        product = _dense(cut(first), columns)
        value = function(product, cut(matrix), cut(new))
        return lax.dynamic_update_slice_in_dim(new, value, start, axis=0)

    # The rest comes first. After the loop, XLA would run it after the loops of other leaves and
    # hold all that it needs till then.
    if rest:
        new = block(number * size, rest, new)
    new = lax.fori_loop(0, number, lambda i, new: block(i * size, size, new), new)
    return view.unmatricize(new)


def _dense(first: Array, second: Array) -> Array:
    return exact_einsum("...ir,...jr->...ij", _held(first), _held(second))


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
        if self.view is None:
            return self.size
        return math.prod(self.p_shape) + math.prod(self.q_shape)


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
    leaves = jax.tree.leaves_with_path(tree)
    # `jaxcomp.stacked` knows names that the tree must have: a misspelt one would be silent.
    check_leaves = getattr(matrix_dims, "check_leaves", None)
    if check_leaves is not None:
        check_leaves(leaves)
    dims = matrix_dims or default_matrix_dims
    plans = []
    for path, leaf in leaves:
        plans.append(_plan(path, leaf, rank, min_compression_rate, dims))
    return plans


def is_compressed(rows: int, cols: int, rank: int, min_compression_rate: float) -> bool:
    """Returns whether two factors of a ``(rows, cols)`` matrix are small beside it, as in torch.

    Example:
      >>> from jaxcomp import extend
      >>> extend.is_compressed(64, 64, 16, 2.0), extend.is_compressed(64, 64, 15, 2.0)
      (False, True)
    """
    return (rows + cols) * rank * min_compression_rate < rows * cols


def _plan(
    path: KeyPath, leaf: Any, rank: int | RankFn, rate: float, matrix_dims: MatrixDimsFn
) -> LeafPlan:
    """Decides about one leaf."""
    name = leaf_name(path)
    try:
        plain = LeafPlan(name, tuple(np.shape(leaf)), leaf_dtype(leaf))
    except TypeError as error:
        raise ValueError(
            f"The leaf {name} is a {type(leaf).__name__} and no array. For an Equinox module "
            "pass eqx.filter(model, eqx.is_inexact_array), for other trees the arrays that are "
            "trained."
        ) from error
    if not is_floating(plain):
        return plain
    leaf_rank: Any = rank
    if callable(rank):
        leaf_rank = rank(path, leaf)
    if leaf_rank is None:
        return plain
    if not is_integer(leaf_rank) or leaf_rank < 1:
        raise ValueError(
            f"`rank` must return a positive integer or None, got {leaf_rank!r} for the leaf "
            f"{name}. Return None for a leaf that shall not be compressed."
        )
    dims = matrix_dims(path, leaf)
    if dims is None:
        return plain
    view = MatrixView(plain.shape, _checked_dims(dims, plain.shape, name))
    r = min(view.n_rows, view.n_cols, int(leaf_rank))
    if not is_compressed(view.n_rows, view.n_cols, r, rate) or 0 in view.batch:
        return plain
    return dataclasses.replace(plain, view=view, rank=r)


def _checked_dims(dims: MatrixDims, shape: tuple[int, ...], name: str) -> MatrixDims:
    """Returns dims with axes counted from the front; refuses what is not each axis once."""
    axes = np.arange(len(shape))
    try:
        batch, rows, cols = (tuple(axes[list(part)].tolist()) for part in dims)
    except (TypeError, ValueError, IndexError):
        batch = rows = cols = ()
    if not rows or not cols or sorted(batch + rows + cols) != axes.tolist():
        raise ValueError(
            f"`matrix_dims` must put each of the {len(shape)} axes of the leaf {name} with shape "
            f"{shape} into exactly one of batch, rows and cols, with at least one row and one "
            f"column axis, got {dims!r}. Return None for a leaf that shall not be compressed."
        )
    return MatrixDims(batch, rows, cols)


def default_matrix_dims(path: KeyPath, leaf: Any) -> MatrixDims | None:
    """Splits the axes into a leading and a trailing block with the fewest rows + columns.

    Rows are the trailing block, so that a Flax kernel ``(in, out)`` becomes torch's ``(out, in)``
    and ``HWIO`` becomes ``(O, HWI)``; ties go to the later cut. A matrix named ``embedding`` is
    ``(vocab, features)`` with the vocabulary as rows, as in torch. None for fewer than two axes.

    Args:
      path: The key path of the leaf.
      leaf: The leaf, or anything else with a shape.

    Returns:
      Which axes are rows and which are columns. A `matrix_dims` function returns this for every
      leaf that shall be split as by default.

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
    names = [name for name in key_names(path) if isinstance(name, str)]
    while names and names[-1] in _ANONYMOUS:
        names.pop()
    if ndim == 2 and names[-1:] == ["embedding"]:
        return MatrixDims(rows=(0,), cols=(1,))
    cuts = range(ndim - 1, 0, -1)  # later cuts first: min() keeps the first of equals
    cut = min(cuts, key=lambda k: math.prod(shape[:k]) + math.prod(shape[k:]))
    return MatrixDims(rows=tuple(range(cut, ndim)), cols=tuple(range(cut)))
