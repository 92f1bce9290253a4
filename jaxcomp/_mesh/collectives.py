"""The mapped axes and all that crosses them: the only file that names `lax.psum` and its relatives.

Values that belong together are packed into one flat vector by hand: XLA merges separate all-reduces
in the HLO, but on CPU over gloo each operand still travels on its own, one after the other. Only
large arrays, and all beside mesh axes that are left to the compiler, are operands of their own of
that one all-reduce.
"""

from __future__ import annotations

import functools
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

from jaxcomp._base.leaves import alike, clipped, put_at, widest
from jaxcomp._base.typing import Array, AxisName, PyTree

# An array of at least so many bytes is an operand of its own. gloo sends one after the other, and a
# further one costs some 0.2 ms, less than packing and unpacking a megabyte; on GPU the launch of a
# copy is nothing beside the copy from here on.
_OWN_OPERAND_BYTES = 1 << 21
# With the widening of factors of more columns than these fused into their products, jaxlib 0.12
# compiles for GPUs for minutes (GPT-2 small at rank 128: 209 s of a processor; at rank 64: 50).
_FUSED_COLUMNS = 64
# XLA merges the operands into all-reduces of at most 256; the largest are worth it the most.
_MOST_OPERANDS = 128

T = TypeVar("T")


def mesh_axes(kind: AxisType, mesh: Any = None) -> tuple[str, ...]:
    """Returns the axes of one kind, of a mesh or of the one in whose context this is called.

    `jax.shard_map` maps over Manual ones, `jax.vmap` over none.
    """
    if mesh is None:
        mesh = get_abstract_mesh()
    names = []
    for name, other in zip(mesh.axis_names, mesh.axis_types, strict=True):
        if other == kind:
            names.append(name)
    return tuple(names)


def other_axes(*kinds: AxisType) -> tuple[str, ...]:
    """Returns axes of more than one device that are not mapped here; all, or those of some kinds.

    An array may be sharded along them, and in automatic ones JAX does not say which arrays are. One
    flat vector of them all could not keep their shardings: the compiler would gather each first.
    """
    shape = get_abstract_mesh().shape
    names = []
    for kind in kinds or (AxisType.Auto, AxisType.Explicit):
        for name in mesh_axes(kind):
            if shape[name] > 1:
                names.append(name)
    return tuple(names)


def known_equal(x: Any, axis_name: AxisName) -> bool:
    """Tells whether JAX knows `x` to be equal on all replicas: only ever under `check_vma=True`."""
    axes = vma_axes(axis_name)
    return bool(axes) and varying(x).isdisjoint(axes)


def axes_known_equal(x: Any, axis_name: AxisName) -> tuple[str, ...]:
    """Returns those of the axes over which JAX knows `x` to be the same."""
    known = varying(x)
    return tuple(name for name in vma_axes(axis_name) if name not in known)


def axis_tuple(axis_name: AxisName | None) -> tuple[str, ...]:
    """Returns axes as a tuple of names; None, as of a dimension that is not split, is none."""
    if isinstance(axis_name, tuple):
        return axis_name
    if axis_name is None:
        return ()
    return (axis_name,)


def axis_size(axis_name: AxisName) -> int:
    """Returns the number of replicas along `axis_name`.

    Raises:
      ValueError: If an axis is not bound where this is called.
    """
    try:
        return math.prod(map(lax.axis_size, axis_tuple(axis_name)))
    except NameError as error:
        raise ValueError(
            f"The axis {axis_name!r} is not bound here. Call update() inside jax.pmap, "
            f"jax.shard_map or jax.vmap with axis_name={axis_name!r}, or pass the axis name that "
            "you mapped over."
        ) from error


def unbound_axis(error: BaseException) -> str | None:
    """Returns the axis that an error of JAX, or of `axis_size`, says is not bound; else None."""
    cause = error.__cause__ or error
    named = re.search(r"unbound axis name: (.+?)(\. |$)", str(cause))
    return named and named[1]


def is_bound(axis_name: AxisName) -> bool:
    """Tells whether this runs inside a function that is mapped over `axis_name`."""
    try:
        axis_size(axis_name)
    except ValueError:
        return False
    return True


