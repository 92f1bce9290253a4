"""Gradient accumulation that communicates once per optimizer step, not once per micro-batch."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomp._base.checks import check_int, check_transformation
from jaxcomp._base.leaves import compute_dtype, is_floating
from jaxcomp._base.stats import CompressionStats
from jaxcomp._base.typing import Array, DType, PyTree
from jaxcomp._mesh.collectives import switch
from jaxcomp._mesh.weights import refuse_misspelt_weight
from jaxcomp._reducers.transformation import Transformation, bytes_of, shown


class AccumulateState(NamedTuple):
    """State of `accumulate`; fields as in `optax.MultiStepsState`."""

    mini_step: Array  # int32 scalar: micro-batches since the last optimizer step; replicated
    gradient_step: Array  # int32 scalar: optimizer steps taken; replicated
    inner_opt_state: PyTree  # the state of what gets the accumulated gradients
    acc_grads: PyTree  # tree like params: the mean so far; per replica

    per_replica = ("acc_grads",)


def accumulate(
    tx: optax.GradientTransformation,
    every_k: int,
    *,
    accumulator_dtype: DType = jnp.float32,
) -> Transformation:
    r"""`optax.MultiSteps` that runs `tx`, and so its collectives, on every k-th call only.

    .. math:: \bar g = \frac{1}{k} \sum_{j=1}^{k} g_j, \qquad
        \text{updates} = \begin{cases} tx(\bar g) & \text{on the k-th call} \\ 0 & \text{else}
        \end{cases}

    `optax.MultiSteps` calls the transformation in it on *every* micro-batch and multiplies what it
    does not want by zero: a reducer in it communicates k times as often as needed. It also keeps a
    NaN for ever, because ``0 * nan`` is ``nan``. Here `tx` stands in a conditional branch, and the
    accumulator is set to zero, not multiplied by it: micro-batches that are not finite cost the one
    optimizer step that they belong to. A reducer turns them into NaN on every replica alike; follow
    it by ``optax.apply_if_finite(optimizer, ...)`` to skip that step.

    Put it outermost, ``accumulate(optax.chain(reducer, optimizer), k)`` or
    ``accumulate(local_sgd(...), k)``: then `sync_every`, schedules and the reducer count optimizer
    steps. In a chain of two levels put it around the slow one only:
    ``chain(allreduce(axis_name="fast"), accumulate(powersgd(axis_name="slow"), k))``. The state has
    the fields of `optax.MultiStepsState`: ``state.mini_step == 0`` after an optimizer step.

    Args:
      tx: What gets the accumulated gradients: a chain that begins with a reducer, or `local_sgd`.
      every_k: Micro-batches per optimizer step.
      accumulator_dtype: How the accumulated gradients are stored.

    Returns:
      A transformation from the local gradients of a micro-batch to updates, zeros but on every k-th
      call.

    Raises:
      ValueError: If an argument is unusable.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomp, optax
      >>> tx = jaxcomp.accumulate(
      ...     optax.chain(jaxcomp.allreduce(axis_name="data"), optax.sgd(1.0)), every_k=2)
      >>> def micro_steps(grads):
      ...     state = tx.init(grads[0])
      ...     first, state = tx.update(grads[0], state)
      ...     second, state = tx.update(grads[1], state)
      ...     return first, second
      >>> grads = jnp.array([[1.0, 2.0], [3.0, 6.0]])  # two replicas, two micro-batches
      >>> [x.tolist() for x in jax.vmap(micro_steps, axis_name="data")(grads)]
      [[0.0, 0.0], [-3.0, -3.0]]
    """
    every_k = check_int("every_k", every_k, 1)
    if not jnp.issubdtype(jnp.dtype(accumulator_dtype), jnp.floating):
        raise ValueError(
            f"`accumulator_dtype` must be a floating dtype, got {jnp.dtype(accumulator_dtype)}: "
            "integers would round the gradients. Leave it out for float32."
        )
    check_transformation("tx", tx)
    inner = optax.with_extra_args_support(tx)

    def init(params: PyTree) -> AccumulateState:
        # Two arrays: a training step that donates its state must not see one buffer twice.
        mini_step = jnp.zeros([], jnp.int32)
        gradient_step = jnp.zeros([], jnp.int32)
        # Like the parameters, so that they are sharded as those are.
        zeros = optax.tree.zeros_like(params, dtype=accumulator_dtype)
        return AccumulateState(mini_step, gradient_step, inner.init(params), zeros)

    def update(
        updates: PyTree,
        state: Any,
        params: PyTree | None = None,
        *,
        weight: Any = None,
        **extra_args: Any,
    ) -> tuple[PyTree, AccumulateState]:
        if weight is not None:
            raise ValueError(
                "accumulate takes no `weight`: its micro-batches count the same. Weigh the "
                "gradients of each before, or accumulate in the function that data_parallel is "
                "given."
            )
        refuse_misspelt_weight(extra_args)
        seen = state.mini_step + 1

        def add(total: Array, gradient: Array) -> Array:
            if not is_floating(gradient):  # of an integer parameter: it carries nothing
                return total
            # As optax does it: the mean so far, which does not overflow where the sum would.
            # Nor does their difference in float32, between opposite ends of 16 bits.
            dtype = compute_dtype(total.dtype)
            mean = total.astype(dtype)
            change = (gradient.astype(dtype) - mean) / seen.astype(dtype)
            return (mean + change).astype(total.dtype)

        def in_its_dtype(mean: Array, gradient: Array) -> Array:
            if not is_floating(gradient):
                return gradient
            return mean.astype(gradient.dtype)

        total = jax.tree.map(add, state.acc_grads, updates)
        mean = jax.tree.map(in_its_dtype, total, updates)

        def emit() -> tuple[PyTree, PyTree, PyTree]:
            result, new = inner.update(mean, state.inner_opt_state, params, **extra_args)
            return result, new, optax.tree.zeros_like(total)

        def wait() -> tuple[PyTree, PyTree, PyTree]:
            shapes, _, _ = jax.eval_shape(emit)
            return optax.tree.zeros_like(shapes), state.inner_opt_state, total

        due = (seen >= every_k).astype(jnp.int32)
        result, new, total = switch(due, [wait, emit])
        mini_step = jnp.where(due > 0, 0, seen)
        return result, AccumulateState(mini_step, state.gradient_step + due, new, total)

    def count_bytes(params: PyTree, replicas: int | None, step: int | None) -> CompressionStats:
        if step is None:
            return bytes_of(tx, params, replicas, None).scaled(1 / every_k)
        due = (step + 1) % every_k == 0
        return bytes_of(tx, params, replicas, step // every_k).scaled(due)

    made_by = f"accumulate({shown(tx)}, every_k={every_k})"
    return Transformation(init, update, made_by=made_by, count_bytes=count_bytes)
