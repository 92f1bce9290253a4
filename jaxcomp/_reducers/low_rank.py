"""A step of PowerSGD, from gradients to updates and state; read it from the bottom.

`powersgd_step` takes the gradients apart and finds the factors to start from; `low_rank_step` adds
the residual, lets the replicas average factors and, with them, the leaves that are not compressed,
rebuilds, and keeps what was not sent; `power_iteration` is how the factors come about. It is an
argument of `low_rank_step`, which `acp_sgd` gives another, as is the wire: a function that averages
arrays and says what this replica sent of them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
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
from jaxcomp._mesh.axes import as_local, axis_size, from_step, other_axes
from jaxcomp._mesh.collectives import Reduced, reduce_mean, this_replica
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

# (arrays, how many of them, at the front, are factors) -> their means, and what was sent
Wire = Callable[[list[Array], int], Reduced]


class PowerSGDState(NamedTuple):
    """State of `powersgd`; a checkpoint holds one, consolidated, for any number of replicas."""

    # int32 scalar: finite updates seen; replicated
    count: Array  # pyright: ignore[reportIncompatibleMethodOverride]
    residual: PyTree  # compressed leaf: what was not sent yet, shape of the leaf; per replica
    q: PyTree  # compressed leaf: (*batch, cols, r) mean right factor, float32; replicated
    # float32 scalar: whose the residual is, 0 for everybody's; per replica
    owner: Any = np.zeros((), np.float32)

    # Read by consolidate, state_specs and shard_state. Not a field: it has no annotation.
    per_replica = ("residual", "owner")


class Factors(NamedTuple):
    """What the replicas averaged; no array of it is as large as a leaf, but for `dense`."""

    p: list[Array]  # of each group: left factors
    q: list[Array]  # right factors; their products are the outputs
    own_p: list[Array]  # factors whose products are what this replica sent
    own_q: list[Array]
    dense: list[Array]  # means of the leaves that are not compressed
    dense_sent: list[Array]
    finite: Array  # bool scalar, equal on every replica


class Leaves(NamedTuple):
    """The gradients of a step: those that are compressed, in groups, and the others.

    Each array costs some dozens of operations, which XLA compiles one by one and a GPU launches one
    by one: 300 layers of width 64 compile for half a minute. So small leaves that are alike are one
    array, with an axis in front that counts them; it costs what one leaf does, but for a copy into
    it and one out of it.
    """

    treedef: Any
    values: list[Any]  # of all leaves, in flattening order
    leaf_plans: list[LeafPlan]  # of all leaves
    dense: list[int]  # positions of those that are averaged as they are
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
        dense = [i for i, x in enumerate(values) if found[i].view is None and is_floating(x)]
        groups = _groups(found)
        plans = [_together(found[group[0]], len(group)) for group in groups]
        views = [plan.view for plan in plans if plan.view is not None]
        return cls(treedef, values, found, dense, groups, plans, views)

    def stack(self, leaves: Sequence[Any]) -> list[Array]:
        """One array for each group, from those of all leaves."""
        taken = ([leaves[i] for i in group] for group in self.groups)
        return [jnp.stack(xs) if len(xs) > 1 else xs[0] for xs in taken]

    def unstack(
        self, leaves: Sequence[Any], arrays: Sequence[Array], dense: Sequence[Array] = ()
    ) -> PyTree:
        """All leaves in their tree, with what is in the groups' arrays and in `dense` replaced."""
        whole = list(leaves)
        for group, x in zip(self.groups, arrays, strict=True):
            for i, leaf in zip(group, x if len(group) > 1 else [x], strict=True):
                whole[i] = leaf
        for i, x in zip(self.dense if dense else (), dense, strict=True):
            whole[i] = x
        return self.treedef.unflatten(whole)


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
    view = MatrixView(shape, MatrixDims((0, *batch), rows, cols), is_stack=True)
    return dataclasses.replace(plan, shape=shape, view=view)


def fitted_state(
    kind: type, options: LowRank, leaves: Leaves, updates: PyTree, state: Any, **kept: bool
) -> list[list[Any]]:
    """The residuals, typed as local, and the factors of a state, in the gradients' order.

    Args:
      kind: Class of the state.
      options: The reducer's arguments.
      leaves: The gradients' leaves.
      updates: The gradients.
      state: What the user passed.
      **kept: For each field of factors, ``p`` or ``q``, whether it holds any.

    Raises:
      ValueError: Listing every leaf whose state does not fit, with the fix.
    """
    shapes = {
        name: [getattr(x, shape) if held and x.view else None for x in leaves.leaf_plans]
        for name, shape, held in (
            ("residual", "shape", options.error_feedback),
            *((name, f"{name}_shape", held) for name, held in kept.items()),
        )
    }
    hint = (
        "Otherwise use the rank, matrix_dims, error_feedback and warm_start that it was made with, "
        "or jaxcomp.adapt_state."
    )
    residuals, *factors = fitted(kind, state, updates, shapes, hint)
    return [as_local(residuals, options.axis_name), *factors]


