"""Averages lists of arrays over the replicas in a PowerSGD step: exactly, or at low rank.

`powersgd_step` calls one of two functions with the same arguments and the same kind of result,
`uncompressed_average` before `start_step` and `low_rank_average` after it, because both are
branches of one conditional. Lists hold the compressed arrays first. `low_rank_average` is the
algorithm of the paper; what remains is the wire.

Floating factors are sent in one all-reduce together with the uncompressed leaves. Integers would
overflow in the sums of an all-reduce, so they are sent in an all-to-all and an all-gather, together
with the uncompressed leaves, which are not rounded. On a mesh with unmapped axes these leaves are
sent in all-reduces of their own then, one for each dtype, because they may be sharded.
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

from jaxcomp._base.checks import is_traced
from jaxcomp._base.leaves import (
    Integers,
    alike,
    compute_dtype,
    is_floating,
    nan_unless,
    put_at,
    saturated,
    widest,
)
from jaxcomp._base.stats import CompressionStats, dense_stats, needed_replicas
from jaxcomp._base.typing import Array, AxisName, MatrixDimsFn, PyTree, RankFn, Shape
from jaxcomp._lowrank.matrices import LeafPlan, MatrixView, outer, plan_leaves, product
from jaxcomp._lowrank.orthogonalize import ROUNDS_TO_SPAN, orthonormal_bases
from jaxcomp._mesh.collectives import (
    Reduced,
    axis_size,
    mean_each,
    reduce_mean,
    unmapped_axes,
)
from jaxcomp._mesh.shares import BlockLayout, ExactLayout, Layout, mean_by_shares

_BLOCK = 128  # largest number of values that share a scale; scales add 3% to the bytes


@dataclasses.dataclass(frozen=True)
class PowerSGDOptions:
    """Holds the arguments of `powersgd`, which documents and checks them."""

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
        """Returns the plan of each leaf of `tree`."""
        return plan_leaves(tree, self.rank, self.min_compression_rate, self.matrix_dims)

    def random_factors(self, plans: list[LeafPlan], count: Any) -> list[Any]:
        """Draws the initial right factors: equal on every replica, different for every leaf."""
        # Threefry, whatever jax_default_prng_impl says: other generators differ between vmapped
        # replicas.
        key = jax.random.key(self.seed, impl="threefry2x32")
        factors: list[Any] = [optax.MaskedNode()] * len(plans)
        kinds: list[Any] = [None] * len(plans)
        for i, plan in enumerate(plans):
            if plan.view is not None:
                kinds[i] = (plan.q_shape, compute_dtype(plan.dtype))
        for positions in alike(kinds):

            def draw(i: Any, kind: Any = kinds[positions[0]]) -> Array:
                leaf_key = jax.random.fold_in(jax.random.fold_in(key, i), count)
                return jax.random.normal(leaf_key, *kind)

            if not is_traced(key):  # outside of jax.jit, JAX compiles one draw for each shape
                drawn: Any = list(map(draw, positions))
            elif self.warm_start:  # one loop for each shape, because a draw takes 0.2 s to compile
                drawn = lax.map(draw, jnp.array(positions))
            else:  # in every step, so all at once
                drawn = jax.vmap(draw)(jnp.array(positions))
            put_at(factors, positions, drawn)
        return factors


class Average(NamedTuple):
    """Holds the averaged gradients and factors of one step; a compressed mean is ``P Q^T``."""

    p: list[Array]  # left factors; zeros if nothing was compressed
    q: list[Array]  # right factors: means over the replicas; unchanged before `start_step`
    q_sent: list[Array]  # right factors of this replica, as sent
    means: list[Array]  # means of all gradients, in the dtypes of their plans; NaN unless finite
    sent: list[Array]  # this replica's contributions to `means`, as sent
    finite: Array  # bool scalar, equal on every replica


def uncompressed_average(
    options: PowerSGDOptions,
    plans: list[LeafPlan],
    gradients: list[Array],
    totals: list[Array],
    starts: list[Array],
) -> Average:
    """Averages everything in one all-reduce, for the steps before `start_step`.

    The arguments are those of `low_rank_average`. Before `start_step` no residual is added, so
    `totals` are the gradients. They are used so that `gradients` need not stay in memory.
    """
    arrays = list(gradients)
    p = []
    for i, (total, start) in enumerate(zip(totals, starts, strict=True)):
        arrays[i] = total.astype(gradients[i].dtype)
        # Both branches of a conditional return the same shapes.
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
    options: PowerSGDOptions,
    plans: list[LeafPlan],
    gradients: list[Array],
    totals: list[Array],
    starts: list[Array],
) -> Average:
    """Averages by one power iteration on every matrix (Vogels et al. 2019, Algorithms 1 and 2).

    Args:
      options: The reducer's arguments.
      plans: The plan of each gradient; those of the compressed gradients come first.
      gradients: This replica's gradients; the uncompressed ones are sent with the first all-reduce.
      totals: The sums of gradient and residual, for each compressed gradient.
      starts: The right factors that the power iteration starts from.
    """
    number = len(totals)
    views = compressed_views(plans)
    # The columns only have to span the right space, because the output does not depend on the
    # basis.
    bases = orthonormal_bases(starts, options.eps, ROUNDS_TO_SPAN)
    left = jax.tree.map(product, views, totals, bases)
    checked = functools.partial(_nan_if_too_large, axis_size(options.axis_name))
    left = jax.tree.map(checked, views, left)
    first = average_factors(options, plans, left, gradients[number:])
    # Factors become zeros if a value is not finite, so no decomposition gets a NaN.
    left = jax.tree.map(lambda x: jnp.where(first.finite, x, 0), first.means[:number])
    # torch orthogonalises the sum over replicas, and this the mean: so eps is divided by their
    # number too.
    p = orthonormal_bases(left, options.eps / axis_size(options.axis_name))
    right = jax.tree.map(functools.partial(product, transposed=True), views, totals, p)
    second = average_factors(options, plans, right, [])
    finite = first.finite & second.finite

    # A NaN in a row of a factor makes the whole row of the product NaN, so it suffices to set the
    # factors to NaN, which are smaller than the gradients.
    means = jax.tree.map(outer, views, p, nan_unless(finite, second.means))
    means += nan_unless(finite, first.means[number:])
    # Read only by a wrapper such as error_feedback; XLA removes it if it is not read.
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
    """Returns the matrix views of the compressed gradients, which come first in `plans`."""
    return [plan.view for plan in plans if plan.view is not None]


def _nan_if_too_large(replicas: int, view: MatrixView, factor: Array) -> Array:
    """Replaces values of a factor by NaN if its matrix is so large that later steps could overflow.

    A factor is the product of a matrix with orthonormal columns, and shows the size of the matrix
    only along these columns. If ``sqrt(rows * cols) * replicas`` times the factor is inside the
    float range, later steps can multiply and sum the residual. Without this check one finite step
    could leave a state that makes every later step NaN.
    """
    size = math.sqrt(view.n_rows * view.n_cols) * replicas
    largest = float(jnp.finfo(factor.dtype).max) / size
    return jnp.where(jnp.abs(factor) < largest, factor, jnp.nan)


def _in_dtypes_of(plans: list[LeafPlan], averages: list[Array]) -> list[Array]:
    """Casts averages to the dtypes of the gradients; clips to their range."""
    # Here and not by the caller, because XLA copies all results of a conditional, and 16 bits are
    # half as many.
    return jax.tree.map(lambda plan, x: saturated(x, plan.dtype), plans, averages)


def average_factors(
    options: PowerSGDOptions,
    plans: Sequence[LeafPlan],
    factors: Sequence[Array],
    uncompressed: Sequence[Array],
) -> Reduced:
    """Averages factors ``(*batch, n, r)``, and after them the uncompressed arrays.

    Only factors are sent as integers, transposed to ``(*batch, r, n)``. Uncompressed arrays are
    sent exactly, in their dtypes, because they have no residual to keep a rounding. If the mesh has
    unmapped axes, these arrays keep their shapes, and so their shardings, in all-reduces.
    """
    axis_name = options.axis_name
    number = len(factors)
    if not isinstance(options.comm_dtype, Integers):
        dtype = _all_reduce_dtype(options, plans)
        return reduce_mean([*factors, *uncompressed], axis_name, dtype, factors=number)
    replicas = axis_size(axis_name)
    parts = list(map(_transposed, factors))
    layouts: list[Layout] = []
    for plan, columns in zip(plans, parts, strict=False):  # plans of uncompressed leaves follow
        # Each leaf of a group is sent as if it were alone.
        shape = columns.shape
        if plan.view is not None and plan.view.is_group:
            shape = shape[1:]
        layouts.append(factor_layout(shape, replicas, options.comm_dtype.bits))
    in_all_reduces: list[Array] = []
    if unmapped_axes():  # cutting a leaf into shares would gather one that is sharded over them
        in_all_reduces += uncompressed
    else:
        for x in uncompressed:
            parts.append(x.astype(compute_dtype(x.dtype)))  # the dtype of the sum
            layouts.append(ExactLayout(x.size, replicas, x.dtype))
    shared = mean_by_shares(parts, layouts, axis_name)
    others = mean_each(in_all_reduces, axis_name)
    for arrays in (shared.means, shared.sent):
        arrays[:number] = map(_transposed, arrays[:number])
    return Reduced(
        shared.means + others.means, shared.sent + others.sent, shared.finite & others.finite
    )


def _all_reduce_dtype(options: PowerSGDOptions, plans: Sequence[LeafPlan]) -> Any:
    """Returns the wire dtype of an all-reduce of leaves with these plans."""
    comm_dtype = options.comm_dtype
    if comm_dtype is None or isinstance(comm_dtype, Integers):  # integers are never all-reduced
        return widest([plan.dtype for plan in plans])
    return comm_dtype


def _transposed(factor: Array) -> Array:
    """Swaps the last two axes.

    The barrier prevents two slow fusions in XLA. One folds the transpose into the product that made
    the factor, which is ten times slower on CPU. The other decodes the factors again for every
    value of a leaf, where they are fused with arithmetic on whole leaves.
    """
    return lax.optimization_barrier(factor).mT


def factor_layout(shape: Shape, replicas: int, bits: int) -> BlockLayout:
    """Cuts the columns ``(*batch, r, n)`` of a factor into blocks of values that share a scale.

    Columns differ in size by orders of magnitude, so a block should not span two columns. No block
    does if its length divides that of a column, and the number of replicas that of the blocks.
    Otherwise some blocks do, which costs fewer bytes than padding every column and share to whole
    blocks.
    """
    column = shape[-1]
    block = math.ceil(column / math.ceil(column / _BLOCK))
    return BlockLayout.of(math.prod(shape), replicas, block, bits)


def count_bytes(
    options: PowerSGDOptions,
    params: PyTree,
    replicas: int | None,
    step: int | None,
) -> CompressionStats:
    """Counts the bytes of a step, for `Reducer.bytes`.

    Args:
      options: The reducer's arguments.
      params: Parameters or gradients.
      replicas: The number of replicas, or None.
      step: The number of the update, or None for a compressed one.
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
    """Returns the bytes that one leaf puts on the wire: both factors, or the uncompressed leaf."""
    if not isinstance(wire, Integers):
        return plan.wire_size * wire.itemsize
    replicas = replicas or 1
    if plan.view is None:
        return ExactLayout(plan.size, replicas, plan.dtype).wire_bytes
    total = 0
    for *batch, n, r in (plan.p_shape, plan.q_shape):
        total += factor_layout((*batch, r, n), replicas, wire.bits).wire_bytes
    return total
