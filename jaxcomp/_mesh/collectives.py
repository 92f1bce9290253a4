"""Mapped axes and all collectives over them: only this file calls `lax.psum` and its relatives.

Reducers and local SGD call `reduce_mean`, which averages a list of arrays in one all-reduce. The
same code runs under `jax.vmap`, `jax.pmap` and `jax.shard_map`; what differs is decided here. Two
questions come up everywhere: whether JAX tracks which values are equal on all replicas
(`vma_axes`), and whether arrays may be sharded over axes that are not mapped (`unmapped_axes`).

The arrays of one all-reduce are packed into one flat vector. XLA would merge separate all-reduces
in the HLO, but on CPU over gloo it still sends the operands one after the other. Large arrays are
not packed: each is one more operand of the same all-reduce. On a mesh with unmapped axes no array
is packed.
"""

from __future__ import annotations

import functools
import heapq
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.flatten_util
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AxisType, PartitionSpec, get_abstract_mesh

from jaxcomp._base.checks import answers_other_names, check_axis_name
from jaxcomp._base.leaves import alike, clipped, put_at, widest
from jaxcomp._base.typing import Array, Axes, AxisName, PyTree

# An array of at least this number of bytes is a separate operand. Over gloo one more operand costs
# about 0.2 ms, less than packing and unpacking a megabyte. On GPU, launching a copy of this size
# takes much less time than the copy.
_OWN_OPERAND_BYTES = 1 << 21
# For factors with more columns, the cast from the wire dtype is not fused into their products: else
# jaxlib 0.12 compiles for minutes for GPUs (GPT-2 small at rank 128: 209 s of CPU; at rank 64: 50
# s).
_FUSED_COLUMNS = 64
# XLA puts at most 256 operands into one all-reduce, and may merge others into this one; the largest
# arrays gain most from not being packed.
_MOST_OPERANDS = 128

T = TypeVar("T")


def mesh_axes(kind: AxisType, mesh: Any = None) -> Axes:
    """Returns the axes of one kind of a mesh; None takes the mesh of the context.

    `jax.shard_map` makes its axes Manual; `jax.vmap` does not change the mesh.
    """
    mesh = mesh or get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return tuple(name for name in kinds if kinds[name] == kind)


def unmapped_axes(*kinds: AxisType) -> Axes:
    """Returns the unmapped mesh axes with more than one device, of all kinds or of some.

    Arrays may be sharded over them, and for Auto axes JAX does not tell which ones. A flat vector
    of several arrays could not keep their shardings: the compiler would gather each array first.
    """
    names: list[str] = []
    for kind in kinds or (AxisType.Auto, AxisType.Explicit):
        names.extend(mesh_axes(kind))
    shape = get_abstract_mesh().shape
    return tuple(filter(lambda name: shape[name] > 1, names))


def known_equal(x: Any, axis_name: AxisName) -> bool:
    """Returns whether JAX knows that `x` is equal on all replicas (only under `check_vma=True`)."""
    return axes_known_equal(x, axis_name) == axis_tuple(axis_name)


def axes_known_equal(x: Any, axis_name: AxisName) -> Axes:
    """Returns the axes in `axis_name` along which JAX knows that `x` is equal."""
    known = varying(x)
    return tuple(name for name in vma_axes(axis_name) if name not in known)


def axis_tuple(axis_name: AxisName | None) -> Axes:
    """Returns axis names as a tuple; None, an entry of a PartitionSpec, gives ()."""
    if isinstance(axis_name, tuple):
        return axis_name
    if axis_name is None:
        return ()
    return (axis_name,)


def axis_size(axis_name: AxisName) -> int:
    """Returns the number of replicas along `axis_name`.

    Raises:
      ValueError: If an axis is not bound, or `axis_name` is no name.
    """
    check_axis_name(axis_name)
    try:
        return math.prod(map(lax.axis_size, axis_tuple(axis_name)))
    except NameError as error:
        raise ValueError(
            f"The axis {axis_name!r} is not bound here. Call update() inside jax.pmap, "
            f"jax.shard_map or jax.vmap with axis_name={axis_name!r}, or pass the axis name that "
            "you mapped over."
        ) from error


