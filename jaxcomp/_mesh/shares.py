"""Averages in shares: replica ``k`` sums share ``k`` of all arrays, and sends the mean to all.

`mean_by_shares` does for integers what `reduce_mean` does for floating dtypes; PowerSGD with
integer factors and `quantized_allreduce` call it. It takes an all-to-all and an all-gather, which
together send as many bytes as a ring all-reduce. Shares are decoded before they are summed, so the
format on the wire can differ from the format of the sum: integers of 8 or 6 bits with a scale for
each block (`BlockLayout`), or exact values (`ExactLayout`). An all-reduce of integers would
overflow.

Arrays of one layout are stacked to one array. The bytes of all arrays lie side by side in a row,
and each replica has one row.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomp._base.checks import answers_other_names, check_int
from jaxcomp._base.leaves import alike, all_finite, put_at
from jaxcomp._base.typing import Array, AxisName, Shape
from jaxcomp._mesh.collectives import Reduced, axis_size, exchange, gather

_SCALE_BYTES = 4
# Arrays with more values are not stacked, because the copy costs more than it saves.
_LARGE = 1 << 19
# Places of four integers of six bits in a word.
_SHIFTS = np.arange(0, 24, 6, dtype=np.int32)
_WORD = 4  # bytes; each array begins on a whole word of a row


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Describes how an array of `size` values is cut into one share for each replica."""

    size: int
    replicas: int

    @property
    def share_shape(self) -> Shape:
        """Returns the shape of one replica's share."""
        raise NotImplementedError

    @property
    def _payload(self) -> int:
        """Returns the bytes of one share, without padding."""
        raise NotImplementedError

    @property
    def row_bytes(self) -> int:
        """Returns the bytes of one share, in whole words."""
        return _WORD * _quotient_up(self._payload, _WORD)

    @property
    def wire_bytes(self) -> int:
        """Returns the bytes of the whole array, in each of the two stages."""
        return self.replicas * self.row_bytes

    def cut(self, x: Array) -> Array:
        """Cuts consecutive arrays into shares ``(replicas, arrays, *share)``."""
        arrays = x.reshape(-1, self.size)
        padded = _padded(arrays, self.replicas * math.prod(self.share_shape))
        shares = padded.reshape(len(arrays), self.replicas, *self.share_shape)
        return shares.swapaxes(0, 1)

    def join(self, shares: Array) -> Array:
        """Inverts `cut`; returns the arrays flat, one behind the other."""
        together = shares.swapaxes(0, 1).reshape(shares.shape[1], -1)
        return together[:, : self.size].ravel()


@dataclasses.dataclass(frozen=True)
class BlockLayout(_Layout):
    """Describes how an array is cut into ``(replicas, blocks, length)``, padded with zeros.

    Each block is sent as integers and one float32 scale.
    """

    blocks: int
    length: int
    bits: int = 8  # bits of an integer: 8, or 6 (four integers in three bytes)

    @classmethod
    def of(cls, size: int, replicas: int, block_size: int | None, bits: int = 8) -> BlockLayout:
        """Makes equal blocks of at most `block_size` values, with little padding."""
        share = _quotient_up(check_int("size", size, 0, 2**63), check_int("replicas", replicas, 1))
        if block_size is not None:
            check_int("block_size", block_size, 1)
        blocks = _quotient_up(share, block_size or max(share, 1))
        return cls(size, replicas, blocks, _quotient_up(share, max(blocks, 1)), bits)

    @property
    def levels(self) -> int:
        """Returns the largest integer; the least is its negative, so signs are treated alike."""
        return 2 ** (self.bits - 1) - 1

    @property
    def share_shape(self) -> Shape:
        """Returns the shape of one replica's share: blocks, and values in a block."""
        return (self.blocks, self.length)

    @property
    def _integer_bytes(self) -> int:
        return self.bits // 2 * _quotient_up(self.blocks * self.length, 4)

    @property
    def _payload(self) -> int:
        return self._integer_bytes + self.blocks * _SCALE_BYTES

    def encode(self, shares: Array) -> Array:
        """Rounds shares ``(..., blocks, length)`` to nearest; returns ``(..., row_bytes)`` int8."""
        integers, scales = _quantize(shares, self.levels)
        packed = _packed(integers.reshape(*shares.shape[:-2], -1), self.bits)
        row = jnp.concatenate([packed, _as_bytes(scales)], axis=-1)
        return _padded(row, self.row_bytes)

    def decode(self, rows: Array, dtype: Any) -> Array:
        """Inverts `encode`, in the floating dtype asked for."""
        packed, scales, _ = jnp.split(rows, [self._integer_bytes, self._payload], axis=-1)
        integers = _unpacked(packed, self.bits)[..., : self.blocks * self.length]
        values = integers.reshape(*rows.shape[:-1], *self.share_shape).astype(dtype)
        scale = _from_bytes(scales, jnp.float32).astype(dtype)
        return values * scale[..., None]


