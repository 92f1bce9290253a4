"""A step of PowerSGD, from gradients to updates and state.

`powersgd_step` adds the residual, lets the replicas average (`exact_average` before `start_step`,
`low_rank_average` from then on), and keeps what was not sent.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcomp._base.leaves import compute_dtype, excess, nan_unless, saturated
from jaxcomp._base.typing import Array, AxisName, PyTree
from jaxcomp._lowrank.matrices import LeafPlan, MatrixView, outer, product, unsent
from jaxcomp._lowrank.orthogonalize import ROUNDS_TO_SPAN, orthonormal_bases
from jaxcomp._mesh.collectives import axis_size, from_step, owner_id
from jaxcomp._reducers.factor_wire import average_exactly, average_factors
from jaxcomp._reducers.groups import Groups, apart, grouped, together
from jaxcomp._reducers.options import LowRank
from jaxcomp._reducers.reducer import Reduction, fitted


class PowerSGDState(NamedTuple):
    """State of `powersgd`; a checkpoint holds one, consolidated, for any number of replicas."""

    # int32 scalar: finite updates seen; replicated
    count: Array  # pyright: ignore[reportIncompatibleMethodOverride]
    residual: PyTree  # compressed leaf: what was not sent yet, shape of the leaf; per replica
    q: PyTree  # compressed leaf: (*batch, cols, r) mean right factor, float32 or wider; replicated
    # float32 scalar: whose the residual is, 0 for everybody's; per replica
    owner: Any = np.zeros((), np.float32)

    # Read by consolidate, state_specs and shard_state. Not a field: it has no annotation.
    per_replica = ("residual", "owner")


class Average(NamedTuple):
    """What the replicas made of their gradients together. A group's array is ``P Q^T``."""

    p: list[Array]  # left factor of each group; zeros where nothing was compressed
    q: list[Array]  # right factor: the mean over the replicas
    q_sent: list[Array]  # right factor: this replica's own, as sent
    means: list[Array]  # of each group, then of the uncompressed leaves; NaN unless finite
    sent: list[Array]  # what this replica sent of them
    finite: Array  # bool scalar, equal on every replica


def powersgd_step(
    options: LowRank,
    updates: PyTree,
    state: PowerSGDState,
    params: PyTree | None = None,
    **extra_args: Any,
) -> Reduction:
    """Makes one update of `powersgd`, whose docstring has the equations.

    Whatever comes out of a conditional is copied. So only factors and outputs do; the sums of
    gradient and residual go into it, and the residual stays outside and is updated in place.

    Args:
      options: The reducer's arguments.
      updates: This replica's gradients.
      state: This replica's state.
      params: Not used, as of other Optax transformations.
      **extra_args: Not used either.
    """
    del params, extra_args
    leaves, treedef = jax.tree.flatten(updates)
    groups = grouped(options.plan(updates))
    residual_leaves, q_leaves = _checked_leaves(options, groups.leaf_plans, updates, state)
    residual = together(groups, residual_leaves) if options.error_feedback else []
    q_before = together(groups, q_leaves) if options.warm_start else []

    started = state.count >= options.start_step
    gradients = together(groups, leaves)
    totals = _with_residual(options, gradients, residual, started)
    uncompressed = [leaves[i] for i in groups.uncompressed]
    starts = _starting_factors(options, groups, q_before, state.count)
    average = from_step(
        state.count,
        options.start_step,
        functools.partial(exact_average, options, groups, starts, totals, uncompressed),
        functools.partial(low_rank_average, options, groups, starts, totals, uncompressed),
    )

    # The plain flag where it can be: XLA holds a copy of the gradients for the other.
    commit = average.finite & started if options.start_step else average.finite
    count = jnp.where(average.finite, optax.safe_increment(state.count), state.count)
    owner = jnp.where(commit, owner_id(options.axis_name), state.owner)
    state = state._replace(count=count, owner=owner)
    if options.error_feedback:
        residual = _unsent(groups, average, totals, residual, commit)
        residual_leaves = apart(groups, residual, residual_leaves)
        state = state._replace(residual=treedef.unflatten(residual_leaves))
    if options.warm_start:
        q = _kept(commit, average.q, q_before)
        q_leaves = apart(groups, q, q_leaves)
        state = state._replace(q=treedef.unflatten(q_leaves))
    means = treedef.unflatten(_all_leaves(groups, average.means, leaves))
    sent = treedef.unflatten(_all_leaves(groups, average.sent, leaves))
    return Reduction(means, state, sent, average.finite)


