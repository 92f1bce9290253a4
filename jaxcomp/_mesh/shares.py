"""A mean in shares: replica ``k`` sums share ``k`` of everything, and sends the mean to everybody.

An all-to-all and an all-gather, which together carry what a ring all-reduce would. In between a
share is decoded, so that what travels need not be what is summed: integers of 8 or 6 bits with a
scale for each block (`BlockLayout`), or values as they are (`ExactLayout`). A sum of integers on
the wire would overflow; here none is taken.

Arrays of one layout travel as one array with an axis in front that counts them, and all arrays side
by side in the bytes of a row. A row belongs to one replica.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxcomp._base.typing import Array, AxisName
from jaxcomp._mesh.collectives import Reduced, axis_size, exchange, gather

_SCALE_BYTES = 4
# Arrays of more values are not worth a copy to be treated together.
_LARGE = 1 << 19
_WORD = 4  # bytes; each array begins on a whole word of a row


class _Shares:
    """How an array of `size` values is cut into as many shares as there are replicas."""

    size: int
    replicas: int

    @property
    def share_shape(self) -> tuple[int, ...]:
        """Returns the shape of one replica's share."""
        raise NotImplementedError

    @property
    def padded_size(self) -> int:
        """Counts the values of all shares."""
        return self.replicas * math.prod(self.share_shape)

    def cut(self, x: Array) -> Array:
        """Cuts an array of any shape into shares ``(replicas, *share)``, padded with zeros."""
        values = _padded(x.reshape(-1), self.padded_size)
        return values.reshape(self.replicas, *self.share_shape)

    def join(self, shares: Array, like: Array) -> Array:
        """Inverts `cut`: an array of the shape of `like`."""
        return shares.reshape(-1)[: self.size].reshape(like.shape)


@dataclasses.dataclass(frozen=True)
class BlockLayout(_Shares):
    """How an array of `size` values is cut: ``(replicas, blocks, length)``, padded with zeros.

    Each block travels as integers and the float32 scale that they have in common.
    """

    size: int
    replicas: int
    blocks: int
    length: int
    bits: int = 8  # of an integer, or 6: four of these in three bytes

    @classmethod
    def of(cls, size: int, replicas: int, block_size: int | None, bits: int = 8) -> BlockLayout:
        """Makes blocks of at most `block_size` values, as equal as possible: little is padded."""
        share = _quotient_up(size, replicas)
        blocks = _quotient_up(share, block_size or max(share, 1))
        return cls(size, replicas, blocks, _quotient_up(share, max(blocks, 1)), bits)

    @property
    def levels(self) -> int:
        """Returns the levels of either sign: a gradient and its negative are treated alike."""
        return 2 ** (self.bits - 1) - 1

    @property
    def _integer_bytes(self) -> int:
        count = self.blocks * self.length
        return count if self.bits == 8 else 3 * _quotient_up(count, 4)

    @property
    def row_bytes(self) -> int:
        """Bytes of one share with its scales."""
        return _whole_words(self._integer_bytes + self.blocks * _SCALE_BYTES)

    @property
    def wire_bytes(self) -> int:
        """Bytes of the whole array with its scales, in either of the two stages."""
        return self.replicas * self.row_bytes

    @property
    def share_shape(self) -> tuple[int, ...]:
        """Returns the shape of one replica's share: blocks, and values in a block."""
        return (self.blocks, self.length)

    def encode(self, shares: Array) -> Array:
        """Rounds shares ``(..., blocks, length)`` to nearest, as ``(..., row_bytes)`` int8."""
        integers, scales = _quantize(shares, self.levels)
        integers = _last_axes_as_one(integers, 2)
        if self.bits == 6:
            integers = _packed(integers)
        scale_bytes = lax.bitcast_convert_type(scales, jnp.int8)
        return _row([integers, _last_axes_as_one(scale_bytes, 3)], self.row_bytes)

    def decode(self, rows: Array, dtype: Any) -> Array:
        """Inverts `encode`, in the floating dtype asked for."""
        end = self._integer_bytes + self.blocks * _SCALE_BYTES
        scale_bytes = rows[..., self._integer_bytes : end]
        scale_bytes = scale_bytes.reshape(*rows.shape[:-1], self.blocks, 1, _SCALE_BYTES)
        scales = lax.bitcast_convert_type(scale_bytes, jnp.float32)
        integers = rows[..., : self._integer_bytes]
        if self.bits == 6:
            integers = _unpacked(integers)[..., : self.blocks * self.length]
        integers = integers.reshape(*rows.shape[:-1], *self.share_shape)
        return integers.astype(dtype) * scales.astype(dtype)


