"""One update of a tree of gradients by factors: what `powersgd` and `acp_sgd` have in common.

Add the residual; let the replicas average factors and, with them, the leaves that are not
compressed; rebuild; keep what was not sent. How the factors come about is an argument, and so is
the wire: a function that averages arrays and says what this replica sent of them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomp._base.checks import (
    check_axis_name,
    check_flag,
    check_function,
    check_int,
    check_number,
    check_static_number,
)
from jaxcomp._base.leaves import (
    Integers,
    all_finite,
    checked_factor_dtype,
    checked_residual_dtype,
    compute_dtype,
    is_floating,
    nan_unless,
    widest,
)
from jaxcomp._base.typing import Array, AxisName, DType, MatrixDimsFn, PyTree, RankFn
from jaxcomp._lowrank.matrices import MatrixView, outer, replace_by_product
from jaxcomp._lowrank.plans import Group, LeafPlan, groups_of, plan_leaves, plan_of, stack, unstack
from jaxcomp._mesh.axes import as_local, axis_size, from_step, is_bound, other_axes
from jaxcomp._mesh.collectives import Reduced, reduce_mean
from jaxcomp._mesh.per_replica import this_replica
from jaxcomp._reducers.integer_factors import reduce_integers
from jaxcomp._reducers.reducer import Reduction
from jaxcomp._reducers.states import Field, fitted, other_state

# (arrays, how many of them, at the front, are factors) -> their means, and what was sent
Wire = Callable[[list[Array], int], Reduced]
# From the plan of a compressed leaf to the shape of its factor; None: no factors are kept.
FactorShape = Callable[[LeafPlan], tuple[int, ...]] | None


@dataclasses.dataclass(frozen=True)
class LowRank:
    """Checked arguments of `powersgd`, which documents them; `acp_sgd` has the same."""

    rank: int | RankFn
    axis_name: AxisName
    start_step: int
    min_compression_rate: float
    error_feedback: bool
    eps: Any
    seed: Any
    comm_dtype: Any
    residual_dtype: Any
    matrix_dims: MatrixDimsFn | None

    @classmethod
    def checked(
        cls,
        *,
        rank: int | RankFn,
        axis_name: AxisName,
        start_step: int = 1_000,
        min_compression_rate: float = 2.0,
        error_feedback: bool = True,
        eps: float = 0.0,
        seed: int = 0,
        comm_dtype: DType | None = None,
        residual_dtype: DType | None = None,
        matrix_dims: MatrixDimsFn | None = None,
    ) -> LowRank:
        """The arguments, if they are usable.

        Raises:
          ValueError: Naming the first that is not.
        """
        check_axis_name(axis_name)
        rate = min_compression_rate
        return cls(
            rank=rank if callable(rank) else check_int("rank", rank, 1),
            axis_name=axis_name,
            start_step=check_int("start_step", start_step, 0),
            min_compression_rate=check_static_number("min_compression_rate", rate, 0),
            error_feedback=check_flag("error_feedback", error_feedback),
            eps=check_number("eps", eps, 0),
            seed=seed if hasattr(seed, "aval") else check_int("seed", seed, 0),
            comm_dtype=checked_factor_dtype("comm_dtype", comm_dtype),
            residual_dtype=checked_residual_dtype(residual_dtype),
            matrix_dims=check_function("matrix_dims", matrix_dims),
        )

    def plan(self, tree: PyTree) -> list[LeafPlan]:
        """What happens to each leaf of `tree`."""
        return plan_leaves(tree, self.rank, self.min_compression_rate, self.matrix_dims)

    @property
    def integers(self) -> Integers | None:
        """As which integers factors travel; the rest then goes as without a `comm_dtype`."""
        return self.comm_dtype if isinstance(self.comm_dtype, Integers) else None

    def wire_dtype(self, dtypes: Iterable[Any]) -> Any:
        """What goes on the wire for gradients of these dtypes, in an all-reduce."""
        if self.comm_dtype is None or self.integers is not None:
            return widest(dtypes)
        return self.comm_dtype

    def zero_residual(self, params: PyTree) -> PyTree:
        """Nothing left over, for every leaf that is compressed; typed as local where it is."""
        leaves, treedef = jax.tree.flatten(params)

        def zeros(leaf: Any, plan: LeafPlan) -> Any:
            if plan.view is None or not self.error_feedback:
                return optax.MaskedNode()
            dtype = self.residual_dtype or compute_dtype(plan.dtype)
            return jnp.zeros_like(leaf, dtype=dtype)

        residual = treedef.unflatten(map(zeros, leaves, self.plan(params)))
        # init() called inside the mapped function: under check_vma a scan can then carry the state.
        return as_local(residual, self.axis_name) if is_bound(self.axis_name) else residual

    def random_factor(self, shape: tuple[int, ...], dtype: Any, *path: Any) -> Array:
        """A factor to start from: the same on every replica, another for every path of numbers."""
        # Threefry whatever jax_default_prng_impl says: others differ between the lanes of a vmap.
        key = jax.random.key(self.seed, impl="threefry2x32")
        for number in path:
            key = jax.random.fold_in(key, number)
        return jax.random.normal(key, shape, compute_dtype(dtype))

    def random_factors(self, params: PyTree, shape: FactorShape, *path: int) -> PyTree:
        """A `random_factor` for every leaf that is compressed, of the shape of its plan."""
        treedef = jax.tree.structure(params)
        factors = [
            self.random_factor(shape(plan), plan.dtype, i, *path)
            if shape and plan.view is not None
            else optax.MaskedNode()
            for i, plan in enumerate(self.plan(params))
        ]
        return treedef.unflatten(factors)


@dataclasses.dataclass(frozen=True)
class Leaves:
    """The gradients of a step: those that are compressed, in groups, and the others."""

    treedef: Any
    values: list[Any]  # of all leaves
    all_plans: list[LeafPlan]
    groups: list[Group]  # positions of compressed leaves; small ones that are alike are one array
    dense: list[int]  # positions of those that are averaged as they are

    @classmethod
    def of(cls, updates: PyTree, plans: list[LeafPlan]) -> Leaves:
        """The leaves of the gradients, by their plans."""
        values, treedef = jax.tree.flatten(updates)
        # A leaf may be sharded along an axis that is left to the compiler; a stack would gather it.
        whole = not other_axes()
        groups = groups_of(plans) if whole else [(i,) for i, x in enumerate(plans) if x.view]
        dense = [i for i, x in enumerate(values) if plans[i].view is None and is_floating(x)]
        return cls(treedef, values, plans, groups, dense)

    @functools.cached_property
    def plans(self) -> list[LeafPlan]:
        """Of each group."""
        return [plan_of(self.all_plans, group) for group in self.groups]

    @property
    def views(self) -> list[MatrixView]:
        """How each group is a batch of matrices."""
        return [plan.view for plan in self.plans if plan.view is not None]

    def taken(self, leaves: Sequence[Any]) -> list[Array]:
        """One array for each group, from those of all leaves."""
        return stack(self.groups, leaves)

    def replaced(self, leaves: Sequence[Any], arrays: Sequence[Array]) -> list[Any]:
        """All leaves, with what is in these arrays in the place of the groups' leaves."""
        new = unstack(self.groups, arrays)
        return [new.get(i, x) for i, x in enumerate(leaves)]

    def joined(self, arrays: Sequence[Array], dense: Sequence[Array]) -> PyTree:
        """The gradients' tree with these arrays in their places; other leaves as they came."""
        whole = self.replaced(self.values, arrays)
        for i, x in zip(self.dense, dense, strict=True):
            whole[i] = x
        return self.tree(whole)

    def tree(self, leaves: Sequence[Any]) -> PyTree:
        """These leaves in a tree like the gradients'."""
        return self.treedef.unflatten(leaves)


