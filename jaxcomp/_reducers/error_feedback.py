"""A residual for a reducer that does not send all it is given."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcomp._base.checks import check_int, check_number, names_checked
from jaxcomp._base.leaves import (
    RESIDUAL_DTYPES,
    checked_dtype,
    clipped,
    compute_dtype,
    floating_leaves,
    in_compute_dtype,
    leaf_dtype,
    saturated,
    with_leaves,
)
from jaxcomp._base.stats import CompressionStats
from jaxcomp._base.typing import Array, DType, PyTree, Schedule
from jaxcomp._mesh.collectives import as_local, local_if_bound, owner_id
from jaxcomp._mesh.per_replica import is_reducer_state, no_owner
from jaxcomp._reducers.reducer import Reducer, Reduction
from jaxcomp._reducers.transformation import call_text, shown


class ErrorFeedbackState(NamedTuple):
    """State of `error_feedback`."""

    residual: PyTree  # floating leaf: what was not sent yet, shape of the leaf; per replica
    inner: PyTree  # the reducer's own state
    # int32 scalar: finite updates seen; replicated
    count: Array  # pyright: ignore[reportIncompatibleMethodOverride]
    # float32 scalar: whose the residual is, 0 for everybody's; per replica
    owner: Any = np.zeros((), np.float32)

    per_replica = ("residual", "owner")


@names_checked
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
      ValueError: If an argument is unusable; from ``init``, if the reducer keeps a residual of its
        own, as `powersgd` does by default; at tracing time, if the state belongs to other leaves.

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
    made_by = call_text(
        "error_feedback",
        {"reducer": reducer, "every": every, "decay": decay, "residual_dtype": residual_dtype},
    )
    _check_reducer(reducer)
    axis_name = reducer.axis_name
    every = check_int("every", every, 1)
    if not callable(decay):
        decay = check_number("decay", decay, 0, 1)
    dtype = checked_dtype("residual_dtype", residual_dtype, RESIDUAL_DTYPES)

    def init(params: PyTree) -> ErrorFeedbackState:
        def zeros(leaf: Any) -> Any:
            if not jnp.issubdtype(leaf_dtype(leaf), jnp.floating):
                return optax.MaskedNode()
            return jnp.zeros_like(leaf, dtype=dtype or compute_dtype(leaf_dtype(leaf)))

        inner = reducer.init(params)
        _refuse_second_residual(reducer, inner)
        return ErrorFeedbackState(
            residual=local_if_bound(jax.tree.map(zeros, params), axis_name),
            inner=inner,
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
        scale: Any = decay(state.count) if callable(decay) else decay
        due = (state.count + 1) % every == 0
        if every > 1:
            scale = jnp.where(due, scale, 0.0)
        gradients = floating_leaves(updates)
        totals = [_add(g, e, scale) for g, e in zip(gradients, residual, strict=True)]
        result = reducer.reduce(with_leaves(updates, totals), state.inner, params, **extra_args)
        means = floating_leaves(result.updates)
        sent = floating_leaves(result.sent)
        outputs = []
        unsent = []
        for i, output in enumerate(floating_leaves(updates if like is None else like)):
            # `allreduce` keeps what is finite; beside a residual nobody shall take half a step.
            mean = jnp.where(result.finite, means[i], jnp.nan)
            outputs.append(saturated(mean, output.dtype))
            remaining = totals[i] - sent[i]
            if output.dtype == jnp.float16:  # what was sent and does not fit the output
                remaining += mean - clipped(mean, output.dtype)
            if every > 1:  # what was not added is still to come
                remaining += jnp.where(due, 0, residual[i].astype(remaining.dtype))
            old = residual[i]
            unsent.append(jnp.where(result.finite, remaining.astype(old.dtype), old))
        new = ErrorFeedbackState(
            residual=jax.tree.structure(state.residual).unflatten(unsent),
            inner=result.state,
            count=jnp.where(result.finite, optax.safe_increment(state.count), state.count),
            owner=jnp.where(result.finite, owner_id(axis_name), state.owner),
        )
        return result._replace(updates=with_leaves(updates, outputs), state=new)

    def count_bytes(params: PyTree, replicas: int | None, step: int | None) -> CompressionStats:
        # The inner reducer gets float32, whatever the gradients are.
        counted = reducer.bytes(in_compute_dtype(params), replicas=replicas, step=step)
        return counted.instead_of(params)

    return Reducer(init, reduce, axis_name, made_by=made_by, count_bytes=count_bytes)


def _check_reducer(reducer: Any) -> None:
    """Refuses what does not say what a replica sent."""
    if isinstance(reducer, Reducer):
        return
    fix = "Call one first: jaxcomp.error_feedback(jaxcomp.allreduce(axis_name='data'))."
    if isinstance(reducer, optax.GradientTransformation):
        fix = "Put it around the reducer of a chain; wrap an average of yours in jaxcomp.Reducer."
    raise ValueError(
        f"error_feedback needs a reducer, which says what a replica sent, got {shown(reducer)}. "
        f"{fix}"
    )


def _refuse_second_residual(reducer: Any, state: PyTree) -> None:
    """Refuses a reducer that keeps what it does not send already: two would grow without bound."""

    def with_residual(node: Any) -> bool:
        return is_reducer_state(node) and hasattr(node, "residual")

    for node in jax.tree.leaves(state, is_leaf=with_residual):
        if with_residual(node) and jax.tree.leaves(node.residual):
            raise ValueError(
                f"{shown(reducer)} keeps a residual of its own, and error_feedback around it would "
                "add what was not sent a second time. Use it as it is, or give powersgd "
                "error_feedback=False."
            )


def _add(gradient: Array, residual: Array, scale: Any) -> Array:
    """Adds them in float32, or in the gradient's own dtype where that is wider."""
    dtype = compute_dtype(gradient.dtype)
    if not (isinstance(scale, (int, float)) and scale == 1):
        residual = residual * jnp.asarray(scale, residual.dtype)
    return gradient.astype(dtype) + residual.astype(dtype)
