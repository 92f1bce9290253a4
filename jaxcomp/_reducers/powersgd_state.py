"""What an update of PowerSGD starts from: its arguments, its form, and what is remembered."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
import optax

from jaxcomp._base.leaves import Integers, compute_dtype, widest
from jaxcomp._base.typing import Array, AxisName, BucketFn, MatrixDimsFn, PyTree, RankFn
from jaxcomp._lowrank.matricize import LeafPlan, plan_leaves
from jaxcomp._mesh.axes import as_local, from_step, is_bound
from jaxcomp._mesh.per_replica import everybodys
from jaxcomp._mesh.weights import Weight
from jaxcomp._reducers.opening import Field, fitted, other_state

# An exact average; left and right factors; or, alternating, one of the two.
Turn = Literal["exact", "both", "left", "right"]
T = TypeVar("T")


class PowerSGDState(NamedTuple):
    """State of `powersgd`; a checkpoint holds one, consolidated, for any number of replicas."""

    # int32 scalar: finite updates seen; replicated
    count: Array  # pyright: ignore[reportIncompatibleMethodOverride]
    residual: PyTree  # compressed leaf: what was not sent yet, shape of the leaf; per replica
    q: PyTree  # compressed leaf: (*batch, cols, r) mean right factor, float32; replicated
    # alternating only, else (): compressed leaf: (*batch, rows, r) mean left factor; replicated
    p: PyTree = ()
    # float32 scalar: whose residual it is, 0 for everybody's; per replica. () without a residual.
    owner: PyTree = ()

    # Read by consolidate, state_specs and shard_state. Not a field: it has no annotation.
    per_replica = ("residual", "owner")


@dataclasses.dataclass(frozen=True)
class Options:
    """Checked arguments of `powersgd`, which documents them."""

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
    error_decay: Any
    feedback_every: int
    reduce_first: AxisName | None
    alternating: bool
    buckets: int | BucketFn | None
    gpu_kernels: bool

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The forms that a step may have."""
        compressed = ("left", "right") if self.alternating else ("both",)
        return ("exact", *compressed) if self.start_step else compressed

    def turn_of(self, count: Array) -> Array:
        """The place in `turns` of the step with this count; int32 scalar."""
        side = (count - self.start_step) % 2 if self.alternating else jnp.zeros_like(count)
        return jnp.where(count < self.start_step, 0, side + 1) if self.start_step else side

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

    def repays_evenly(self, weight: Weight | None) -> TypeGuard[Weight]:
        """Whether residuals are shares of the mean one, whatever their replicas weigh by now.

        A residual holds what was not sent, and how its replica differs from the others. The latter
        cancels in the mean under the weights that it arose with, and under no others. So it is kept
        as it entered the mean, weight included, and enters the next mean as it is. For that the
        mean weight must be known, which the first all-reduce brings for the second; the first one
        takes that of the last step, which the length of warm right factors tells, or the replica's
        own, because all that it decides is directions. One-sided steps have no second all-reduce.
        """
        return weight is not None and self.error_feedback and not self.alternating

    def random_q(self, plan: LeafPlan, index: Array | int, count: Array | int) -> Array:
        """A right factor to start from: the same everywhere, another for every leaf and count."""
        return self._random(plan.q_shape, plan.dtype, (index, count))

    def random_p(self, plan: LeafPlan, index: int) -> Array:
        """A left factor for alternating steps to hold until the first of them replaces it."""
        return self._random(plan.p_shape, plan.dtype, (index, 0, 1))

    def random_stack(self, plan: LeafPlan, stack: tuple[int, ...], count: Array) -> Array:
        """The `random_q` of each leaf of a stack with this plan, along the first axis."""

        def of_member(index: Array) -> Array:
            return self._random(plan.q_shape[1:], plan.dtype, (index, count))

        return jax.vmap(of_member)(jnp.array(stack))

    def _random(self, shape: tuple[int, ...], dtype: Any, path: tuple[Array | int, ...]) -> Array:
        # Threefry whatever jax_default_prng_impl says: others differ between the lanes of a vmap.
        key = jax.random.key(self.seed, impl="threefry2x32")
        for number in path:
            key = jax.random.fold_in(key, number)
        return jax.random.normal(key, shape, compute_dtype(dtype))


