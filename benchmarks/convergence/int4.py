"""4-bit integers on the wire: a layout for `jaxcomp.extend.mean_by_shares`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.extend import BlockLayout, round_to

Array = jax.Array

_LEVELS = 7
_BLOCK = 128
_SCALE_BYTES = 2  # bfloat16


class Int4Layout(BlockLayout):
    """Two integers travel in a byte; at most 128 have a scale in common, rounded to nearest."""

    @classmethod
    def of(
        cls, size: int, replicas: int, block_size: int | None = _BLOCK, bits: int = 4
    ) -> Int4Layout:
        """Blocks of an even length, as equal as possible."""
        even = BlockLayout.of(size, replicas, block_size)
        return cls(size, replicas, even.blocks, even.length + even.length % 2, bits)

    @property
    def row_bytes(self) -> int:
        """Bytes of one share with its scales."""
        return self.blocks * (self.length // 2 + _SCALE_BYTES)

    def encode(self, blocks: Array, key: Array | None) -> Array:
        """Blocks ``(n, blocks, length)`` as ``(n, row_bytes)`` int8; the key is not used."""
        del key
        top = jnp.abs(blocks).max(axis=-1, keepdims=True)
        # XLA's maximum on CPU can lose a NaN, a sum does not: that of x - x is 0 or NaN.
        finite = jnp.sum(blocks - blocks, axis=-1, keepdims=True) == 0
        scale = round_to(jnp.where(finite, top / _LEVELS, jnp.nan), jnp.bfloat16)
        usable = scale >= jnp.finfo(jnp.float32).tiny
        rounded = jnp.round(blocks / jnp.where(usable, scale, 1))
        integers = jnp.where(usable, jnp.clip(rounded, -_LEVELS, _LEVELS), 0).astype(jnp.int8)
        low, high = integers[..., ::2], integers[..., 1::2]
        scales = lax.bitcast_convert_type(scale.astype(jnp.bfloat16), jnp.int8)
        parts = ((low & 15) | (high << 4), scales)
        return jnp.concatenate([x.reshape(x.shape[0], -1) for x in parts], axis=1)

    def decode(self, rows: Array, dtype: Any) -> Array:
        """The inverse of `encode`, in the floating dtype asked for."""
        n, count = rows.shape[0], self.blocks * self.length // 2
        packed = rows[:, :count].reshape(n, self.blocks, -1)
        scales = rows[:, count:].reshape(n, self.blocks, 1, _SCALE_BYTES)
        # Shifted to the top and back, so that the sign of the low one is extended.
        pair = jnp.stack([(packed << 4) >> 4, packed >> 4], axis=-1)
        integers = pair.reshape(n, self.blocks, self.length).astype(dtype)
        return integers * lax.bitcast_convert_type(scales, jnp.bfloat16).astype(dtype)
