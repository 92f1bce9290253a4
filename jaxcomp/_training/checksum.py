"""A 32-bit hash of an array: what `check_replicas` compares."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp._base.typing import Array


@jax.jit  # traced once for a shape, of which a model has few
def checksum(leaf: Array) -> Array:
    """A 32-bit hash of bits and positions. A sum: a sharded leaf is summed where it lies."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        leaf = jnp.stack([leaf.real, leaf.imag])
    total = jnp.zeros([], jnp.uint32)
    positions = jnp.zeros(leaf.shape, jnp.uint32)
    for axis in range(leaf.ndim):
        positions = positions * jnp.uint32(leaf.shape[axis] & 0xFFFFFFFF)
        positions = positions + lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
    for word, bits in enumerate(_words(leaf)):
        salted = bits ^ mix(positions + jnp.uint32(0x9E3779B9 * (word + 1) & 0xFFFFFFFF))
        total = total + jnp.sum(mix(salted), dtype=jnp.uint32)
    return mix(total)


def _words(leaf: Array) -> list[Array]:
    """The bits of each element, as one or two uint32."""
    if leaf.dtype == jnp.bool_:
        return [leaf.astype(jnp.uint32)]
    width = leaf.dtype.itemsize
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[width]
    bits = lax.bitcast_convert_type(leaf, unsigned)  # 8 bytes give a new last axis of 2
    if width == 8:
        return [bits[..., 0], bits[..., 1]]
    return [bits.astype(jnp.uint32)]


def mix(x: Array) -> Array:
    """Murmur3's finaliser: every bit of the result depends on every bit of `x`."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
