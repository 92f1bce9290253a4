"""A step of PowerSGD, from gradients to updates and state; read it from the bottom.

`powersgd_step` takes the gradients apart; `low_rank_step` adds the residual, lets the replicas
average factors and, with them, the uncompressed leaves, rebuilds, and keeps what was not sent;
`power_iteration` is how the factors come about, and `acp_sgd` gives `low_rank_step` another way.
Its argument is the wire: a function that averages arrays and says what this replica sent of them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
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
from jaxcomp._mesh.collectives import Reduced, owner_id, reduce_mean
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
# One array for each group of leaves, by the name of the state's field
FactorsByName = Mapping[str, list[Array]]


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
    """What stands for the gradients: factors whose products they are, and uncompressed leaves."""

    p: list[Array]  # of each group of leaves: left factors
    q: list[Array]  # right factors
    uncompressed: list[Array]


class Averaged(NamedTuple):
    """What became of the gradients on the wire."""

    means: Factors
    sent: Factors  # what this replica sent of them
    kept: FactorsByName  # factors for the state
    finite: Array  # bool scalar, equal on every replica


# From factors of the state, the sums of gradient and residual of each group, and the uncompressed
# leaves
Average = Callable[[FactorsByName, list[Array], list[Array], Wire], Averaged]


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
        taken = ([leaves[i] for i in group] for group in self.groups)
        return [jnp.stack(xs) if len(xs) > 1 else xs[0] for xs in taken]

    def unstack(
        self, leaves: Sequence[Any], arrays: Sequence[Array], uncompressed: Sequence[Array] = ()
    ) -> PyTree:
        """All leaves in their tree, with what is in the groups' arrays in the place of theirs."""
        whole = list(leaves)
        for i, x in zip(self.uncompressed_at if uncompressed else (), uncompressed, strict=True):
            whole[i] = x
        for group, x in zip(self.groups, arrays, strict=True):
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
        dtypes = (plan.dtype for plan in self.leaf_plans)
        floating = [kind for kind in dtypes if jnp.issubdtype(kind, jnp.floating)]
        return reduce_mean(parts, axis_name, wire_dtype(dtype, floating), factors=n_factors)


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


def fitted_state(
    options: LowRank, leaves: Leaves, updates: PyTree, state: Any, kind: Any, *factors: str
) -> dict[str, list[Any]]:
    """The leaves of the residual, typed as local, and of these factors, by fields that hold any.

    Args:
      options: Arguments of the reducer.
      leaves: The gradients' leaves.
      updates: The gradients.
      state: What the user passed.
      kind: The class that it must have.
      *factors: Those that the state holds: ``"p"``, ``"q"``.

    Raises:
      ValueError: Listing every leaf whose state does not fit, with the fix.
    """
    plans, held = leaves.leaf_plans, {*factors, *(["residual"] if options.error_feedback else [])}
    shape_of = {"residual": "shape", "p": "p_shape", "q": "q_shape"}
    shapes = {
        name: [getattr(x, shape) if name in held and x.view else None for x in plans]
        for name, shape in shape_of.items()
        if name in kind._fields
    }
    hint = (
        "Otherwise use the rank, matrix_dims, error_feedback and warm_start that it was made with, "
        "or jaxcomp.adapt_state."
    )
    found = dict(zip(shapes, fitted(kind, state, updates, shapes, hint), strict=True))
    found["residual"] = as_local(found["residual"], options.axis_name)
    return {name: xs for name, xs in found.items() if name in held}