def mean_of_parts(options: LowRank, leaves: Leaves, parts: list[Array], n_factors: int) -> Reduced:
    """The wire: an all-reduce, or for factors as integers an all-to-all and an all-gather."""
    dtype, axis_name = options.comm_dtype, options.axis_name
    if isinstance(dtype, Integers) and n_factors:
        # Each leaf of a stack is sent as it would be alone.
        stacks = {k for k, group in enumerate(leaves.groups) if len(group) > 1}
        return reduce_integers(parts, axis_name, factors=n_factors, bits=dtype.bits, stacks=stacks)
    dtypes = (x.dtype for x in leaves.leaf_plans if is_floating(x))
    return reduce_mean(parts, axis_name, wire_dtype(dtype, dtypes), factors=n_factors)


def in_range(
    views: Sequence[MatrixView], factors: Sequence[Array], axis_name: AxisName
) -> list[Array]:
    """The factors, NaN where a matrix that gives such values may overflow in later steps.

    A product with orthonormal columns shows how large a matrix is in their directions only. With
    ``sqrt(rows * cols) * replicas`` times the product inside the float range, what a residual keeps
    of the matrix can be multiplied and summed again. Otherwise a single finite step would leave a
    state of which every later step is NaN.
    """
    checked = []
    for view, x in zip(views, factors, strict=True):
        size = math.sqrt(view.n_rows * view.n_cols) * axis_size(axis_name)
        checked.append(jnp.where(jnp.abs(x) < float(jnp.finfo(x.dtype).max) / size, x, jnp.nan))
    return checked


def power_iteration(
    options: LowRank,
    views: Sequence[MatrixView],
    starts: list[Array],
    totals: list[Array],
    dense: list[Array],
    wire: Wire,
) -> Factors:
    """One power iteration on every matrix (Vogels et al. 2019, Algorithms 1 and 2).

    Args:
      options: `eps` and the axis of the replicas.
      views: How each of the arrays is a batch of matrices.
      starts: Right factors to begin with.
      totals: Gradients plus residuals.
      dense: Leaves that are averaged as they are, in the first of the two all-reduces.
      wire: Averages arrays, of which the first are factors.
    """
    n, axis_name = len(totals), options.axis_name
    starts = [q.astype(x.dtype) for q, x in zip(starts, totals, strict=True)]
    # They only have to span the space: the output depends on it, and not on its basis.
    bases = orthonormal_bases(starts, options.eps, ROUNDS_TO_SPAN)
    left = [product(*each) for each in zip(views, totals, bases, strict=True)]
    first = wire([*in_range(views, left, axis_name), *dense], n)
    # Zeros for what is not finite: no decomposition need be trusted with NaN. The mean stands in
    # for torch's sum; dividing eps too leaves the quotient unchanged.
    left = [jnp.where(first.finite, x, 0) for x in first.means[:n]]
    p = orthonormal_bases(left, options.eps / axis_size(axis_name))
    right = [product(*each, transposed=True) for each in zip(views, totals, p, strict=True)]
    second = wire(right, n)
    # Typed as this replica's own, also a factor that is the same on every replica: as without one.
    own_p, own_q, dense_sent = as_local((p, second.sent, first.sent[n:]), axis_name)
    finite = first.finite & second.finite
    return Factors(p, second.means, own_p, own_q, first.means[n:], dense_sent, finite)


