"""Are the replicas really replicas? One checksum per leaf, compared in one all-reduce.

A run whose processes loaded different parameters trains without an error and learns little. Nothing
in JAX finds that: each process declares its own values to be the replicated ones.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomp._base.checks import check_axis_name, check_int
from jaxcomp._base.leaves import leaf_dtype, leaf_name
from jaxcomp._base.typing import Array, AxisName, PyTree
from jaxcomp._mesh.axes import as_local, axis_size, switch
from jaxcomp._mesh.collectives import maximum, replica_index
from jaxcomp._mesh.per_replica import map_leaves


class ReplicaMismatch(ValueError):
    """Replicas that should hold the same values do not."""


class ReplicaCheck(NamedTuple):
    """What `check_replicas` found; equal on every replica."""

    leaves: PyTree  # bool scalar for each leaf of the tree: the same on every replica
    checksums: Array  # (replicas,) uint32: of the whole tree; all 0 where the check was not due

    @property
    def equal(self) -> Array:
        """Bool scalar: whether all leaves are."""
        return jnp.stack([jnp.asarray(x) for x in jax.tree.leaves(self.leaves)]).all()

    def raise_if_different(self) -> None:
        """Call it outside of the mapped function, on what came out of it.

        Raises:
          ReplicaMismatch: Naming the leaves that differ, and the replicas that differ from most.
        """
        # Out of pmap or vmap every value has an axis of replicas in front, with equal entries.
        one = jax.tree.map(lambda x: _local(x).reshape(-1)[0], self.leaves)
        sums = _local(self.checksums)
        sums = sums.reshape(-1, sums.shape[-1])[0]
        wrong = [leaf_name(p) for p, ok in jax.tree_util.tree_flatten_with_path(one)[0] if not ok]
        if not wrong:
            return
        values, counts = np.unique(sums, return_counts=True)
        common = values[counts.argmax()]
        others = np.flatnonzero(sums != common).tolist()
        who = (
            f"replica {_listed(others)} from the {counts.max()} others"
            if counts.max() > len(sums) / 2
            else f"all {len(sums)} replicas, in {len(values)} groups"
        )
        raise ReplicaMismatch(
            f"These leaves differ between replicas ({who}): {_listed(wrong)}. Start every process "
            "from the same seed or the same checkpoint."
        )


def check_replicas(
    tree: PyTree, axis_name: AxisName, *, step: Array | int = 0, every: int = 1
) -> ReplicaCheck:
    r"""Compares a tree between the replicas by checksums, in one all-reduce of a few bytes a leaf.

    The checksum of a leaf is a 32-bit hash of its bits and their positions, so that ``-0.0``,
    ``0.0`` and any two NaN patterns count as different. The all-reduce takes the maximum of each
    hash and of its complement; a leaf is the same everywhere iff the two maxima are complements.
    Different leaves go unnoticed with probability :math:`2^{-32}`.

    What a state declares as per replica (`PowerSGDState.residual`) is left out.

    Args:
      tree: Parameters, or a whole training state.
      axis_name: The mapped axis or axes of the replicas.
      step: The number of the step, for `every`; the same on every replica.
      every: Check only if `step` is a multiple of it; in between nothing is sent, and all leaves
        are reported equal.

    Returns:
      A `ReplicaCheck`. Return it from the mapped function and call its ``raise_if_different()``.

    Raises:
      ValueError: If the axis is not bound, or `every` is not a positive integer.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomp
      >>> params = {"b": jnp.zeros((3, 4)), "w": jnp.zeros((3, 2, 2)).at[2].set(1.0)}
      >>> found = jax.vmap(lambda p: jaxcomp.check_replicas(p, "data"), axis_name="data")(params)
      >>> try:
      ...     found.raise_if_different()
      ... except jaxcomp.ReplicaMismatch as error:
      ...     print(str(error)[:73])
      These leaves differ between replicas (replica 2 from the 2 others): ['w']
    """
    check_axis_name(axis_name)
    every = check_int("every", every, 1)
    if every == 1:
        return _check(tree, axis_name)
    same = jax.tree.map(lambda leaf: jnp.array(True), tree)
    nothing = ReplicaCheck(same, jnp.zeros(axis_size(axis_name), jnp.uint32))
    due = (jnp.asarray(step) % every == 0).astype(jnp.int32)
    return switch(due, [lambda: nothing, lambda: _check(tree, axis_name)])


def _check(tree: PyTree, axis_name: AxisName) -> ReplicaCheck:
    leaves, treedef = jax.tree.flatten(tree)
    skip = lambda path, leaf, local: local or leaf_dtype(leaf) == jax.dtypes.float0  # noqa: E731
    compared = [not skipped for skipped in jax.tree.leaves(map_leaves(skip, tree))]
    arrays = [jnp.asarray(x) for x, due in zip(leaves, compared, strict=True) if due]
    hashes = [_checksum(x) for x in as_local(arrays, axis_name)]
    own = jnp.stack(hashes) if hashes else jnp.zeros(0, jnp.uint32)
    whole = _mix(jnp.sum(_mix(own + lax.iota(jnp.uint32, own.size)), dtype=jnp.uint32))
    slots = jnp.zeros(axis_size(axis_name), jnp.uint32)
    slots = as_local(slots, axis_name).at[replica_index(axis_name)].set(whole)
    largest = maximum(jnp.concatenate([own, ~own, slots]), axis_name)
    same = largest[: own.size] == ~largest[own.size : 2 * own.size]
    found = iter(same)
    flags = [next(found) if due else jnp.array(True) for due in compared]
    return ReplicaCheck(treedef.unflatten(flags), largest[2 * own.size :])


@jax.jit  # traced once for a shape, of which a model has few
def _checksum(leaf: Array) -> Array:
    """A 32-bit hash of bits and positions. A sum: a sharded leaf is summed where it lies."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        leaf = jnp.stack([leaf.real, leaf.imag])
    if leaf.dtype == jnp.bool_:
        leaf = leaf.astype(jnp.uint8)
    unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(leaf.dtype.itemsize, jnp.uint32)
    # Of 8 bytes there are two numbers, along a new last axis.
    bits = lax.bitcast_convert_type(leaf, unsigned).astype(jnp.uint32)
    positions = jnp.zeros(bits.shape, jnp.uint32)
    for axis, length in enumerate(bits.shape):
        positions = positions * jnp.uint32(length & 0xFFFFFFFF)
        positions = positions + lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
    salted = bits ^ _mix(positions + jnp.uint32(0x9E3779B9))
    return _mix(jnp.sum(_mix(salted), dtype=jnp.uint32))


def _mix(x: Array) -> Array:
    """Murmur3's finaliser: every bit of the result depends on every bit of `x`."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _local(x: Any) -> np.ndarray:
    """A host copy; of an array over several processes, this process's part."""
    if getattr(x, "is_fully_addressable", True) or x.is_fully_replicated:
        return np.asarray(x)
    return np.asarray(x.addressable_shards[0].data)


def _listed(items: list[Any]) -> str:
    shown = ", ".join(str(item) for item in items[:10])
    return shown + (f" and {len(items) - 10} more" if len(items) > 10 else "")
