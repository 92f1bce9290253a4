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

from jaxcomp._base.leaves import Integers, all_finite, compute_dtype, wire_dtype
from jaxcomp._base.stats import CompressionStats, dense_leaves, needed_replicas
from jaxcomp._base.typing import Array, PyTree
from jaxcomp._lowrank.matrices import LeafPlan, MatrixView
from jaxcomp._mesh.collectives import Reduced, axis_size, mean_each, other_axes, reduce_mean
from jaxcomp._mesh.shares import BlockLayout, ExactLayout, Layout, mean_by_shares
from jaxcomp._reducers.groups import Gradients
from jaxcomp._reducers.options import LowRank

_BLOCK = 128  # values that share a scale, at most: 3% more bytes for the scales


def average_exactly(options: LowRank, gradients: Gradients) -> Reduced:
    """Averages all gradients in one all-reduce, without integers."""
    arrays = [*gradients.compressed, *gradients.uncompressed]
    return reduce_mean(arrays, options.axis_name, _all_reduce_dtype(options, arrays))


def average_factors(
    options: LowRank,
    gradients: Gradients,
    factors: Sequence[Array],
    uncompressed: Sequence[Array],
) -> Reduced:
    """Averages a factor ``(*batch, n, r)`` of each compressed gradient, and others behind them."""
    number = len(factors)
    if not isinstance(options.comm_dtype, Integers):
        dtype = _all_reduce_dtype(options, [*gradients.compressed, *gradients.uncompressed])
        arrays = [*factors, *uncompressed]
        return reduce_mean(arrays, options.axis_name, dtype, factors=number)
    columns = [_transposed(factor) for factor in factors]
    reduced = _average_columns(options, gradients.views, columns, uncompressed)
    means = [_transposed(x) for x in reduced.means[:number]]
    sent = [_transposed(x) for x in reduced.sent[:number]]
    means += reduced.means[number:]
    sent += reduced.sent[number:]
    return Reduced(means, sent, reduced.finite)


def _all_reduce_dtype(options: LowRank, gradients: Sequence[Any]) -> Any:
    """Returns what goes on the wire for gradients, or plans of them, of these dtypes."""
    return wire_dtype(options.comm_dtype, [x.dtype for x in gradients])


def _average_columns(
    options: LowRank,
    views: Sequence[MatrixView],
    columns: Sequence[Array],
    uncompressed: Sequence[Array],
) -> Reduced:
    """Averages factors, by columns ``(*batch, r, n)``, as integers and other leaves exactly.

    Beside mesh axes that are left to the compiler these keep their shapes and so their shardings,
    in an all-reduce for each dtype.
    """
    axis_name = options.axis_name
    replicas = axis_size(axis_name)
    layouts: list[Layout] = []
    stacks = set()
    for i, (view, x) in enumerate(zip(views, columns, strict=True)):
        shape = x.shape
        if view.is_group:  # each leaf of a group is sent as it would be alone
            stacks.add(i)
            shape = shape[1:]
        layouts.append(factor_layout(shape, replicas, options.comm_dtype.bits))
    if other_axes():
        reduced = mean_by_shares(columns, layouts, axis_name, stacks)
        others = mean_each(uncompressed, axis_name)
        finite = reduced.finite & all_finite(others)
        return Reduced([*reduced.means, *others], [*reduced.sent, *uncompressed], finite)
    # In their own dtypes: they have no residual that could keep a rounding.
    layouts += [ExactLayout(x.size, replicas, x.dtype) for x in uncompressed]
    values = [x.astype(compute_dtype(x.dtype)) for x in uncompressed]
    reduced = mean_by_shares([*columns, *values], layouts, axis_name, stacks)
    return Reduced(
        _in_dtypes_of(uncompressed, reduced.means),
        _in_dtypes_of(uncompressed, reduced.sent),
        reduced.finite,
    )


def _in_dtypes_of(uncompressed: Sequence[Array], arrays: list[Array]) -> list[Array]:
    """Returns the arrays, of which the last stand for these leaves, in the dtypes of these."""
    first = len(arrays) - len(uncompressed)
    rest = [x.astype(leaf.dtype) for x, leaf in zip(arrays[first:], uncompressed, strict=True)]
    return [*arrays[:first], *rest]


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
        return CompressionStats.of(dense_leaves(params, wire))
    if isinstance(options.comm_dtype, Integers):
        wire = options.comm_dtype
        replicas = needed_replicas(replicas)
    leaves = []
    for plan, leaf in zip(plans, dense_leaves(params), strict=True):
        after = leaf_bytes(plan, wire, replicas)
        leaves.append(dataclasses.replace(leaf, rank=plan.rank, bytes_after=after))
    return CompressionStats.of(leaves)


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