def unbound_axis(error: BaseException) -> str | None:
    """Returns the unbound axis that an error of JAX or of `axis_size` names, or None."""
    # The error of `axis_size` has JAX's error as its cause, whose text names the axis.
    cause = error.__cause__ or error
    named = re.search(r"unbound axis name: (.+?)(\. |$)", str(cause))
    return named and named[1]


def is_bound(axis_name: AxisName) -> bool:
    """Returns whether this is called inside a function that is mapped over `axis_name`."""
    try:
        axis_size(axis_name)
    except ValueError:
        return False
    return True


def varying(x: Any) -> frozenset[str]:
    """Returns the mesh axes over which JAX's type of `x` varies; none without `check_vma=True`."""
    shape = x
    if not isinstance(x, jax.ShapeDtypeStruct):  # which JAX takes for no value, but has the field
        shape = jax.typeof(x)
    return getattr(shape.manual_axis_type, "varying", frozenset())


def vma_axes(axis_name: AxisName) -> Axes:
    """Returns the axes whose replication JAX tracks: all under `check_vma=True`, else none."""
    axis_size(axis_name)  # names an axis that is not bound
    # JAX does not tell whether check_vma is on. The index has a varying type only if it is.
    names = []
    for name in axis_tuple(axis_name):
        if varying(lax.axis_index(name)):
            names.append(name)
    return tuple(names)


@answers_other_names
def as_local(tree: PyTree, axis_name: AxisName) -> PyTree:
    """Marks every array as this replica's own value; it costs nothing and changes no value.

    `local_value_and_grad` does this to the parameters. Do it yourself before another function
    differentiates with respect to them, for example flax's ``DynamicScale.value_and_grad``.

    Args:
      tree: Any tree of arrays.
      axis_name: The mapped axis or axes of the replicas.

    Returns:
      The same tree. Under ``shard_map(check_vma=True)`` it has the type "varying over the axes", so
      that a gradient with respect to it stays local. Elsewhere gradients are local anyway.

    Raises:
      ValueError: If the axis is not bound.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomp
      >>> def gradient(w, x):
      ...     return jax.grad(lambda w: jnp.sum(w * x))(jaxcomp.as_local(w, "data"))
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> specs = {"in_specs": (jax.P(), jax.P("data")), "out_specs": jax.P("data")}
      >>> jax.shard_map(gradient, mesh=mesh, **specs)(jnp.ones(2), jnp.arange(2.0)).tolist()
      [0.0, 1.0]
    """
    axes = frozenset(vma_axes(axis_name))
    if not axes:
        return tree
    return jax.tree.map(lambda x: _marked(x, axes), tree)


def local_if_bound(tree: PyTree, axis_name: AxisName) -> PyTree:
    """Marks a fresh state `as_local` if it is made inside of the mapped function.

    So a scan under ``check_vma=True`` can carry it.
    """
    if not is_bound(axis_name):
        return tree
    return as_local(tree, axis_name)


def _marked(x: Any, axes: frozenset[str]) -> Any:
    """Adds axes to those over which JAX's type of `x` varies."""
    missing = tuple(sorted(axes - varying(x)))
    if not missing:
        return x
    return lax.pcast(x, missing, to="varying")


def _varying_of_any(tree: PyTree) -> frozenset[str]:
    """Returns the axes over which the type of at least one array or shape of a tree varies."""
    return frozenset().union(*map(varying, jax.tree.leaves(tree)))


def typed_like(x: Array, tree: PyTree) -> Array:
    """Types `x` as varying over all axes over which an array or shape of the tree varies.

    The carried value of a loop must keep its type, but the loop's body may combine it with a value
    that varies over more axes.
    """
    return _marked(x, _varying_of_any(tree))


def switch(index: Array, branches: Sequence[Callable[[], T]]) -> T:
    """Runs `lax.switch` on branches whose results may vary over different axes.

    A branch that ends in an average returns replicated values, another branch may return values
    that differ between replicas. Under ``check_vma=True`` a conditional needs one type for both.
    """
    if len(branches) == 1:
        return branches[0]()
    if not mesh_axes(AxisType.Manual):  # no types to make equal, and tracing twice takes time
        return lax.switch(index, branches)
    shapes = map(jax.eval_shape, branches)
    axes = jax.tree.map(lambda *xs: _varying_of_any(xs), *shapes)

    def marked(branch: Callable[[], T]) -> T:
        return jax.tree.map(_marked, branch(), axes)

    return lax.switch(index, [functools.partial(marked, branch) for branch in branches])


