"""Averages gradients exactly, or in a narrower dtype on the wire.

`allreduce` is the baseline for every compressed reducer, the first level of a chain of two, and the
reducer of local SGD when none is passed. It keeps no state: nothing that it rounds comes back in a
later step, for which `error_feedback` can be put around it.
"""

from __future__ import annotations

from typing import Any

import optax

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

    Put it before a reducer along a slow axis to average along a fast axis first:
    ``optax.chain(allreduce(axis_name="fast"), powersgd(axis_name="slow"))``.

    This is torch's default hook; with `comm_dtype` it is its ``fp16_compress_hook`` or
    ``bf16_compress_hook``.

    Args:
      axis_name: The mapped axis (or axes) along which the replicas lie.
      comm_dtype: The dtype on the wire: bfloat16, float16 or float32; None for the gradients' own
        dtypes (one all-reduce for each dtype).

    Returns:
      A stateless transformation from local gradients to their mean, in the gradients' dtypes.

    Raises:
      ValueError: If an argument is unusable; at tracing time, if the axis is not bound, or a
        gradient is not floating or was already reduced over the axis.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomp
      >>> tx = jaxcomp.allreduce(axis_name="data")
      >>> grads = {"w": jnp.array([[1.0, 2.0], [3.0, 4.0]])}  # two replicas
      >>> jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="data")(grads)["w"].tolist()
      [[2.0, 3.0], [2.0, 3.0]]
    """
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
        # Weighted gradients are float32, but are sent in the dtypes of the original gradients.
        dtypes = [wire or x.dtype for x in floating_leaves(updates if like is None else like)]
        reduced = mean_each(floating_leaves(updates), axis_name, dtypes)
        # There is no state to protect, so finite leaves stay finite, as in any all-reduce.
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
