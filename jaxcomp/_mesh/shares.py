"""A mean in shares: replica ``k`` sums share ``k`` of everything, and sends the mean to everybody.

An all-to-all and an all-gather, which together carry what a ring all-reduce would. In between a
share is decoded, so that what travels need not be what is summed: integers of 8 or 6 bits with a
scale for each block (`BlockLayout`), or values as they are (`ExactLayout`). A sum of integers on
the wire would overflow; here none is taken.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp._base.typing import Array, AxisName
from jaxcomp._mesh.collectives import Reduced, axis_size, exchange, gather

_SCALE_BYTES = 4
# Arrays of more values are not worth a copy to be treated together.
_LARGE = 1 << 19
_WORD = 4  # bytes; each array begins on a whole word of a row


@dataclasses.dataclass(frozen=True)
class BlockLayout:
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
        """Blocks of at most `block_size` values, as equal as possible so that little is padded."""
        share = _quotient_up(size, replicas)
        blocks = _quotient_up(share, block_size or max(share, 1))
        return cls(size, replicas, blocks, _quotient_up(share, max(blocks, 1)), bits)

    @property
    def levels(self) -> int:
        """Of either sign: symmetric, so that a gradient and its negative are treated alike."""
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

    def cut(self, x: Array) -> Array:
        """From any shape to blocks."""
        return _padded(x, self.replicas * self.blocks * self.length).reshape(
            self.replicas, self.blocks, self.length
        )

    def join(self, blocks: Array, like: Array) -> Array:
        """The inverse of `cut`."""
        return blocks.reshape(-1)[: self.size].reshape(like.shape)

    def encode(self, blocks: Array) -> Array:
        """Blocks ``(n, blocks, length)`` as ``(n, row_bytes)`` int8, rounded to nearest."""
        integers, scales = _quantize(blocks, self.levels)
        if self.bits == 6:
            integers = _packed(integers.reshape(integers.shape[0], -1))
        return _rows([integers, lax.bitcast_convert_type(scales, jnp.int8)], self.row_bytes)

    def decode(self, rows: Array, dtype: Any) -> Array:
        """The inverse of `encode`, in the floating dtype asked for."""
        n, used = rows.shape[0], self._integer_bytes
        integers = rows[:, :used]
        if self.bits == 6:
            integers = _unpacked(integers)[:, : self.blocks * self.length]
        integers = integers.reshape(n, self.blocks, self.length)
        scales = rows[:, used : used + self.blocks * _SCALE_BYTES]
        scales = lax.bitcast_convert_type(
            scales.reshape(n, self.blocks, 1, _SCALE_BYTES), jnp.float32
        )
        return integers.astype(dtype) * scales.astype(dtype)


@dataclasses.dataclass(frozen=True)
class ExactLayout:
    """An array of `size` values in shares ``(replicas, length)`` that travel as their own bits."""

    size: int
    replicas: int
    dtype: Any  # on the wire

    @property
    def length(self) -> int:
        """Values in a share."""
        return _quotient_up(self.size, self.replicas)

    @property
    def row_bytes(self) -> int:
        """Bytes of one share."""
        return _whole_words(self.length * jnp.dtype(self.dtype).itemsize)

    @property
    def wire_bytes(self) -> int:
        """Bytes of the whole array, in either of the two stages."""
        return self.replicas * self.row_bytes

    def cut(self, x: Array) -> Array:
        """From any shape to shares."""
        return _padded(x, self.replicas * self.length).reshape(self.replicas, self.length)

    def join(self, shares: Array, like: Array) -> Array:
        """The inverse of `cut`."""
        return shares.reshape(-1)[: self.size].reshape(like.shape)

    def encode(self, shares: Array) -> Array:
        """Shares ``(n, length)`` as ``(n, row_bytes)`` int8."""
        bits = lax.bitcast_convert_type(shares.astype(self.dtype), jnp.int8)
        return _rows([bits], self.row_bytes)

    def decode(self, rows: Array, dtype: Any) -> Array:
        """The inverse of `encode`, in the floating dtype asked for."""
        n, itemsize = rows.shape[0], jnp.dtype(self.dtype).itemsize
        bits = rows[:, : self.length * itemsize].reshape(n, self.length, itemsize)
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
    if not sum(part.size for part in parts):
        # Constants, which are replicated by their type under check_vma=True.
        nothing = [jnp.zeros(part.shape, part.dtype) for part in parts]
        return Reduced(nothing, list(parts), jnp.array(True))
    # From here on each part has an axis in front that counts its arrays.
    arrays = [part if i in stacks else part[None] for i, part in enumerate(parts)]
    groups = _groups(arrays, layouts)
    wire = _encode([_cut(group, arrays) for group in groups], groups)
    received = _decode(exchange(wire, axis_name), groups)
    means = [jax.vmap(_mean_of_rows)(x) for x in received]
    second = _encode(means, groups)
    outputs = _decode(gather(second[0], axis_name), groups)

    # The second rounding of a share is known only to the replica that summed it. There it counts as
    # that replica's own, so that the mean of what was sent is the output.
    owner, sent = lax.axis_index(axis_name), []
    firsts, seconds = _decode(wire, groups), _decode(second, groups)
    for first, mean, rounded in zip(firsts, means, seconds, strict=True):
        own = lax.dynamic_index_in_dim(first, owner, axis=1)
        both = own + replicas * (rounded - mean)
        # As many times the rounding may be more than the float range has left.
        both = jnp.where(jnp.isfinite(both), both, own)
        sent.append(lax.dynamic_update_index_in_dim(first, both, owner, axis=1))
    finite = jnp.stack([jnp.isfinite(x).all() for x in outputs]).all()

    def restored(values: list[Array]) -> list[Array]:
        joined = _joined(values, groups, arrays)
        return [x if i in stacks else x[0] for i, x in enumerate(joined)]

    return Reduced(restored(outputs), restored(sent), finite)


class _Group(NamedTuple):
    """Parts of one layout, which are treated together: a GPU launches a kernel for each otherwise.

    What belongs to a group is an array with an axis of their arrays in front.
    """

    positions: list[int]
    layout: Layout
    dtype: Any
    number: int  # of arrays, in all its parts


def _groups(arrays: Sequence[Array], layouts: Sequence[Layout]) -> list[_Group]:
    kinds: dict[Any, list[int]] = {}
    for i, (x, layout) in enumerate(zip(arrays, layouts, strict=True)):
        key = layout, x.shape[1:], x.dtype, i if x.size > _LARGE else None
        kinds.setdefault(key, []).append(i)
    return [
        _Group(kind, layout, dtype, sum(arrays[i].shape[0] for i in kind))
        for (layout, _, dtype, _), kind in kinds.items()
    ]


def _cut(group: _Group, arrays: Sequence[Array]) -> Array:
    own = [arrays[i] for i in group.positions]
    # A single one needs no copy.
    return jax.vmap(group.layout.cut)(own[0] if len(own) == 1 else jnp.concatenate(own))


def _encode(values: Sequence[Array], groups: Sequence[_Group]) -> Array:
    """The rows of all groups side by side."""
    rows = []
    for group, x in zip(groups, values, strict=True):
        encoded = jax.vmap(group.layout.encode)(x)
        width = group.number * group.layout.row_bytes
        rows.append(encoded.swapaxes(0, 1).reshape(encoded.shape[1], width))
    return jnp.concatenate(rows, axis=1)


def _decode(rows: Array, groups: Sequence[_Group]) -> list[Array]:
    values, start = [], 0
    for group in groups:
        number, width = group.number, group.layout.row_bytes
        own = rows[:, start : start + number * width]
        own = own.reshape(rows.shape[0], number, width).swapaxes(0, 1)
        values.append(jax.vmap(lambda x, g=group: g.layout.decode(x, g.dtype))(own))
        start += number * width
    return values


def _joined(
    values: Sequence[Array], groups: Sequence[_Group], like: Sequence[Array]
) -> list[Array]:
    results = list(like)
    for group, x in zip(groups, values, strict=True):
        start = 0
        for i in group.positions:
            end = start + like[i].shape[0]
            results[i] = jax.vmap(group.layout.join)(x[start:end], like[i])
            start = end
    return results


def _mean_of_rows(x: Array) -> Array:
    """The mean over the first axis, which stays with length 1.

    Divided before it is summed, so that no sum overflows where the mean does not; and as a product,
    because XLA's CPU backend takes ten times as long for a sum over the first axis.
    """
    weights = jnp.full(x.shape[0], 1 / x.shape[0], x.dtype)
    return jnp.einsum("w,w...->...", weights, x, precision=lax.Precision.HIGHEST)[None]


def _quantize(x: Array, levels: int) -> tuple[Array, Array]:
    """Integers up to `levels` in the shape of `x`, and a float32 scale for each of its last axes.

    A scale is NaN where a value of its block is not finite, and 0 where all are zero or so small
    that the scale would be subnormal.
    """
    top = jnp.abs(x).max(axis=-1, keepdims=True, initial=0)
    scale = (top / levels).astype(jnp.float32)
    # A maximum need not show a NaN: XLA's CPU backend drops it at some shapes (jaxlib 0.10.2). A
    # sum does; that of x - x is 0 or NaN.
    finite = jnp.isfinite(scale) & (jnp.sum(x - x, axis=-1, keepdims=True) == 0)
    usable = scale >= jnp.finfo(jnp.float32).tiny
    scaled = x / jnp.where(usable, scale, 1).astype(x.dtype)
    integers = jnp.where(usable, jnp.clip(jnp.round(scaled), -levels, levels), 0).astype(jnp.int8)
    return integers, jnp.where(finite, jnp.where(usable, scale, 0), jnp.nan)


def _packed(integers: Array) -> Array:
    """6-bit integers ``(n, count)``, four in three bytes: ``(n, 3 * ceil(count / 4))`` int8."""
    padded = jnp.pad(integers, ((0, 0), (0, -integers.shape[1] % 4)))
    # Shifts of unsigned bytes drop what leaves them, and carry no sign.
    a, b, c, d = jnp.moveaxis(
        lax.bitcast_convert_type(padded, jnp.uint8).reshape(padded.shape[0], -1, 4) & 63, -1, 0
    )
    three = jnp.stack([a | (b << 6), (b >> 2) | (c << 4), (c >> 4) | (d << 2)], axis=-1)
    return lax.bitcast_convert_type(three, jnp.int8).reshape(padded.shape[0], -1)


def _unpacked(packed: Array) -> Array:
    """The inverse of `_packed`, with up to three zeros at the end."""
    x, y, z = jnp.moveaxis(
        lax.bitcast_convert_type(packed, jnp.uint8).reshape(packed.shape[0], -1, 3), -1, 0
    )
    four = jnp.stack([x, (x >> 6) | (y << 2), (y >> 4) | (z << 4), z >> 2], axis=-1) & 63
    signed = lax.bitcast_convert_type(four ^ 32, jnp.int8) - 32
    return signed.reshape(packed.shape[0], -1)


def _rows(arrays: Sequence[Array], row_bytes: int) -> Array:
    """int8 arrays ``(n, ...)`` as ``(n, row_bytes)``, one after the other, padded with zeros."""
    rows = jnp.concatenate([x.reshape(x.shape[0], -1) for x in arrays], axis=1)
    return jnp.pad(rows, ((0, 0), (0, row_bytes - rows.shape[1])))


def _padded(x: Array, size: int) -> Array:
    return jnp.pad(x.reshape(-1), (0, size - x.size))


def _quotient_up(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)


def _whole_words(count: int) -> int:
    return _WORD * _quotient_up(count, _WORD)