def branch_at_step(count: Array, step: int, before: Callable[[], T], after: Callable[[], T]) -> T:
    """Runs `before` while ``count < step``, then `after`; with ``step=0`` there is no branch."""
    if not step:
        return after()
    return switch((count >= step).astype(jnp.int32), [before, after])


class Reduced(NamedTuple):
    """Holds the result of averaging several arrays."""

    means: list[Array]  # the averages, replicated
    sent: list[Array]  # this replica's contributions as sent; `means` averages them
    finite: Array  # bool scalar, replicated: True if all means are finite


@answers_other_names
def reduce_mean(
    parts: Sequence[Array],
    axis_name: AxisName,
    wire_dtype: Any,
    *,
    factors: int = 0,
) -> Reduced:
    """Averages arrays over the replicas in one all-reduce.

    Arrays are packed into one flat vector. Each large array is a separate operand, because packing
    it would take longer and need twice its memory. On GPU XLA may split separate operands over
    several all-reduces, so factors, which the next product waits for, are always packed. On a mesh
    with unmapped axes each array is sent in its own shape, and so keeps its sharding.

    If an array is cast to the wire dtype, all arrays are also divided by a power of two before the
    sum. This rounds nothing, and no sum of 16-bit gradients overflows if their mean does not.
    Otherwise they are not divided, because that would need a copy.

    Args:
      parts: Arrays of any shapes and floating dtypes; the results have the same shapes and dtypes.
      axis_name: The mapped axis or axes.
      wire_dtype: The dtype on the wire. If it is narrower than float32, or than an array, values
        are rounded to it once.
      factors: The number of factors, which come first in `parts` and are small compared with their
        leaves. Values of a factor beyond the range of the wire dtype are clipped. On a mesh with
        Auto axes each device sends its share of the factors, and gathers the means.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxcomp import extend
      >>> def mean(x):
      ...     reduced = extend.reduce_mean([x, 2 * x], "data", jnp.float32)  # one all-reduce
      ...     return *reduced.means, reduced.finite
      >>> [m.tolist() for m in jax.vmap(mean, axis_name="data")(jnp.array([1.0, 3.0]))]
      [[2.0, 2.0], [4.0, 4.0], [True, True]]
    """
    replicas = axis_size(axis_name)
    if not any(part.size for part in parts):
        # Constants have a replicated type under check_vma=True.
        nothing = [jnp.zeros(part.shape, part.dtype) for part in parts]
        return Reduced(nothing, list(parts), jnp.array(True))
    wire_dtype = jnp.dtype(wire_dtype)
    dtypes = [part.dtype for part in parts]
    dtype = widest([wire_dtype, *dtypes])
    exact = dtype == wire_dtype  # no array is wider than the wire
    scale = 1.0
    if not exact or set(dtypes) != {dtype}:
        scale = 0.5 ** math.ceil(math.log2(replicas))
    scaled = []
    for i, part in enumerate(parts):
        value = part.astype(dtype)
        if i < factors:
            value = clipped(value, wire_dtype)
        scaled.append(value * scale)
    values, unpacked = _operands(scaled, factors)
    if not exact:
        values = [_rounded(value, wire_dtype) for value in values]
    automatic = unmapped_axes(AxisType.Auto)
    if automatic:
        values[:factors] = map(_laid_out, values[:factors])
    totals = _psum(values, axis_name, dtype)
    # The means are finite if the sums are. XLA's CPU backend would write all results of isfinite to
    # memory and then combine them. It sums x - x, which is 0 or NaN, while it reads x.
    zeros_or_nan = [jnp.sum(total - total) for total in totals]
    # What was sent, as a replica that decodes it sees it.
    values = jax.tree.map(lambda value: value.astype(dtype), values)
    columns = [part.shape[-1] for part in parts[:factors]]
    if not exact and max(columns, default=0) > _FUSED_COLUMNS:
        # Cast once, here. For fewer columns every use of a factor casts it: fewer kernels on GPUs.
        totals, values = jax.tree.map(lax.optimization_barrier, (totals, values))
    means = _divided(unpacked(totals), replicas * scale, dtypes)
    if automatic:
        # Undo `_laid_out`: else the products of the factors would get its sharding.
        means[:factors] = map(_whole, means[:factors])
    sent = list(parts)
    if not exact:
        sent = _divided(unpacked(values), scale, dtypes)
    return Reduced(means, sent, (jnp.stack(zeros_or_nan) == 0).all())


