"""The wire of low-rank updates: how factors and uncompressed leaves are averaged, and their bytes.

Floating factors go out in one all-reduce, and what is not compressed rides along. Integers would
overflow where they are summed: they go out in an all-to-all and an all-gather instead, the other
leaves beside them as they are.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxcomp._base.leaves import Integers, compute_dtype, wire_dtype
from jaxcomp._base.stats import CompressionStats, dense_leaves, needed_replicas
from jaxcomp._base.typing import Array, PyTree
from jaxcomp._lowrank.matrices import LeafPlan
from jaxcomp._mesh.collectives import Reduced, axis_size, mean_each, other_axes, reduce_mean
from jaxcomp._mesh.shares import BlockLayout, ExactLayout, Layout, mean_by_shares
from jaxcomp._reducers.options import LowRank

_BLOCK = 128  # values that share a scale, at most: 3% more bytes for the scales


def average_exactly(
    options: LowRank, plans: Sequence[LeafPlan], arrays: Sequence[Array]
) -> Reduced:
    """Averages all arrays in one all-reduce, without integers."""
    return reduce_mean(arrays, options.axis_name, _all_reduce_dtype(options, plans))


def average_factors(
    options: LowRank,
    plans: Sequence[LeafPlan],
    factors: Sequence[Array],
    uncompressed: Sequence[Array],
) -> Reduced:
    """Averages factors ``(*batch, n, r)``, and uncompressed arrays behind them.

    Integers are for the factors only, by columns ``(*batch, r, n)``. The others go exactly, in
    their own dtypes: they have no residual that could keep a rounding. Beside mesh axes that are
    left to the compiler these keep their shapes, and so their shardings, in all-reduces.
    """
    axis_name = options.axis_name
    number = len(factors)
    if not isinstance(options.comm_dtype, Integers):
        dtype = _all_reduce_dtype(options, plans)
        return reduce_mean([*factors, *uncompressed], axis_name, dtype, factors=number)
    replicas = axis_size(axis_name)
    parts = [_transposed(factor) for factor in factors]
    layouts: list[Layout] = []
    for plan, columns in zip(plans, parts, strict=False):
        # Each leaf of a group is sent as it would be alone.
        is_group = plan.view is not None and plan.view.is_group
        shape = columns.shape[1:] if is_group else columns.shape
        layouts.append(factor_layout(shape, replicas, options.comm_dtype.bits))
    in_all_reduces: list[Array] = []
    if other_axes():
        in_all_reduces += uncompressed
    else:
        parts += [x.astype(compute_dtype(x.dtype)) for x in uncompressed]
        layouts += [ExactLayout(x.size, replicas, x.dtype) for x in uncompressed]
    shared = mean_by_shares(parts, layouts, axis_name)
    others = mean_each(in_all_reduces, axis_name)
    for arrays in (shared.means, shared.sent):
        arrays[:number] = map(_transposed, arrays[:number])
    return Reduced(
        shared.means + others.means, shared.sent + others.sent, shared.finite & others.finite
    )


def _all_reduce_dtype(options: LowRank, plans: Sequence[LeafPlan]) -> Any:
    """Returns what an all-reduce of leaves with these plans has on the wire."""
    return wire_dtype(options.comm_dtype, [plan.dtype for plan in plans])


def _transposed(factor: Array) -> Array:
    """Swaps the last two axes.

    The barrier keeps XLA from folding the transpose into the product that made the factor, whose
    CPU backend is ten times slower at that form, and from decoding the factors anew for every
    value of a leaf, where it fuses them with the arithmetic on what is as large as the gradients.
    """
    return lax.optimization_barrier(factor).mT


def factor_layout(shape: tuple[int, ...], replicas: int, bits: int) -> BlockLayout:
    """Cuts the columns ``(*batch, r, n)`` of a factor into blocks of values that share a scale.

    The columns differ in size by orders of magnitude and the integers of a block share their scale.
    So a column is cut into equal blocks. They stay within it where its blocks can be dealt out
    equally to the replicas; where not, a few take the end of one column and the start of the next,
    which costs less than padding every replica's share to whole blocks.
    """
    column = shape[-1]
    block = math.ceil(column / math.ceil(column / _BLOCK))
    return BlockLayout.of(math.prod(shape), replicas, block, bits)


def count_bytes(
    options: LowRank,
    params: PyTree,
    replicas: int | None,
    step: int | None,
) -> CompressionStats:
    """Counts what a step sends: the answer of `Reducer.bytes`.

    Args:
      options: The reducer's arguments.
      params: Parameters or gradients.
      replicas: How many there are, or None.
      step: Which update, or None for a compressed one.
    """
    plans = [plan for plan in options.plan(params) if jnp.issubdtype(plan.dtype, jnp.floating)]
    wire = _all_reduce_dtype(options, plans)
    if step is not None and step < options.start_step:
        return CompressionStats(dense_leaves(params, wire))
    if isinstance(options.comm_dtype, Integers):
        wire = options.comm_dtype
        replicas = needed_replicas(replicas)
    leaves = []
    for plan, leaf in zip(plans, dense_leaves(params), strict=True):
        after = leaf_bytes(plan, wire, replicas)
        leaves.append(dataclasses.replace(leaf, rank=plan.rank, bytes_after=after))
    return CompressionStats(tuple(leaves))


def leaf_bytes(plan: LeafPlan, wire: Any, replicas: int | None) -> int:
    """Returns the bytes that one leaf puts on the wire: both factors, or all of it uncompressed."""
    if not isinstance(wire, Integers):
        return plan.wire_size * wire.itemsize
    replicas = replicas or 1
    if plan.view is None:
        return ExactLayout(plan.size, replicas, plan.dtype).wire_bytes
    total = 0
    for *batch, n, r in (plan.p_shape, plan.q_shape):
        total += factor_layout((*batch, r, n), replicas, wire.bits).wire_bytes
    return total
