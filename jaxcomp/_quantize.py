"""An all-reduce with 8-bit integers on the wire and float32 sums in between.

Every leaf is cut into one share for each replica and every share into blocks with a scale of their
own. Quantise, send share ``k`` to replica ``k``, which sums it in float32, quantises the mean, and
sends it to everybody. A sum of int8 values on the wire would overflow; here none is taken.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomp._checks import check_axis_name, check_int
from jaxcomp._collectives import axis_size, exchange, gather, replica_index
from jaxcomp._gradients import reducible, replaced
from jaxcomp._reduction import Reducer, Reduction, averaged_first, check_reduce_first
from jaxcomp._typing import Array, AxisName, PyTree

_LEVELS = 127  # -127 .. 127: symmetric, so that a gradient and its negative are treated alike
_SCALE_BYTES = 4
_ROUNDINGS = ("nearest", "stochastic")


class QuantizedState(NamedTuple):
    """State of `quantized_allreduce`."""

    # int32 scalar: finite updates seen, from which stochastic rounding draws; replicated
    count: Array  # pyright: ignore[reportIncompatibleMethodOverride]

    per_replica = ()


@dataclasses.dataclass(frozen=True)
class BlockLayout:
    """How a leaf of `size` values is cut: ``(replicas, blocks, length)``, padded with zeros."""

    size: int
    replicas: int
    blocks: int
    length: int

    @classmethod
    def of(cls, size: int, replicas: int, block_size: int | None) -> BlockLayout:
        """Blocks of at most `block_size` values, as equal as possible so that little is padded."""
        share = -(-size // replicas)
        blocks = -(-share // (block_size or max(share, 1)))
        return cls(size, replicas, blocks, -(-share // max(blocks, 1)))

    @property
    def wire_bytes(self) -> int:
        """Bytes of the whole leaf with its scales, in either of the two stages."""
        return self.replicas * self.blocks * (self.length + _SCALE_BYTES)

    def cut(self, leaf: Array) -> Array:
        """From any shape to blocks."""
        padding = self.replicas * self.blocks * self.length - self.size
        flat = jnp.pad(leaf.reshape(-1), (0, padding))
        return flat.reshape(self.replicas, self.blocks, self.length)

    def join(self, blocks: Array, like: Array) -> Array:
        """The inverse of `cut`."""
        return blocks.reshape(-1)[: self.size].reshape(like.shape)


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
        updates: PyTree, state: QuantizedState, params: PyTree | None = None, **extra_args: Any
    ) -> Reduction:
        del params, extra_args
        updates = averaged_first(updates, reduce_first)
        leaves, treedef = jax.tree.flatten(updates)
        positions = reducible(updates, axis_name)
        chosen = [leaves[i] for i in positions]
        key = None
        if rounding == "stochastic":
            key = jax.random.fold_in(jax.random.key(seed), state.count)
            key = jax.random.fold_in(key, replica_index(axis_name))
        means, sent, finite = _allreduce(chosen, axis_name, block_size, key)
        count = jnp.where(finite, optax.safe_increment(state.count), state.count)
        return Reduction(
            treedef.unflatten(replaced(leaves, positions, means)),
            QuantizedState(count),
            treedef.unflatten(replaced(leaves, positions, sent)),
            finite,
        )

    return Reducer(init, reduce, axis_name)


def _allreduce(
    leaves: list[Array], axis_name: AxisName, block_size: int | None, key: Array | None
) -> tuple[list[Array], list[Array], Array]:
    """Means, this replica's contributions as sent, and whether all of it is finite."""
    replicas = axis_size(axis_name)
    layouts = [BlockLayout.of(leaf.size, replicas, block_size) for leaf in leaves]
    if not sum(leaf.size for leaf in leaves):
        return leaves, leaves, jnp.array(True)
    keys = (None, None) if key is None else jax.random.split(key)

    blocks = [lay.cut(x.astype(jnp.float32)) for lay, x in zip(layouts, leaves, strict=True)]
    wire = _encode(blocks, keys[0])
    received = _decode(exchange(wire, axis_name), layouts)
    means = [_mean_of_rows(x) for x in received]
    second = _encode(means, keys[1])
    outputs = _decode(gather(second[0], axis_name), layouts)

    # The second rounding of a share is known only to the replica that summed it. There it counts as
    # that replica's own, so that the mean of what was sent is the output.
    owner = replica_index(axis_name)
    sent = []
    for first, mean, rounded in zip(
        _decode(wire, layouts), means, _decode(second, layouts), strict=True
    ):
        own = lax.dynamic_index_in_dim(first, owner, keepdims=True) + replicas * (rounded - mean)
        sent.append(lax.dynamic_update_index_in_dim(first, own, owner, axis=0))

    finite = jnp.stack([jnp.isfinite(x).all() for x in outputs]).all()
    outputs = [jnp.where(finite, x, jnp.nan) for x in outputs]
    return _like(outputs, layouts, leaves), _like(sent, layouts, leaves), finite