def fitted_state(
    kind: type,
    options: LowRank,
    leaves: Leaves,
    updates: PyTree,
    state: Any,
    **factors: FactorShape,
) -> tuple[list[Any], ...]:
    """The residuals, typed as local, and the named factors of a state, in the gradients' order.

    Raises:
      ValueError: Listing every leaf whose state does not fit, with the fix.
    """
    if not isinstance(state, kind):
        raise other_state("The reducer", kind.__name__, state)
    residual = (lambda plan: plan.shape) if options.error_feedback else None
    fields = [
        Field(
            name,
            getattr(state, name),
            [shape(plan) if shape and plan.view else None for plan in leaves.all_plans],
        )
        for name, shape in {"residual": residual, **factors}.items()
    ]
    hint = (
        "Otherwise use the rank, matrix_dims, error_feedback and warm_start that it was made with, "
        "or jaxcomp.adapt_state."
    )
    residuals, *found = fitted(kind.__name__, updates, fields, hint)
    return as_local(residuals, options.axis_name), *found


class Factors(NamedTuple):
    """What the replicas averaged; no array of it is as large as a leaf, but for `dense`."""

    p: list[Array]  # of each group: left factors
    q: list[Array]  # right factors; their products are the outputs
    own_p: list[Array]  # factors whose products are what this replica sent
    own_q: list[Array]
    dense: list[Array]  # means of the leaves that are not compressed
    dense_sent: list[Array]
    finite: Array  # bool scalar, equal on every replica


class Step(NamedTuple):
    """One update, but for the state."""

    updates: PyTree
    sent: PyTree
    residual: PyTree
    owner: Array  # of the residual that was written
    factors: Factors
    finite: Array  # bool scalar, equal on every replica
    commit: Array  # bool scalar: whether the state takes what is new

    def reduction(self, state: Any, **factors: PyTree) -> Reduction:
        """With a new state: these factors, the residual, and a step more if it is finite."""
        count = jnp.where(self.finite, optax.safe_increment(state.count), state.count)
        owner = jnp.where(self.commit, self.owner, state.owner)
        new = state._replace(count=count, residual=self.residual, owner=owner, **factors)
        return Reduction(self.updates, new, self.sent, self.finite)