def _divided(xs: Sequence[Array], divisor: float, dtypes: Sequence[Any]) -> list[Array]:
    quotients = []
    for x, dtype in zip(xs, dtypes, strict=True):
        quotients.append((x / divisor).astype(dtype))
    return quotients


def _rounded(value: Array, dtype: Any) -> Array:
    """Rounds to a narrower dtype so that XLA cannot undo it.

    XLA may remove a cast to a narrower dtype and back. The contribution that counts as sent would
    then not be rounded. `lax.reduce_precision` is never removed, but it flushes subnormal float16
    values to zero. So float16 values are only cast, and a barrier keeps the cast.
    """
    if dtype == jnp.float16:
        return lax.optimization_barrier(value.astype(dtype))
    info = jnp.finfo(dtype)
    return lax.reduce_precision(value, info.nexp, info.nmant).astype(dtype)


def _operands(
    parts: list[Array], factors: int
) -> tuple[list[Array], Callable[[list[Array]], list[Array]]]:
    """Packs small arrays, and the first `factors` arrays of any size, into one flat vector.

    An array stays alone if it is the only one to pack, or if the mesh has unmapped axes.

    Returns:
      The operands, and a function that unpacks such operands to arrays.
    """
    large = [i for i in range(factors, len(parts)) if parts[i].nbytes >= _OWN_OPERAND_BYTES]
    alone = heapq.nlargest(_MOST_OPERANDS, large, key=lambda i: parts[i].nbytes)
    if unmapped_axes() or len(parts) - len(alone) <= 1:  # a single array keeps its shape
        return parts, list
    packed: list[Any] = list(parts)
    for i in alone:
        packed[i] = None  # not a leaf for `ravel_pytree`, so positions stay
    flat, unravel = jax.flatten_util.ravel_pytree(packed)

    def unpacked(operands: list[Array]) -> list[Array]:
        arrays = unravel(operands[0])
        put_at(arrays, alone, operands[1:])
        return arrays

    return [flat, *(parts[i] for i in alone)], unpacked


def _whole(x: Array) -> Array:
    """Lays an array out whole on each device of the Auto axes."""
    return lax.with_sharding_constraint(x, PartitionSpec())


def _laid_out(x: Array) -> Array:
    """Shards the longest axis that the devices of the Auto axes divide, over these axes.

    Else the compiler would copy a factor to every device that needs it, and each device would send
    the whole factor.
    """
    axes = unmapped_axes(AxisType.Auto)
    shape = get_abstract_mesh().shape
    devices = math.prod(shape[name] for name in axes)
    divisible = [axis for axis, length in enumerate(x.shape) if length % devices == 0]
    if not x.size or not divisible:
        return x
    spec: list[Any] = [None] * x.ndim
    spec[max(divisible, key=lambda axis: (x.shape[axis], axis))] = axes
    # Replicate first: the compiler propagates shardings backwards too, into gradient and model.
    return lax.with_sharding_constraint(_whole(x), PartitionSpec(*spec))


def mean_each(
    leaves: Sequence[Array], axis_name: AxisName, wire_dtypes: Sequence[Any] | None = None
) -> Reduced:
    """Averages arrays in one all-reduce for every wire dtype; None takes the arrays' dtypes."""
    means = list(leaves)
    sent = list(leaves)
    finite = jnp.array(True)
    dtypes = wire_dtypes or [x.dtype for x in leaves]
    for positions in alike(dtypes):
        parts = [leaves[i] for i in positions]
        reduced = reduce_mean(parts, axis_name, dtypes[positions[0]])
        finite &= reduced.finite
        put_at(means, positions, reduced.means)
        put_at(sent, positions, reduced.sent)
    return Reduced(means, sent, finite)


