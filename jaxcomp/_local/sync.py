"""The engine of local SGD: what replicas do when they synchronise, and the state they keep.

`local_sgd` and `local_sgd_round` are two doors to it. They say when; this says what: an average of
the parameters, or a step of an outer optimizer along the mean pseudo-gradient.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from jaxcomp._base.checks import check_flag, check_transformation
from jaxcomp._base.leaves import all_finite, in_compute_dtype
from jaxcomp._base.stats import CompressionStats, dense_stats
from jaxcomp._base.typing import Array, AxisName, PyTree
from jaxcomp._mesh.collectives import as_local, axis_tuple, local_if_bound
from jaxcomp._mesh.per_replica import no_owner
from jaxcomp._mesh.weights import averaged
from jaxcomp._reducers.allreduce import allreduce
from jaxcomp._reducers.transformation import bytes_of

AverageInnerState: TypeAlias = bool | Literal["reset"]
InnerInit: TypeAlias = Callable[[PyTree], PyTree]


class LocalSGDState(NamedTuple):
    """State of `local_sgd` and `local_sgd_round`; a checkpoint holds one, consolidated."""

    # int32 scalar: optimizer steps taken; replicated. Named as in every Optax state, although a
    # tuple has a method of that name.
    count: Array  # pyright: ignore[reportIncompatibleMethodOverride]
    last_sync: Array  # int32 scalar: `count` after the last step that replicas share; replicated
    inner: PyTree  # inner state; per replica
    # Of `local_sgd` with a reducer or an outer optimizer: parameters after the last outer step;
    # otherwise (). Replicated.
    anchor: PyTree
    outer: PyTree  # the outer optimizer's state, in rounds one for each fragment, or (); replicated
    reducer: PyTree  # the reducer's state, in rounds one for each fragment; declares its own fields
    # In rounds after which replicas differ: this replica's floating parameters; otherwise (). Per
    # replica.
    local: PyTree = ()
    # float32 scalar: whose inner state it is, 0 for everybody's; per replica.
    owner: PyTree = ()

    # Read by consolidate, state_specs and shard_state. Not a field: it has no annotation.
    per_replica = ("inner", "local", "owner")

    @property
    def synced(self) -> Array:
        """Tells whether the last step set parameters to an average; equal on all replicas."""
        return (self.count == self.last_sync) & (self.count > 0)

    @classmethod
    def first(
        cls, axis_name: AxisName, inner: PyTree, local: PyTree = (), **shared: PyTree
    ) -> LocalSGDState:
        """Makes the state before the first step."""
        inner, local = local_if_bound(jax.tree.map(jnp.asarray, (inner, local)), axis_name)
        # Two arrays: a training step that donates its state must not see one buffer twice.
        count = jnp.zeros([], jnp.int32)
        last_sync = jnp.zeros([], jnp.int32)
        owner = no_owner(axis_name)
        return cls(count, last_sync, inner, local=local, owner=owner, **shared)


@dataclasses.dataclass(frozen=True)
class Sync:
    """The checked arguments that say what replicas do when they synchronise."""

    axis_name: AxisName
    reducer: optax.GradientTransformationExtraArgs  # a `Reducer`, or one that says nothing
    outer: optax.GradientTransformation
    exact: bool  # no reducer was passed: pseudo-gradients too go through `average`
    plain: bool  # nor an outer optimizer: parameters are averaged
    average_inner: AverageInnerState
    drop_non_finite: bool  # who comes with a value that is not finite does not count

    def init(self, params: PyTree) -> tuple[PyTree, PyTree]:
        """Makes the outer optimizer's and the reducer's state for these parameters."""
        return self.outer.init(params), self.reducer.init(params)

    def step(
        self,
        params: PyTree,
        state: LocalSGDState,
        begin: InnerInit,
        weight: Any = None,
        axes: AxisName | None = None,
    ) -> tuple[PyTree, LocalSGDState]:
        """Averages over all replicas, or takes the outer step with the mean pseudo-gradient.

        Args:
          params: This replica's.
          state: With the states that belong to these parameters. The anchor is what they were after
            the last outer step, or what all replicas keep if nobody counts; (): what each has.
          begin: (parameters) -> inner state as the inner optimizer would begin with them.
          weight: How much this replica counts; None if all count the same.
          axes: Take a plain average over these instead, as at a narrow level of a hierarchy.
        """
        anchor = state.anchor
        momenta = ()
        if self.average_inner is True:
            momenta = state.inner
        # The momenta of one that is dropped are no more finite than what they led to.
        anew = None
        if self.drop_non_finite:
            anew = ~all_finite(jax.tree.leaves((params, momenta)))
            if weight is None:
                weight = 1
            weight = jnp.where(anew, 0, jnp.asarray(weight, jnp.float32))
        if self.average_inner == "reset":
            anew = jnp.array(True)

        plain = self.plain or axes is not None
        over = axes or self.axis_name
        sent = params
        if not plain:
            sent = jax.tree.map(jnp.subtract, anchor, params)
        if plain or self.exact:
            (mean, momenta), counted = averaged((sent, momenta), over, weight)
        else:
            weights = {} if weight is None else {"weight": weight}
            mean, reducer = self.reducer.update(sent, state.reducer, anchor, **weights)
            state = state._replace(reducer=reducer)
            # With nothing to average, no all-reduce of weights.
            counting = weight if self.average_inner is True else None
            momenta, counted = averaged(momenta, over, counting)
        new = mean
        outer = state.outer
        if not plain:
            updates, outer = self.outer.update(mean, outer, anchor)
            new = optax.apply_updates(anchor, updates)
        inner = state.inner
        if self.average_inner is True:
            if counted is not None:
                momenta = optax.tree.where(counted, momenta, inner)
            inner = momenta
        if counted is not None and (plain or self.exact):
            before = params
            if axes is None and jax.tree.leaves(anchor):
                before = anchor
            new, outer = optax.tree.where(counted, (new, outer), (before, state.outer))
        if anew is not None:
            fresh = as_local(_begun_anew(inner, begin(new)), self.axis_name)
            inner = optax.tree.where(anew, fresh, inner)
        if not plain:
            anchor = new
        return new, state._replace(inner=inner, outer=outer, anchor=anchor)

    def bytes(
        self,
        part: PyTree,
        replicas: int | None,
        nth: int | None,
        begin: InnerInit | None,
        params: PyTree,
        *,
        plain: bool = False,
    ) -> CompressionStats:
        """Counts what one average sends.

        Args:
          part: The parameters that are averaged.
          replicas: How many there are, if known.
          nth: It comes after so many averages; None for all exact ones.
          begin: The inner optimizer's init, needed if its state is averaged too.
          params: All parameters.
          plain: Leaves the reducer out, as a narrow level of a hierarchy does.
        """
        sent = wide_stats(part)
        if not (plain or self.exact):
            sent = bytes_of(self.reducer, part, replicas, nth)
        if self.average_inner is True:
            if begin is None:
                raise ValueError(
                    "The inner state is averaged too, and its size is not known. Make the round "
                    "with inner_init=optimizer.init."
                )
            sent = sent.plus(wide_stats(jax.eval_shape(begin, params), "inner state "))
        return sent


def _whole_step(
    updates: PyTree, state: PyTree, params: PyTree | None = None
) -> tuple[PyTree, PyTree]:
    """Updates an outer optimizer that takes the mean pseudo-gradient as it is."""
    del params
    return jax.tree.map(jnp.negative, updates), state


def check_sync(
    axis_name: AxisName,
    reducer: Any,
    outer: Any,
    average_inner_state: Any,
    drop_non_finite: Any = False,
) -> Sync:
    """Reads the arguments that `local_sgd` and `local_sgd_round` share; refuses unusable ones."""
    for name, value in (("reducer", reducer), ("outer", outer)):
        if value is not None:
            check_transformation(name, value, " or None")
    axes = getattr(reducer, "axis_name", axis_name)
    if set(axis_tuple(axes)) != set(axis_tuple(axis_name)):
        raise ValueError(
            f"`reducer` averages over {axes!r} and axis_name is {axis_name!r}: parameters would "
            "differ for ever along the other axes. Make both for the same axes."
        )
    if not isinstance(average_inner_state, bool) and average_inner_state != "reset":
        raise ValueError(
            f"`average_inner_state` must be True, False or 'reset', got {average_inner_state!r}."
        )
    exact = reducer is None
    plain = exact and outer is None
    if exact:
        reducer = allreduce(axis_name=axis_name)
    if outer is None:  # the anchor takes the whole step
        outer = optax.GradientTransformation(lambda params: (), _whole_step)
    return Sync(
        axis_name,
        optax.with_extra_args_support(reducer),
        outer,
        exact,
        plain,
        average_inner_state,
        check_flag("drop_non_finite", drop_non_finite),
    )


def wide_stats(tree: PyTree, prefix: str = "") -> CompressionStats:
    """Counts what `average` sends: float32, or the leaf's own dtype where that is wider."""
    leaves = []
    for leaf in dense_stats(in_compute_dtype(tree)).leaves:
        leaves.append(dataclasses.replace(leaf, path=prefix + leaf.path))
    return CompressionStats(tuple(leaves))


def total(params: PyTree, parts: Iterable[CompressionStats]) -> CompressionStats:
    """Adds several payloads up, beside an all-reduce of the gradients."""
    stats = dense_stats(params).scaled(0)
    for part in parts:
        stats = stats.plus(part.scaled(1, before=0))
    return stats


def _begun_anew(state: PyTree, initial: PyTree) -> PyTree:
    """Returns `initial`, but schedules and injected hyperparameters as `state` has them.

    Momenta and the counts that correct their bias begin anew; a learning rate must not warm up
    again in every round.
    """
    kept = (optax.ScaleByScheduleState, optax.InjectStatefulHyperparamsState)

    def begun(old: Any, new: Any) -> Any:
        if isinstance(old, optax.InjectStatefulHyperparamsState):
            return old._replace(inner_state=_begun_anew(old.inner_state, new.inner_state))
        if isinstance(old, optax.ScaleByScheduleState):
            return old
        return new

    return jax.tree.map(begun, state, initial, is_leaf=lambda node: isinstance(node, kept))
