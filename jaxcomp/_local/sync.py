"""What replicas do when they synchronise: an average, or a step of an outer optimizer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from jaxcomp._base.checks import check_flag
from jaxcomp._base.leaves import (
    all_finite,
    compute_dtype,
    in_compute_dtype,
    leaf_dtype,
    leaf_name,
)
from jaxcomp._base.stats import CompressionStats, LeafStats, dense_leaves
from jaxcomp._base.typing import Array, AxisName, PyTree
from jaxcomp._mesh.collectives import as_local, axis_size, axis_tuple, mean_each, switch
from jaxcomp._mesh.weights import share_of_mean, weighted
from jaxcomp._reducers.allreduce import allreduce
from jaxcomp._reducers.transformation import bytes_of

AverageInnerState: TypeAlias = bool | Literal["reset"]
InnerInit: TypeAlias = Callable[[PyTree], PyTree]


def average(
    tree: PyTree, axis_name: AxisName, *, when: Array | None = None, weight: Any = None
) -> PyTree:
    r"""The mean of every floating leaf over the replicas; the end of a run of local steps.

    .. math:: \bar x = \frac{1}{W} \sum_{w=1}^{W} x_w

    A run of `local_sgd` that does not end on an average loses nothing with
    ``params = average(params, axis_name)``. The same function averages what is neither parameter
    nor optimizer state, such as BatchNorm statistics.

    Args:
      tree: Any tree of arrays. Averaged in float32 even where stored narrower (one all-reduce for
        all of it), then back to the stored dtype. Integers, flags and keys stay as they are.
      axis_name: The mapped axis or axes of the replicas.
      when: A boolean scalar, the same on every replica: average only if it is true. With
        ``when=state.synced`` for a `LocalSGDState`, BatchNorm statistics are averaged together with
        the parameters, and the steps in between still hold no collective.
      weight: How much this replica counts, a number; what one of weight 0 holds, NaN or not, counts
        for nothing. None if all count the same.

    Returns:
      The same tree. Without `when` it is equal on every replica, bit for bit, and replicated under
      ``shard_map(check_vma=True)``.

    Raises:
      ValueError: If the axis is not bound, or a leaf is complex.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomp
      >>> params = {"w": jnp.array([[1.0, 2.0], [3.0, 6.0]])}  # two replicas
      >>> jax.vmap(lambda p: jaxcomp.average(p, "data"), axis_name="data")(params)["w"].tolist()
      [[2.0, 4.0], [2.0, 4.0]]
    """
    axis_size(axis_name)  # so that an unbound axis is named even if there is nothing to average
    if when is not None:
        return switch(
            jnp.asarray(when).astype(jnp.int32),
            [lambda: tree, lambda: average(tree, axis_name, weight=weight)],
        )
    return _averaged(tree, axis_name, weight)[0]


def _averaged(tree: PyTree, axis_name: AxisName, weight: Any) -> tuple[PyTree, Array | None]:
    """The mean, and whether any replica counted; None if all do."""
    leaves, treedef = jax.tree.flatten(tree)
    positions = []
    for i, (path, leaf) in enumerate(jax.tree_util.tree_flatten_with_path(tree)[0]):
        dtype = leaf_dtype(leaf)
        if jnp.issubdtype(dtype, jnp.complexfloating):
            raise ValueError(
                f"The leaf {leaf_name(path)} has dtype {dtype}, and only floating leaves are "
                "averaged. Average its real and imaginary parts."
            )
        if jnp.issubdtype(dtype, jnp.floating):
            positions.append(i)
    stored = [jnp.asarray(leaves[i]) for i in positions]
    wide = as_local([x.astype(compute_dtype(x.dtype)) for x in stored], axis_name)
    counted = None
    if weight is not None:
        share, mean_weight = share_of_mean(weight, axis_name)
        wide, counted = weighted(wide, share), mean_weight != 0
    for i, x, mean in zip(positions, stored, mean_each(wide, axis_name), strict=True):
        leaves[i] = mean.astype(x.dtype)
    return treedef.unflatten(leaves), counted


def _unless_nobody(counted: Array | None, new: PyTree, before: PyTree) -> PyTree:
    """What was averaged, or what was there before if the weights of all are 0."""
    if counted is None:
        return new
    return jax.tree.map(functools.partial(jnp.where, counted), new, before)


class Part(NamedTuple):
    """What takes part in an average: parameters, and the states that belong to them."""

    params: PyTree  # all floating ones, or one fragment of them
    inner: PyTree
    outer: PyTree  # of these parameters
    reducer: PyTree  # of these parameters


@dataclasses.dataclass(frozen=True)
class Sync:
    """The checked arguments that say what replicas do when they synchronise."""

    axis_name: AxisName
    reducer: optax.GradientTransformationExtraArgs  # a `Reducer`, or one that says nothing
    outer: optax.GradientTransformationExtraArgs | None
    exact: bool  # no reducer was given: pseudo-gradients too go through `average`
    average_inner: AverageInnerState
    drop_non_finite: bool  # who comes with a value that is not finite does not count

    @property
    def plain(self) -> bool:
        """Whether the parameters themselves are averaged: neither reducer nor outer optimizer."""
        return self.exact and self.outer is None

    def init(self, params: PyTree) -> tuple[PyTree, PyTree]:
        """The outer optimizer's and the reducer's state for these parameters."""
        outer = self.outer.init(params) if self.outer else ()
        return outer, self.reducer.init(params)

    def step(
        self,
        anchor: PyTree,
        part: Part,
        begin: InnerInit,
        weight: Any = None,
        *,
        axes: AxisName | None = None,
    ) -> Part:
        """The average over all replicas, or the outer step with the mean pseudo-gradient.

        Args:
          anchor: The parameters after the last outer step. For a plain average what all keep if
            nobody counts; (): what each has.
          part: This replica's parameters and states.
          begin: (parameters) -> inner state as the inner optimizer would begin with them.
          weight: How much this replica counts; None if all count the same.
          axes: Take the plain average over these instead.
        """
        plain, averages_inner = self.plain or axes is not None, self.average_inner is True
        inner = part.inner if averages_inner else ()
        dropped = None
        if self.drop_non_finite:
            finite = all_finite(jax.tree.leaves((part.params, inner)))
            weight = jnp.asarray(1.0 if weight is None else weight).astype(jnp.float32)
            weight, dropped = jnp.where(finite, weight, 0), ~finite

        given = part.params if plain else jax.tree.map(lambda a, p: a - p, anchor, part.params)
        outer, reducer = part.outer, part.reducer
        if plain or self.exact:
            (mean, inner), counted = _averaged((given, inner), axes or self.axis_name, weight)
        else:
            extra = {} if weight is None else {"weight": weight}
            mean, reducer = self.reducer.update(given, reducer, anchor, **extra)
            kept = weight if averages_inner else None  # with nothing to average, no all-reduce
            inner, counted = _averaged(inner, self.axis_name, kept)
        inner = _unless_nobody(counted, inner, part.inner) if averages_inner else part.inner

        if plain:
            before = anchor if jax.tree.leaves(anchor) else part.params
            params = _unless_nobody(counted, mean, before)
        else:
            updates = jax.tree.map(jnp.negative, mean)
            if self.outer:
                updates, outer = self.outer.update(mean, outer, anchor)
            params = optax.apply_updates(anchor, updates)
            if self.exact:
                before = anchor, part.outer
                params, outer = _unless_nobody(counted, (params, outer), before)

        # Of who is dropped momenta are no more finite than what they led to.
        anew = jnp.array(True) if self.average_inner == "reset" else dropped
        if anew is not None:
            fresh = as_local(_reset(inner, begin(params)), self.axis_name)
            inner = jax.tree.map(functools.partial(jnp.where, anew), fresh, inner)
        return Part(params, inner, outer, reducer)

    def bytes(
        self,
        params: PyTree,
        inner: PyTree,
        replicas: int | None,
        nth: int | None,
        *,
        plain: bool = False,
    ) -> list[LeafStats]:
        """What one average of these parameters sends.

        It comes after `nth` averages, None for all exact ones. Of the inner state something is sent
        only if it is averaged. `plain` goes without the reducer, as a narrow level of a hierarchy.
        """
        if plain or self.exact:
            leaves = wide_leaves(params)
        else:
            leaves = list(bytes_of(self.reducer, params, replicas, nth).leaves)
        return leaves + (wide_leaves(inner, "inner state ") if self.average_inner is True else [])


def wide_leaves(tree: PyTree, prefix: str = "") -> list[LeafStats]:
    """What `average` sends: float32, or the leaf's own dtype where that is wider."""
    leaves = dense_leaves(in_compute_dtype(tree))
    return [dataclasses.replace(leaf, path=prefix + leaf.path) for leaf in leaves]


