"""Synchronises the replicas of local SGD, and defines the state that they keep.

`local_sgd` and `local_sgd_round` decide when replicas synchronise, and call this module. It
averages the parameters, or takes a step of an outer optimizer along the mean pseudo-gradient.
`average` is for users, at the end of a run of `local_sgd` or for statistics beside it, and for
`local_sgd` itself where its rounds begin. Unlike a reducer it is exact, keeps no state and takes
any tree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcomp._base.checks import answers_other_names, check_flag, check_transformation
from jaxcomp._base.leaves import all_finite, in_compute_dtype
from jaxcomp._base.stats import CompressionStats, dense_stats
from jaxcomp._base.typing import Array, AxisName, PyTree
from jaxcomp._local.fragments import check_not_complex, put_back
from jaxcomp._mesh.collectives import as_local, axis_size, axis_tuple, local_if_bound, switch
from jaxcomp._mesh.per_replica import no_owner
from jaxcomp._mesh.weights import averaged
from jaxcomp._reducers.allreduce import allreduce
from jaxcomp._reducers.reducer import Reducer, averaging, check_averaged
from jaxcomp._reducers.transformation import Transformation
from jaxcomp._training.on_mesh import named_axis, only_replica

AverageInnerState: TypeAlias = bool | Literal["reset"]
InnerInit: TypeAlias = Callable[[PyTree], PyTree]


class LocalSGDState(NamedTuple):
    """Holds the state of `local_sgd` and `local_sgd_round`; consolidated in a checkpoint."""

    # int32 scalar: number of optimizer steps taken; replicated. The name is that of every Optax
    # state, although a tuple has a method of this name.
    count: Array  # pyright: ignore[reportIncompatibleMethodOverride]
    last_sync: Array  # int32 scalar: `count` after the last average (see `synced`); replicated
    inner: PyTree  # inner state; per replica
    # In `local_sgd` with a reducer or an outer optimizer: parameters after the last outer step;
    # otherwise (). Replicated.
    anchor: PyTree
    outer: PyTree  # outer optimizer's state (in rounds: one for each fragment), or (); replicated
    reducer: PyTree  # the reducer's state (in rounds: one for each fragment); declares its fields
    # In rounds after which parameters differ between replicas: this replica's floating parameters;
    # otherwise (). Per replica.
    local: PyTree = ()
    # float32 scalar: id of the replica that owns the inner state, 0 if all share it; per replica.
    owner: PyTree = ()

    # Read by consolidate, state_specs and shard_state. It is not a field, because it has no
    # annotation.
    per_replica = ("inner", "local", "owner")

    @property
    def synced(self) -> Array:
        """Returns whether the last step averaged parameters (or gradients, before `start_step`)."""
        return (self.count == self.last_sync) & (self.count > 0)

    @classmethod
    def first(
        cls, axis_name: AxisName, inner: PyTree, local: PyTree = (), **shared: PyTree
    ) -> LocalSGDState:
        """Makes the state before the first step."""
        inner, local = local_if_bound(jax.tree.map(jnp.asarray, (inner, local)), axis_name)
        # Two arrays: a training step that donates its state must not get one buffer twice.
        count = jnp.zeros([], jnp.int32)
        last_sync = jnp.zeros([], jnp.int32)
        owner = no_owner(axis_name)
        return cls(count, last_sync, inner, local=local, owner=owner, **shared)


@dataclasses.dataclass(frozen=True)
class Sync:
    """Synchronises replicas; holds the checked arguments for it."""

    axis_name: AxisName
    reducer: Transformation  # a `Reducer`, or a chain that averages
    outer: optax.GradientTransformation
    uncompressed: bool  # no reducer was passed
    plain: bool  # no reducer and no outer optimizer, so parameters are averaged
    average_inner: AverageInnerState
    drop_non_finite: bool  # ignore a replica with a value that is not finite

    def init(self, params: PyTree) -> tuple[PyTree, PyTree]:
        """Makes the states of the outer optimizer and the reducer for these parameters."""
        # Not when it is built: a run starts JAX's backend, perhaps before jax.distributed.
        _check_averages(self.reducer, self.axis_name)
        return self.outer.init(params), self.reducer.init(params)

    def step(
        self,
        params: PyTree,
        state: LocalSGDState,
        begin: Any,
        all_params: PyTree,
        weight: Any,
        axes: AxisName,
    ) -> tuple[PyTree, LocalSGDState]:
        """Averages parameters, or takes the outer step with the mean pseudo-gradient.

        Args:
          params: This replica's parameters.
          state: The state, with the parts that belong to these parameters. Its anchor holds the
            parameters after the last outer step, which replicas return to if all weights are 0.
            With () as anchor they then keep their own parameters.
          begin: The inner optimizer's `init`. Read only if inner states may be reset.
          all_params: All parameters, of which `params` may be a part.
          weight: This replica's weight; None if all replicas have the same weight.
          axes: The axes to average over. At a narrow level of a hierarchy, which does not have all
            axes of the replicas, parameters are averaged whatever the reducer and the optimizer.
        """
        anchor = state.anchor
        momenta = ()
        if self.average_inner is True:
            momenta = state.inner
        anew = None  # a flag: whether this replica's inner state is reset; None for never
        if self.drop_non_finite:
            # A dropped replica's momenta may not be finite either, so they are reset. A weight of 0
            # is how a replica is ignored, so no average needs to know of dropping.
            anew = ~all_finite(jax.tree.leaves((params, momenta)))
            if weight is None:
                weight = 1
            weight = jnp.where(anew, 0, jnp.asarray(weight, jnp.float32))
        if self.average_inner == "reset":
            anew = jnp.array(True)

        # At a narrow level replicas elsewhere have other parameters, so no anchor is common to all.
        narrow = set(axis_tuple(axes)) != set(axis_tuple(self.axis_name))
        plain = self.plain or narrow
        exact = plain or self.uncompressed
        sent = params
        if not plain:
            sent = jax.tree.map(jnp.subtract, anchor, params)
        if exact:
            # Momenta in the same all-reduce.
            (mean, momenta), counted = averaged((sent, momenta), axes, weight)
        else:
            mean, reducer = self.reducer.update(sent, state.reducer, anchor, weight=weight)
            check_averaged(mean, self.axis_name)
            state = state._replace(reducer=reducer)
            # Without momenta to average, skip the all-reduce of weights.
            counting = weight if self.average_inner is True else None
            momenta, counted = averaged(momenta, axes, counting)
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
        if counted is not None and exact:
            # All weights were 0, and the mean is of nothing.
            before = params
            if not narrow and jax.tree.leaves(anchor):
                before = anchor
            new = optax.tree.where(counted, new, before)
            if not plain:  # else nothing has changed it, and it is equal on all replicas
                outer = optax.tree.where(counted, outer, state.outer)
        if anew is not None:
            fresh = as_local(_begun_anew(inner, begin(put_back(new, all_params))), self.axis_name)
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
        """Counts the bytes of one average.

        Args:
          part: The parameters that are averaged.
          replicas: The number of replicas, or None.
          nth: The number of earlier averages; None for an average after all exact ones.
          begin: The inner optimizer's `init`, needed if its state is averaged too.
          params: All parameters.
          plain: True without the reducer, as at a narrow level of a hierarchy.
        """
        sent = wide_stats(part)
        if not (plain or self.uncompressed):
            sent = self.reducer.bytes(part, replicas=replicas, step=nth)
        if self.average_inner is True:
            if begin is None:
                raise ValueError(
                    "The inner state is averaged too, but its size is not known. Make the round "
                    "with inner_init=optimizer.init."
                )
            sent = sent.plus(wide_stats(jax.eval_shape(begin, params), "inner state "))
        return sent


@answers_other_names
def average(
    tree: PyTree, axis_name: AxisName, *, when: Array | None = None, weight: Any = None
) -> PyTree:
    r"""Averages every floating leaf over the replicas, for example at the end of local steps.

    .. math:: \bar x = \frac{1}{W} \sum_{w=1}^{W} x_w

    If a run of `local_sgd` ends between two averages, call ``params = average(params, axis_name)``
    at the end. The function also averages other arrays, such as BatchNorm statistics.

    Args:
      tree: Any tree of arrays. Floating leaves are averaged in float32 or wider, in one all-reduce,
        and cast back to their dtypes. Integers, flags and keys stay as they are.
      axis_name: The mapped axis or axes of the replicas.
      when: A bool scalar, equal on every replica: average only if it is true. With
        ``when=state.synced`` for a `LocalSGDState`, BatchNorm statistics are averaged together with
        the parameters, and the other steps still have no collective.
      weight: This replica's weight, a number. The values of a replica with weight 0 are ignored,
        even NaN. None if all replicas have the same weight.

    Returns:
      The same tree. Without `when` it is equal on every replica, bit for bit, and replicated under
      ``shard_map(check_vma=True)``.

    Raises:
      ValueError: If the axis is not bound, a leaf is complex, or `when` is not a bool.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomp
      >>> params = {"w": jnp.array([[1.0, 2.0], [3.0, 6.0]])}  # two replicas
      >>> jax.vmap(lambda p: jaxcomp.average(p, "data"), axis_name="data")(params)["w"].tolist()
      [[2.0, 4.0], [2.0, 4.0]]
    """
    axis_size(axis_name)  # names an unbound axis even if there is nothing to average
    check_not_complex(tree)

    def means() -> PyTree:
        return averaged(tree, axis_name, weight)[0]

    if when is None:
        return means()
    kind = getattr(when, "dtype", type(when))
    if np.shape(when) or kind not in (bool, np.dtype(bool)):
        raise ValueError(f"`when` must be a single True or False, got {when!r}.")
    return switch(jnp.asarray(when).astype(jnp.int32), [lambda: tree, means])


def _whole_step(
    updates: PyTree, state: PyTree, params: PyTree | None = None
) -> tuple[PyTree, PyTree]:
    """Moves the anchor by the mean pseudo-gradient: the update without an outer optimizer."""
    del params
    return jax.tree.map(jnp.negative, updates), state


def check_sync(
    axis_name: AxisName,
    reducer: Any,
    outer: Any,
    average_inner_state: Any,
    drop_non_finite: Any = False,
) -> Sync:
    """Checks the arguments that `local_sgd` and `local_sgd_round` share."""
    uncompressed = reducer is None
    if uncompressed:
        reducer = allreduce(axis_name=axis_name)
    named_axis(reducer, axis_name)  # refuses other objects, and a reducer along other axes
    plain = uncompressed and outer is None
    if outer is None:  # the anchor moves by the whole pseudo-gradient; the state is empty
        outer = optax.GradientTransformation(lambda params: (), _whole_step)
    check_transformation("outer", outer, " or None")
    if isinstance(outer, Reducer):
        raise ValueError(f"`outer` must be an optimizer, got {outer!r}. Pass it as reducer=.")
    words = (True, False, "reset")
    if type(average_inner_state) not in (bool, str) or average_inner_state not in words:
        raise ValueError(
            f"`average_inner_state` must be True, False or 'reset', got {average_inner_state!r}."
        )
    return Sync(
        axis_name,
        averaging(reducer, axis_name),
        outer,
        uncompressed,
        plain,
        average_inner_state,
        check_flag("drop_non_finite", drop_non_finite),
    )


def _check_averages(reducer: Any, axis_name: AxisName) -> None:
    """Refuses a chain that ends with an optimizer, whose updates would pass for an average.

    It runs the chain on one replica. An average of one gradient does not point against it, even if
    it is compressed or clipped; an optimizer's update does.

    Raises:
      ValueError: If the update of the only replica points against its gradient.
    """
    if isinstance(reducer, Reducer):
        return

    def alignment(gradient: Array) -> Array:
        update, _ = reducer.update(gradient, reducer.init(gradient), gradient)
        return jnp.vdot(update, gradient)

    try:
        # Adam does not run under strict promotion, and dtypes do not matter here.
        with jax.ensure_compile_time_eval(), jax.numpy_dtype_promotion("standard"):
            along = only_replica(alignment, axis_tuple(axis_name))(jnp.ones((4, 4)))
            against = bool(along < 0)
    except Exception:  # a chain for other parameters, of which nothing is found out
        return
    if against:
        raise ValueError(
            "`reducer` ends with an optimizer: its update points against the gradient, where an "
            "average is needed. Pass the reducer alone; an optimizer of the averages is `outer`."
        )


def wide_stats(tree: PyTree, prefix: str = "") -> CompressionStats:
    """Counts the bytes of `average`, which sends float32 or the leaf's wider dtype."""
    leaves = []
    for leaf in dense_stats(in_compute_dtype(tree)).leaves:
        leaves.append(dataclasses.replace(leaf, path=prefix + leaf.path))
    return CompressionStats(tuple(leaves))


def payload(params: PyTree, parts: Iterable[CompressionStats]) -> CompressionStats:
    """Adds several payloads; `bytes_before` is that of an all-reduce of the gradients."""
    stats = dense_stats(params).scaled(0)
    for part in parts:
        stats = stats.plus(part.scaled(1, before=0))
    return stats


def _begun_anew(state: PyTree, initial: PyTree) -> PyTree:
    """Returns `initial` with the schedules and injected hyperparameters of `state`.

    Momenta and the counts that correct their bias are reset. Counts of schedules are kept, because
    a learning rate must not warm up again in every round.
    """
    kept = (optax.ScaleByScheduleState, optax.InjectStatefulHyperparamsState)

    def begun(old: Any, new: Any) -> Any:
        if isinstance(old, optax.InjectStatefulHyperparamsState):
            return old._replace(inner_state=_begun_anew(old.inner_state, new.inner_state))
        if isinstance(old, optax.ScaleByScheduleState):
            return old
        return new

    return jax.tree.map(begun, state, initial, is_leaf=lambda node: isinstance(node, kept))
