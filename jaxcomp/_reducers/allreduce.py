"""The all-reduce, narrowed on the wire if asked."""

from __future__ import annotations

from typing import Any

import optax

from jaxcomp._base.checks import check_axis_name
from jaxcomp._base.leaves import checked_dtype, floating_leaves, with_leaves
from jaxcomp._base.stats import CompressionStats, dense_stats
from jaxcomp._base.typing import AxisName, DType, PyTree
from jaxcomp._mesh.collectives import mean_each
from jaxcomp._reducers.reducer import Reducer, Reduction
from jaxcomp._reducers.transformation import shows_its_call


@shows_its_call
def allreduce(
    *,
    axis_name: AxisName,
    comm_dtype: DType | None = None,
) -> Reducer:
    r"""Averages gradients over the replicas in one all-reduce.

    .. math:: \bar g = \frac{1}{W} \sum_{w=1}^{W} g_w

    In front of a reducer along a slow axis, it averages along a fast one: ``optax.chain(
    allreduce(axis_name="fast"), powersgd(axis_name="slow"))``.

    torch's default hook, and with `comm_dtype` its ``fp16_compress_hook`` / ``bf16_compress_hook``.

    Args:
      axis_name: The mapped axis (or axes) along which the replicas lie.
      comm_dtype: What goes on the wire: None for the gradients' own dtype (one all-reduce for each
        dtype present), or bfloat16, float16, float32.

    Returns:
      A stateless transformation from local gradients to their mean, in the gradients' dtypes.

    Raises:
      ValueError: If an argument is unusable; at tracing time, if the axis is not bound, a gradient
        is not floating, or was already reduced over the axis.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomp
      >>> tx = jaxcomp.allreduce(axis_name="data")
      >>> grads = {"w": jnp.array([[1.0, 2.0], [3.0, 4.0]])}  # two replicas
      >>> jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="data")(grads)["w"].tolist()
      [[2.0, 3.0], [2.0, 3.0]]
    """
    check_axis_name(axis_name)
    wire = checked_dtype("comm_dtype", comm_dtype)

    def reduce(
        updates: PyTree,
        state: optax.EmptyState,
        params: PyTree | None = None,
        *,
        like: PyTree | None = None,
        **extra_args: Any,
    ) -> Reduction:
        del params, extra_args
        # Weighted gradients are float32, but go out in the dtypes that they had.
        dtypes = [wire or x.dtype for x in floating_leaves(updates if like is None else like)]
        reduced = mean_each(floating_leaves(updates), axis_name, dtypes)
        # There is no state to protect, and what is finite stays so, as with any all-reduce.
        return Reduction(
            updates=with_leaves(updates, reduced.means),
            state=state,
            sent=with_leaves(updates, reduced.sent),
            finite=reduced.finite,
        )

    def count_bytes(params: PyTree, replicas: int | None, step: int | None) -> CompressionStats:
        del replicas, step
        return dense_stats(params, wire)

    return Reducer(optax.init_empty_state, reduce, axis_name, count_bytes=count_bytes)