def total(params: PyTree, parts: Iterable[list[LeafStats]]) -> CompressionStats:
    """The sum of several payloads, beside an all-reduce of the gradients."""
    found = {leaf.path: dataclasses.replace(leaf, bytes_after=0) for leaf in dense_leaves(params)}
    for leaf in (leaf for part in parts for leaf in part):
        known = found.get(leaf.path, dataclasses.replace(leaf, bytes_before=0, bytes_after=0))
        after = known.bytes_after + leaf.bytes_after
        found[leaf.path] = dataclasses.replace(
            leaf, bytes_before=known.bytes_before, bytes_after=after
        )
    return CompressionStats.of(found.values())


def check_sync(
    axis_name: AxisName,
    reducer: Any,
    outer: Any,
    average_inner_state: Any,
    drop_non_finite: Any = False,
) -> Sync:
    """Reads the arguments that `local_sgd` and `local_sgd_round` share; refuses unusable ones."""
    for name, value in (("reducer", reducer), ("outer", outer)):
        if not (value is None or is_transformation(value)):
            raise ValueError(
                f"`{name}` must be an Optax gradient transformation or None, got {value!r}."
            )
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
    return Sync(
        axis_name,
        optax.with_extra_args_support(reducer or allreduce(axis_name=axis_name)),
        None if outer is None else optax.with_extra_args_support(outer),
        reducer is None,
        average_inner_state,
        check_flag("drop_non_finite", drop_non_finite),
    )


def is_transformation(value: Any) -> bool:
    """Whether it looks like one of Optax's."""
    return hasattr(value, "init") and hasattr(value, "update")


def _reset(state: PyTree, initial: PyTree) -> PyTree:
    """`initial`, but schedules and injected hyperparameters go on from where `state` has them.

    Momenta and the counts that correct their bias begin anew; a learning rate must not warm up
    again in every round.
    """
    kept = (optax.ScaleByScheduleState, optax.InjectStatefulHyperparamsState)

    def choose(old: Any, new: Any) -> Any:
        if isinstance(old, optax.InjectStatefulHyperparamsState):
            return old._replace(inner_state=_reset(old.inner_state, new.inner_state))
        return old if isinstance(old, optax.ScaleByScheduleState) else new

    return jax.tree.map(choose, state, initial, is_leaf=lambda x: isinstance(x, kept))
