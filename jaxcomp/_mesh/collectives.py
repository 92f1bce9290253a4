"""Everything that talks to other replicas: the only file that names `lax.psum` and its relatives.

Values that belong together are packed into one flat vector by hand: XLA merges separate all-reduces
in the HLO, but on CPU over gloo each operand still travels on its own, one after the other. Only
large arrays, and all beside mesh axes that are left to the compiler, are operands of their own of
that one all-reduce.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from jaxcomp._base.leaves import round_to, widest
from jaxcomp._base.typing import Array, AxisName
from jaxcomp._mesh.axes import (
    as_local,
    axis_size,
    axis_tuple,
    mesh_axes,
    other_axes,
    vma_axes,
)

# On CPU an array of at least so many bytes for every replica is an operand of its own. gloo sends
# one operand after the other, in pieces of 1/W: a further one costs some 0.2 ms with two replicas,
# packing and unpacking a megabyte costs more.
_OWN_OPERAND_BYTES = 1 << 19
# On GPU the launch of a copy is nothing beside the copy, and the wire is faster.
_OWN_OPERAND_BYTES_ON_GPU = 1 << 21
# With the widening of factors of more columns than these fused into their products, jaxlib 0.12
# compiles for GPUs for minutes (GPT-2 small at rank 128: 209 s of a processor; at rank 64: 50).
_FUSED_COLUMNS = 64
# XLA merges the operands into all-reduces of at most 256; the largest are worth it the most.
_MOST_OPERANDS = 128


class Reduced(NamedTuple):
    """What an all-reduce of several arrays gave."""

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

    They travel as one flat vector; large ones beside it, each as an operand of its own, because
    packing them would take longer and need twice their memory. On GPU XLA may split such operands
    over several all-reduces, so that factors, which others wait for, are packed there. Beside mesh
    axes that are left to the compiler each travels in its own shape, so that one sharded over such
    an axis stays so.

    Args:
      parts: Arrays of any shapes and floating dtypes; means and sent have the same.
      axis_name: The mapped axis or axes.
      wire_dtype: What goes on the wire. Where it is narrower than an array, or float16, the values
        are divided by the number of replicas before they are rounded: a sum of float16 overflows
        where their mean does not.
      factors: How many of the first parts are factors, small compared with the weights that they
        stand for. Beside automatic axes each device sends its share of them, and gathers the means.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxcomp import extend
      >>> def mean(x):
      ...     reduced = extend.reduce_mean([x, 2 * x], "data", jnp.float32)  # one all-reduce
      ...     return *reduced.means, reduced.finite
      >>> [m.tolist() for m in jax.vmap(mean, axis_name="data")(jnp.array([1.0, 3.0]))]
      [[2.0, 2.0], [4.0, 4.0], [True, True]]
    """
    parts, replicas = list(parts), axis_size(axis_name)
    if not sum(part.size for part in parts):
        # Constants, which are replicated by their type under check_vma=True.
        nothing = [jnp.zeros(part.shape, part.dtype) for part in parts]
        return Reduced(nothing, parts, jnp.array(True))
    reduce = functools.partial(
        _reduce_groups,
        axis_name=axis_name,
        wire_dtype=jnp.dtype(wire_dtype),
        factors=factors,
    )
    if other_axes():
        return reduce(parts, groups=[[i] for i in range(len(parts))])
    on_cpu = _groups(parts, replicas * _OWN_OPERAND_BYTES)
    elsewhere = _groups(parts, _OWN_OPERAND_BYTES_ON_GPU, factors)
    if on_cpu == elsewhere:
        return reduce(parts, groups=on_cpu)
    return lax.platform_dependent(
        parts,
        cpu=functools.partial(reduce, groups=on_cpu),
        default=functools.partial(reduce, groups=elsewhere),
    )


