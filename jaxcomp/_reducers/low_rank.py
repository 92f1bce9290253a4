"""How the replicas of a PowerSGD step average, on lists of arrays: exactly, or at low rank.

Floating factors go out in one all-reduce, and what is not compressed rides along. Integers would
overflow where they are summed: they go out in an all-to-all and an all-gather instead, the other
leaves beside them as they are.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomp._base.leaves import (
    Integers,
    compute_dtype,
    is_floating,
    nan_unless,
    saturated,
    wire_dtype,
)
from jaxcomp._base.stats import CompressionStats, dense_stats, needed_replicas
from jaxcomp._base.typing import Array, AxisName, MatrixDimsFn, PyTree, RankFn
from jaxcomp._lowrank.matrices import LeafPlan, MatrixView, outer, plan_leaves, product
from jaxcomp._lowrank.orthogonalize import ROUNDS_TO_SPAN, orthonormal_bases
from jaxcomp._mesh.collectives import (
    Reduced,
    axis_size,
    local_if_bound,
    mean_each,
    other_axes,
    reduce_mean,
)
from jaxcomp._mesh.shares import BlockLayout, ExactLayout, Layout, mean_by_shares

_BLOCK = 128  # values that share a scale, at most: 3% more bytes for the scales


@dataclasses.dataclass(frozen=True)
class LowRank:
    """Arguments of `powersgd`, which documents and checks them."""

    rank: int | RankFn
    axis_name: AxisName
    start_step: int
    min_compression_rate: float
    error_feedback: bool
    warm_start: bool
    eps: Any
    seed: Any
    comm_dtype: Any
    residual_dtype: Any
    matrix_dims: MatrixDimsFn | None

    def plan(self, tree: PyTree) -> list[LeafPlan]:
        """Plans what happens to each leaf of `tree`."""
        return plan_leaves(tree, self.rank, self.min_compression_rate, self.matrix_dims)

    def first_residual(self, params: PyTree) -> PyTree:
        """Makes residuals of zeros for every leaf that is compressed."""
        leaves, treedef = jax.tree.flatten(params)
        residual: list[Any] = [optax.MaskedNode()] * len(leaves)
        for i, plan in enumerate(self.plan(params)):
            if plan.view is not None and self.error_feedback:
                dtype = self.residual_dtype or compute_dtype(plan.dtype)
                residual[i] = jnp.zeros_like(leaves[i], dtype=dtype)
        return local_if_bound(treedef.unflatten(residual), self.axis_name)

    def random_factors(self, plans: list[LeafPlan], count: Any) -> list[Any]:
        """Draws right factors to start from: the same on every replica, others for every leaf."""
        # Threefry whatever jax_default_prng_impl says: others differ between the lanes of a vmap.
        key = jax.random.key(self.seed, impl="threefry2x32")
        factors: list[Any] = [optax.MaskedNode()] * len(plans)
        for i, plan in enumerate(plans):
            if plan.view is not None:
                leaf_key = jax.random.fold_in(jax.random.fold_in(key, i), count)
                factors[i] = jax.random.normal(leaf_key, plan.q_shape, compute_dtype(plan.dtype))
        return factors


class Average(NamedTuple):
    """What the replicas made of their gradients; a mean that was compressed is ``P Q^T``."""

    p: list[Array]  # left factors; zeros where nothing was compressed
    q: list[Array]  # right factors: means over the replicas; before `start_step` as they were
    q_sent: list[Array]  # right factors: this replica's own, as sent
    means: list[Array]  # of all gradients, in the dtypes of their plans; NaN unless finite
    sent: list[Array]  # what this replica sent of them
    finite: Array  # bool scalar, equal on every replica


def exact_average(
    options: LowRank,
    plans: list[LeafPlan],
    gradients: list[Array],
    totals: list[Array],
    starts: list[Array],
) -> Average:
    """Averages everything in one all-reduce, as in all steps before `start_step`.

    The arguments are those of `low_rank_average`. Before the start the sums are the gradients: the
    gradients themselves would have to be kept beside them.
    """
    arrays = list(gradients)
    p = []
    for i, (total, start) in enumerate(zip(totals, starts, strict=True)):
        arrays[i] = total.astype(gradients[i].dtype)
        p.append(jnp.zeros(plans[i].p_shape, start.dtype))
    dtype = _all_reduce_dtype(options, plans)  # never integers
    reduced = reduce_mean(arrays, options.axis_name, dtype)
    return Average(
        p,
        starts,
        optax.tree.zeros_like(starts),
        _in_dtypes_of(plans, nan_unless(reduced.finite, reduced.means)),
        _in_dtypes_of(plans, reduced.sent),
        reduced.finite,
    )


def low_rank_average(
    options: LowRank,
    plans: list[LeafPlan],
    gradients: list[Array],
    totals: list[Array],
    starts: list[Array],
) -> Average:
    """Averages by one power iteration on every matrix (Vogels et al. 2019, Algorithms 1 and 2).

    Args:
      options: The reducer's arguments.
      plans: What happens to each gradient.
      gradients: This replica's, of which the uncompressed ones ride along in the first of the two
        all-reduces.
      totals: Gradients plus residuals of the compressed ones.
      starts: The right factors that the iteration begins with.
    """
    number = len(totals)
    views = compressed_views(plans)
    # They only have to span the space: the output depends on it, and not on its basis.
    bases = orthonormal_bases(starts, options.eps, ROUNDS_TO_SPAN)
    left = jax.tree.map(product, views, totals, bases)
    left = _nan_if_too_large(views, left, axis_size(options.axis_name))
    first = average_factors(options, plans, left, gradients[number:])
    # Zeros for what is not finite: no decomposition need be trusted with NaN. The mean stands in
    # for torch's sum; dividing eps too leaves the quotient unchanged.
    left = jax.tree.map(lambda x: jnp.where(first.finite, x, 0), first.means[:number])
    p = orthonormal_bases(left, options.eps / axis_size(options.axis_name))
    right = jax.tree.map(functools.partial(product, transposed=True), views, totals, p)
    second = average_factors(options, plans, right, [])
    finite = first.finite & second.finite

    # One NaN in a row of a factor is NaN in the whole row of the product: no second look at what is
    # as large as the gradients.
    means = jax.tree.map(outer, views, nan_unless(finite, p), second.means)
    means += nan_unless(finite, first.means[number:])
    # For a reducer around this one; XLA drops it where nobody asks.
    sent = jax.tree.map(outer, views, p, second.sent) + first.sent[number:]
    return Average(
        p,
        second.means,
        second.sent,
        _in_dtypes_of(plans, means),
        _in_dtypes_of(plans, sent),
        finite,
    )


def compressed_views(plans: list[LeafPlan]) -> list[MatrixView]:
    """Returns how each of the compressed gradients, which come first, is a batch of matrices."""
    return [plan.view for plan in plans if plan.view is not None]


def _nan_if_too_large(
    views: Sequence[MatrixView], factors: Sequence[Array], replicas: int
) -> list[Array]:
    """Makes a factor NaN where the matrix behind it is so large that later steps could overflow.

    A product with orthonormal columns shows how large a matrix is in their directions only. With
    ``sqrt(rows * cols) * replicas`` times the product inside the float range, what a residual keeps
    of the matrix can be multiplied and summed again. Otherwise a single finite step would leave a
    state of which every later step is NaN.
    """
    checked = []
    for view, factor in zip(views, factors, strict=True):
        size = math.sqrt(view.n_rows * view.n_cols) * replicas
        largest = float(jnp.finfo(factor.dtype).max) / size
        checked.append(jnp.where(jnp.abs(factor) < largest, factor, jnp.nan))
    return checked


def _in_dtypes_of(plans: list[LeafPlan], averages: list[Array]) -> list[Array]:
    """Casts averages to the dtypes of the gradients, as far as these reach."""
    return jax.tree.map(lambda plan, x: saturated(x, plan.dtype), plans, averages)


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
    parts = list(map(_transposed, factors))
    layouts: list[Layout] = []
    for plan, columns in zip(plans, parts, strict=False):
        # Each leaf of a group is sent as it would be alone.
        shape = columns.shape
        if plan.view is not None and plan.view.is_group:
            shape = shape[1:]
        layouts.append(factor_layout(shape, replicas, options.comm_dtype.bits))
    in_all_reduces: list[Array] = []
    if other_axes():
        in_all_reduces += uncompressed
    else:
        for x in uncompressed:
            parts.append(x.astype(compute_dtype(x.dtype)))
            layouts.append(ExactLayout(x.size, replicas, x.dtype))
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
    plans = list(filter(is_floating, options.plan(params)))
    wire = _all_reduce_dtype(options, plans)
    if step is not None and step < options.start_step:
        return dense_stats(params, wire)
    if isinstance(options.comm_dtype, Integers):
        wire = options.comm_dtype
        replicas = needed_replicas(replicas)
    leaves = []
    for plan, leaf in zip(plans, dense_stats(params).leaves, strict=True):
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
