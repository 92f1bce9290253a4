"""A residual for a reducer that does not send all it is given."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcomp._base.checks import check_int, check_number
from jaxcomp._base.leaves import (
    RESIDUAL_DTYPES,
    checked_dtype,
    clipped,
    compute_dtype,
    floating_leaves,
    in_compute_dtype,
    is_floating,
    leaf_dtype,
    nan_unless,
    with_leaves,
)
from jaxcomp._base.stats import CompressionStats
from jaxcomp._base.typing import Array, DType, PyTree, Schedule
from jaxcomp._mesh.collectives import as_local, local_if_bound, owner_id
from jaxcomp._mesh.per_replica import no_owner
from jaxcomp._reducers.reducer import Reducer, Reduction
from jaxcomp._reducers.transformation import shown, shows_its_call


class ErrorFeedbackState(NamedTuple):
    """State of `error_feedback`."""

    residual: PyTree  # floating leaf: what was not sent yet, shape of the leaf; per replica
    inner: PyTree  # the reducer's own state
    # int32 scalar: finite updates seen; replicated
    count: Array  # pyright: ignore[reportIncompatibleMethodOverride]
    # float32 scalar: whose the residual is, 0 for everybody's; per replica
    owner: Any = np.zeros((), np.float32)

    per_replica = ("residual", "owner")


@shows_its_call
def error_feedback(
    reducer: Reducer,
    *,
    every: int = 1,
    decay: float | Schedule = 1.0,
    residual_dtype: DType | None = None,
) -> Reducer:
    r"""Gives a reducer a residual: what it does not send in one step is added to the next gradient.

    With local gradient :math:`g_w`, residual :math:`e_w` and the reducer :math:`\mathcal{C}`, of
    whose average :math:`s_w` is this replica's own part as it was sent:

    .. math::
        m_w = g_w + e_w, \qquad \text{output} = \mathcal{C}(m) = \frac{1}{W} \sum_w s_w, \qquad
        e_w = m_w - s_w

    So nothing is lost: the mean residual is the mean of :math:`m` minus the output, whatever the
    wire did to it; only how an all-reduce of 16-bit numbers rounds its sums is in nobody's
    residual. The gradients reach the reducer in float32 (or wider, where they are). If an
    output is not finite, all outputs are NaN and the state stays as it was, bit for bit.

    Args:
      reducer: A reducer of this package, or a `Reducer` of your own: it says what a replica sent.
        The residual of torch's hooks, :math:`m_w` minus the output, has the right mean too; but
        each replica's deviation from it grows like the square root of the step count.
      every: Add the residual back every so many updates only; it accumulates in between.
      decay: Scales the residual as it is added back: a number in [0, 1] or an Optax schedule of
        the update count. Other values than 1 lose what they leave out: docs/convergence.md says
        what neither this nor `every` gains.
      residual_dtype: How the residual is stored: bfloat16 or float32; None for float32.

    Returns:
      A reducer. Its state is an `ErrorFeedbackState`.

    Raises:
      ValueError: If an argument is unusable, or the reducer keeps a residual of its own, as
        `powersgd` does by default; at tracing time, if the state belongs to other leaves.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomp
      >>> tx = jaxcomp.error_feedback(jaxcomp.quantized_allreduce(axis_name="data"))
      >>> grads = {"w": jnp.array(2 * [[1.0, 0.003, 2.0, 2.0]])}  # two replicas
      >>> state = tx.init({"w": jnp.zeros(4)})
      >>> axes = jaxcomp.state_axes(state)
      >>> step = jax.vmap(tx.update, in_axes=(0, None), out_axes=(None, axes), axis_name="data")
      >>> means, state = step(grads, state)
      >>> [round(float(x), 3) for x in means["w"]]  # 0.003 is below half a level of 1/127
      [1.0, 0.0, 2.0, 2.0]
      >>> [round(float(x), 3) for x in state.residual["w"][0]]
      [0.0, 0.003, 0.0, 0.0]

    References:
      Karimireddy et al.: Error Feedback Fixes SignSGD and other Gradient Compression Schemes.
      ICML 2019.
    """
    _check_reducer(reducer)
    axis_name = reducer.axis_name
    every = check_int("every", every, 1)
    if not callable(decay):
        decay = check_number("decay", decay, 0, 1)
    dtype = checked_dtype("residual_dtype", residual_dtype, RESIDUAL_DTYPES)

    def init(params: PyTree) -> ErrorFeedbackState:
        def zeros(leaf: Any) -> Any:
            if not is_floating(leaf):
                return optax.MaskedNode()
            return jnp.zeros_like(leaf, dtype=dtype or compute_dtype(leaf_dtype(leaf)))

        return ErrorFeedbackState(
            residual=local_if_bound(jax.tree.map(zeros, params), axis_name),
            inner=reducer.init(params),
            count=jnp.zeros([], jnp.int32),
            owner=no_owner(axis_name),
        )

    def reduce(
        updates: PyTree,
        state: ErrorFeedbackState,
        params: PyTree | None = None,
        *,
        like: PyTree | None = None,
        **extra_args: Any,
    ) -> Reduction:
        residual = as_local(jax.tree.leaves(state.residual), axis_name)
        scale: Any = decay
        if callable(decay):
            scale = decay(state.count)
        due = (state.count + 1) % every == 0
        if every > 1:
            scale = jnp.where(due, scale, 0.0)
        gradients = floating_leaves(updates)
        totals = jax.tree.map(functools.partial(_add, scale=scale), gradients, residual)
        result = reducer.reduce(with_leaves(updates, totals), state.inner, params, **extra_args)
        # `allreduce` keeps what is finite; beside a residual nobody shall take half a step.
        means = nan_unless(result.finite, floating_leaves(result.updates))
        sent = floating_leaves(result.sent)
        unsent = []
        for i, output in enumerate(floating_leaves(updates if like is None else like)):
            remaining = totals[i] - sent[i]
            if output.dtype == jnp.float16:  # what was sent and does not fit the output
                remaining += means[i] - clipped(means[i], output.dtype)
            old = residual[i]
            if every > 1:  # what was not added is still to come
                remaining += jnp.where(due, 0, old.astype(remaining.dtype))
            unsent.append(jnp.where(result.finite, remaining.astype(old.dtype), old))
        new = ErrorFeedbackState(
            residual=jax.tree.structure(state.residual).unflatten(unsent),
            inner=result.state,
            count=jnp.where(result.finite, optax.safe_increment(state.count), state.count),
            owner=jnp.where(result.finite, owner_id(axis_name), state.owner),
        )
        return result._replace(updates=with_leaves(updates, means), state=new)

    def count_bytes(params: PyTree, replicas: int | None, step: int | None) -> CompressionStats:
        # The inner reducer gets float32, whatever the gradients are.
        counted = reducer.bytes(in_compute_dtype(params), replicas=replicas, step=step)
        return counted.instead_of(params)

    return Reducer(init, reduce, axis_name, count_bytes=count_bytes, keeps_residual=True)


def _check_reducer(reducer: Any) -> None:
    """Refuses what does not say what a replica sent, or keeps what it does not send already."""
    if not isinstance(reducer, Reducer):
        fix = "Call one first: jaxcomp.error_feedback(jaxcomp.allreduce(axis_name='data'))."
        if isinstance(reducer, optax.GradientTransformation):
            fix = (
                "Put it around the reducer of a chain; wrap an average of yours in jaxcomp.Reducer."
            )
        raise ValueError(
            "error_feedback needs a reducer, which says what a replica sent, got "
            f"{shown(reducer)}. {fix}"
        )
    if reducer.keeps_residual:
        raise ValueError(
            f"{reducer!r} keeps a residual of its own, and error_feedback around it would add what "
            "was not sent a second time. Use it as it is, or give powersgd error_feedback=False."
        )


def _add(gradient: Array, residual: Array, scale: Any) -> Array:
    """Adds them in float32, or in the gradient's own dtype where that is wider."""
    dtype = compute_dtype(gradient.dtype)
    if not (isinstance(scale, (int, float)) and scale == 1):
        residual = residual * jnp.asarray(scale, residual.dtype)
    return gradient.astype(dtype) + residual.astype(dtype)
