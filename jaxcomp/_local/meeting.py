"""What happens when local runs meet: an average, or a step of an outer optimizer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from jaxcomp._base.checks import check_flag, check_static_number
from jaxcomp._base.leaves import compute_dtype, leaf_dtype, leaf_name
from jaxcomp._base.stats import CompressionStats
from jaxcomp._base.typing import Array, AxisName, PyTree
from jaxcomp._local.fragments import Fragments
from jaxcomp._local.periods import Periods
from jaxcomp._local.sent import Sent
from jaxcomp._mesh.axes import as_local, axis_size, axis_tuple, switch
from jaxcomp._mesh.weights import as_weight, weighted_mean_each
from jaxcomp._reducers.allreduce import allreduce
from jaxcomp._reducers.contract import bytes_of
from jaxcomp._reducers.opening import all_finite

AverageInnerState: TypeAlias = bool | Literal["reset"]
InnerInit: TypeAlias = Callable[[PyTree], PyTree]
# One for all fragments, or one for each.
Outer: TypeAlias = optax.GradientTransformation | Sequence[optax.GradientTransformation]


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
        if jnp.issubdtype(leaf_dtype(leaf), jnp.complexfloating):
            raise ValueError(
                f"The leaf {leaf_name(path)} has dtype {leaf_dtype(leaf)}, and only floating "
                "leaves are averaged. Average its real and imaginary parts."
            )
        if jnp.issubdtype(leaf_dtype(leaf), jnp.floating):
            positions.append(i)
    local = [jnp.asarray(leaves[i]) for i in positions]
    wide = as_local([x.astype(compute_dtype(x.dtype)) for x in local], axis_name)
    reduced, known = weighted_mean_each(wide, as_weight(weight, axis_name), axis_name)
    for i, x, mean in zip(positions, local, reduced.means, strict=True):
        leaves[i] = mean.astype(x.dtype)
    counted = None if known is None or known.mean is None else known.mean != 0
    return treedef.unflatten(leaves), counted


def _unless_nobody(counted: Array | None, averaged: PyTree, before: PyTree) -> PyTree:
    """What was averaged, or what was there before if the weights of all are 0."""
    if counted is None:
        return averaged
    return jax.tree.map(functools.partial(jnp.where, counted), averaged, before)


class Part(NamedTuple):
    """What takes part in an average: parameters, and the states that belong to them."""

    params: PyTree  # one fragment
    inner: PyTree
    outer: PyTree  # of the fragment
    reducer: PyTree  # of the fragment


@dataclasses.dataclass(frozen=True)
class Meeting:
    """The checked arguments that say what replicas do when they meet."""

    axis_name: AxisName
    reducer: optax.GradientTransformationExtraArgs  # a `Reducer`, or one that says nothing
    optimizers: tuple[optax.GradientTransformationExtraArgs, ...]  # for each fragment, or none
    exact: bool  # no reducer was given: pseudo-gradients too go through `average`
    average_inner: AverageInnerState
    alpha: float  # share of the local parameters that is kept
    late: bool  # what is averaged is used some updates later
    drop_non_finite: bool  # who comes with a value that is not finite does not count

    @property
    def plain(self) -> bool:
        """Whether the parameters themselves are averaged: neither reducer nor optimizer."""
        return self.exact and not self.optimizers

    @property
    def anchored(self) -> bool:
        """Whether `local_sgd` keeps an anchor."""
        return self.late or not self.plain

    def sent(self, periods: Periods, inner_init: InnerInit | None, replicas: int | None) -> Sent:
        """The bytes of averages at these times."""

        def reduced(part: PyTree, nth: int | None) -> CompressionStats:
            return bytes_of(self.reducer, part, replicas, nth)

        return Sent(
            periods,
            None if self.exact else reduced,
            self.average_inner is True,
            inner_init,
            shares_start=not self.plain,
        )

    def init(self, params: PyTree, fragments: Fragments) -> tuple[Any, Any, Any]:
        """(anchor, outer states, reducer states), a state for each fragment."""
        parts = [fragments.take(params, k) for k in range(fragments.count)]
        reducer = tuple(self.reducer.init(part) for part in parts)
        # A copy, because a training step that donates its state must not see one buffer twice.
        anchor = jax.tree.map(jnp.copy, params) if self.anchored else ()
        outer = tuple(tx.init(part) for tx, part in zip(self.optimizers, parts, strict=False))
        return anchor, outer, reducer

    def meet(
        self, k: int, anchor: PyTree, local: Part, begin: InnerInit, weight: Any = None
    ) -> Part:
        """The average of one fragment over all replicas, or the outer step with its mean.

        Args:
          k: Which fragment.
          anchor: The fragment as it was after the last outer step. For a plain average what all
            keep if nobody counts; (): each its own.
          local: This replica's parameters and states.
          begin: (parameters) -> inner state as the inner optimizer would begin with them.
          weight: How much this replica counts; None if all count the same.
        """
        if self.plain:
            return self.mean(local, self.axis_name, begin, weight, anchor)
        weight, dropped = self._counting(local, weight)
        pseudo = jax.tree.map(lambda a, p: a - p, anchor, local.params)
        counted = None
        if self.exact:
            reduced, counted = _averaged(pseudo, self.axis_name, weight)
            reducer = local.reducer
        else:
            given = {} if weight is None else {"weight": weight}
            reduced, reducer = self.reducer.update(pseudo, local.reducer, anchor, **given)
        outer = local.outer
        if self.optimizers:
            updates, outer = self.optimizers[k].update(reduced, outer, anchor)
        else:
            updates = jax.tree.map(jnp.negative, reduced)
        params = _unless_nobody(counted, optax.apply_updates(anchor, updates), anchor)
        outer = _unless_nobody(counted, outer, local.outer)
        inner = local.inner
        if self.average_inner is True:
            inner, counted = _averaged(inner, self.axis_name, weight)
            inner = _unless_nobody(counted, inner, local.inner)
        averaged = Part(params, inner, outer, reducer)
        return self._reset(averaged, begin, dropped)

    def mean(
        self,
        local: Part,
        axes: AxisName,
        begin: InnerInit,
        weight: Any = None,
        anchor: PyTree = (),
    ) -> Part:
        """The plain average over `axes` in one all-reduce, with the inner state if asked for.

        Where nobody counts, `anchor` is kept, or what each replica has of its own.
        """
        params, inner = local.params, local.inner
        weight, dropped = self._counting(local, weight)
        if self.average_inner is True:
            (params, inner), counted = _averaged((params, inner), axes, weight)
            inner = _unless_nobody(counted, inner, local.inner)
        else:
            params, counted = _averaged(params, axes, weight)
        kept = anchor if jax.tree.leaves(anchor) else local.params
        params = _unless_nobody(counted, params, kept)
        return self._reset(local._replace(params=params, inner=inner), begin, dropped)

    def mix(self, shared: PyTree, local: PyTree) -> PyTree:
        """What a replica goes on with: the parameters that all agree on, and a share of its own.

        An element of its own that is not finite is left out, so that it does not outlive a meeting.
        """
        if not self.alpha:
            return shared

        def one(shared: Array, local: Array) -> Array:
            wide = compute_dtype(shared.dtype)
            mixed = (1 - self.alpha) * shared.astype(wide) + self.alpha * local.astype(wide)
            return jnp.where(jnp.isfinite(local), mixed.astype(shared.dtype), shared)

        return jax.tree.map(one, shared, local)

    def _counting(self, local: Part, weight: Any) -> tuple[Any, Array | None]:
        """This replica's weight, and whether it was dropped; None if nobody is."""
        if not self.drop_non_finite:
            return weight, None
        given = (local.params, local.inner) if self.average_inner is True else local.params
        finite = all_finite(jax.tree.leaves(given))
        own = jnp.asarray(1.0 if weight is None else weight).astype(jnp.float32)
        return jnp.where(finite, own, 0), ~finite

    def _reset(self, averaged: Part, begin: InnerInit, dropped: Array | None) -> Part:
        everybody = self.average_inner == "reset"
        if not everybody and dropped is None:
            return averaged
        state = as_local(reset(averaged.inner, begin(averaged.params)), self.axis_name)
        if dropped is not None and not everybody:
            # Its momenta are no more finite than what they led to.
            pick = functools.partial(jnp.where, dropped)
            state = jax.tree.map(pick, state, averaged.inner)
        return averaged._replace(inner=state)