@dataclasses.dataclass(frozen=True)
class ExactLayout(_Shares):
    """An array of `size` values in shares ``(replicas, length)`` that travel as their own bits."""

    size: int
    replicas: int
    dtype: Any  # on the wire

    @property
    def length(self) -> int:
        """Values in a share."""
        return _quotient_up(self.size, self.replicas)

    @property
    def _value_bytes(self) -> int:
        return self.length * jnp.dtype(self.dtype).itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes of one share."""
        return _whole_words(self._value_bytes)

    @property
    def wire_bytes(self) -> int:
        """Bytes of the whole array, in either of the two stages."""
        return self.replicas * self.row_bytes

    @property
    def share_shape(self) -> tuple[int, ...]:
        """Returns the shape of one replica's share."""
        return (self.length,)

    def encode(self, shares: Array) -> Array:
        """Writes shares ``(..., length)`` as ``(..., row_bytes)`` int8."""
        bits = lax.bitcast_convert_type(shares.astype(self.dtype), jnp.int8)
        return _row([_last_axes_as_one(bits, 2)], self.row_bytes)

    def decode(self, rows: Array, dtype: Any) -> Array:
        """Inverts `encode`, in the floating dtype asked for."""
        itemsize = jnp.dtype(self.dtype).itemsize
        bits = rows[..., : self._value_bytes]
        bits = bits.reshape(*rows.shape[:-1], self.length, itemsize)
        return lax.bitcast_convert_type(bits, self.dtype).astype(dtype)


Layout = BlockLayout | ExactLayout


