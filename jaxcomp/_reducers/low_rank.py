"""A step of PowerSGD, from gradients to updates and state; read it from the bottom.

`powersgd_step` adds the residual, lets the replicas average factors and, with them, the
uncompressed leaves, rebuilds, and keeps what was not sent. `power_iteration` is how the factors
come about. `Leaves` only makes small leaves that are alike one array; skip it at first.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcomp._base.leaves import (
    Integers,
    all_finite,
    compute_dtype,
    is_floating,
    nan_unless,
    wire_dtype,
)
from jaxcomp._base.typing import Array, AxisName, MatrixDims, PyTree
from jaxcomp._lowrank.matrices import LeafPlan, MatrixView, outer, plan_leaves, product, unsent
from jaxcomp._lowrank.orthogonalize import ROUNDS_TO_SPAN, orthonormal_bases
from jaxcomp._mesh.collectives import (
    Reduced,
    axis_size,
    from_step,
    other_axes,
    owner_id,
    reduce_mean,
)
from jaxcomp._reducers.integer_factors import reduce_integers
from jaxcomp._reducers.options import LowRank
from jaxcomp._reducers.reducer import Reduction, fitted

# A leaf of at most so many values is copied faster than the operations that it saves are launched.
_SMALL = 1 << 16
# Of all stacks together: their copies of gradients, residuals and outputs are 16 MB each.
_MOST_VALUES = 1 << 22
# XLA takes 32 leaves at once out of a stack. From a longer one each is a kernel of its own on a
# GPU, and temporary memory is twice as much (200 layers, rank 4, jaxlib 0.10.2).
_MOST_LEAVES = 32


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


class Factors(NamedTuple):
    """What stands for the gradients: factors whose products they are, and uncompressed leaves."""

    p: list[Array]  # of each group of leaves: left factors
    q: list[Array]  # right factors
    uncompressed: list[Array]


class Averaged(NamedTuple):
    """What became of the gradients on the wire."""

    means: Factors
    sent: Factors  # what this replica sent of them
    finite: Array  # bool scalar, equal on every replica


class Leaves(NamedTuple):
    """The gradients of a step: those that are compressed, in groups, and the others.

    Each array costs some dozens of operations, which XLA compiles one by one and a GPU launches one
    by one: 300 layers of width 64 compile for half a minute. So small leaves that are alike are one
    array, with an axis in front that counts them; it costs what one leaf does, but for a copy into
    it and one out of it.
    """

    treedef: Any
    values: list[Any]  # gradients of all leaves, in flattening order
    leaf_plans: list[LeafPlan]  # of all leaves
    uncompressed_at: list[int]  # positions of those that are averaged as they are
    groups: list[tuple[int, ...]]  # positions of compressed leaves; those of a group are one array
    plans: list[LeafPlan]  # of the array of each group
    views: list[MatrixView]  # how it is a batch of matrices

    @classmethod
    def of(cls, options: LowRank, updates: PyTree) -> Leaves:
        """The leaves of the gradients, those that are compressed in groups."""
        values, treedef = jax.tree.flatten(updates)
        found = plan_leaves(
            updates, options.rank, options.min_compression_rate, options.matrix_dims
        )
        rest = [i for i, x in enumerate(values) if found[i].view is None and is_floating(x)]
        groups = _groups(found)
        plans = [_together(found[group[0]], len(group)) for group in groups]
        views = [plan.view for plan in plans if plan.view is not None]
        return cls(treedef, values, found, rest, groups, plans, views)

    def stack(self, leaves: Sequence[Any]) -> list[Array]:
        """One array for each group, from those of all leaves."""
        xs = [[leaves[i] for i in group] for group in self.groups]
        return [jnp.stack(x) if len(x) > 1 else x[0] for x in xs]

    def unstack(self, leaves: Sequence[Any], arrays: Sequence[Array]) -> PyTree:
        """All leaves in their tree, with those of the groups from their arrays.

        Further arrays are uncompressed leaves.
        """
        whole, places = list(leaves), [*self.groups, *((i,) for i in self.uncompressed_at)]
        for group, x in zip(places, arrays, strict=False):
            for i, leaf in zip(group, x if len(group) > 1 else [x], strict=True):
                whole[i] = leaf
        return self.treedef.unflatten(whole)

    def all_reduce(
        self, options: LowRank, parts: list[Array], n_factors: int, *, integers: bool = True
    ) -> Reduced:
        """The wire: an all-reduce; for factors as integers an all-to-all and an all-gather.

        The first `n_factors` parts are one factor for each group, in order.
        """
        dtype, axis_name = options.comm_dtype, options.axis_name
        if isinstance(dtype, Integers) and integers:
            # Each leaf of a stack is sent as it would be alone.
            stacks = {k for k, group in enumerate(self.groups) if len(group) > 1}
            return reduce_integers(
                parts, axis_name, factors=n_factors, bits=dtype.bits, stacks=stacks
            )
        sent_dtype = wire_dtype(dtype, (x.dtype for x in self.values if is_floating(x)))
        return reduce_mean(parts, axis_name, sent_dtype, factors=n_factors)


def _groups(plans: Sequence[LeafPlan]) -> list[tuple[int, ...]]:
    """The compressed leaves; small equal ones together, the small until `_MOST_VALUES`."""
    kinds: dict[Any, list[int]] = {}
    # A leaf may be sharded along an axis that is left to the compiler: a stack would gather it.
    small = -1 if other_axes() else _SMALL
    for i, plan in enumerate(plans):
        alone = i if plan.size > small else None
        if plan.view is not None:
            kinds.setdefault((dataclasses.replace(plan, path=""), alone), []).append(i)
    groups, values = [], 0
    for kind in sorted(kinds.values(), key=lambda kind: plans[kind[0]].size):
        values += len(kind) * plans[kind[0]].size if len(kind) > 1 else 0
        most = _MOST_LEAVES if values <= _MOST_VALUES else 1
        groups += [tuple(kind[k : k + most]) for k in range(0, len(kind), most)]
    return sorted(groups)


def _together(plan: LeafPlan, number: int) -> LeafPlan:
    """The plan of so many leaves that are stacked, each of which has this one."""
    if number == 1 or plan.view is None:
        return plan
    batch, rows, cols = (tuple(axis + 1 for axis in part) for part in plan.view.dims)
    shape = (number, *plan.shape)
    view = MatrixView(shape, MatrixDims((0, *batch), rows, cols), is_group=True)
    return dataclasses.replace(plan, shape=shape, view=view)


def _nan_if_too_large(
    views: Sequence[MatrixView], factors: Sequence[Array], axis_name: AxisName
) -> list[Array]:
    """The factors, NaN where the matrix behind them is so large that later steps could overflow.

    A product with orthonormal columns shows how large a matrix is in their directions only. With
    ``sqrt(rows * cols) * replicas`` times the product inside the float range, what a residual keeps
    of the matrix can be multiplied and summed again. Otherwise a single finite step would leave a
    state of which every later step is NaN.
    """
    sizes = [math.sqrt(view.n_rows * view.n_cols) * axis_size(axis_name) for view in views]
    most = [float(jnp.finfo(x.dtype).max) / size for x, size in zip(factors, sizes, strict=True)]
    return [jnp.where(jnp.abs(x) < m, x, jnp.nan) for x, m in zip(factors, most, strict=True)]


def power_iteration(
    options: LowRank,
    leaves: Leaves,
    starts: Sequence[Array],
    totals: list[Array],
    uncompressed: list[Array],
) -> Averaged:
    """One power iteration on every matrix (Vogels et al. 2019, Algorithms 1 and 2).

    It begins with the right factors `starts`; `totals` are gradients plus residuals. The
    `uncompressed` leaves are averaged as they are, in the first of the two all-reduces.
    """
    n, eps, axis_name, views = len(totals), options.eps, options.axis_name, leaves.views
    # They only have to span the space: the output depends on it, and not on its basis.
    bases = orthonormal_bases(starts, eps, ROUNDS_TO_SPAN)
    left = _nan_if_too_large(views, jax.tree.map(product, views, totals, bases), axis_name)
    first = leaves.all_reduce(options, [*left, *uncompressed], n)
    # Zeros for what is not finite: no decomposition need be trusted with NaN. The mean stands in
    # for torch's sum; dividing eps too leaves the quotient unchanged.
    left = [jnp.where(first.finite, x, 0) for x in first.means[:n]]
    p = orthonormal_bases(left, eps / axis_size(axis_name))
    right = jax.tree.map(functools.partial(product, transposed=True), views, totals, p)
    second = leaves.all_reduce(options, right, n)
    means, sent = Factors(p, second.means, first.means[n:]), Factors(p, second.sent, first.sent[n:])
    return Averaged(means, sent, first.finite & second.finite)


def _fresh_factors(options: LowRank, leaves: Leaves, count: Array) -> list[Array]:
    """Right factors to begin with that are drawn for every leaf and count."""
    fresh = []
    for group in leaves.groups:
        plan = leaves.leaf_plans[group[0]]
        draw = functools.partial(options.random_factor, plan.q_shape, plan.dtype)
        at = lambda index, draw=draw: draw(index, count)  # noqa: E731
        fresh.append(at(group[0]) if len(group) == 1 else jax.vmap(at)(jnp.array(group)))
    return fresh


def powersgd_step(
    options: LowRank,
    updates: PyTree,
    state: PowerSGDState,
    params: PyTree | None = None,
    **extra_args: Any,
) -> Reduction:
    """One update of `powersgd`, whose docstring has the equations, from its checked arguments.

    An all-reduce before `start_step`, averages of factors from then on. Whatever comes out of a
    conditional is copied. So only factors and outputs do; the sums of gradient and residual go into
    it, and the residual stays outside and is updated in place.
    """
    leaves = Leaves.of(options, updates)
    plans, feedback, warm = leaves.leaf_plans, options.error_feedback, options.warm_start
    shapes = {
        "residual": [x.shape if feedback and x.view else None for x in plans],
        "q": [x.q_shape if warm and x.view else None for x in plans],
    }
    fields = fitted(PowerSGDState, state, updates, shapes)
    start, count, started = options.start_step, state.count, state.count >= options.start_step
    gradients = leaves.stack(leaves.values)
    uncompressed = [leaves.values[i] for i in leaves.uncompressed_at]
    wide = [compute_dtype(x.dtype) for x in gradients]
    residual = leaves.stack(fields["residual"]) if feedback else []
    q_before = leaves.stack(fields["q"]) if warm else []
    starts = jax.tree.map(jnp.astype, q_before, wide[: len(q_before)])

    totals = jax.tree.map(jnp.astype, gradients, wide)
    for i, x in enumerate(residual):
        unsent_before = x.astype(wide[i])
        totals[i] += jnp.where(started, unsent_before, 0) if start else unsent_before

    def as_gradients(arrays: list[Array]) -> list[Array]:
        return jax.tree.map(jnp.astype, arrays, [x.dtype for x in gradients])

    def all_reduced() -> tuple[Any, ...]:
        # The sums, which are the gradients before the start: the gradients themselves would have to
        # be kept beside them.
        parts = [*as_gradients(totals), *uncompressed]
        means, sent, finite = leaves.all_reduce(options, parts, 0, integers=False)
        # Factors that nobody reads.
        p = jax.tree.map(lambda plan, dtype: jnp.zeros(plan.p_shape, dtype), leaves.plans, wide)
        q = jax.tree.map(lambda plan, dtype: jnp.zeros(plan.q_shape, dtype), leaves.plans, wide)
        return p, q, starts, nan_unless(finite, means), sent, finite

    def compressed() -> tuple[Any, ...]:
        begin = starts if warm else _fresh_factors(options, leaves, count)
        means, own, finite = power_iteration(options, leaves, begin, totals, uncompressed)
        # One NaN in a row of a factor is NaN in the whole row of the product: no second look at
        # what is as large as the gradients, but for float16, which may overflow where factors did
        # not.
        p = nan_unless(finite, means.p)
        outputs = as_gradients(jax.tree.map(outer, leaves.views, p, means.q))
        if any(x.dtype == jnp.float16 for x in outputs):
            finite &= all_finite([x for x in outputs if x.dtype == jnp.float16])
            outputs = nan_unless(finite, outputs)
        outputs += nan_unless(finite, means.uncompressed)
        # For a reducer around this one; XLA drops it where nobody asks.
        sent = [*as_gradients(jax.tree.map(outer, leaves.views, own.p, own.q)), *own.uncompressed]
        return own.p, own.q, means.q[: len(starts)], outputs, sent, finite

    own_p, own_q, q_after, outputs, sent, finite = from_step(count, start, all_reduced, compressed)
    commit = finite & started if start else finite
    pairs = zip(q_after, q_before, strict=True)
    q = [jnp.where(commit, x.astype(old.dtype), old) for x, old in pairs]
    if residual:
        keep = functools.partial(unsent, commit=commit)
        residual = jax.tree.map(keep, leaves.views, own_p, own_q, totals, residual)
    state = state._replace(
        count=jnp.where(finite, optax.safe_increment(count), count),
        residual=leaves.unstack(fields["residual"], residual),
        q=leaves.unstack(fields["q"], q),
        owner=jnp.where(commit, owner_id(options.axis_name), state.owner),
    )
    means, contribution = (leaves.unstack(leaves.values, xs) for xs in (outputs, sent))
    return Reduction(means, state, contribution, finite)
