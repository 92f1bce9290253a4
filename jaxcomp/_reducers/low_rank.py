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

from jaxcomp._base.leaves import compute_dtype, excess, nan_unless, saturated
from jaxcomp._base.typing import Array, AxisName
from jaxcomp._lowrank.matrices import MatrixView, outer, product, unsent
from jaxcomp._lowrank.orthogonalize import ROUNDS_TO_SPAN, orthonormal_bases
from jaxcomp._mesh.collectives import axis_size, from_step
from jaxcomp._reducers.factor_wire import average_exactly, average_factors
from jaxcomp._reducers.groups import Gradients
from jaxcomp._reducers.options import LowRank


class Arrays(NamedTuple):
    """Holds averages: compressed groups in the dtypes of their gradients, and all other leaves."""

    compressed: list[Array]
    uncompressed: list[Array]


class Average(NamedTuple):
    """What the replicas made of their gradients; a mean that was compressed is ``P Q^T``."""

    p: list[Array]  # left factors; zeros where nothing was compressed
    q: list[Array]  # right factors: means over the replicas; before `start_step` as they were
    q_sent: list[Array]  # right factors: this replica's own, as sent
    means: Arrays  # NaN unless finite
    sent: Arrays  # what this replica sent of them
    finite: Array  # bool scalar, equal on every replica


class Step(NamedTuple):
    """An average, and what is kept for the next step."""

    average: Average
    residual: list[Array]
    commit: Array  # bool scalar: whether residual and right factors are new


def low_rank_step(
    options: LowRank,
    gradients: Gradients,
    residual: list[Array],
    starts: list[Array],
    count: Array,
) -> Step:
    """Makes one step of `powersgd`, whose docstring has the equations.

    Whatever comes out of a conditional is copied. So only factors and outputs do; the sums of
    gradient and residual go into it, and the residual stays outside and is updated in place.

    Args:
      options: The reducer's arguments.
      gradients: This replica's.
      residual: What it has not sent of the compressed ones; empty without error feedback.
      starts: The right factors that the power iteration begins with.
      count: How many finite updates there were.
    """
    started = count >= options.start_step
    totals = _with_residual(options, gradients.compressed, residual, started)
    average = from_step(
        count,
        options.start_step,
        functools.partial(exact_average, options, gradients, totals, starts),
        functools.partial(low_rank_average, options, gradients, totals, starts),
    )
    # With `started` in the flag XLA keeps a copy of the gradients: not where every step compresses.
    commit = average.finite & started if options.start_step else average.finite
    if residual:
        residual = _unsent(gradients, average, totals, residual, commit)
    return Step(average, residual, commit)


def exact_average(
    options: LowRank, gradients: Gradients, totals: list[Array], starts: list[Array]
) -> Average:
    """Averages everything in one all-reduce, as in all steps before `start_step`.

    The arguments are those of `low_rank_average`. Before the start the sums are the gradients: the
    gradients themselves would have to be kept beside them.
    """
    number = len(totals)
    pairs = zip(totals, gradients.compressed, strict=True)
    compressed = [total.astype(gradient.dtype) for total, gradient in pairs]
    reduced = average_exactly(options, gradients._replace(compressed=compressed))
    p = []
    for view, total, start in zip(gradients.views, totals, starts, strict=True):
        p.append(jnp.zeros((*view.batch, view.n_rows, start.shape[-1]), total.dtype))
    q_sent = [jnp.zeros_like(start) for start in starts]
    means = nan_unless(reduced.finite, reduced.means)
    return Average(
        p,
        starts,
        q_sent,
        _like_gradients(gradients, means[:number], means[number:]),
        _like_gradients(gradients, reduced.sent[:number], reduced.sent[number:]),
        reduced.finite,
    )


def low_rank_average(
    options: LowRank, gradients: Gradients, totals: list[Array], starts: list[Array]
) -> Average:
    """Averages by one power iteration on every matrix (Vogels et al. 2019, Algorithms 1 and 2).

    Args:
      options: The reducer's arguments.
      gradients: This replica's, of which the uncompressed ones ride along in the first of the two
        all-reduces.
      totals: Gradients plus residuals of the compressed ones.
      starts: The right factors that the iteration begins with.
    """
    views = gradients.views
    number = len(totals)
    # They only have to span the space: the output depends on it, and not on its basis.
    bases = orthonormal_bases(starts, options.eps, ROUNDS_TO_SPAN)
    left = _products(views, totals, bases)
    left = _nan_if_too_large(views, left, options.axis_name)
    first = average_factors(options, gradients, left, gradients.uncompressed)
    # Zeros for what is not finite: no decomposition need be trusted with NaN. The mean stands in
    # for torch's sum; dividing eps too leaves the quotient unchanged.
    left = [jnp.where(first.finite, x, 0) for x in first.means[:number]]
    p = orthonormal_bases(left, options.eps / axis_size(options.axis_name))
    right = _products(views, totals, p, transposed=True)
    second = average_factors(options, gradients, right, [])
    finite = first.finite & second.finite

    # One NaN in a row of a factor is NaN in the whole row of the product: no second look at what is
    # as large as the gradients.
    means = _outers(views, nan_unless(finite, p), second.means)
    uncompressed = nan_unless(finite, first.means[number:])
    # For a reducer around this one; XLA drops it where nobody asks.
    sent = _outers(views, p, second.sent)
    return Average(
        p,
        second.means,
        second.sent,
        _like_gradients(gradients, means, uncompressed),
        _like_gradients(gradients, sent, first.sent[number:]),
        finite,
    )


def _with_residual(
    options: LowRank, gradients: list[Array], residual: list[Array], started: Array
) -> list[Array]:
    """Adds the residual, from `start_step` on, in float32 or a wider dtype of the gradients."""
    totals = [x.astype(compute_dtype(x.dtype)) for x in gradients]
    for i, old in enumerate(residual):
        old = old.astype(totals[i].dtype)
        totals[i] += jnp.where(started, old, 0) if options.start_step else old
    return totals


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


def _like_gradients(
    gradients: Gradients, compressed: list[Array], uncompressed: list[Array]
) -> Arrays:
    """Casts averages to the dtypes of the gradients, as far as these reach."""
    pairs = zip(compressed, gradients.dtypes, strict=True)
    compressed = [saturated(x, dtype) for x, dtype in pairs]
    return Arrays(compressed, uncompressed)


def _unsent(
    gradients: Gradients,
    average: Average,
    totals: list[Array],
    residual: list[Array],
    commit: Array,
) -> list[Array]:
    """Returns the new residuals: the sums less what was sent of them, and what did not fit.

    A product of factors may be beyond the range of float16 where gradients are not. What of it the
    output cannot hold was sent and reached nobody, so it stays, and goes out in later steps.
    """
    kept = []
    for i, view in enumerate(gradients.views):
        total = totals[i]
        if gradients.dtypes[i] == jnp.float16:
            total += excess(outer(view, average.p[i], average.q[i]), jnp.float16)
        kept.append(unsent(view, average.p[i], average.q_sent[i], total, residual[i], commit))
    return kept
