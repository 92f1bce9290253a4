"""How the replicas of a PowerSGD step average, on lists of arrays: exactly, or at low rank."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxcomp._base.leaves import nan_unless, saturated
from jaxcomp._base.typing import Array
from jaxcomp._lowrank.matrices import LeafPlan, MatrixView, outer, product
from jaxcomp._lowrank.orthogonalize import ROUNDS_TO_SPAN, orthonormal_bases
from jaxcomp._mesh.collectives import axis_size
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
    views = compressed_views(plans)
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
    return [saturated(x, plan.dtype) for x, plan in zip(averages, plans, strict=True)]
