"""An average with 4-bit integers on the wire, as `jaxcomp.quantized_allreduce` does it with 8.

Quantise, send share ``k`` to replica ``k`` (all-to-all), which sums it in float32, quantises the
mean and sends it to everybody (all-gather). Two integers travel in a byte; 128 share a scale.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp._base.leaves import round_to
from jaxcomp._mesh.axes import axis_size
from jaxcomp._mesh.collectives import exchange, gather, replica_index
from jaxcomp._mesh.shares import BlockLayout

Array = jax.Array

_LEVELS = 7
_BLOCK = 128
_SCALE_BYTES = 2  # bfloat16


def average_int4(parts: Sequence[Array], axis_name: str) -> tuple[list[Array], list[Array], Array]:
    """Means, this replica's contributions as sent, and whether all of it is finite."""
    means, sent, finite = [], [], jnp.array(True)
    replicas, owner = axis_size(axis_name), replica_index(axis_name)
    for part in parts:
        layout = _layout(part.size, replicas)
        first = _encode(layout.cut(part))
        received = _decode([exchange(x, axis_name) for x in first])
        mean = (received / replicas).sum(axis=0, keepdims=True)
        second = _encode(mean)
        output = _decode([gather(x[0], axis_name) for x in second])
        # As in jaxcomp: the second rounding of a share counts as its owner's.
        own = _decode(first)
        share = lax.dynamic_index_in_dim(own, owner, keepdims=True)
        share = share + replicas * (_decode(second) - mean)
        means.append(layout.join(output, part))
        sent.append(layout.join(lax.dynamic_update_index_in_dim(own, share, owner, axis=0), part))
        finite &= jnp.isfinite(output).all()
    return means, sent, finite


def int4_bytes(size: int, replicas: int) -> int:
    """Bytes of a part of `size` values with its scales, in either of the two stages."""
    layout = _layout(size, replicas)
    return replicas * layout.blocks * (layout.length // 2 + _SCALE_BYTES)


def _layout(size: int, replicas: int) -> BlockLayout:
    layout = BlockLayout.of(size, replicas, _BLOCK)
    return BlockLayout(size, replicas, layout.blocks, layout.length + layout.length % 2)


def _encode(blocks: Array) -> tuple[Array, Array]:
    """Blocks ``(n, blocks, length)`` as bytes of two integers each, and a scale for each block."""
    top = jnp.abs(blocks).max(axis=-1, keepdims=True)
    scale = round_to(jnp.where(jnp.isfinite(top), top / _LEVELS, jnp.nan), jnp.bfloat16)
    usable = scale >= jnp.finfo(jnp.float32).tiny
    rounded = jnp.round(blocks / jnp.where(usable, scale, 1))
    integers = jnp.where(usable, jnp.clip(rounded, -_LEVELS, _LEVELS), 0).astype(jnp.int8)
    low, high = integers[..., ::2], integers[..., 1::2]
    return (low & 15) | (high << 4), scale.astype(jnp.bfloat16)


def _decode(encoded: Sequence[Array]) -> Array:
    """The inverse of `_encode`."""
    packed, scale = encoded
    # Shifted to the top and back, so that the sign of the low one is extended.
    pair = jnp.stack([(packed << 4) >> 4, packed >> 4], axis=-1)
    return pair.reshape(*packed.shape[:-1], -1).astype(jnp.float32) * scale.astype(jnp.float32)