def exact_average(
    options: LowRank,
    groups: Groups,
    starts: list[Array],
    totals: list[Array],
    uncompressed: list[Array],
) -> Average:
    """Averages everything in one all-reduce, as in all steps before `start_step`.

    The arguments are those of `low_rank_average`. Before the start the sums are the gradients: the
    gradients themselves would have to be kept beside them.
    """
    arrays = [*_in_dtypes_of(groups, totals), *uncompressed]
    reduced = average_exactly(options, groups, arrays)
    p = [jnp.zeros(plan.p_shape, x.dtype) for plan, x in zip(groups.plans, totals, strict=True)]
    q_sent = [jnp.zeros_like(q) for q in starts]
    means = nan_unless(reduced.finite, reduced.means)
    return Average(p, starts, q_sent, means, reduced.sent, reduced.finite)


def low_rank_average(
    options: LowRank,
    groups: Groups,
    starts: list[Array],
    totals: list[Array],
    uncompressed: list[Array],
) -> Average:
    """Averages by one power iteration on every matrix (Vogels et al. 2019, Algorithms 1 and 2).

    Args:
      options: The reducer's arguments.
      groups: Which leaves the arrays are.
      starts: The right factors that the iteration begins with, of each group.
      totals: Gradients plus residuals of each group.
      uncompressed: The leaves that are averaged as they are, in the first of two all-reduces.
    """
    number = len(totals)
    views = groups.views
    # They only have to span the space: the output depends on it, and not on its basis.
    bases = orthonormal_bases(starts, options.eps, ROUNDS_TO_SPAN)
    left = _products(views, totals, bases)
    left = _nan_if_too_large(views, left, options.axis_name)
    first = average_factors(options, groups, left, uncompressed)
    # Zeros for what is not finite: no decomposition need be trusted with NaN. The mean stands in
    # for torch's sum; dividing eps too leaves the quotient unchanged.
    left = [jnp.where(first.finite, x, 0) for x in first.means[:number]]
    p = orthonormal_bases(left, options.eps / axis_size(options.axis_name))
    right = _products(views, totals, p, transposed=True)
    second = average_factors(options, groups, right, [])
    finite = first.finite & second.finite

    # One NaN in a row of a factor is NaN in the whole row of the product: no second look at what is
    # as large as the gradients.
    means = _in_dtypes_of(groups, _outers(views, nan_unless(finite, p), second.means))
    means += nan_unless(finite, first.means[number:])
    # For a reducer around this one; XLA drops it where nobody asks.
    sent = _in_dtypes_of(groups, _outers(views, p, second.sent))
    sent += first.sent[number:]
    return Average(p, second.means, second.sent, means, sent, finite)


def _checked_leaves(
    options: LowRank, plans: Sequence[LeafPlan], updates: PyTree, state: PowerSGDState
) -> tuple[list[Any], list[Any]]:
    """Returns the leaves of residual and right factor; refuses a state of other gradients."""
    shapes: dict[str, list[tuple[int, ...] | None]] = {"residual": [], "q": []}
    for plan in plans:
        compressed = plan.view is not None
        keeps_residual = compressed and options.error_feedback
        keeps_q = compressed and options.warm_start
        shapes["residual"].append(plan.shape if keeps_residual else None)
        shapes["q"].append(plan.q_shape if keeps_q else None)
    fields = fitted(PowerSGDState, state, updates, shapes)
    return fields["residual"], fields["q"]