def _groups(parts: Sequence[Array], large: int, factors: int = 0) -> list[list[int]]:
    """Which parts travel together: the largest, from `large` bytes on, alone; the rest as one.

    The first `factors` of the parts are never alone.
    """
    others = parts[factors:]
    sizes = [0] * factors + [part.size * part.dtype.itemsize for part in others]
    own = sorted((i for i, size in enumerate(sizes) if size >= large), key=lambda i: -sizes[i])
    own = sorted(own[:_MOST_OPERANDS])
    rest = [i for i in range(len(parts)) if i not in set(own)]
    return [*([rest] if rest else []), *([i] for i in own)]


def _reduce_groups(
    parts: list[Array],
    *,
    groups: list[list[int]],
    axis_name: AxisName,
    wire_dtype: Any,
    factors: int,
) -> Reduced:
    """`reduce_mean` with one operand of the all-reduce for each of the groups."""
    replicas = axis_size(axis_name)
    # A sum of float16 overflows where their mean does not, and neither 16-bit type holds the other.
    dtypes = {part.dtype for part in parts} | {wire_dtype}
    dtype = wire_dtype if dtypes == {wire_dtype} != {jnp.dtype(jnp.float16)} else widest(dtypes)
    values = [[parts[i].astype(dtype) for i in group] for group in groups]
    # A single one keeps its shape.
    values = [
        xs[0] if len(xs) == 1 else jnp.concatenate([x.reshape(-1) for x in xs]) for xs in values
    ]
    exact = dtype == wire_dtype
    if not exact:
        values = [round_to(value / replicas, wire_dtype) for value in values]
    automatic = other_axes(AxisType.Auto)
    totals = _psum(_spread(values, factors) if automatic else values, axis_name, wire_dtype)
    if not exact and any(x.shape[-1] > _FUSED_COLUMNS for x in parts[:factors]):
        # Widened once. Otherwise every use of a factor widens it: fewer kernels, on GPUs.
        totals, values = (
            [lax.optimization_barrier(x.astype(dtype)) for x in xs] for xs in (totals, values)
        )
    # The mean is finite where the sum is. XLA's CPU backend writes out all the results of isfinite
    # before it combines them; x - x, which is 0 or NaN, it adds up as it reads.
    finite = jnp.stack([jnp.sum(total - total) == 0 for total in totals]).all()

    def unpacked(values: list[Array]) -> list[Array]:
        each = list(parts)
        for group, value in zip(groups, values, strict=True):
            ends = itertools.accumulate(parts[i].size for i in group)
            for i, end in zip(group, ends, strict=True):
                start = end - parts[i].size
                own = value if len(group) == 1 else lax.slice_in_dim(value, start, end)
                each[i] = own.reshape(parts[i].shape)
        return each

    means, sent = unpacked(totals), parts
    if exact:
        means = [x / replicas for x in means]
    else:
        sent = [x * replicas for x in unpacked(values)]
    means, sent = (
        [x.astype(part.dtype) for x, part in zip(xs, parts, strict=True)]
        for xs in (_gathered(means, factors) if automatic else means, sent)
    )
    return Reduced(means, sent, finite)


def _spread(xs: list[Array], factors: int) -> list[Array]:
    """The first arrays, `factors` in number, laid out over the automatic axes.

    The compiler would copy a factor to every device that needs it and then let each of them send
    all of it.
    """
    axes = other_axes(AxisType.Auto)
    devices = math.prod(jax.sharding.get_abstract_mesh().shape[name] for name in axes)

    def lay_out(x: Array) -> Array:
        length, axis = max(
            ((n, i) for i, n in enumerate(x.shape) if n % devices == 0), default=(0, 0)
        )
        if not length:
            return x
        spec = [axes if i == axis else None for i in range(x.ndim)]
        # Whole first: layouts travel backwards too, into the gradient and the model that made it.
        x = lax.with_sharding_constraint(x, PartitionSpec())
        return lax.with_sharding_constraint(x, PartitionSpec(*spec))

    return [lay_out(x) if i < factors else x for i, x in enumerate(xs)]


