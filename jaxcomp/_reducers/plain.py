"""Plain Optax transformations where a reducer is wanted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxcomp._base.leaves import all_finite
from jaxcomp._base.typing import AxisName, PyTree
from jaxcomp._reducers.reducer import Reducer, Reduction, cast_as, check_gradients, takes_rows
from jaxcomp._reducers.transformation import CountBytes, Transformation, shown


def reduction_of(tx: optax.GradientTransformation) -> Callable[..., Reduction]:
    """The `reduce` of a reducer, or a stand-in for it made from a plain transformation.

    Nothing is known of what a plain transformation sends. The stand-in takes the average for every
    replica's contribution, as torch's hooks do: residuals then have the right mean.

    Args:
      tx: A `Reducer`, or any Optax transformation from local gradients to averages.

    Returns:
      A function of updates, state, params and extra arguments by name that returns a `Reduction`.

    Raises:
      ValueError: If `tx` is none, as a reducer that was not called.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from jaxcomp import extend
      >>> result = extend.reduction_of(optax.identity())(jnp.ones(2), optax.EmptyState())
      >>> result.sent.tolist(), bool(result.finite)
      ([1.0, 1.0], True)
    """
    if isinstance(tx, Reducer):
        return tx.reduce
    if not isinstance(tx, optax.GradientTransformation):
        fix = "Call it first" if callable(tx) else "Pass one"
        raise ValueError(
            f"A reducer is wanted, got {shown(tx)}. {fix}, as in "
            "jaxcomp.error_feedback(jaxcomp.allreduce(axis_name='data'))."
        )
    plain = optax.with_extra_args_support(tx)

    def reduce(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra_args: Any
    ) -> Reduction:
        if extra_args.get("weight") is not None:
            raise ValueError(
                f"{shown(tx)} takes no `weight`: it does not say along which axis the replicas "
                "lie. The reducers of jaxcomp do, and a jaxcomp.Reducer of your own."
            )
        means, new_state = plain.update(updates, state, params, **extra_args)
        finite = all_finite(jax.tree.leaves(means))
        kept = jax.tree.map(lambda new, old: jnp.where(finite, new, old), new_state, state)
        return Reduction(means, kept, means, finite)

    return reduce


def reducer_if_mapped(
    init: Any, reduce: Any, axis_name: AxisName | None, made_by: str, count_bytes: CountBytes
) -> Transformation:
    """A `Reducer`, or a plain transformation where nothing but plain ones went in."""
    if axis_name:
        return Reducer(init, reduce, axis_name, made_by=made_by, count_bytes=count_bytes)

    def update(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, PyTree]:
        check_gradients(updates, None)
        result = reduce(updates, state, params, **extra_args)
        return cast_as(result.updates, updates), result.state

    return Transformation(init, takes_rows(update, init), made_by=made_by, count_bytes=count_bytes)