def low_rank_step(
    options: LowRank,
    leaves: Leaves,
    state: Any,
    residual: list[Any],
    average: Callable[[list[Array], list[Array], Wire], Factors],
) -> tuple[Reduction, Factors, Array]:
    """One update: an all-reduce before `start_step`, one of factors from then on.

    Only two things depend on the count through a conditional: the factors and, built from them, the
    outputs. Whatever comes out of a conditional is copied, so that the sums of gradient and
    residual are only inputs of it, and the residual stays outside and is updated in place.

    Args:
      options: The reducer's arguments.
      leaves: This replica's gradients.
      state: With a count, a residual and its owner.
      residual: The residual's leaves, masked nodes where there is none.
      average: From the sums of gradient and residual, the leaves that are not compressed, and the
        wire to the factors.

    Returns:
      The update, in whose state the factors are still the old ones; the factors; and whether the
      state takes what is new, a bool scalar.
    """
    axis_name, start, count = options.axis_name, options.start_step, state.count
    gradients, dense = leaves.stack(leaves.values), [leaves.values[i] for i in leaves.dense]
    wire = functools.partial(mean_of_parts, options, leaves)
    started, dtypes, n = count >= start, [x.dtype for x in gradients], len(gradients)

    totals = [x.astype(compute_dtype(x.dtype)) for x in gradients]
    olds = leaves.stack(residual) if options.error_feedback else []
    for i, old in enumerate(olds):
        extra = old.astype(totals[i].dtype)
        totals[i] += jnp.where(started, extra, 0) if start else extra

    def nothing() -> Factors:
        p = [jnp.zeros(x.p_shape, compute_dtype(x.dtype)) for x in leaves.plans]
        q = [jnp.zeros(x.q_shape, compute_dtype(x.dtype)) for x in leaves.plans]
        zeros = [jnp.zeros(x.shape, x.dtype) for x in dense]
        own_p, own_q, blank = as_local((p, q, zeros), axis_name)
        return Factors(p, q, own_p, own_q, zeros, blank, jnp.array(True))

    def products(p: list[Array], q: list[Array]) -> list[Array]:
        each = zip(leaves.views, p, q, dtypes, strict=True)
        return [outer(view, a, b).astype(dtype) for view, a, b, dtype in each]

    def exact() -> tuple[list[Array], list[Array], Array]:
        # Before the start the sums are the gradients.
        whole = [x.astype(dtype) for x, dtype in zip(totals, dtypes, strict=True)]
        reduced = wire([*whole, *dense], 0)
        sent = as_local(reduced.sent, axis_name)
        return nan_unless(reduced.finite, reduced.means), sent, reduced.finite

    def rebuilt() -> tuple[list[Array], list[Array], Array]:
        finite = found.finite
        if jnp.dtype(jnp.float16) in dtypes:  # may overflow where its factors did not
            outputs = products(found.p, found.q)
            finite &= all_finite([x for x in outputs if x.dtype == jnp.float16])
            outputs = nan_unless(finite, outputs)
        else:
            # One NaN in a row of a factor is NaN in the whole row of the product: no second look at
            # what is as large as the gradients.
            outputs = products(nan_unless(finite, found.p), found.q)
        sent = [*products(found.own_p, found.own_q), *found.dense_sent]
        return [*outputs, *nan_unless(finite, found.dense)], as_local(sent, axis_name), finite

    found = from_step(count, start, nothing, lambda: average(totals, dense, wire))
    outputs, sent, finite = from_step(count, start, exact, rebuilt)
    commit = finite & started if start else finite
    new = state._replace(
        count=jnp.where(finite, optax.safe_increment(count), count),
        owner=jnp.where(commit, this_replica(axis_name), state.owner),
    )
    if olds:
        own = zip(leaves.views, found.own_p, found.own_q, totals, olds, strict=True)
        kept = [unsent(*each, commit) for each in own]
        new = new._replace(residual=leaves.unstack(residual, kept))
    updates, own_part = (leaves.unstack(leaves.values, x[:n], x[n:]) for x in (outputs, sent))
    return Reduction(updates, new, own_part, finite), found, commit


def committed(commit: Array, new: Sequence[Array], old: Sequence[Array]) -> list[Array]:
    """The new factors, or the old ones where the state stays as it was."""
    pairs = zip(new, old, strict=True)
    return [jnp.where(commit, x.astype(before.dtype), before) for x, before in pairs]


def powersgd_step(
    options: LowRank,
    warm_start: bool,
    updates: PyTree,
    state: PowerSGDState,
    params: PyTree | None = None,
    **extra_args: Any,
) -> Reduction:
    """One update of `powersgd`, whose docstring has the equations, from its checked arguments."""
    del params, extra_args
    leaves = Leaves.of(options, updates)
    residual, q = fitted_state(PowerSGDState, options, leaves, updates, state, q=warm_start)
    starts = leaves.stack(q) if warm_start else _drawn(options, leaves, state.count)
    average = functools.partial(power_iteration, options, leaves.views, starts)
    result, factors, commit = low_rank_step(options, leaves, state, residual, average)
    if not warm_start:
        return result
    q = leaves.unstack(q, committed(commit, factors.q, starts))
    return result._replace(state=result.state._replace(q=q))


def _drawn(options: LowRank, leaves: Leaves, count: Array) -> list[Array]:
    """Fresh right factors of each group, another for every leaf and count."""

    def of_leaf(index: Array | int) -> Array:
        plan = leaves.leaf_plans[group[0]]
        return options.random_factor(plan.q_shape, plan.dtype, index, count)

    factors = []
    for group in leaves.groups:
        alone = len(group) == 1
        factors.append(of_leaf(group[0]) if alone else jax.vmap(of_leaf)(jnp.array(group)))
    return factors