@dataclasses.dataclass(frozen=True)
class Phase:
    """Which form one update has: known from its turn, or told by its count."""

    options: Options
    turn: Turn | None  # None: the count decides, in a conditional
    count: Array  # int32 scalar: updates before this one

    @property
    def started(self) -> Array | None:
        """Bool scalar: whether this update is compressed; None if it is known to be."""
        if self.turn is not None:
            return jnp.array(False) if self.turn == "exact" else None
        return None if self.options.start_step == 0 else self.count >= self.options.start_step

    @property
    def is_left(self) -> Array:
        """Bool scalar: whether an alternating update sends left factors."""
        if self.turn is not None:
            return jnp.array(self.turn == "left")
        return (self.count - self.options.start_step) % 2 == 0

    def exact_or(self, exact: Callable[[], T], compressed: Callable[[], T]) -> T:
        """What is to be done before `start_step`, or what from then on."""
        if self.turn is not None:
            return exact() if self.turn == "exact" else compressed()
        return from_step(self.count, self.options.start_step, exact, compressed)

    def left_or_right(self, left: Callable[[], T], right: Callable[[], T]) -> T:
        """What is to be done in an alternating update that sends left factors, or right ones."""
        if self.turn is not None:
            return left() if self.turn == "left" else right()
        return jax.lax.cond(self.is_left, left, right)

    def feedback(self, ours: Array) -> tuple[Any, Any]:
        """By what the residual is multiplied as it is added, and as it is kept; None: 1 and 0.

        Args:
          ours: Bool scalar: whether the residual is this replica's; if not, none of it is kept.
        """
        decay, every = self.options.error_decay, self.options.feedback_every
        added: Any = decay(self.count) if callable(decay) else decay
        if every > 1:
            due = (self.count + 1) % every == 0
            return jnp.where(due, added, 0.0), jnp.where(due | ~ours, 0.0, 1.0)
        return (None if isinstance(added, (int, float)) and added == 1 else added), None


class Memory(NamedTuple):
    """What is remembered of every leaf, in flattening order; a masked node where nothing is."""

    residual: list[Any]
    q: list[Any]
    p: list[Any]  # all masked unless alternating


def initial_state(options: Options, params: PyTree) -> PowerSGDState:
    """Nothing left over, random factors; typed as local where it is made in a mapped function."""
    leaves, treedef = jax.tree.flatten(params)
    residual: list[Any] = [optax.MaskedNode()] * len(leaves)
    q, p = list(residual), list(residual)
    for i, (leaf, plan) in enumerate(zip(leaves, options.plan(params), strict=True)):
        if plan.view is None:
            continue
        if options.error_feedback:
            dtype = options.residual_dtype or compute_dtype(plan.dtype)
            residual[i] = jnp.zeros_like(leaf, dtype=dtype)
        if options.warm_start:
            q[i] = options.random_q(plan, i, 0)
        if options.alternating:
            p[i] = options.random_p(plan, i)
    owner = everybodys(options.axis_name) if options.error_feedback else ()
    state = state_of(options, treedef, jnp.zeros([], jnp.int32), Memory(residual, q, p), owner)
    if is_bound(options.axis_name):
        # init() called inside the mapped function: under check_vma a scan can then carry the state.
        state = state._replace(residual=as_local(state.residual, options.axis_name))
    return state


def state_of(
    options: Options, treedef: Any, count: Array, memory: Memory, owner: PyTree
) -> PowerSGDState:
    """The state with these leaves."""
    residual, q, p = (treedef.unflatten(field) for field in memory)
    return PowerSGDState(count, residual, q, p if options.alternating else (), owner)


def fitted_memory(
    options: Options, plans: list[LeafPlan], updates: PyTree, state: PowerSGDState
) -> Memory:
    """The leaves of the state beside those of the gradients, residuals marked as local.

    Raises:
      ValueError: Listing every leaf whose state does not fit, with the fix.
    """
    if not (hasattr(state, "residual") and hasattr(state, "q")):
        raise other_state("powersgd", "PowerSGDState", state)
    nothing = jax.tree.map(lambda _: optax.MaskedNode(), updates)
    two_sided = isinstance(state.p, tuple) and not state.p
    # Both are () for a tree without leaves, which no switch can tell from the other.
    if jax.tree.leaves(updates) and two_sided == options.alternating:
        raise ValueError(
            f"The PowerSGDState was not made with alternating={options.alternating}, as this "
            "update is. Make it with init() of the same powersgd, or with jaxcomp.adapt_state."
        )
    kept = [plan.shape if plan.view and options.error_feedback else None for plan in plans]
    right = [plan.q_shape if plan.view and options.warm_start else None for plan in plans]
    left = [plan.p_shape if plan.view and options.alternating else None for plan in plans]
    residual, q, p = fitted(
        "PowerSGDState",
        updates,
        [
            Field("residual", state.residual, kept),
            Field("q", state.q, right),
            Field("p", state.p if options.alternating else nothing, left),
        ],
        "Otherwise use the rank, matrix_dims and switches that the state was made with, or "
        "jaxcomp.adapt_state.",
    )
    return Memory(as_local(residual, options.axis_name), q, p)
