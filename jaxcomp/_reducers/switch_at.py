"""A change from one reducer to another after a number of updates."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

from jaxcomp._base.checks import check_int
from jaxcomp._base.leaves import floating_leaves, nan_unless, with_leaves
from jaxcomp._base.stats import CompressionStats
from jaxcomp._base.typing import Array, PyTree
from jaxcomp._mesh.axes import as_local, from_step
from jaxcomp._mesh.per_replica import mark_local
from jaxcomp._reducers.plain import reducer_if_mapped, reduction_of
from jaxcomp._reducers.reducer import Reducer, Reduction, cast_as, other_state
from jaxcomp._reducers.transformation import Transformation, bytes_of, call_text


class SwitchState(NamedTuple):
    """State of `switch_at`."""

    # int32 scalar: finite updates seen; replicated
    count: Array  # pyright: ignore[reportIncompatibleMethodOverride]
    before: PyTree  # the first reducer's state
    after: PyTree  # the second reducer's state

    per_replica = ()


def switch_at(
    step: int,
    before: optax.GradientTransformation,
    after: optax.GradientTransformation,
) -> Transformation:
    """Hands over from one reducer to another after a number of updates.

    The update counted as ``step`` (from 0) is the first of `after`. ``powersgd(start_step=...)`` is
    the same hand-over from an exact average; use this one to begin with anything else. Only the
    reducer whose turn it is communicates and changes its state. Updates that are not finite are not
    counted.

    Args:
      step: Updates of `before`.
      before: The first reducer.
      after: The second one. Its own ``start_step``, if it has one, counts its own updates: pass 0.

    Returns:
      A reducer. Its state is a `SwitchState`, with the states of both.

    Raises:
      ValueError: If `step` is not a non-negative integer, or the reducers lie along different axes.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomp
      >>> tx = jaxcomp.switch_at(
      ...     1,
      ...     jaxcomp.allreduce(axis_name="data", comm_dtype=jnp.bfloat16),
      ...     jaxcomp.powersgd(rank=1, axis_name="data", start_step=0),
      ... )
      >>> grads = {"w": jax.random.normal(jax.random.key(0), (2, 8, 8))}  # two replicas
      >>> state = tx.init({"w": jnp.zeros((8, 8))})
      >>> def two_steps(grads, state):
      ...     first, state = tx.update(grads, state)
      ...     return first, tx.update(grads, state)[0]
      >>> first, second = jax.vmap(two_steps, in_axes=(0, None), axis_name="data")(grads, state)
      >>> [int(jnp.linalg.matrix_rank(x["w"][0])) for x in (first, second)]
      [8, 1]
    """
    made_by = call_text("switch_at", locals())
    step = check_int("step", step, 0)
    axes = [tx.axis_name for tx in (before, after) if isinstance(tx, Reducer)]
    if len(set(axes)) > 1:
        raise ValueError(
            f"`before` and `after` must have the same axis_name, got {axes[0]!r} and {axes[1]!r}."
        )
    axis_name = axes[0] if axes else None
    first, second = reduction_of(before), reduction_of(after)

    def init(params: PyTree) -> SwitchState:
        return SwitchState(jnp.zeros([], jnp.int32), before.init(params), after.init(params))

    def reduce(
        updates: PyTree, state: SwitchState, params: PyTree | None = None, **extra_args: Any
    ) -> Reduction:
        if not isinstance(state, SwitchState):
            raise other_state("switch_at", "SwitchState", state)
        if axis_name:
            state = mark_local(state, axis_name)

        def run(function: Any, own: PyTree, other: PyTree, swapped: bool) -> Reduction:
            result = function(updates, own, params, **extra_args)
            states = (other, result.state) if swapped else (result.state, other)
            # One type for both branches, also where only one of them computes in float32.
            sent = cast_as(result.sent, updates)
            sent = as_local(sent, axis_name) if axis_name else sent
            return result._replace(state=states, sent=sent)

        result = from_step(
            state.count,
            step,
            lambda: run(first, state.before, state.after, swapped=False),
            lambda: run(second, state.after, state.before, swapped=True),
        )
        count = jnp.where(result.finite, optax.safe_increment(state.count), state.count)
        # A reducer without a state poisons only what is not finite; nobody shall take half a step.
        whole = nan_unless(result.finite, floating_leaves(result.updates))
        return result._replace(
            updates=with_leaves(result.updates, whole), state=SwitchState(count, *result.state)
        )

    def count_bytes(params: PyTree, replicas: int | None, at: int | None) -> CompressionStats:
        if at is not None and at < step:
            return bytes_of(before, params, replicas, at)
        return bytes_of(after, params, replicas, None if at is None else at - step)

    return reducer_if_mapped(init, reduce, axis_name, made_by, count_bytes)