def nan_if_too_large(
    views: Sequence[MatrixView], factors: Sequence[Array], axis_name: AxisName
) -> list[Array]:
    """The factors, NaN where the matrix behind them is so large that later steps could overflow.

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
    starts: FactorsByName,
    totals: list[Array],
    uncompressed: list[Array],
    wire: Wire,
) -> Averaged:
    """One power iteration on every matrix (Vogels et al. 2019, Algorithms 1 and 2).

    Args:
      options: `eps`, and the axis of the replicas.
      views: How each of the arrays is a batch of matrices.
      starts: Right factors to begin with, ``"q"``.
      totals: Gradients plus residuals, of each group of leaves.
      uncompressed: Other leaves, averaged as they are in the first of the two all-reduces.
      wire: Averages arrays, of which the first are factors.
    """
    n, eps, axis_name = len(totals), options.eps, options.axis_name
    # They only have to span the space: the output depends on it, and not on its basis.
    bases = orthonormal_bases(starts["q"], eps, ROUNDS_TO_SPAN)
    left = [product(*each) for each in zip(views, totals, bases, strict=True)]
    first = wire([*nan_if_too_large(views, left, axis_name), *uncompressed], n)
    # Zeros for what is not finite: no decomposition need be trusted with NaN. The mean stands in
    # for torch's sum; dividing eps too leaves the quotient unchanged.
    left = [jnp.where(first.finite, x, 0) for x in first.means[:n]]
    p = orthonormal_bases(left, eps / axis_size(axis_name))
    right = [product(*each, transposed=True) for each in zip(views, totals, p, strict=True)]
    second = wire(right, n)
    means, sent = Factors(p, second.means, first.means[n:]), Factors(p, second.sent, first.sent[n:])
    return Averaged(means, sent, {"q": second.means}, first.finite & second.finite)


def _from_fresh_factors(
    options: LowRank, leaves: Leaves, count: Array, starts: FactorsByName, *arrays: Any
) -> Averaged:
    """A `power_iteration` from right factors that are drawn for every leaf and count."""
    del starts  # the state holds no factors

    def of_leaf(plan: LeafPlan, index: Array | int) -> Array:
        return options.random_factor(plan.q_shape, plan.dtype, index, count)

    fresh = []
    for group in leaves.groups:
        draw = functools.partial(of_leaf, leaves.leaf_plans[group[0]])
        fresh.append(draw(group[0]) if len(group) == 1 else jax.vmap(draw)(jnp.array(group)))
    averaged = power_iteration(options, leaves.views, {"q": fresh}, *arrays)
    return averaged._replace(kept={})


def low_rank_step(
    options: LowRank,
    leaves: Leaves,
    state: Any,
    fields: Mapping[str, list[Any]],
    average: Average,
) -> Reduction:
    """One update: an all-reduce before `start_step`, averages of factors from then on.

    Whatever comes out of a conditional is copied. So only factors and outputs do; the sums of
    gradient and residual go into it, and the residual stays outside and is updated in place.

    Args:
      options: Arguments of the reducer.
      leaves: This replica's gradients.
      state: With a count, a residual and its owner.
      fields: The leaves of the state's fields, as `fitted_state` gives them.
      average: `power_iteration` or another way to average the sums of gradient and residual, from
        the factors of the state in the dtype of the sums.
    """
    start, count, started = options.start_step, state.count, state.count >= options.start_step
    wire = functools.partial(leaves.all_reduce, options)
    gradients = leaves.stack(leaves.values)
    uncompressed = [leaves.values[i] for i in leaves.uncompressed_at]
    dtypes, n = [x.dtype for x in gradients], len(gradients)

    totals = [x.astype(compute_dtype(x.dtype)) for x in gradients]
    olds = leaves.stack(fields["residual"]) if "residual" in fields else []
    for i, old in enumerate(olds):
        extra = old.astype(totals[i].dtype)
        totals[i] += jnp.where(started, extra, 0) if start else extra
    before = {name: leaves.stack(xs) for name, xs in fields.items() if name != "residual"}
    starts = {
        name: [x.astype(total.dtype) for x, total in zip(xs, totals, strict=True)]
        for name, xs in before.items()
    }

    def nothing() -> Averaged:  # which nobody reads before the start
        p = [jnp.zeros(x.p_shape, compute_dtype(x.dtype)) for x in leaves.plans]
        q = [jnp.zeros(x.q_shape, compute_dtype(x.dtype)) for x in leaves.plans]
        zeros = Factors(p, q, [jnp.zeros(x.shape, x.dtype) for x in uncompressed])
        return Averaged(zeros, zeros, starts, jnp.array(True))

    def products(p: list[Array], q: list[Array]) -> list[Array]:
        each = zip(leaves.views, p, q, dtypes, strict=True)
        return [outer(view, a, b).astype(dtype) for view, a, b, dtype in each]

    def as_they_are() -> tuple[Averaged, list[Array], list[Array], Array]:
        # The sums, which are the gradients before the start: the gradients themselves would have to
        # be kept beside them.
        whole = [x.astype(dtype) for x, dtype in zip(totals, dtypes, strict=True)]
        reduced = leaves.all_reduce(options, [*whole, *uncompressed], 0, integers=False)
        means = nan_unless(reduced.finite, reduced.means)
        return nothing(), means, reduced.sent, reduced.finite

    def compressed() -> tuple[Averaged, list[Array], list[Array], Array]:
        averaged = average(starts, totals, uncompressed, wire)
        (p, q, means), finite = averaged.means, averaged.finite
        # One NaN in a row of a factor is NaN in the whole row of the product: no second look at
        # what is as large as the gradients, but for float16, which may overflow where factors did
        # not.
        outputs = products(nan_unless(finite, p), q)
        if jnp.dtype(jnp.float16) in dtypes:
            finite &= all_finite([x for x in outputs if x.dtype == jnp.float16])
            outputs = nan_unless(finite, outputs)
        own_p, own_q, sent = averaged.sent
        outputs = [*outputs, *nan_unless(finite, means)]
        return averaged, outputs, [*products(own_p, own_q), *sent], finite

    averaged, outputs, sent, finite = from_step(count, start, as_they_are, compressed)
    commit = finite & started if start else finite
    new = {}
    for name, xs in before.items():
        pairs = zip(averaged.kept[name], xs, strict=True)
        kept = [jnp.where(commit, x.astype(old.dtype), old) for x, old in pairs]
        new[name] = leaves.unstack(fields[name], kept)
    if olds:
        own = zip(leaves.views, averaged.sent.p, averaged.sent.q, totals, olds, strict=True)
        kept = [unsent(*each, commit) for each in own]
        new["residual"] = leaves.unstack(fields["residual"], kept)
    state = state._replace(
        count=jnp.where(finite, optax.safe_increment(count), count),
        owner=jnp.where(commit, owner_id(options.axis_name), state.owner),
        **new,
    )
    means, own_part = (leaves.unstack(leaves.values, x[:n], x[n:]) for x in (outputs, sent))
    return Reduction(means, state, own_part, finite)


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
    held = ["q"] if warm_start else []
    fields = fitted_state(options, leaves, updates, state, PowerSGDState, *held)
    average = functools.partial(power_iteration, options, leaves.views)
    if not warm_start:
        average = functools.partial(_from_fresh_factors, options, leaves, state.count)
    return low_rank_step(options, leaves, state, fields, average)