@dataclasses.dataclass(frozen=True)
class ExactLayout(_Layout):
    """Describes how an array is cut into shares ``(replicas, length)``, sent in one dtype."""

    dtype: Any  # the wire dtype

    @property
    def share_shape(self) -> Shape:
        """Returns the shape of one replica's share."""
        return (_quotient_up(self.size, self.replicas),)

    @property
    def _payload(self) -> int:
        return math.prod(self.share_shape) * jnp.dtype(self.dtype).itemsize

    def encode(self, shares: Array) -> Array:
        """Writes shares ``(..., length)`` as ``(..., row_bytes)`` int8."""
        return _padded(_as_bytes(shares.astype(self.dtype)), self.row_bytes)

    def decode(self, rows: Array, dtype: Any) -> Array:
        """Inverts `encode`, in the floating dtype asked for."""
        return _from_bytes(rows[..., : self._payload], self.dtype).astype(dtype)


Layout = BlockLayout | ExactLayout


@answers_other_names
def mean_by_shares(
    parts: Sequence[Array], layouts: Sequence[Layout], axis_name: AxisName
) -> Reduced:
    """Averages arrays over the replicas in an all-to-all and an all-gather of int8 rows.

    Args:
      parts: Arrays of any shapes, float32 or wider; the results have the same shapes and dtypes.
      layouts: The layout of each part. A part may be a stack of arrays along its first axis, with
        the layout of one array; the result is the same as for separate parts.
      axis_name: The mapped axis or axes.

    Returns:
      The means, this replica's contributions as sent, and whether all means are finite. A value
      that is not finite makes its block NaN on every replica.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxcomp import extend
      >>> def mean(x):
      ...     layout = extend.BlockLayout.of(x.size, replicas=2, block_size=128)
      ...     return extend.mean_by_shares([x], [layout], "data").means[0]
      >>> jax.vmap(mean, axis_name="data")(jnp.array([[1.0, -2.0], [3.0, -2.0]]))[0].tolist()
      [2.0, -2.0]
    """
    replicas = axis_size(axis_name)
    # Empty parts become constants, which have a replicated type under check_vma=True.
    means = [jnp.zeros(x.shape, x.dtype) for x in parts]
    sent = list(parts)
    groups = _groups(parts, layouts)
    if not groups:
        return Reduced(means, sent, jnp.array(True))
    kinds = []
    shares = []
    unravels = []
    widths = []
    for positions in groups:
        flat, unravel = jax.flatten_util.ravel_pytree([parts[i] for i in positions])
        layout = layouts[positions[0]]
        kinds.append(layout)
        shares.append(layout.cut(flat))
        unravels.append(unravel)
        widths.append(layout.row_bytes * (flat.size // layout.size))
    ends = np.cumsum(widths)[:-1]

    def encoded(shares: Sequence[Array]) -> Array:
        # The rows of all groups side by side, (replicas, bytes).
        rows = []
        for kind, x in zip(kinds, shares, strict=True):
            rows.append(kind.encode(x).reshape(len(x), -1))
        return jnp.concatenate(rows, axis=1)

    def decoded(rows: Array) -> list[Array]:
        each = []
        for layout, x, part in zip(kinds, shares, jnp.split(rows, ends, axis=1), strict=True):
            each.append(layout.decode(part.reshape(len(rows), -1, layout.row_bytes), x.dtype))
        return each

    wire = encoded(shares)
    averaged = list(map(_mean_of_rows, decoded(exchange(wire, axis_name))))
    wire_of_means = encoded(averaged)
    outputs = decoded(gather(wire_of_means[0], axis_name))

    owner = lax.axis_index(axis_name)
    rounded = decoded(wire_of_means)
    for k, local in enumerate(decoded(wire)):
        # Only the replica that summed a share knows the share's second rounding. It is added to
        # that replica's contribution, so that the mean of the contributions is the output.
        once = lax.dynamic_index_in_dim(local, owner)
        twice = once + replicas * (rounded[k] - averaged[k])
        # `replicas` times the rounding may exceed the float range.
        twice = jnp.where(jnp.isfinite(twice), twice, once)
        local = lax.dynamic_update_index_in_dim(local, twice, owner, axis=0)
        put_at(means, groups[k], unravels[k](kinds[k].join(outputs[k])))
        put_at(sent, groups[k], unravels[k](kinds[k].join(local)))
    return Reduced(means, sent, all_finite(outputs))


def _groups(parts: Sequence[Array], layouts: Sequence[Layout]) -> list[list[int]]:
    """Groups small parts by layout; a large part is alone, and empty parts are left out.

    Without groups a GPU would launch every kernel once for each part.
    """
    kinds: list[Any] = []
    for part, layout in zip(parts, layouts, strict=True):
        kind = (layout, part.dtype)
        if part.size > _LARGE:
            kind = len(kinds)  # a kind of its own
        kinds.append(kind if part.size else None)
    return alike(kinds)


def _mean_of_rows(x: Array) -> Array:
    """Averages over the first axis, and keeps it with length 1.

    Values are divided before the sum, so that the sum does not overflow if the mean does not. The
    sum is a matrix product, because XLA's CPU backend is ten times slower at sums over the first
    axis.
    """
    weights = jnp.full(len(x), 1 / len(x), x.dtype)
    return jnp.einsum("w,w...->...", weights, x, precision=lax.Precision.HIGHEST)[None]


def _quantize(x: Array, levels: int) -> tuple[Array, Array]:
    """Returns integers of `x` between -levels and levels, and a float32 scale for each last axis.

    A scale is NaN if a value of its block is not finite. It is 0 if all values are zero, or so
    small that the scale would be subnormal.
    """
    largest = jnp.abs(x).max(axis=-1)
    scale = (largest / levels).astype(jnp.float32)
    # The maximum may miss a NaN: XLA's CPU backend drops it at some shapes (jaxlib 0.10.2). The sum
    # of x - x, which is 0 or NaN, does not miss it.
    zero_or_nan = jnp.sum(x - x, axis=-1)
    finite = jnp.isfinite(scale) & (zero_or_nan == 0)
    tiny = jnp.finfo(jnp.float32).tiny
    scale = jnp.where(scale >= tiny, scale, 0)
    # A block with scale 0 becomes zeros: x / inf is 0, where x / 0 would be NaN.
    divisor = jnp.where(scale > 0, scale, jnp.inf).astype(x.dtype)
    rounded = jnp.round(x / divisor[..., None])
    integers = jnp.clip(rounded, -levels, levels).astype(jnp.int8)
    return integers, jnp.where(finite, scale, jnp.nan)


def _packed(integers: Array, bits: int) -> Array:
    """Packs integers ``(..., count)`` as int8, every four of them in `bits` / 2 bytes."""
    whole = _padded(integers, 4 * _quotient_up(integers.shape[-1], 4))
    if bits == 8:
        return whole
    # The low six bits of two's complement are those of the number, negative or not.
    fours = whole.astype(jnp.int32).reshape(*whole.shape[:-1], -1, 4) & 63
    joined = jnp.sum(fours << jnp.broadcast_to(_SHIFTS, fours.shape), axis=-1)
    three = lax.bitcast_convert_type(joined, jnp.int8)[..., :3]  # the fourth byte is 0
    return three.reshape(*whole.shape[:-1], -1)


def _unpacked(packed: Array, bits: int) -> Array:
    """Inverts `_packed`, with up to three zeros at the end."""
    if bits == 8:
        return packed
    three = packed.reshape(*packed.shape[:-1], -1, 3)
    words = lax.bitcast_convert_type(_padded(three, 4), jnp.int32)
    fours = (words[..., None] >> jnp.broadcast_to(_SHIFTS, (*words.shape, 4))) & 63
    # Extends the sign of six bits.
    signed = (fours ^ 32) - 32
    return signed.astype(jnp.int8).reshape(*packed.shape[:-1], -1)


def _as_bytes(x: Array) -> Array:
    """Writes values ``(..., count)`` as int8 ``(..., count * itemsize)``."""
    each = lax.bitcast_convert_type(x, jnp.int8)
    return each.reshape(*x.shape[:-1], -1)


def _from_bytes(row: Array, dtype: Any) -> Array:
    """Inverts `_as_bytes`."""
    size = jnp.dtype(dtype).itemsize
    values = row.reshape(*row.shape[:-1], -1, size)
    # The cast removes the axis of bytes, except for values of one byte.
    return lax.bitcast_convert_type(values, dtype).reshape(values.shape[:-1])


def _padded(x: Array, size: int) -> Array:
    """Pads the last axis with zeros up to `size`."""
    widths = [(0, 0)] * x.ndim
    widths[-1] = (0, size - x.shape[-1])
    return jnp.pad(x, widths)


def _quotient_up(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)
