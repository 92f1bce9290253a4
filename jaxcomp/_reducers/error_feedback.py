"""Adds a residual to a reducer that does not send the whole gradient.

It is for reducers that keep no residual themselves, such as `quantized_allreduce`, a 16-bit
`allreduce` or a user's own; `powersgd` has its own residual, in the shape that its factors allow.
The wrapper knows nothing of how a reducer compresses: a `Reduction` says what this replica sent,
and the rest is kept.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcomp._base.checks import check_function, check_int, check_number
from jaxcomp._base.leaves import (
    RESIDUAL_DTYPES,
    checked_dtype,
    compute_dtype,
    floating_leaves,
    in_compute_dtype,
    is_floating,
    leaf_dtype,
    limited,
    nan_unless,
    with_leaves,
)
from jaxcomp._base.stats import CompressionStats
from jaxcomp._base.typing import Array, DType, PyTree, Schedule
from jaxcomp._mesh.collectives import as_local, axis_size, local_if_bound, owner_id
from jaxcomp._mesh.per_replica import no_owner
from jaxcomp._reducers.reducer import Reducer, Reduction, check_reducer
from jaxcomp._reducers.transformation import shows_its_call


class ErrorFeedbackState(NamedTuple):
    """Holds the state of `error_feedback`."""

    residual: PyTree  # floating leaf: the part not sent yet, shape of the leaf; per replica
    inner: PyTree  # state of the wrapped reducer
    # int32 scalar: finite updates seen; replicated
    count: Array  # pyright: ignore[reportIncompatibleMethodOverride]
    # float32 scalar: id of the replica that owns the residual, 0 if all share it; per replica
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
    r"""Adds a residual to a reducer: the unsent part of a gradient is added to the next gradient.

    With local gradient :math:`g_w`, residual :math:`e_w`, the reducer :math:`\mathcal{C}`, and
    :math:`s_w`, the contribution that this replica sent:

    .. math::
        m_w = g_w + e_w, \qquad \text{output} = \mathcal{C}(m) = \frac{1}{W} \sum_w s_w, \qquad
        e_w = m_w - s_w

    So nothing is lost: the mean residual is the mean of :math:`m` minus the output, whatever the
    reducer rounds. One exception: a 16-bit all-reduce rounds its sums, and no residual holds that
    rounding. The reducer gets the gradients in float32 (or wider, if they are wider). If an output
    is not finite, all outputs are NaN and the state stays as it was, bit for bit.

    Args:
      reducer: A reducer of this package, or a `Reducer` of your own; it returns what a replica
        sent. (The residual of torch's hooks, :math:`m_w` minus the output, has the same mean, but
        each replica's deviation from the mean grows like the square root of the step count.)
      every: Add the residual to the gradient only in every `every`-th update; it accumulates in
        between.
      decay: Factor of the residual when it is added: a number in [0, 1] or an Optax schedule of the
        update count. A value below 1 loses a part of the residual. Neither `decay` nor `every`
        improved a run (docs/convergence.md).
      residual_dtype: The dtype of the residual: bfloat16 or float32; None for float32 or wider.

    Returns:
      A reducer. Its state is an `ErrorFeedbackState`.

    Raises:
      ValueError: If an argument is unusable, or the reducer already keeps a residual, as `powersgd`
        does by default; at tracing time, if the state belongs to other leaves.

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
    fix = "Call one first: jaxcomp.error_feedback(jaxcomp.allreduce(axis_name='data'))."
    if isinstance(reducer, optax.GradientTransformation):
        fix = "Put it around the reducer of a chain; wrap an average of yours in jaxcomp.Reducer."
    if check_reducer(reducer, fix).keeps_residual:
        raise ValueError(
            f"{reducer!r} keeps a residual of its own, and error_feedback around it would add the "
            "unsent part a second time. Use it as it is, or pass error_feedback=False to powersgd."
        )
    axis_name = reducer.axis_name
    every = check_int("every", every, 1)
    if callable(decay):
        check_function("decay", decay, "count")
    else:
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

    def count_bytes(params: PyTree, replicas: int | None, step: int | None) -> CompressionStats:
        # The inner reducer gets float32 or wider, whatever the gradients' dtype.
        counted = reducer.bytes(in_compute_dtype(params), replicas=replicas, step=step)
        return counted.instead_of(params)

    step = functools.partial(_step, reducer, every, decay)
    return Reducer(init, step, axis_name, count_bytes=count_bytes, keeps_residual=True)


def _step(
    reducer: Reducer,
    every: int,
    decay: Any,
    updates: PyTree,
    state: ErrorFeedbackState,
    params: PyTree | None = None,
    *,
    like: PyTree | None = None,
    **extra_args: Any,
) -> Reduction:
    """Makes one update, of which the docstring of `error_feedback` has the equations."""
    axis_name = reducer.axis_name
    residual = as_local(jax.tree.leaves(state.residual), axis_name)
    scale: Any = decay
    if callable(decay):
        scale = check_number("decay", decay(state.count), 0, 1)
    # Counted from 1, so that a whole period comes before the first residual is added.
    due = (state.count + 1) % every == 0
    if every > 1:
        scale = jnp.where(due, scale, 0.0)

    def with_residual(gradient: Array, residual: Array) -> Array:
        """Adds ``scale * residual``, in float32 or the gradient's wider dtype."""
        dtype = compute_dtype(gradient.dtype)
        if not (isinstance(scale, (int, float)) and scale == 1):
            residual = residual * jnp.asarray(scale, residual.dtype)
        return gradient.astype(dtype) + residual.astype(dtype)

    totals = jax.tree.map(with_residual, floating_leaves(updates), residual)
    result = reducer.reduce(with_leaves(updates, totals), state.inner, params, **extra_args)
    # `allreduce` returns the finite leaves of a partly finite step. With a residual a step is
    # taken whole or not at all.
    means = nan_unless(result.finite, floating_leaves(result.updates))
    sent = floating_leaves(result.sent)
    unsent = []
    values = sum(total.size for total in totals)
    for i, output in enumerate(floating_leaves(updates if like is None else like)):
        remaining = totals[i] - sent[i]
        if jnp.finfo(output.dtype).bits < 32:  # sent, but perhaps beyond the output's range
            largest = float(jnp.finfo(output.dtype).max)
            within = jnp.clip(means[i], -largest, largest)
            remaining += means[i] - within
            means[i] = within
        old = residual[i]
        if every > 1:  # keep the residual that was not added
            remaining += jnp.where(due, 0, old.astype(remaining.dtype))
        remaining = limited(remaining, values, axis_size(axis_name))
        unsent.append(jnp.where(result.finite, remaining.astype(old.dtype), old))
    new = ErrorFeedbackState(
        residual=jax.tree.structure(state.residual).unflatten(unsent),
        inner=result.state,
        count=jnp.where(result.finite, optax.safe_increment(state.count), state.count),
        owner=jnp.where(result.finite, owner_id(axis_name), state.owner),
    )
    return result._replace(updates=with_leaves(updates, means), state=new)