def varying(x: Any) -> frozenset[str]:
    """Returns the mesh axes over which JAX knows `x` to differ; none unless shard_map checks."""
    shape = x
    if not isinstance(x, jax.ShapeDtypeStruct):
        shape = jax.typeof(x)
    kind = shape.manual_axis_type
    if kind is None:
        return frozenset()
    return kind.varying


def vma_axes(axis_name: AxisName) -> tuple[str, ...]:
    """Returns the axes whose replication JAX tracks here: all under `check_vma=True`, else none."""
    axis_size(axis_name)
    names = []
    for name in axis_tuple(axis_name):
        if name in varying(lax.axis_index(name)):
            names.append(name)
    return tuple(names)


def as_local(tree: PyTree, axis_name: AxisName) -> PyTree:
    """Marks every array as this replica's own value. Costs nothing; values do not change.

    `local_value_and_grad` does this to the parameters. Do it yourself before anything else that
    differentiates with respect to them, for example flax's ``DynamicScale.value_and_grad``.

    Args:
      tree: Any tree of arrays.
      axis_name: The mapped axis or axes of the replicas.

    Returns:
      The same tree; under ``shard_map(check_vma=True)`` typed as varying over the axes, so that a
      gradient with respect to it stays local. Elsewhere gradients are local anyway.

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
    """Marks a fresh state `as_local` where it is made inside of the mapped function.

    Under ``check_vma=True`` a scan can then carry it.
    """
    if not is_bound(axis_name):
        return tree
    return as_local(tree, axis_name)


def _marked(x: Any, axes: frozenset[str]) -> Any:
    """Types `x` as varying over these axes too."""
    missing = tuple(sorted(axes - varying(x)))
    if not missing:
        return x
    return lax.pcast(x, missing, to="varying")


def _varying_of_any(tree: PyTree) -> frozenset[str]:
    """Returns the axes over which at least one of the arrays, or shapes, varies."""
    return frozenset().union(*map(varying, jax.tree.leaves(tree)))


def typed_like(x: Array, tree: PyTree) -> Array:
    """Types `x` as varying over all axes over which any array, or shape, of the tree does.

    What a loop carries must have one type before and after, and an argument of the loop's body may
    vary over axes over which the carried array did not.
    """
    return _marked(x, _varying_of_any(tree))


def switch(index: Array, branches: Sequence[Callable[[], T]]) -> T:
    """Runs `lax.switch` of branches that may differ in what JAX knows to be local.

    A branch that ends in an average returns replicated values; another branch may return values
    that differ by replica. Under ``check_vma=True`` a conditional needs one type for both.
    """
    if len(branches) == 1:
        return branches[0]()
    if not mesh_axes(AxisType.Manual):
        return lax.switch(index, branches)
    shapes = map(jax.eval_shape, branches)
    axes = jax.tree.map(lambda *xs: _varying_of_any(xs), *shapes)

    def marked(branch: Callable[[], T]) -> T:
        return jax.tree.map(_marked, branch(), axes)

    return lax.switch(index, [functools.partial(marked, branch) for branch in branches])


def from_step(count: Array, step: int, before: Callable[[], T], after: Callable[[], T]) -> T:
    """Runs `before` while ``count < step``, then `after`; with ``step=0`` there is no branch."""
    if not step:
        return after()
    return switch((count >= step).astype(jnp.int32), [before, after])


class Reduced(NamedTuple):
    """What an average of several arrays gave."""

    means: list[Array]  # the averages, replicated
    sent: list[Array]  # this replica's own contributions as sent: what the means are the mean of
    finite: Array  # bool scalar, replicated: whether every value of the means is finite


def reduce_mean(
    parts: Sequence[Array],
    axis_name: AxisName,
    wire_dtype: Any,
    *,
    factors: int = 0,
) -> Reduced:
    """Averages arrays over the replicas in one all-reduce.

    They travel as one flat vector. Large ones travel beside it, each as an operand of its own:
    packing them would take longer and need twice their memory. On GPU XLA may split such operands
    over several all-reduces, so factors, which others wait for, are always packed. Beside mesh axes
    that are left to the compiler each travels in its own shape, and so keeps its sharding.

    Values that are cast for the wire are also divided before they are added up, by a power of two,
    which rounds nothing: no sum of 16-bit gradients overflows where their mean does not. Others
    would have to be copied for that.

    Args:
      parts: Arrays of any shapes and floating dtypes; means and sent have the same.
      axis_name: The mapped axis or axes.
      wire_dtype: What goes on the wire. Where it is narrower than float32, or than an array, the
        values are rounded to it once.
      factors: How many of the first parts are factors, small compared with the weights that they
        stand for. What a factor has beyond the range of the wire is not sent. Beside automatic axes
        each device sends its share of them, and gathers the means.

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
        # Constants, which are replicated by their type under check_vma=True.
        nothing = [jnp.zeros(part.shape, part.dtype) for part in parts]
        return Reduced(nothing, list(parts), jnp.array(True))
    wire_dtype = jnp.dtype(wire_dtype)
    dtypes = [part.dtype for part in parts]
    dtype = widest([wire_dtype, *dtypes])
    exact = dtype == wire_dtype
    shares = []
    scales = []
    columns = 0  # of the widest factor
    for i, part in enumerate(parts):
        value = part.astype(dtype)
        if i < factors:
            value = clipped(value, wire_dtype)
            columns = max(columns, part.shape[-1])
        scale = 1.0
        if not exact or part.dtype != dtype:
            scale = 0.5 ** math.ceil(math.log2(replicas))
        scales.append(scale)
        shares.append(value * scale)
    values, unpacked = _operands(shares, factors)
    automatic = other_axes(AxisType.Auto)
    for i, value in enumerate(values):
        if not exact:
            values[i] = _rounded(value, wire_dtype)
        if automatic and i < factors:
            values[i] = _laid_out(values[i])
    totals = _psum(values, axis_name, dtype)
    zeros_or_nan = []
    for i, total in enumerate(totals):
        # The mean is finite where the sum is. XLA's CPU backend writes out all the results of
        # isfinite before it combines them; x - x, which is 0 or NaN, it adds up as it reads.
        zeros_or_nan.append(jnp.sum(total - total))
        values[i] = values[i].astype(dtype)
        if not exact and columns > _FUSED_COLUMNS:
            # Widened once. Otherwise every use of a factor widens it: fewer kernels, on GPUs.
            totals[i] = lax.optimization_barrier(total)
            values[i] = lax.optimization_barrier(values[i])
    means = unpacked(totals)
    sent = list(parts)
    if not exact:
        sent = unpacked(values)
    for i, part in enumerate(parts):
        means[i] = (means[i] / (replicas * scales[i])).astype(part.dtype)
        if automatic and i < factors:
            # Left in the layout of `_laid_out`, they would move the weights made from them into it.
            means[i] = _whole(means[i])
        if not exact:
            sent[i] = (sent[i] / scales[i]).astype(part.dtype)
    return Reduced(means, sent, (jnp.stack(zeros_or_nan) == 0).all())