def mean_by_shares(
    parts: Sequence[Array],
    layouts: Sequence[Layout],
    axis_name: AxisName,
    stacks: Collection[int] = (),
) -> Reduced:
    """Averages arrays over the replicas in an all-to-all and an all-gather of int8 rows.

    Args:
      parts: Arrays of any shapes, float32 or wider; means and sent have the same.
      layouts: How each of them travels.
      axis_name: The mapped axis or axes.
      stacks: Positions of parts that are many arrays each, along their first axis. Such a part has
        the layout of one of them: they travel as they would in parts of their own.

    Returns:
      The means, what this replica sent of them, and whether all means are finite. A value that is
      not finite makes its block NaN on every replica, and never an integer.

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
    if sum(part.size for part in parts) == 0:
        # Constants, which are replicated by their type under check_vma=True.
        nothing = [jnp.zeros(part.shape, part.dtype) for part in parts]
        return Reduced(nothing, list(parts), jnp.array(True))
    groups = _alike(parts, layouts, stacks)
    shares = [group.cut(parts) for group in groups]
    wire = _encoded(groups, shares)
    received = _decoded(groups, exchange(wire, axis_name))
    means = [_mean_of_rows(x) for x in received]
    wire_of_means = _encoded(groups, means)
    outputs = _decoded(groups, gather(wire_of_means[0], axis_name))
    finite = jnp.stack([jnp.isfinite(x).all() for x in outputs]).all()

    # The second rounding of a share is known only to the replica that summed it. There it counts as
    # that replica's own, so that the mean of what was sent is the output.
    owner = lax.axis_index(axis_name)
    sent = _decoded(groups, wire)
    for i, rounded in enumerate(_decoded(groups, wire_of_means)):
        once = lax.dynamic_index_in_dim(sent[i], owner)
        twice = once + replicas * (rounded - means[i])
        # As many times the rounding may be more than the float range has left.
        twice = jnp.where(jnp.isfinite(twice), twice, once)
        sent[i] = lax.dynamic_update_index_in_dim(sent[i], twice, owner, axis=0)
    return Reduced(_joined(groups, outputs, parts), _joined(groups, sent, parts), finite)


@dataclasses.dataclass(frozen=True)
class _Group:
    """Parts of one layout, which are treated together: a GPU launches a kernel for each otherwise.

    What belongs to a group is one array ``(replicas, arrays, *share)``.
    """

    layout: Layout
    dtype: Any
    positions: list[int]  # of its parts
    counts: list[int]  # how many arrays each part is

    @property
    def number(self) -> int:
        """Counts the arrays in all parts."""
        return sum(self.counts)

    @property
    def row_bytes(self) -> int:
        """Bytes of one replica's shares of all arrays."""
        return self.number * self.layout.row_bytes

    def cut(self, parts: Sequence[Array]) -> Array:
        """Cuts all arrays of the group into shares."""
        layout = self.layout
        flat = []
        for i, count in zip(self.positions, self.counts, strict=True):
            values = parts[i].reshape(count, layout.size)
            flat.append(_padded(values, layout.padded_size))
        together = flat[0] if len(flat) == 1 else jnp.concatenate(flat)  # one needs no copy
        shares = together.reshape(self.number, layout.replicas, *layout.share_shape)
        return shares.swapaxes(0, 1)

    def join(self, shares: Array, like: Sequence[Array]) -> list[Array]:
        """Inverts `cut`: the parts of the group, in their order."""
        layout = self.layout
        together = shares.swapaxes(0, 1).reshape(self.number, layout.padded_size)
        together = together[:, : layout.size]
        parts = []
        start = 0
        for i, count in zip(self.positions, self.counts, strict=True):
            part = together[start : start + count]
            parts.append(part.reshape(like[i].shape))
            start += count
        return parts


def _alike(
    parts: Sequence[Array], layouts: Sequence[Layout], stacks: Collection[int]
) -> list[_Group]:
    """Groups the parts by layout; a large one is a group of its own."""
    groups: dict[Any, _Group] = {}
    for i, (part, layout) in enumerate(zip(parts, layouts, strict=True)):
        alone = i if part.size > _LARGE else None
        group = groups.setdefault((layout, part.dtype, alone), _Group(layout, part.dtype, [], []))
        group.positions.append(i)
        group.counts.append(part.shape[0] if i in stacks else 1)
    return list(groups.values())


def _encoded(groups: Sequence[_Group], shares: Sequence[Array]) -> Array:
    """Writes the rows of all groups side by side, ``(replicas, bytes)``."""
    rows = []
    for group, x in zip(groups, shares, strict=True):
        encoded = group.layout.encode(x)
        rows.append(encoded.reshape(len(encoded), group.row_bytes))
    return jnp.concatenate(rows, axis=1)


def _decoded(groups: Sequence[_Group], rows: Array) -> list[Array]:
    """Inverts `_encoded`."""
    shares = []
    start = 0
    for group in groups:
        encoded = rows[:, start : start + group.row_bytes]
        encoded = encoded.reshape(len(rows), group.number, group.layout.row_bytes)
        shares.append(group.layout.decode(encoded, group.dtype))
        start += group.row_bytes
    return shares


def _joined(
    groups: Sequence[_Group], shares: Sequence[Array], like: Sequence[Array]
) -> list[Array]:
    """Returns the parts of all groups, in the order and the shapes of `like`."""
    joined = list(like)
    for group, x in zip(groups, shares, strict=True):
        for i, part in zip(group.positions, group.join(x, like), strict=True):
            joined[i] = part
    return joined