def check_meeting(
    axis_name: AxisName,
    periods: Periods,
    reducer: Any,
    outer: Any,
    average_inner_state: Any,
    alpha: Any,
    drop_non_finite: Any = False,
) -> Meeting:
    """Reads the arguments that `local_sgd` and `local_sgd_round` share.

    Raises:
      ValueError: If one is unusable.
    """
    if not (reducer is None or _is_transformation(reducer)):
        raise ValueError(
            f"`reducer` must be an Optax gradient transformation or None, got {reducer!r}."
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
    if average_inner_state is not False and (periods.fragments > 1 or periods.delay):
        raise ValueError(
            f"average_inner_state={average_inner_state!r} needs fragments=1 and "
            "fragment_sync_delay=0: the inner state belongs to all parameters, and goes on while a "
            "part of them is averaged."
        )
    if check_flag("drop_non_finite", drop_non_finite) and (periods.fragments > 1 or periods.delay):
        raise ValueError(
            "drop_non_finite=True needs fragments=1 and fragment_sync_delay=0: what is not finite "
            "in one part spreads to the others before their turn."
        )
    return Meeting(
        axis_name,
        optax.with_extra_args_support(reducer or allreduce(axis_name=axis_name)),
        _check_outer(outer, periods.fragments),
        reducer is None,
        average_inner_state,
        check_static_number("fragment_update_alpha", alpha, 0, 1),
        periods.delay > 0,
        drop_non_finite,
    )


def _check_outer(outer: Any, fragments: int) -> tuple[Any, ...]:
    """An optimizer for each fragment, or none."""
    if outer is None:
        return ()
    each = isinstance(outer, (list, tuple)) and not _is_transformation(outer)
    optimizers: tuple[Any, ...] = tuple(outer) if each else (outer,) * fragments
    wrong = [optimizer for optimizer in optimizers if not _is_transformation(optimizer)]
    if wrong:
        raise ValueError(
            "`outer` must be an Optax gradient transformation, one for each fragment or None, got "
            f"{wrong[0]!r}."
        )
    if len(optimizers) != fragments:
        raise ValueError(
            f"`outer` has {len(optimizers)} optimizers, and there are {fragments} fragments. Pass "
            "one for each, or a single one for all."
        )
    return tuple(optax.with_extra_args_support(optimizer) for optimizer in optimizers)


def _is_transformation(value: Any) -> bool:
    return hasattr(value, "init") and hasattr(value, "update")


def reset(state: PyTree, initial: PyTree) -> PyTree:
    """`initial`, but schedules and injected hyperparameters go on from where `state` has them.

    Momenta and the counts that correct their bias begin anew; a learning rate must not warm up
    again in every round.
    """
    kept = (optax.ScaleByScheduleState, optax.InjectStatefulHyperparamsState)

    def choose(old: Any, new: Any) -> Any:
        if isinstance(old, optax.InjectStatefulHyperparamsState):
            return old._replace(inner_state=reset(old.inner_state, new.inner_state))
        return old if isinstance(old, optax.ScaleByScheduleState) else new

    return jax.tree.map(choose, state, initial, is_leaf=lambda x: isinstance(x, kept))