def _gathered(xs: list[Array], factors: int) -> list[Array]:
    """The first arrays, `factors` in number, whole on every device.

    Left in the layout of `_spread`, they would move the weights that are made from them into it.
    """
    whole = [lax.with_sharding_constraint(x, PartitionSpec()) for x in xs[:factors]]
    return [*whole, *xs[factors:]]


def mean_each(leaves: Sequence[Array], axis_name: AxisName) -> list[Array]:
    """Averages each array in its own dtype: one all-reduce for every dtype among them."""
    means = list(leaves)
    for dtype in dict.fromkeys(leaf.dtype for leaf in leaves):
        chosen = [i for i, leaf in enumerate(leaves) if leaf.dtype == dtype]
        reduced = reduce_mean([leaves[i] for i in chosen], axis_name, dtype)
        for i, mean in zip(chosen, reduced.means, strict=True):
            means[i] = mean
    return means


def owner_id(axis_name: AxisName) -> Array:
    """The owner of what this replica keeps, its number less that of all: float32 scalar, not 0."""
    return lax.axis_index(axis_name).astype(jnp.float32) - axis_size(axis_name)


def _one_call(axis_name: AxisName) -> bool:
    """Whether one collective takes all the axes. `jax.vmap` has rules for one axis at a time."""
    axes = axis_tuple(axis_name)
    return len(axes) == 1 or set(axes) <= set(mesh_axes(AxisType.Manual))


def exchange(x: Array, axis_name: AxisName) -> Array:
    """Sends row ``k`` of `x` to replica ``k``: row ``w`` of the result came from replica ``w``."""
    if _one_call(axis_name):
        return lax.all_to_all(x, axis_name, split_axis=0, concat_axis=0, tiled=True)
    axes = axis_tuple(axis_name)
    rows = x.reshape(*(lax.axis_size(name) for name in axes), *x.shape[1:])
    for i, name in enumerate(axes):
        rows = lax.all_to_all(rows, name, split_axis=i, concat_axis=i, tiled=True)
    return rows.reshape(x.shape)


def gather(x: Array, axis_name: AxisName) -> Array:
    """Every replica's `x` along a new axis 0, typed as replicated under ``check_vma=True``."""
    if not _one_call(axis_name):
        rows = functools.reduce(gather, reversed(axis_tuple(axis_name)), x)
        return rows.reshape(-1, *x.shape)
    if vma_axes(axis_name):
        return lax.all_gather(x, axis_name, to="invarying")
    return lax.all_gather(x, axis_name)


def largest(leaf: Array, axis_name: AxisName) -> Array:
    """The elementwise maximum over the replicas, for values that have no mean."""
    leaf = as_local(leaf, axis_name)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = lax.pmax(jax.random.key_data(leaf), axis_name)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    if leaf.dtype == jnp.bool_:
        return lax.pmax(leaf.astype(jnp.int32), axis_name).astype(jnp.bool_)
    return lax.pmax(leaf, axis_name)


def total(x: Array, axis_name: AxisName) -> Array:
    """The sum over the replicas, in its own dtype."""
    return lax.psum(as_local(x, axis_name), axis_name)


def _psum(xs: list[Array], axis_name: AxisName, wire_dtype: Any) -> list[Array]:
    """Sums values that are exact in `wire_dtype`, with that dtype on the wire where there is one.

    XLA's CPU backend has no bfloat16 all-reduce: it widens to float32 by itself, and aborts the
    process when some mesh axes are left to the compiler. There the sum is taken in float32 openly.
    """

    def summed(xs: list[Array], on_wire: Any) -> list[Array]:
        totals = lax.psum([x.astype(on_wire) for x in xs], axis_name)
        return [total.astype(x.dtype) for total, x in zip(totals, xs, strict=True)]

    wide = functools.partial(summed, on_wire=jnp.float32)
    narrow = functools.partial(summed, on_wire=wire_dtype)
    if jnp.dtype(wire_dtype) != jnp.bfloat16:
        return narrow(xs)
    return lax.platform_dependent(xs, cpu=wide, default=narrow)
