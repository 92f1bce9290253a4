"""Averages gradients with 8-bit integers on the wire and sums in float32.

Every leaf is cut into one share for each replica, and every share into blocks, each with a scale.
`jaxcomp._mesh.shares` rounds and sends them. This file only chooses the blocks, and counts the
bytes that they take.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import optax

from jaxcomp._base.checks import check_int
from jaxcomp._base.leaves import floating_leaves, nan_unless, with_leaves
from jaxcomp._base.stats import CompressionStats, dense_stats, needed_replicas
from jaxcomp._base.typing import AxisName, PyTree
from jaxcomp._mesh.collectives import axis_size
from jaxcomp._mesh.shares import BlockLayout, mean_by_shares
from jaxcomp._reducers.reducer import Reducer, Reduction
from jaxcomp._reducers.transformation import shows_its_call


@shows_its_call
def quantized_allreduce(
    *,
    axis_name: AxisName,
    block_size: int | None = 256,
) -> Reducer:
    r"""Averages gradients with int8 on the wire: a quarter of float32's bytes, in two collectives.

    For a block :math:`x` with scale :math:`s = \max |x| / 127`,

    .. math::
        \mathcal{Q}(x) = s \cdot \mathrm{round}(x / s), \qquad
        \bar g = \mathcal{Q}\Big(\frac{1}{W} \sum_{w=1}^{W} \mathcal{Q}(g_w)\Big)

    The inner quantisation is sent in an all-to-all, so that each replica sums one share of every
    leaf in float32. The outer quantisation is sent in an all-gather. Scales are sent with the
    integers.

    The error of a value is at most 1/127 of its block's largest magnitude (averaged over the
    replicas); each stage adds half of it. Rounding to nearest is biased, so put `error_feedback`
    around it for training.

    If a gradient is not finite on any replica, all outputs are NaN on every replica.

    torch's ``quantization_pertensor_hook`` (here ``block_size=None``) and
    ``quantization_perchannel_hook`` send every replica's whole gradient to every other replica:
    ``W / 2`` times as many bytes.

    Args:
      axis_name: The mapped axis (or axes) along which the replicas lie.
      block_size: The largest number of values that share a scale; None for one scale in each share
        of each leaf. A block never spans two leaves. With 256, scales add 1.6% to the bytes.

    Returns:
      A stateless transformation from local gradients to outputs in the gradients' dtypes, equal on
      every replica.

    Raises:
      ValueError: If an argument is unusable; at tracing time, if the axis is not bound, or a
        gradient is not floating or was already reduced over the axis.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomp
      >>> tx = jaxcomp.quantized_allreduce(axis_name="data")
      >>> grads = {"w": jnp.array([[1.27, 0.5], [-1.27, 0.104]])}  # two replicas
      >>> means, _ = jax.vmap(tx.update, in_axes=(0, None), axis_name="data")(
      ...     grads, tx.init(grads))
      >>> [round(float(x), 3) for x in means["w"][0]]
      [0.0, 0.302]

    References:
      Alistarh et al.: QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding.
      NeurIPS 2017.
    """
    if block_size is not None:
        block_size = check_int("block_size", block_size, 1)

    def reduce(
        updates: PyTree, state: optax.EmptyState, params: PyTree | None = None, **extra_args: Any
    ) -> Reduction:
        del params, extra_args
        replicas = axis_size(axis_name)
        # Also for float64, because eight bits resolve less than float32.
        arrays = [x.astype(jnp.float32) for x in floating_leaves(updates)]
        layouts = [BlockLayout.of(x.size, replicas, block_size) for x in arrays]
        reduced = mean_by_shares(arrays, layouts, axis_name)
        return Reduction(
            updates=with_leaves(updates, nan_unless(reduced.finite, reduced.means)),
            state=state,
            sent=with_leaves(updates, reduced.sent),
            finite=reduced.finite,
        )

    def count_bytes(params: PyTree, replicas: int | None, step: int | None) -> CompressionStats:
        del step
        replicas = needed_replicas(replicas)
        leaves = []
        for leaf in dense_stats(params).leaves:
            layout = BlockLayout.of(leaf.size, replicas, block_size)
            leaves.append(dataclasses.replace(leaf, bytes_after=layout.wire_bytes))
        return CompressionStats(tuple(leaves))

    return Reducer(optax.init_empty_state, reduce, axis_name, count_bytes=count_bytes)
