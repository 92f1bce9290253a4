"""Decides which leaves are compressed, views them as matrices, and multiplies them with factors.

`plan_leaves` makes a `LeafPlan` for each leaf; the reducers, the count of bytes and the adviser all
ask it, so they agree about what is compressed. A plan's `MatrixView` says which axes are rows and
columns: ``M`` is ``(rows, cols)``, ``P`` is ``(rows, r)`` and ``Q`` is ``(cols, r)``, each with the
leading batch axes of the view.

A leaf is not transposed if a reshape suffices: the view remembers whether rows or columns come
first in memory, and the products contract the right axis. Most of the code below chooses, for a
rank and a platform, the form of a product that XLA compiles to fast code; all forms agree to
rounding.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomp._base.checks import (
    answers_other_names,
    check_dims,
    check_int,
    check_rank,
    check_static_number,
    is_integer,
)
from jaxcomp._base.leaves import (
    clipped,
    is_floating,
    is_narrow,
    key_names,
    leaf_name,
    limited,
    named_dtype,
)
from jaxcomp._base.typing import Array, KeyPath, MatrixDims, MatrixDimsFn, PyTree, RankFn, Shape
from jaxcomp._mesh.collectives import typed_like, unmapped_axes

# A residual that is exact in float32 needs products that are exact in float32.
_EXACT = lax.Precision.HIGHEST
# On NVIDIA GPUs that precision does not use the tensor cores. This algorithm does: it writes each
# array as a sum of three bfloat16 parts, and adds six products of parts in float32.
_EXACT_ON_TENSOR_CORES = lax.DotAlgorithmPreset.BF16_BF16_F32_X6
# Up to this rank, P Q^T is computed as a sum of outer products. XLA fuses the sum with the
# arithmetic around it, where a matrix product would write its dense result and read it again. The
# sum has the shape of the leaf, because a reshape would prevent updating the residual in place.
_FUSED_RANK = 8
# Above that rank, the product is computed in blocks of this number of bytes; a core's cache holds
# two of them.
_BLOCK_BYTES = 1 << 20
# Products over an axis of this length are computed in at least this number of pieces on GPUs.
_LONG = 1 << 13
_PIECES = 72
# Key-path entries of a flax.nnx variable's array; they are not names of a parameter.
_ANONYMOUS = ("value", "raw_value")

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class MatrixView:
    """Views one leaf as a batch of ``(n_rows, n_cols)`` matrices.

    The array that `matricize` returns has shape ``(*batch, n_cols, n_rows)`` if `cols_first`, else
    ``(*batch, n_rows, n_cols)``. `cols_first` chooses the order that is a plain reshape of the
    leaf, if one is.
    """

    shape: Shape
    dims: MatrixDims
    # True for a stack of several leaves, which are later cut out of the result.
    is_group: bool = False

    @property
    def batch(self) -> Shape:
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
        """Returns whether `matricize` puts columns before rows."""
        # If neither order is a plain reshape, one is as good as the other.
        batch, rows, cols = self.dims
        return batch + rows + cols != tuple(range(len(self.shape)))

    @property
    def order(self) -> tuple[int, ...]:
        """Returns the axes of the leaf in the order of `matricize`."""
        batch, rows, cols = self.dims
        first, second = self.in_order(rows, cols)
        return batch + first + second

    def in_order(self, of_rows: T, of_cols: T) -> tuple[T, T]:
        """Swaps a value for rows and one for columns if `cols_first` is true; its own inverse."""
        if self.cols_first:
            return of_cols, of_rows
        return of_rows, of_cols

    def sizes(self, axes: tuple[int, ...]) -> Shape:
        """Returns the sizes of some axes of the leaf."""
        return tuple(self.shape[axis] for axis in axes)

    def matricize(self, leaf: Array) -> Array:
        """Converts a leaf to a batch of matrices, in the order of `cols_first`."""
        pair = self.in_order(self.n_rows, self.n_cols)
        return leaf.transpose(self.order).reshape(*self.batch, *pair)

    def unmatricize(self, matrix: Array) -> Array:
        """Converts a batch of matrices to a leaf: the inverse of `matricize`."""
        # `argsort` inverts a permutation.
        return matrix.reshape(self.sizes(self.order)).transpose(np.argsort(self.order))

    def along(self, axes: tuple[int, ...], values: Array) -> Array:
        """Reshapes ``(*batch, n)`` so that it lies along `axes` of the leaf, with 1 elsewhere."""
        sizes = np.ones(len(self.shape), int)
        sizes[list(axes)] = self.sizes(axes)
        return values.reshape(self.sizes(axes)).transpose(np.argsort(axes)).reshape(sizes)


def exact_einsum(subscripts: str, first: Array, second: Array) -> Array:
    """Multiplies two arrays with float32 precision on every platform.

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

    XLA refuses the algorithm for GPUs older than Ampere, such as T4 and V100.
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
        # This is a sum along rows or columns, which XLA fuses with the operation that made the
        # leaf.
        einsum = functools.partial(jnp.einsum, precision=_EXACT)
    else:
        leaf = _held(leaf)
    matrix = view.matricize(leaf)
    if view.cols_first != transposed:
        flipped = functools.partial(einsum, "...ir,...ij->...rj")

        def on_cpu(factor: Array, matrix: Array) -> Array:
            # Without the barrier XLA on CPU folds the transpose into the product (contraction over
            # the first axis of both arrays), which is 10 to 50 times slower.
            return lax.optimization_barrier(flipped(factor, matrix))

        def elsewhere(factor: Array, matrix: Array) -> Array:
            size = _piece(*factor.shape[-2:])
            if size == factor.shape[-2]:
                return flipped(factor, matrix)
            pieces = [x.reshape(*view.batch, -1, size, x.shape[-1]) for x in (factor, matrix)]
            return flipped(*pieces).sum(-3)

        return lax.platform_dependent(factor, matrix, cpu=on_cpu, default=elsewhere).mT
    # It contracts the last axis of the matrix, which is fast.
    multiplied = functools.partial(einsum, "...ij,...jr->...ir")
    if factor.shape[-1] > _FUSED_RANK:
        default = _multiplied_on_gpus
    else:
        default = _summed_along_rows
    return lax.platform_dependent(matrix, factor, cpu=multiplied, default=default)