def _mean_of_rows(x: Array) -> Array:
    """The mean over the first axis, which stays with length 1.

    Divided before it is summed, so that no sum overflows where the mean does not; and as a product,
    because XLA's CPU backend takes ten times as long for a sum over the first axis.
    """
    weights = jnp.full(x.shape[0], 1 / x.shape[0], x.dtype)
    return jnp.einsum("w,w...->...", weights, x, precision=lax.Precision.HIGHEST)[None]


def _encode(blocks: list[Array], key: Array | None) -> Array:
    """Blocks ``(n, blocks, length)`` as int8 rows: the integers of all leaves, then the scales."""
    integers, scales = [], []
    for i, x in enumerate(blocks):
        rounded, scale = _quantize(x, None if key is None else jax.random.fold_in(key, i))
        integers.append(rounded.reshape(x.shape[0], -1))
        scales.append(lax.bitcast_convert_type(scale, jnp.int8).reshape(x.shape[0], -1))
    return jnp.concatenate(integers + scales, axis=1)


def _decode(rows: Array, layouts: list[BlockLayout]) -> list[Array]:
    """The inverse of `_encode`: one float32 ``(n, blocks, length)`` for each leaf."""
    integers, scales, n = [], [], rows.shape[0]
    lengths = [lay.blocks * lay.length for lay in layouts]
    lengths += [lay.blocks * _SCALE_BYTES for lay in layouts]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    parts = [rows[:, start : start + size] for start, size in zip(starts, lengths, strict=True)]
    for lay, x, scale in zip(layouts, parts, parts[len(layouts) :], strict=False):
        integers.append(x.reshape(n, lay.blocks, lay.length).astype(jnp.float32))
        quadruples = scale.reshape(n, lay.blocks, 1, _SCALE_BYTES)
        scales.append(lax.bitcast_convert_type(quadruples, jnp.float32))
    return [x * scale for x, scale in zip(integers, scales, strict=True)]


def _quantize(x: Array, key: Array | None) -> tuple[Array, Array]:
    """Integers of the shape of `x`, and a float32 scale for each of its last axes.

    A scale is NaN where a value of its block is not finite, and 0 where all are zero or so small
    that the scale would be subnormal.
    """
    top = jnp.abs(x).max(axis=-1, keepdims=True, initial=0)
    scale = top / _LEVELS
    usable = scale >= jnp.finfo(jnp.float32).tiny
    scaled = x / jnp.where(usable, scale, 1)
    if key is None:
        rounded = jnp.round(scaled)
    else:
        rounded = jnp.floor(scaled + jax.random.uniform(key, x.shape, x.dtype))
    integers = jnp.where(usable, jnp.clip(rounded, -_LEVELS, _LEVELS), 0).astype(jnp.int8)
    return integers, jnp.where(jnp.isfinite(top), jnp.where(usable, scale, 0), jnp.nan)


def _like(blocks: list[Array], layouts: list[BlockLayout], leaves: list[Array]) -> list[Array]:
    return [
        lay.join(x, leaf).astype(leaf.dtype)
        for lay, x, leaf in zip(layouts, blocks, leaves, strict=True)
    ]