def _mean_of_rows(x: Array) -> Array:
    """Averages over the first axis, which stays with length 1.

    Divided before it is summed, so that no sum overflows where the mean does not; and as a product,
    because XLA's CPU backend takes ten times as long for a sum over the first axis.
    """
    number = x.shape[0]
    weights = jnp.full(number, 1 / number, x.dtype)
    mean = jnp.einsum("w,w...->...", weights, x, precision=lax.Precision.HIGHEST)
    return mean[None]


def _quantize(x: Array, levels: int) -> tuple[Array, Array]:
    """Returns integers up to `levels` like `x`, and a float32 scale for each of its last axes.

    A scale is NaN where a value of its block is not finite, and 0 where all are zero or so small
    that the scale would be subnormal.
    """
    top = jnp.abs(x).max(axis=-1, keepdims=True, initial=0)
    scale = (top / levels).astype(jnp.float32)
    # A maximum need not show a NaN: XLA's CPU backend drops it at some shapes (jaxlib 0.10.2). A
    # sum does; that of x - x is 0 or NaN.
    zero_or_nan = jnp.sum(x - x, axis=-1, keepdims=True)
    finite = jnp.isfinite(scale) & (zero_or_nan == 0)
    usable = scale >= jnp.finfo(jnp.float32).tiny
    divisor = jnp.where(usable, scale, 1).astype(x.dtype)
    rounded = jnp.clip(jnp.round(x / divisor), -levels, levels)
    integers = jnp.where(usable, rounded, 0).astype(jnp.int8)
    scale = jnp.where(usable, scale, 0)
    return integers, jnp.where(finite, scale, jnp.nan)


def _packed(integers: Array) -> Array:
    """Packs 6-bit integers ``(..., count)`` as int8 ``(..., 3 * ceil(count / 4))``."""
    fours = _quotient_up(integers.shape[-1], 4)
    unsigned = lax.bitcast_convert_type(_padded(integers, 4 * fours), jnp.uint8) & 63
    unsigned = unsigned.reshape(*integers.shape[:-1], fours, 4)
    a, b, c, d = jnp.moveaxis(unsigned, -1, 0)
    # Shifts of unsigned bytes drop what leaves them, and carry no sign.
    first = a | (b << 6)
    second = (b >> 2) | (c << 4)
    third = (c >> 4) | (d << 2)
    three = jnp.stack([first, second, third], axis=-1)
    return _last_axes_as_one(lax.bitcast_convert_type(three, jnp.int8), 2)


def _unpacked(packed: Array) -> Array:
    """Inverts `_packed`, with up to three zeros at the end."""
    fours = packed.shape[-1] // 3
    unsigned = lax.bitcast_convert_type(packed, jnp.uint8)
    unsigned = unsigned.reshape(*packed.shape[:-1], fours, 3)
    x, y, z = jnp.moveaxis(unsigned, -1, 0)
    second = (x >> 6) | (y << 2)
    third = (y >> 4) | (z << 4)
    four = jnp.stack([x, second, third, z >> 2], axis=-1) & 63
    # Six bits with a sign, as eight.
    signed = lax.bitcast_convert_type(four ^ 32, jnp.int8) - 32
    return _last_axes_as_one(signed, 2)


def _row(arrays: Sequence[Array], row_bytes: int) -> Array:
    """Puts int8 arrays ``(..., n)`` one behind the other, padded with zeros to a row."""
    return _padded(jnp.concatenate(arrays, axis=-1), row_bytes)


def _padded(x: Array, size: int) -> Array:
    """Pads the last axis with zeros up to `size`."""
    widths = [(0, 0)] * x.ndim
    widths[-1] = (0, size - x.shape[-1])
    return jnp.pad(x, widths)


def _last_axes_as_one(x: Array, number: int) -> Array:
    kept = x.shape[:-number]
    return x.reshape(*kept, math.prod(x.shape[-number:]))


def _quotient_up(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)


def _whole_words(count: int) -> int:
    return _WORD * _quotient_up(count, _WORD)
