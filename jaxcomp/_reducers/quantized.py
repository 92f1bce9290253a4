"""An all-reduce with 8-bit integers on the wire and float32 sums in between.

Every leaf is cut into one share for each replica and every share into blocks with a scale of their
own; `_shares` has how they are rounded and sent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomp._base.checks import check_axis_name, check_int
from jaxcomp._base.stats import CompressionStats, dense_leaves, needed_replicas
from jaxcomp._base.typing import Array, AxisName, PyTree
from jaxcomp._mesh.axes import axis_size
from jaxcomp._mesh.collectives import Reduced, replica_index
from jaxcomp._mesh.shares import BlockLayout, ExactLayout, Layout, mean_by_shares
from jaxcomp._mesh.weights import Weight, weighted_mean
from jaxcomp._reducers.contract import (
    Reducer,
    Reduction,
    call_text,
)
from jaxcomp._reducers.opening import check_reduce_first, open_step, other_state

_ROUNDINGS = ("nearest", "stochastic")
# By how much a small weight may enlarge the rounding that a replica answers for.
_MOST = 8.0


class QuantizedState(NamedTuple):
    """State of `quantized_allreduce`."""

    # int32 scalar: finite updates seen, from which stochastic rounding draws; replicated
    count: Array  # pyright: ignore[reportIncompatibleMethodOverride]

    per_replica = ()


def quantized_allreduce(
    *,
    axis_name: AxisName,
    bits: int = 8,
    block_size: int | None = 256,
    rounding: str = "nearest",
    seed: int = 0,
    reduce_first: AxisName | None = None,
) -> Reducer:
    r"""Averages gradients with int8 on the wire: a quarter of float32's bytes, in two collectives.

    For a block :math:`x` with scale :math:`s = \max |x| / 127`,

    .. math::
        \mathcal{Q}(x) = s \cdot \mathrm{round}(x / s), \qquad
        \bar g = \mathcal{Q}\Big(\frac{1}{W} \sum_{w=1}^{W} \mathcal{Q}(g_w)\Big)

    The inner quantisation goes out in an all-to-all, which gives each replica one share of every
    leaf to sum in float32; the outer one in an all-gather. The scales travel with the integers.

    With ``rounding="nearest"`` no value is off by more than 1/127 of its block's largest magnitude
    (averaged over the replicas): half of that from each stage. Rounding to nearest is biased: put
    `error_feedback` around it for training. ``rounding="stochastic"`` is unbiased, with up to twice
    the error.

    With ``weight=``, `error_feedback` repays the second rounding in full as long as no replica
    counts less than an eighth of the mean.

    If a gradient is not finite on any replica, all outputs are NaN on every replica and the state
    stays as it was.

    torch's ``quantization_pertensor_hook`` (here ``block_size=None``) and its per-channel sister
    send every replica's whole gradient to every other, ``W / 2`` times as many bytes.

    Args:
      axis_name: The mapped axis (or axes) along which the replicas lie.
      bits: 8, the integers there are collectives for.
      block_size: Values that share a scale, at most; None for one scale in each leaf's share of a
        replica. Blocks never span two leaves. 256 costs 1.6% more bytes for the scales.
      rounding: "nearest" or "stochastic".
      seed: Seeds stochastic rounding. Every replica and every update draws its own.
      reduce_first: A fast axis (or axes) over which gradients are averaged exactly beforehand.

    Returns:
      A transformation from local gradients to outputs in the gradients' dtypes, equal on every
      replica. Its state is a `QuantizedState`.

    Raises:
      ValueError: If an argument is unusable; at tracing time, if the axis is not bound, a gradient
        is not floating, or was already reduced over the axis.

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
    made_by = call_text("quantized_allreduce", locals())
    check_axis_name(axis_name)
    check_reduce_first(reduce_first, axis_name)
    if check_int("bits", bits, 1) != 8:
        raise ValueError(
            f"`bits` must be 8, the only integers on the wire so far, got bits={bits}."
        )
    if block_size is not None:
        block_size = check_int("block_size", block_size, 1)
    if rounding not in _ROUNDINGS:
        raise ValueError(f"`rounding` must be one of {', '.join(_ROUNDINGS)}, got {rounding!r}.")
    seed = seed if hasattr(seed, "aval") else check_int("seed", seed, 0)

    def init(params: PyTree) -> QuantizedState:
        del params
        return QuantizedState(jnp.zeros([], jnp.int32))

    def reduce(
        updates: PyTree,
        state: QuantizedState,
        params: PyTree | None = None,
        *,
        weight: Any = None,
        **extra_args: Any,
    ) -> Reduction:
        del params, extra_args
        if not isinstance(state, QuantizedState):
            raise other_state("quantized_allreduce", "QuantizedState", state)
        step = open_step(updates, axis_name, reduce_first, weight)
        key = None
        if rounding == "stochastic":
            key = jax.random.fold_in(jax.random.key(seed), state.count)
            key = jax.random.fold_in(key, replica_index(axis_name))
        arrays = [x.astype(jnp.float32) for x in step.arrays]
        replicas = axis_size(axis_name)

        def mean(parts: list[Array]) -> Reduced:
            layouts: list[Layout] = [BlockLayout.of(x.size, replicas, block_size) for x in arrays]
            # A weight that rides along, which no integer could hold.
            layouts += [ExactLayout(x.size, replicas, x.dtype) for x in parts[len(arrays) :]]
            return mean_by_shares(parts, layouts, axis_name, key)

        reduced, weight = weighted_mean(mean, arrays, step.weight, axis_name)
        sent = reduced.sent if weight is None else _attributed(reduced.sent, arrays, weight)
        new = QuantizedState(jnp.asarray(optax.safe_increment(state.count)))
        return step.close(reduced.means, new, reduced.finite, sent=sent, old=state)

    def count_bytes(params: PyTree, replicas: int | None, step: int | None) -> CompressionStats:
        del step
        needed = needed_replicas(replicas)
        return CompressionStats.of(
            dataclasses.replace(
                leaf, bytes_after=BlockLayout.of(leaf.size, needed, block_size).wire_bytes
            )
            for leaf in dense_leaves(params)
        )

    return Reducer(init, reduce, axis_name, made_by=made_by, count_bytes=count_bytes)


def _attributed(sent: Sequence[Array], arrays: Sequence[Array], weight: Weight) -> list[Array]:
    """What this replica sent, with no more of the shares' rounding than it can pay back.

    The rounding of a mean counts as that of the replica that summed it, which its weight divides.
    That of a replica that counts little today would be many times its own values, and count in
    full in its residual tomorrow.
    """
    assert weight.mean is not None  # a first mean has brought it
    most = jnp.minimum(1, _MOST * weight.own / weight.mean)
    part = jnp.where(weight.own == 0, 1, most)  # of weight 0 it is divided by the mean already
    return [x + part * (y - x) for x, y in zip(arrays, sent, strict=True)]
