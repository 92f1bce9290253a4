"""The arithmetic of a PowerSGD step, on lists of arrays.

`low_rank_step` adds the residual, lets the replicas average (`exact_average` before `start_step`,
`low_rank_average` from then on), and keeps what was not sent.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxcomp._base.leaves import compute_dtype, nan_unless, saturated
from jaxcomp._base.typing import Array
from jaxcomp._lowrank.matrices import LeafPlan, MatrixView, outer, product, unsent
from jaxcomp._lowrank.orthogonalize import ROUNDS_TO_SPAN, orthonormal_bases
from jaxcomp._mesh.collectives import axis_size, from_step
from jaxcomp._reducers.factor_wire import average_exactly, average_factors
from jaxcomp._reducers.options import LowRank


class Average(NamedTuple):
    """What the replicas made of their gradients; a mean that was compressed is ``P Q^T``."""

    p: list[Array]  # left factors; zeros where nothing was compressed
    q: list[Array]  # right factors: means over the replicas; before `start_step` as they were
    q_sent: list[Array]  # right factors: this replica's own, as sent
    means: list[Array]  # of all gradients, in the dtypes of their plans; NaN unless finite
    sent: list[Array]  # what this replica sent of them
    finite: Array  # bool scalar, equal on every replica


class Step(NamedTuple):
    """An average, and what is kept for the next step."""

    average: Average
    residual: list[Array]
    q: list[Array]  # right factors to begin with
    commit: Array  # bool scalar: whether residual and right factors are new


def low_rank_step(
    options: LowRank,
    plans: list[LeafPlan],
    gradients: list[Array],
    residual: list[Array],
    starts: list[Array],
    count: Array,
) -> Step:
    """Makes one step of `powersgd`, whose docstring has the equations.

    Whatever comes out of a conditional is copied. So only factors and outputs do; the sums of
    gradient and residual go into it, and the residual stays outside and is updated in place.

    Args:
      options: The reducer's arguments.
      plans: What happens to each gradient; those that are compressed come first.
      gradients: This replica's.
      residual: What it has not sent of the compressed ones; empty without error feedback.
      starts: The right factors that the power iteration begins with, one for each compressed one.
      count: How many finite updates there were.
    """
    started = count >= options.start_step
    totals = [x.astype(compute_dtype(x.dtype)) for x in gradients[: len(starts)]]
    starts = [start.astype(total.dtype) for start, total in zip(starts, totals, strict=True)]
    for i, old in enumerate(residual):
        old = old.astype(totals[i].dtype)
        totals[i] += jnp.where(started, old, 0) if options.start_step else old
    average = from_step(
        count,
        options.start_step,
        functools.partial(exact_average, options, plans, gradients, totals, starts),
        functools.partial(low_rank_average, options, plans, gradients, totals, starts),
    )
    # With `started` in the flag XLA keeps a copy of the gradients: not where every step compresses.
    commit = average.finite & started if options.start_step else average.finite
    q = [jnp.where(commit, new, old) for new, old in zip(average.q, starts, strict=True)]
    kept = []
    views = _views(plans)
    for i, old in enumerate(residual):
        factors = average.p[i], average.q[i], average.q_sent[i]
        kept.append(unsent(views[i], plans[i].dtype, *factors, totals[i], old, commit))
    return Step(average, kept, q, commit)


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
    reduced = average_exactly(options, plans, arrays)
    return Average(
        p,
        starts,
        [jnp.zeros_like(start) for start in starts],
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
    views = _views(plans)
    # They only have to span the space: the output depends on it, and not on its basis.
    bases = orthonormal_bases(starts, options.eps, ROUNDS_TO_SPAN)
    left = jax.tree.map(product, views, totals, bases)
    left = _nan_if_too_large(views, left, axis_size(options.axis_name))
    first = average_factors(options, plans, left, gradients[number:])
    # Zeros for what is not finite: no decomposition need be trusted with NaN. The mean stands in
    # for torch's sum; dividing eps too leaves the quotient unchanged.
    left = [jnp.where(first.finite, x, 0) for x in first.means[:number]]
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


def _views(plans: list[LeafPlan]) -> list[MatrixView]:
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
    return [saturated(x, plan.dtype) for x, plan in zip(averages, plans, strict=True)]