def _rounded(value: Array, dtype: Any) -> Array:
    """Rounds to a narrower dtype, once.

    A cast there and back may be left out by XLA, and what counts as sent would not be rounded. So
    it is rounded before it is cast. But `lax.reduce_precision` has nothing but zeros below the
    normal range of float16: there the cast alone rounds, and a barrier keeps it.
    """
    if dtype == jnp.float16:
        return lax.optimization_barrier(value.astype(dtype))
    info = jnp.finfo(dtype)
    return lax.reduce_precision(value, info.nexp, info.nmant).astype(dtype)


def _operands(
    parts: list[Array], factors: int
) -> tuple[list[Array], Callable[[list[Array]], list[Array]]]:
    """Packs small arrays, and the first `factors` whatever their size, into one flat vector.

    These are alone only if nothing else is to be packed, or beside axes that are left to the
    compiler.

    Returns:
      The operands, and a function that makes the arrays of operands like these.
    """
    large = []
    for i in range(factors, len(parts)):
        if parts[i].nbytes >= _OWN_OPERAND_BYTES:
            large.append(i)
    large.sort(key=lambda i: -parts[i].nbytes)
    alone = large[:_MOST_OPERANDS]
    if other_axes() or len(parts) - len(alone) <= 1:  # a single one keeps its shape
        return parts, list
    operands: list[Any] = [None]
    packed: list[Any] = list(parts)
    for i in alone:
        operands.append(parts[i])
        packed[i] = None
    operands[0], unravel = jax.flatten_util.ravel_pytree(packed)

    def unpacked(operands: list[Array]) -> list[Array]:
        arrays = unravel(operands[0])
        put_at(arrays, alone, operands[1:])
        return arrays

    return operands, unpacked


