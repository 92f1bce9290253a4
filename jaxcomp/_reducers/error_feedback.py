"""A residual for a reducer that does not send all it is given."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcomp._base.leaves import checked_residual_dtype, compute_dtype, leaf_dtype
from jaxcomp._base.stats import CompressionStats
from jaxcomp._base.typing import Array, AxisName, DType, PyTree
from jaxcomp._mesh.axes import as_local, is_bound
from jaxcomp._mesh.per_replica import everybodys, of_reducer, this_replica
from jaxcomp._reducers.contract import (
    Reduction,
    Transformation,
    all_finite,
    bytes_of,
    call_text,
    reducer_if_mapped,
    reduction_of,
    shown,
)
from jaxcomp._reducers.opening import (
    Field,
    check_reduce_first,
    fitted,
    open_step,
    other_state,
)


class ErrorFeedbackState(NamedTuple):
    """State of `error_feedback`."""

    # Floating leaf: what was not sent yet, shape of the leaf; per replica.
    residual: PyTree
    inner: PyTree  # the reducer's own state
    # float32 scalar: whose residual it is, 0 for everybody's; per replica. () if no axis is known.
    owner: PyTree = ()

    per_replica = ("residual", "owner")


def error_feedback(
    reducer: optax.GradientTransformation,
    *,
    residual_dtype: DType | None = None,
    reduce_first: AxisName | None = None,
) -> Transformation:
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
      reducer: A reducer of this package, or a `Reducer` of your own. Of any other transformation
        it is not known what a replica sent; there the residual is :math:`m_w` minus the output, as
        in torch's hooks. Its mean is right, but each replica's deviation from the mean is never
        sent, and grows like the square root of the step count.
      residual_dtype: How the residual is stored: bfloat16 or float32; None for float32.
      reduce_first: A fast axis (or axes) over which gradients are averaged exactly beforehand. Give
        it here and not to the reducer: residuals are then equal along the fast axis, and only the
        slow axis concerns `state_specs`, `shard_state` and `consolidate`.

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
      >>> step = jax.vmap(tx.update, in_axes=(0, None), out_axes=(None, 0), axis_name="data")
      >>> means, state = step(grads, state)
      >>> [round(float(x), 3) for x in means["w"]]  # 0.003 is below half a level of 1/127
      [1.0, 0.0, 2.0, 2.0]
      >>> [round(float(x), 3) for x in state.residual["w"][0]]
      [0.0, 0.003, 0.0, 0.0]

    References:
      Karimireddy et al.: Error Feedback Fixes SignSGD and other Gradient Compression Schemes.
      ICML 2019.
    """
    made_by = call_text("error_feedback", locals())
    dtype = checked_residual_dtype(residual_dtype)
    axis_name = getattr(reducer, "axis_name", None)
    check_reduce_first(reduce_first, axis_name or ())
    inner = reduction_of(reducer)

    def init(params: PyTree) -> ErrorFeedbackState:
        def zeros(leaf: Any) -> Any:
            kind = leaf_dtype(leaf)
            if not jnp.issubdtype(kind, jnp.floating):
                return optax.MaskedNode()
            return jnp.zeros_like(leaf, dtype=dtype or compute_dtype(kind))

        residual = jax.tree.map(zeros, params)
        if axis_name and is_bound(axis_name):
            # init() called inside the mapped function: a scan can then carry the state.
            residual = as_local(residual, axis_name)
        owner = everybodys(axis_name) if axis_name else ()
        inner_state = reducer.init(params)
        _refuse_second_residual(reducer, inner_state)
        return ErrorFeedbackState(residual, inner_state, owner)

    def reduce(
        updates: PyTree,
        state: ErrorFeedbackState,
        params: PyTree | None = None,
        *,
        weight: Any = None,
        **extra_args: Any,
    ) -> Reduction:
        if not isinstance(state, ErrorFeedbackState):
            raise other_state("error_feedback", "ErrorFeedbackState", state)
        step = open_step(updates, axis_name, reduce_first, weight)
        residual = _fitted_residual(step.tree(step.arrays), state.residual)
        if axis_name:
            residual = as_local(residual, axis_name)
        kept = [residual[i] for i in step.positions]
        totals = [_add(g, e) for g, e in zip(step.arrays, kept, strict=True)]
        if step.weight is not None:
            extra_args["weight"] = step.weight
        result = inner(step.tree(totals), state.inner, params, **extra_args)

        zipped = zip(step.beside(result.updates), step.arrays, strict=True)
        means = [mean.astype(gradient.dtype) for mean, gradient in zipped]
        # A float16 output can overflow where the float32 mean did not.
        finite = result.finite & all_finite(means)
        sent = step.beside(result.sent)
        owner = as_local(state.owner, axis_name) if axis_name else ()
        old = ErrorFeedbackState(step.treedef.unflatten(residual), state.inner, owner)
        for i, e, total, own in zip(step.positions, kept, totals, sent, strict=True):
            residual[i] = (total - own).astype(e.dtype)
        if axis_name and not isinstance(owner, tuple):
            owner = this_replica(axis_name)
        new = ErrorFeedbackState(step.treedef.unflatten(residual), result.state, owner)
        return step.close(means, new, finite, sent=sent, old=old)

    def count_bytes(params: PyTree, replicas: int | None, step: int | None) -> CompressionStats:
        # The inner reducer gets float32, whatever the gradients are.
        wide = jax.tree.map(_widened, params)
        counted = bytes_of(reducer, wide, replicas, step)
        return counted.instead_of(params)

    return reducer_if_mapped(init, reduce, axis_name, made_by, count_bytes)


def _refuse_second_residual(reducer: Any, state: PyTree) -> None:
    """Refuses a reducer that keeps what it does not send already: two would grow without bound.

    Raises:
      ValueError: With the fix.
    """

    def with_residual(node: Any) -> bool:
        return of_reducer(node) and hasattr(node, "residual")

    for node in jax.tree.leaves(state, is_leaf=with_residual):
        if with_residual(node) and jax.tree.leaves(node.residual):
            raise ValueError(
                f"{shown(reducer)} keeps a residual of its own, and error_feedback around it would "
                "add what was not sent a second time. Use it as it is, or give powersgd "
                "error_feedback=False."
            )


def _widened(leaf: Any) -> jax.ShapeDtypeStruct:
    dtype = leaf_dtype(leaf)
    floating = jnp.issubdtype(dtype, jnp.floating)
    return jax.ShapeDtypeStruct(np.shape(leaf), compute_dtype(dtype) if floating else dtype)


def _add(gradient: Array, residual: Array) -> Array:
    """Their sum in float32, or in the gradient's own dtype where that is wider."""
    dtype = compute_dtype(gradient.dtype)
    return gradient.astype(dtype) + residual.astype(dtype)


def _fitted_residual(updates: PyTree, residual: PyTree) -> list[Any]:
    """The leaves of `residual` beside those of `updates`.

    Raises:
      ValueError: Listing every leaf that does not fit, with the fix.
    """
    shapes: list[tuple[int, ...] | None] = [
        np.shape(leaf) if jnp.issubdtype(leaf.dtype, jnp.floating) else None
        for leaf in jax.tree.leaves(updates)
    ]
    field = Field("residual", residual, shapes)
    return fitted("ErrorFeedbackState", updates, [field], "Otherwise make a new state.")[0]
