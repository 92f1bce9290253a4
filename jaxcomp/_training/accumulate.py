"""Accumulates gradients, and communicates once per optimizer step, not once per micro-batch.

`accumulate` is for transformations that hold a reducer, in a function that is mapped over the
replicas; loops with `data_parallel` accumulate inside of the gradient function instead. The
accumulated gradients are local, so they differ between replicas, like a residual.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomp._base.checks import check_int, check_transformation
from jaxcomp._base.leaves import WIRE_DTYPES, checked_dtype, compute_dtype, is_floating
from jaxcomp._base.stats import CompressionStats
from jaxcomp._base.typing import Array, DType, PyTree
from jaxcomp._mesh.collectives import switch
from jaxcomp._mesh.weights import refuse_misspelt_weight
from jaxcomp._reducers.reducer import in_dtypes_of
from jaxcomp._reducers.transformation import Transformation, bytes_of, shows_its_call

# Integers would round the gradients.
_DTYPES = (*WIRE_DTYPES, "float64")


class AccumulateState(NamedTuple):
    """Holds the state of `accumulate`; fields as in `optax.MultiStepsState`."""

    mini_step: Array  # int32 scalar: micro-batches since the last optimizer step; replicated
    gradient_step: Array  # int32 scalar: optimizer steps taken; replicated
    inner_opt_state: PyTree  # the state of `tx`
    acc_grads: PyTree  # tree like the parameters: mean gradient so far; per replica

    per_replica = ("acc_grads",)


@shows_its_call
def accumulate(
    tx: optax.GradientTransformation,
    every_k: int,
    *,
    accumulator_dtype: DType = jnp.float32,
) -> Transformation:
    r"""Accumulates like `optax.MultiSteps`, but runs `tx` and its collectives only every k-th time.

    .. math:: \bar g = \frac{1}{k} \sum_{j=1}^{k} g_j, \qquad
        \text{updates} = \begin{cases} tx(\bar g) & \text{on the k-th call} \\ 0 & \text{else}
        \end{cases}

    `optax.MultiSteps` calls its transformation on *every* micro-batch and multiplies unneeded
    results by zero, so a reducer in it communicates k times as often as necessary. It also keeps a
    NaN for ever, because ``0 * nan`` is ``nan``. Here `tx` runs in a conditional branch, and the
    accumulator is set to zero. A micro-batch that is not finite affects only its own optimizer
    step. A reducer makes the updates of that step NaN on every replica;
    ``optax.apply_if_finite(optimizer, ...)`` after the reducer skips the step.

    Use it as the outermost transformation, ``accumulate(optax.chain(reducer, optimizer), k)`` or
    ``accumulate(local_sgd(...), k)``, so that `sync_every`, schedules and the reducer count
    optimizer steps. In a chain of two levels put it around the slow level only:
    ``chain(allreduce(axis_name="fast"), accumulate(powersgd(axis_name="slow"), k))``. The state has
    the fields of `optax.MultiStepsState`; after an optimizer step ``state.mini_step == 0``.

    Args:
      tx: The transformation of the accumulated gradients: a chain that begins with a reducer, or
        `local_sgd`.
      every_k: Number of micro-batches per optimizer step.
      accumulator_dtype: The dtype of the accumulated gradients, floating.

    Returns:
      A transformation from the local gradients of a micro-batch to updates. Updates are zeros
      except on every k-th call.

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
    accumulator_dtype = checked_dtype("accumulator_dtype", accumulator_dtype, _DTYPES)
    check_transformation("tx", tx)
    inner = optax.with_extra_args_support(tx)

    def init(params: PyTree) -> AccumulateState:
        # Two arrays: a training step that donates its state must not get one buffer twice.
        mini_step = jnp.zeros([], jnp.int32)
        gradient_step = jnp.zeros([], jnp.int32)
        # zeros_like, so that they have the shardings of the parameters.
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
                "accumulate takes no `weight`: all micro-batches have the same weight. Weight the "
                "gradients of each micro-batch yourself, or accumulate in the gradient function of "
                "data_parallel."
            )
        refuse_misspelt_weight(extra_args)
        seen = state.mini_step + 1

        def add(total: Array, gradient: Array) -> Array:
            if not is_floating(gradient):  # of an integer parameter: it holds no value
                return total
            # The mean so far, as in optax, does not overflow where a sum would. In float32, the
            # difference of two 16-bit values does not overflow either.
            dtype = compute_dtype(total.dtype)
            mean = total.astype(dtype)
            change = (gradient.astype(dtype) - mean) / seen.astype(dtype)
            return (mean + change).astype(total.dtype)

        total = jax.tree.map(add, state.acc_grads, updates)
        mean = in_dtypes_of(updates, total)

        def emit() -> tuple[PyTree, PyTree, PyTree]:
            result, new = inner.update(mean, state.inner_opt_state, params, **extra_args)
            return result, new, optax.tree.zeros_like(total)

        def wait() -> tuple[PyTree, PyTree, PyTree]:
            # The updates of `tx` may have other dtypes than the gradients.
            shapes, _, _ = jax.eval_shape(emit)
            return optax.tree.zeros_like(shapes), state.inner_opt_state, total

        due = (seen >= every_k).astype(jnp.int32)
        result, new, total = switch(due, [wait, emit])
        mini_step = jnp.where(due > 0, 0, seen)
        return result, AccumulateState(mini_step, state.gradient_step + due, new, total)

    def count_bytes(params: PyTree, replicas: int | None, step: int | None) -> CompressionStats:
        if step is None:  # the mean over the micro-batches
            return bytes_of(tx, params, replicas, None).scaled(1 / every_k)
        due = (step + 1) % every_k == 0
        return bytes_of(tx, params, replicas, step // every_k).scaled(due)

    return Transformation(init, update, count_bytes=count_bytes)