def _whole(x: Array) -> Array:
    return lax.with_sharding_constraint(x, PartitionSpec())


def _laid_out(x: Array) -> Array:
    """Splits the longest axis that can be split over all devices of the automatic axes.

    The compiler would copy a factor to every device that needs it and then let each of them send
    all of it.
    """
    axes = other_axes(AxisType.Auto)
    shape = get_abstract_mesh().shape
    devices = math.prod(shape[name] for name in axes)
    divisible = []
    for axis, length in enumerate(x.shape):
        if length % devices == 0:
            divisible.append((length, axis))
    if not x.size or not divisible:
        return x
    _, longest = max(divisible)
    spec: list[Any] = [None] * x.ndim
    spec[longest] = axes
    # Whole first: layouts travel backwards too, into the gradient and the model that made it.
    return lax.with_sharding_constraint(_whole(x), PartitionSpec(*spec))


def mean_each(
    leaves: Sequence[Array], axis_name: AxisName, wire_dtypes: Sequence[Any] | None = None
) -> Reduced:
    """Averages arrays in one all-reduce for every dtype on the wire, by default their own."""
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
    """Returns the owner of what this replica keeps: its index less their number, -n to -1."""
    return lax.axis_index(axis_name).astype(jnp.float32) - axis_size(axis_name)


def _collective_axes(axis_name: AxisName) -> list[AxisName]:
    """Returns the axes of each collective: `jax.vmap` has rules for one axis at a time only."""
    axes = axis_tuple(axis_name)
    if set(axes) <= set(mesh_axes(AxisType.Manual)):
        return [axes]
    return list(axes)


def exchange(x: Array, axis_name: AxisName) -> Array:
    """Sends row ``k`` of `x` to replica ``k``: row ``w`` of the result came from replica ``w``."""
    axes = _collective_axes(axis_name)
    sizes = list(map(axis_size, axes))
    rows = x.reshape(*sizes, *x.shape[1:])
    for i, names in enumerate(axes):
        # Nothing is sent by a single replica, whose shape `jax.vmap` gets wrong where the operand
        # is not mapped (jax 0.10.2).
        if sizes[i] > 1:
            rows = lax.all_to_all(rows, names, split_axis=i, concat_axis=i, tiled=True)
    return rows.reshape(x.shape)


def gather(x: Array, axis_name: AxisName) -> Array:
    """Gathers every `x` along a new axis 0, typed as replicated under ``check_vma=True``."""
    rows = x
    for names in reversed(_collective_axes(axis_name)):
        kind = "invarying" if vma_axes(names) else "varying"
        rows = lax.all_gather(rows, names, to=kind)
    return rows.reshape(-1, *x.shape)


def maximum(x: Array, axis_name: AxisName) -> Array:
    """Takes the elementwise maximum over the replicas, for values that have no mean."""
    return lax.pmax(as_local(x, axis_name), axis_name)


def total(x: Array, axis_name: AxisName) -> Array:
    """Sums over the replicas, in the array's own dtype; flags as int32."""
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.int32)
    return lax.psum(as_local(x, axis_name), axis_name)


def _psum(xs: list[Array], axis_name: AxisName, dtype: Any) -> list[Array]:
    """Sums arrays with their own dtype on the wire where there is one, and returns them in `dtype`.

    XLA's CPU backend has no bfloat16 all-reduce: it widens to float32 by itself, and aborts the
    process when some mesh axes are left to the compiler. So on CPU
    the arrays are cast to float32 before the sum.
    """

    def summed(xs: list[Array]) -> Any:
        return optax.tree.cast(lax.psum(xs, axis_name), dtype)

    def summed_wide(xs: list[Array]) -> list[Array]:
        return lax.psum(optax.tree.cast(xs, dtype), axis_name)

    if xs[0].dtype != jnp.bfloat16:
        return summed(xs)
    return lax.platform_dependent(xs, cpu=summed_wide, default=summed)