def owner_id(axis_name: AxisName) -> Array:
    """Returns this replica's id as an owner: its index minus the number of replicas, -n to -1."""
    # Negative, so that no id is 0, which says that all replicas share; floating, so that NaN can
    # mark a state that lacks the rows of some.
    return lax.axis_index(axis_name).astype(jnp.float32) - axis_size(axis_name)


def _collective_axes(axis_name: AxisName) -> list[AxisName]:
    """Returns the axes of each collective; `jax.vmap` supports only one axis at a time."""
    axes = axis_tuple(axis_name)
    if set(axes) <= set(mesh_axes(AxisType.Manual)):
        return [axes]
    return list(axes)


def exchange(x: Array, axis_name: AxisName) -> Array:
    """Sends row ``k`` of `x` to replica ``k``; row ``w`` of the result comes from replica ``w``."""
    axes = _collective_axes(axis_name)
    sizes = list(map(axis_size, axes))
    rows = x.reshape(*sizes, *x.shape[1:])
    for i, names in enumerate(axes):
        # A single replica sends nothing; for it `jax.vmap` returns a wrong shape if the operand is
        # not mapped (jax 0.10.2).
        if sizes[i] > 1:
            rows = lax.all_to_all(rows, names, split_axis=i, concat_axis=i, tiled=True)
    return rows.reshape(x.shape)


def gather(x: Array, axis_name: AxisName) -> Array:
    """Gathers `x` of all replicas along a new axis 0; its type is replicated."""
    rows = x
    # The last axis first, because each gather puts its axis in front.
    for names in reversed(_collective_axes(axis_name)):
        # JAX tracks types only under check_vma=True, and then must learn that the result is equal.
        kind = "invarying" if vma_axes(names) else "varying"
        rows = lax.all_gather(rows, names, to=kind)
    return rows.reshape(-1, *x.shape)


def maximum(x: Array, axis_name: AxisName) -> Array:
    """Returns the elementwise maximum over the replicas, for values that have no mean."""
    return _over_replicas(lax.pmax, jnp.max, as_local(x, axis_name), axis_name)


def sum_over_replicas(x: Array, axis_name: AxisName) -> Array:
    """Sums over the replicas in the array's dtype; flags as int32."""
    if x.dtype == jnp.bool_:  # a sum of flags counts them
        x = x.astype(jnp.int32)
    # `lax.psum` refuses a value whose type varies along a part of the axes only.
    return _over_replicas(lax.psum, jnp.sum, as_local(x, axis_name), axis_name)


def _over_replicas(
    collective: Callable[..., Any], reduce: Callable[..., Array], xs: PyTree, axis_name: AxisName
) -> Any:
    """Calls a collective, or does the same with gathered rows where JAX cannot.

    On a mesh with Explicit axes, `lax.psum` and `lax.pmax` over an axis of `jax.vmap` end in an
    error of jax 0.11 and 0.12 ("Length of sharding.spec"), but `lax.all_gather` does not.
    """
    if mesh_axes(AxisType.Explicit) and not mesh_axes(AxisType.Manual):
        return jax.tree.map(lambda x: reduce(gather(x, axis_name), axis=0).astype(x.dtype), xs)
    return collective(xs, axis_name)


def _psum(xs: list[Array], axis_name: AxisName, dtype: Any) -> list[Array]:
    """Sums arrays over the replicas in their dtype on the wire, and returns them in `dtype`.

    XLA's CPU backend has no bfloat16 all-reduce. It widens to float32 by itself, and aborts the
    process if the mesh has Auto axes. So on CPU the arrays are cast to float32 before the sum.
    """

    def summed(xs: list[Array]) -> Any:
        totals = _over_replicas(lax.psum, jnp.sum, xs, axis_name)
        return optax.tree.cast(totals, dtype)

    def summed_wide(xs: list[Array]) -> Any:
        return summed(jax.tree.map(lambda x: x.astype(dtype), xs))

    if xs[0].dtype != jnp.bfloat16:
        return summed(xs)
    return lax.platform_dependent(xs, cpu=summed_wide, default=summed)