def low_rank_step(
    options: LowRank,
    leaves: Leaves,
    residual: list[Any],
    count: Array,
    average: Callable[[list[Array], list[Array], Wire], Factors],
) -> Step:
    """One update: an all-reduce before `start_step`, one of factors from then on.

    Only two things depend on the count through a conditional: the factors and, built from them, the
    outputs. Whatever comes out of a conditional is copied, so that the sums of gradient and
    residual are only inputs of it, and the residual stays outside and is updated in place.

    Args:
      options: The reducer's arguments.
      leaves: This replica's gradients.
      residual: Of all leaves, masked nodes where there is none.
      count: Updates before this one; int32 scalar.
      average: From the sums of gradient and residual, the leaves that are not compressed, and the
        wire to the factors.
    """
    axis_name, start = options.axis_name, options.start_step
    gradients, dense = leaves.taken(leaves.values), [leaves.values[i] for i in leaves.dense]
    dtypes = [x.dtype for x in gradients]
    dtype = options.wire_dtype(x.dtype for x in [*gradients, *dense])
    started = count >= start

    totals = [x.astype(compute_dtype(x.dtype)) for x in gradients]
    olds = leaves.taken(residual) if options.error_feedback else []
    for i, e in enumerate(olds):
        extra = e.astype(totals[i].dtype)
        totals[i] += jnp.where(started, extra, 0) if start else extra

    def exact_wire(parts: list[Array], factors: int) -> Reduced:
        return reduce_mean(parts, axis_name, dtype, factors=factors)

    def compressed() -> Factors:
        found = average(totals, dense, _integer_wire(options, leaves) or exact_wire)
        # One type for both branches, also for a factor that is the same on every replica.
        own_p, own_q, sent = as_local((found.own_p, found.own_q, found.dense_sent), axis_name)
        return found._replace(own_p=own_p, own_q=own_q, dense_sent=sent)

    def nothing() -> Factors:
        p = [jnp.zeros(x.p_shape, compute_dtype(x.dtype)) for x in leaves.plans]
        q = [jnp.zeros(x.q_shape, compute_dtype(x.dtype)) for x in leaves.plans]
        blank = [jnp.zeros_like(x) for x in dense]
        own = as_local((p, q, blank), axis_name)
        zeros = [jnp.zeros(x.shape, x.dtype) for x in dense]
        return Factors(p, q, own[0], own[1], zeros, own[2], jnp.array(True))

    def products(p: list[Array], q: list[Array]) -> list[Array]:
        each = zip(leaves.views, p, q, dtypes, strict=True)
        return [outer(view, a, b).astype(kind) for view, a, b, kind in each]

    def exact() -> tuple[list[Array], list[Array], Array]:
        # Before the start the sums are the gradients.
        whole = [x.astype(kind) for x, kind in zip(totals, dtypes, strict=True)]
        reduced = exact_wire([*whole, *dense], 0)
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

    found = from_step(count, start, nothing, compressed)
    outputs, sent, finite = from_step(count, start, exact, rebuilt)
    commit = finite & started if start else finite

    def unsent(product: Array, total: Array, old: Array) -> Array:
        return jnp.where(commit, (total - product).astype(old.dtype), old)

    if olds:
        own = zip(leaves.views, found.own_p, found.own_q, totals, olds, strict=True)
        kept = [replace_by_product(*each, unsent) for each in own]
        residual = leaves.replaced(residual, kept)
    n = len(gradients)
    means, own_part = (leaves.joined(x[:n], x[n:]) for x in (outputs, sent))
    residual, owner = leaves.tree(residual), this_replica(axis_name)
    return Step(means, own_part, residual, owner, found, finite, commit)


def committed(commit: Array, new: Sequence[Array], old: Sequence[Array]) -> list[Array]:
    """The new factors, or the old ones where the state stays as it was."""
    pairs = zip(new, old, strict=True)
    return [jnp.where(commit, x.astype(before.dtype), before) for x, before in pairs]


def in_range(
    views: Sequence[MatrixView], factors: Sequence[Array], axis_name: AxisName
) -> list[Array]:
    """The factors, NaN where a matrix that gives such values may overflow in later steps.

    A product with orthonormal columns shows how large a matrix is in their directions only. With
    ``sqrt(rows * cols) * replicas`` times the product inside the float range, what a residual keeps
    of the matrix can be multiplied and summed again. Otherwise a single finite step would leave a
    state of which every later step is NaN.
    """
    replicas = axis_size(axis_name)

    def checked(view: MatrixView, x: Array) -> Array:
        most = float(jnp.finfo(x.dtype).max) / (math.sqrt(view.n_rows * view.n_cols) * replicas)
        return jnp.where(jnp.abs(x) < most, x, jnp.nan)

    return [checked(view, x) for view, x in zip(views, factors, strict=True)]


def _integer_wire(options: LowRank, leaves: Leaves) -> Wire | None:
    """Factors as integers in an all-to-all and an all-gather; the rest unrounded."""
    integers = options.integers
    if integers is None:
        return None
    # Each leaf of a stack is sent as it would be alone.
    stacks = {k for k, group in enumerate(leaves.groups) if len(group) > 1}

    def mean(parts: list[Array], factors: int) -> Reduced:
        return reduce_integers(
            parts, options.axis_name, factors=factors, bits=integers.bits, stacks=stacks
        )

    return mean