def _with_residual(
    options: LowRank, gradients: list[Array], residual: list[Array], started: Array
) -> list[Array]:
    """Adds the residual, from `start_step` on, in float32 or a wider dtype of the gradients."""
    totals = [x.astype(compute_dtype(x.dtype)) for x in gradients]
    for i, old in enumerate(residual):
        old = old.astype(totals[i].dtype)
        totals[i] += jnp.where(started, old, 0) if options.start_step else old
    return totals


def _starting_factors(
    options: LowRank, groups: Groups, q_before: list[Array], count: Array
) -> list[Array]:
    """Returns the last right factors, or fresh ones, other for every leaf and count."""
    if options.warm_start:
        wide = [compute_dtype(plan.dtype) for plan in groups.plans]
        return [q.astype(dtype) for q, dtype in zip(q_before, wide, strict=True)]
    fresh = []
    for group in groups.positions:
        plan = groups.leaf_plans[group[0]]
        draw = functools.partial(options.random_factor, plan.q_shape, plan.dtype)
        if len(group) == 1:
            fresh.append(draw(group[0], count))
        else:
            fresh.append(jax.vmap(draw, in_axes=(0, None))(jnp.array(group), count))
    return fresh


def _products(
    views: list[MatrixView], totals: list[Array], factors: list[Array], *, transposed: bool = False
) -> list[Array]:
    return jax.tree.map(functools.partial(product, transposed=transposed), views, totals, factors)


def _outers(views: list[MatrixView], p: list[Array], q: list[Array]) -> list[Array]:
    return jax.tree.map(outer, views, p, q)


def _nan_if_too_large(
    views: Sequence[MatrixView], factors: Sequence[Array], axis_name: AxisName
) -> list[Array]:
    """Makes a factor NaN where the matrix behind it is so large that later steps could overflow.

    A product with orthonormal columns shows how large a matrix is in their directions only. With
    ``sqrt(rows * cols) * replicas`` times the product inside the float range, what a residual keeps
    of the matrix can be multiplied and summed again. Otherwise a single finite step would leave a
    state of which every later step is NaN.
    """
    checked = []
    for view, factor in zip(views, factors, strict=True):
        size = math.sqrt(view.n_rows * view.n_cols) * axis_size(axis_name)
        largest = float(jnp.finfo(factor.dtype).max) / size
        checked.append(jnp.where(jnp.abs(factor) < largest, factor, jnp.nan))
    return checked


def _in_dtypes_of(groups: Groups, arrays: list[Array]) -> list[Array]:
    """Returns the arrays in the dtypes of the gradients; what float16 cannot hold at its end."""
    return [saturated(x, plan.dtype) for x, plan in zip(arrays, groups.plans, strict=True)]


def _unsent(
    groups: Groups, average: Average, totals: list[Array], residual: list[Array], commit: Array
) -> list[Array]:
    """Returns the new residuals: the sums less what was sent of them, and what did not fit.

    A product of factors may be beyond the range of float16 where gradients are not. What of it the
    output cannot hold was sent and reached nobody, so it stays, and goes out in later steps.
    """
    kept = []
    for i, view in enumerate(groups.views):
        total = totals[i]
        dtype = groups.plans[i].dtype
        if dtype == jnp.float16:
            total += excess(outer(view, average.p[i], average.q[i]), dtype)
        kept.append(unsent(view, average.p[i], average.q_sent[i], total, residual[i], commit))
    return kept


def _kept(commit: Array, new: list[Array], old: list[Array]) -> list[Array]:
    """Returns the new factors in the dtype of the old, which stay where a step was refused."""
    return [jnp.where(commit, x.astype(y.dtype), y) for x, y in zip(new, old, strict=True)]


def _all_leaves(groups: Groups, arrays: list[Array], leaves: list[Any]) -> list[Any]:
    """Returns all leaves, from the arrays of the groups and behind them the uncompressed leaves."""
    number = len(groups.positions)
    result = apart(groups, arrays[:number], leaves)
    for i, array in zip(groups.uncompressed, arrays[number:], strict=True):
        result[i] = array
    return result