def _piece(n: int, rank: int) -> int:
    """Returns the length of the pieces in which GPUs sum a product over an axis of length `n`.

    XLA splits a product over a long axis into a power of two of pieces, and copies the leaf to pad
    it if these are not equal. It does not split `_PIECES` equal ones again. Their sums, `rank`
    values for each value of a row, are written and read, so a piece has to be longer than that.
    """
    if rank > 1 and n >= _LONG and not unmapped_axes():
        for size in range(n // _PIECES, 2 * rank, -1):
            if n % size == 0:
                return size
    return n


def _multiplied_on_gpus(matrix: Array, factor: Array) -> Array:
    """Multiplies a matrix with a factor of more than `_FUSED_RANK` columns.

    Programs for several GPUs lose the algorithm of a product of two matrices that contracts the
    last axis of the first and the first of the second, and with it float32's precision: Shardy
    converts it to an operation without one (jaxlib 0.11.2). So the factor comes first, and a
    barrier prevents that XLA exchanges them again.
    """
    return _held(exact_einsum("...jr,...ij->...ri", factor, matrix)).mT


def _summed_along_rows(matrix: Array, factor: Array) -> Array:
    """Multiplies as one sum for each column of the factor; XLA makes one kernel of all on GPUs."""
    sums = []
    for column in jnp.moveaxis(factor, -1, 0):
        sums.append(jnp.sum(matrix * column[..., None, :], axis=-1))
    return jnp.stack(sums, axis=-1)


def _held(x: Array) -> Array:
    """Prevents XLA on GPUs from fusing the operations before and behind this one.

    Its kernels for products of parts do not compile with some fused operations, such as slices of a
    larger array.
    """
    return lax.platform_dependent(x, cpu=lambda x: x, default=lax.optimization_barrier)


def _after(done: Array, factor: Array) -> Array:
    """Prevents XLA on GPUs from using a factor of more than `_FUSED_RANK` columns before `done`.

    With several GPUs XLA would compute the dense products of all leaves while the last all-reduce
    runs, and keep them: as much memory as the gradients.
    """
    if factor.shape[-1] <= _FUSED_RANK:
        return factor
    return lax.platform_dependent(factor, cpu=lambda x: x, default=lambda x: jnp.where(done, x, 0))


def by_columns(factor: Array) -> Array:
    """Stores the columns of a factor, or of a stack of factors, one after the other on GPUs.

    Neighbouring threads read one column of a factor along the last axis of a leaf. Where its values
    are `r` apart in memory, the kernel is up to three times slower at rank 8. XLA cannot choose
    another layout for an array of one axis. Such an array would lose its sharding over unmapped
    axes.
    """
    if unmapped_axes():
        return _held(factor)
    columns = factor.mT
    return _held(columns.reshape(-1)).reshape(columns.shape).mT


def factors_of(stack: Array) -> list[Array]:
    """Returns the factors of a stack, each as GPUs read it fast."""
    if stack.shape[-1] > _FUSED_RANK:  # no kernel reads single columns
        return list(map(_held, stack))
    # All in one kernel; those that read a factor cut it out of the stack.
    return list(by_columns(stack))


def outer(view: MatrixView, p: Array, q: Array) -> Array:
    """Rebuilds ``P Q^T`` in the shape of the leaf."""
    first, last = view.in_order(p, q)
    # In a group the fused sum would be computed again for each leaf of the stack.
    if p.shape[-1] > _FUSED_RANK or view.is_group:
        return view.unmatricize(_dense(first, last))
    batch, rows, cols = view.dims
    p, q = view.in_order(first, by_columns(last))
    # A sum of outer products, which XLA fuses with the arithmetic around it.
    products = []
    for k in range(p.shape[-1]):
        left = view.along(batch + rows, p[..., k])
        right = view.along(batch + cols, q[..., k])
        products.append(left * right)
    return functools.reduce(jnp.add, products)


def unsent(
    view: MatrixView,
    dtype: Any,
    p: Array,
    q: Array,
    q_sent: Array,
    total: Array,
    old: Array,
    commit: Array,
    replicas: int,
) -> Array:
    """Returns the new residual: ``total - P Q_w^T`` if `commit`, else `old`; updated in place.

    This replica has sent ``P Q_w^T``, with its own right factor. The mean ``P Q^T`` may exceed the
    range of a narrow dtype even if the gradients do not. The part that such an output cannot hold
    was sent but not applied, so it is added to the residual and sent in later steps.

    On CPU a product that XLA does not fuse is computed in blocks of the matrix's first axis, each
    of which replaces its part of `old`. The leaf is one block on GPU, where each block would launch
    several kernels, and on a mesh with unmapped axes, along which the leaf may be sharded.
    """
    if is_narrow(dtype):
        mean = outer(view, p, q)
        total += mean - clipped(mean, dtype)

    def remaining(product: Array, total: Array, old: Array) -> Array:
        new = limited(total - product, view.n_rows * view.n_cols, replicas)
        return jnp.where(commit, new.astype(old.dtype), old)

    def whole() -> Array:
        # With a leading axis of 1, like the state that `jax.shard_map` passes: else a reshape would
        # prevent XLA from writing the new residual in the place of the old one.
        # Held, because XLA on GPUs would make one kernel of output and residual, which cannot write
        # the output in the place of the sum.
        product = outer(view, _held(p), _held(_after(commit, q_sent)))
        return remaining(product[None], total[None], old[None]).reshape(old.shape)

    def in_blocks() -> Array:
        first, second = view.in_order(p, q_sent)
        matrix = view.matricize(total)
        # The loop over the blocks carries it, and the blocks vary where any of these does.
        new = view.matricize(typed_like(old, (p, q_sent, total, commit)))
        number = min(matrix.size * matrix.dtype.itemsize // _BLOCK_BYTES, matrix.shape[0])
        size, rest = divmod(matrix.shape[0], number)

        def block(start: Array | int, size: int, new: Array) -> Array:
            cut = functools.partial(lax.dynamic_slice_in_dim, start_index=start, slice_size=size)
            columns = second
            if view.batch:  # cut both factors along the batch axis; else keep all columns
                columns = cut(second)
            product = _dense(cut(first), columns)
            value = remaining(product, cut(matrix), cut(new))
            return lax.dynamic_update_slice_in_dim(new, value, start, axis=0)

        # The remainder comes first. After the loop, XLA would run it after the loops of other
        # leaves and keep its inputs in memory until then.
        if rest:
            new = block(number * size, rest, new)
        new = lax.fori_loop(0, number, lambda i, new: block(i * size, size, new), new)
        return view.unmatricize(new)

    small = total.size * total.dtype.itemsize < 2 * _BLOCK_BYTES
    moves = view.order != tuple(range(total.ndim))  # never by the default rule
    if p.shape[-1] <= _FUSED_RANK or small or moves or unmapped_axes():
        return whole()
    return lax.platform_dependent(cpu=in_blocks, default=whole)


def _dense(first: Array, second: Array) -> Array:
    return exact_einsum("...ir,...jr->...ij", _held(first), _held(second))


@dataclasses.dataclass(frozen=True)
class LeafPlan:
    """Plans one leaf: its matrix view and rank, or None and 0 for an uncompressed leaf."""

    path: str
    shape: Shape
    dtype: Any
    view: MatrixView | None = None
    rank: int = 0

    @property
    def size(self) -> int:
        """Returns the number of values in the leaf."""
        return math.prod(self.shape)

    @property
    def p_shape(self) -> Shape:
        """Returns the shape ``(*batch, n_rows, r)`` of the left factor."""
        assert self.view is not None
        return (*self.view.batch, self.view.n_rows, self.rank)

    @property
    def q_shape(self) -> Shape:
        """Returns the shape ``(*batch, n_cols, r)`` of the right factor."""
        assert self.view is not None
        return (*self.view.batch, self.view.n_cols, self.rank)

    @property
    def wire_size(self) -> int:
        """Returns the number of values that this leaf puts on the wire in one step."""
        if self.view is None:
            return self.size
        return math.prod(self.p_shape) + math.prod(self.q_shape)


@answers_other_names
def plan_leaves(
    tree: PyTree,
    rank: int | RankFn,
    min_compression_rate: float,
    matrix_dims: MatrixDimsFn | None = None,
) -> list[LeafPlan]:
    """Decides for every leaf of `tree`, in flattening order, whether it is compressed and how.

    Args:
      tree: Arrays, or other objects with ``shape`` and ``dtype``.
      rank: The rank, or a function of (key path, leaf) that returns it, or None for an uncompressed
        leaf.
      min_compression_rate: A leaf is compressed iff
        ``(rows + cols) * r * min_compression_rate < rows * cols``, ``r = min(rows, cols, rank)``.
      matrix_dims: A function of (key path, leaf) that returns `MatrixDims`, or None for an
        uncompressed leaf. None uses `default_matrix_dims`.

    Returns:
      One plan for each leaf.

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
    check_rank(rank)
    check_dims(matrix_dims)
    leaves = jax.tree.leaves_with_path(tree)
    # `jaxcomp.stacked` checks here that the tree has its names: a misspelt name would do nothing.
    check_leaves = getattr(matrix_dims, "check_leaves", None)
    if check_leaves is not None:
        check_leaves(leaves)
    dims = matrix_dims or default_matrix_dims
    plans = []
    for path, leaf in leaves:
        plans.append(_plan(path, leaf, rank, min_compression_rate, dims))
    return plans


@answers_other_names
def is_compressed(rows: int, cols: int, rank: int, min_compression_rate: float) -> bool:
    """Returns whether a ``(rows, cols)`` matrix shrinks enough at this rank, by torch's rule.

    Example:
      >>> from jaxcomp import extend
      >>> extend.is_compressed(64, 64, 16, 2.0), extend.is_compressed(64, 64, 15, 2.0)
      (False, True)
    """
    for name, value in {"rows": rows, "cols": cols, "rank": rank}.items():
        check_int(name, value, 0)
    rate = check_static_number("min_compression_rate", min_compression_rate, 0)
    return (rows + cols) * rank * rate < rows * cols


def _plan(
    path: KeyPath, leaf: Any, rank: int | RankFn, rate: float, matrix_dims: MatrixDimsFn
) -> LeafPlan:
    """Makes the plan of one leaf."""
    name = leaf_name(path)
    plain = LeafPlan(name, tuple(np.shape(leaf)), named_dtype(path, leaf))
    if not is_floating(plain):  # before the user's functions, which may expect a matrix
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
    # An empty batch passes the rule, but has nothing to send and no basis.
    if not is_compressed(view.n_rows, view.n_cols, r, rate) or 0 in view.batch:
        return plain
    return dataclasses.replace(plain, view=view, rank=r)


def _checked_dims(dims: MatrixDims, shape: Shape, name: str) -> MatrixDims:
    """Returns dims with non-negative axes; refuses dims that do not contain each axis once."""
    axes = np.arange(len(shape))
    # NumPy's indexing counts negative axes from the end, and refuses axes that do not exist.
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


@answers_other_names
def default_matrix_dims(path: KeyPath, leaf: Any) -> MatrixDims | None:
    """Splits the axes into a leading and a trailing block with the fewest rows + columns.

    Rows are the trailing block, so that a Flax kernel ``(in, out)`` becomes torch's ``(out, in)``
    and ``HWIO`` becomes ``(O, HWI)``; ties go to the later cut. A matrix named ``embedding`` is
    ``(vocab, features)`` with the vocabulary as rows, as in torch. Returns None for fewer than two
    axes.

    Args:
      path: The key path of the leaf.
      leaf: The leaf, or another object with a shape.

    Returns:
      The axes of rows and columns. A `matrix_dims` function can return this for leaves that it does
      not split in its own way.

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
    named = [name for name in key_names(path) if isinstance(name, str) and name not in _ANONYMOUS]
    if ndim == 2 and named[-1:] == ["embedding"]:
        return MatrixDims(rows=(0,), cols=(1,))
    # Later cuts first: min() keeps the first of equals.
    cuts = range(ndim - 1, 0, -1)
    cut = min(cuts, key=lambda cut: math.prod(shape[:cut]) + math.prod(shape[cut:]))
    return MatrixDims(rows=tuple(range(cut, ndim)), cols=tuple(range(cut)))
