"""Bytes of a step before and after compression, leaf by leaf: what `Reducer.bytes` answers."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp._base.leaves import is_floating, leaf_dtype, leaf_name
from jaxcomp._base.typing import PyTree


@dataclasses.dataclass(frozen=True)
class LeafStats:
    """Bytes of one leaf in one step, or in a whole run."""

    path: str
    shape: tuple[int, ...]
    rank: int  # 0 for a leaf that is not compressed
    bytes_before: int  # plain all-reduce in the leaf's own dtype
    bytes_after: int  # payload of the collectives after compression

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def compressed(self) -> bool:
        """Tells whether the leaf is sent as two factors."""
        return self.rank > 0

    @property
    def ratio(self) -> float:
        """Says how many times fewer bytes it is; 1.0 for an empty leaf."""
        return _ratio(self.bytes_before, self.bytes_after)


@dataclasses.dataclass(frozen=True)
class CompressionStats:
    """Payload of the collectives, as each replica passes it to them, of a step or a whole run."""

    leaves: tuple[LeafStats, ...]

    @property
    def bytes_before(self) -> int:
        """Adds up the bytes of a plain all-reduce."""
        return sum(leaf.bytes_before for leaf in self.leaves)

    @property
    def bytes_after(self) -> int:
        """Adds up the bytes after compression."""
        return sum(leaf.bytes_after for leaf in self.leaves)

    def scaled(self, after: float, before: int = 1) -> CompressionStats:
        """Returns so many times the bytes of each leaf, rounded to a byte."""
        leaves = []
        for leaf in self.leaves:
            sent = round(after * leaf.bytes_after)
            dense = before * leaf.bytes_before
            leaves.append(dataclasses.replace(leaf, bytes_before=dense, bytes_after=sent))
        return CompressionStats(tuple(leaves))

    def plus(self, other: CompressionStats) -> CompressionStats:
        """Returns the bytes of both together; a leaf has the rank that it has in `other`."""
        leaves = {leaf.path: leaf for leaf in self.leaves}
        for leaf in other.leaves:
            same = leaves.get(leaf.path, dataclasses.replace(leaf, bytes_before=0, bytes_after=0))
            leaves[leaf.path] = dataclasses.replace(
                leaf,
                bytes_before=same.bytes_before + leaf.bytes_before,
                bytes_after=same.bytes_after + leaf.bytes_after,
            )
        return CompressionStats(tuple(leaves.values()))

    def instead_of(self, tree: PyTree) -> CompressionStats:
        """Compares the same payload with that of an all-reduce of another tree of these leaves."""
        dense = dense_stats(tree)
        before = {leaf.path: leaf.bytes_before for leaf in dense.leaves}
        leaves = []
        for leaf in self.leaves:  # or of one leaf, in which all of them are
            instead = before.get(leaf.path, dense.bytes_before)
            leaves.append(dataclasses.replace(leaf, bytes_before=instead))
        return CompressionStats(tuple(leaves))

    @property
    def ratio(self) -> float:
        """Says how many times fewer bytes there are in total."""
        return _ratio(self.bytes_before, self.bytes_after)

    def __str__(self) -> str:
        width = len("total")
        for leaf in self.leaves:
            width = max(width, len(leaf.path))
        row = f"{{:<{width}}}  {{:>18}}  {{:>4}}  {{:>13,}}  {{:>13,}}  {{:>6.1f}}".format
        lines = [f"{'leaf':<{width}}  {'shape':>18}  rank         before          after   ratio"]
        for leaf in self.leaves:
            rank = leaf.rank or "-"
            before = leaf.bytes_before
            lines.append(
                row(leaf.path, str(leaf.shape), rank, before, leaf.bytes_after, leaf.ratio)
            )
        lines.append(row("total", "", "", self.bytes_before, self.bytes_after, self.ratio))
        return "\n".join(lines)


def whole_run(
    count: Callable[[int], CompressionStats], steps: int, *, in_phases: bool
) -> CompressionStats:
    """Adds up what the steps of a run send.

    Args:
      count: From a step, counted from 0, to what it sends.
      steps: How many there are.
      in_phases: Whether what has once changed never comes back, as exact steps do not. Then only
        the edges of such phases are looked for, and a million steps take no longer than thousand.
    """
    total = CompressionStats(())
    step = 0
    while step < steps:
        stats = count(step)
        end = step + 1
        if in_phases:
            later = range(end, steps)
            end += bisect.bisect_left(later, True, key=lambda at: count(at) != stats)
        total = total.plus(stats.scaled(end - step, end - step))
        step = end
    return total


def dense_stats(tree: PyTree, wire: Any = None) -> CompressionStats:
    """Counts every floating leaf uncompressed, in its own dtype on the wire or in `wire`."""
    leaves = []
    for path, leaf in jax.tree.leaves_with_path(tree):
        if not is_floating(leaf):
            continue
        dtype = jnp.dtype(leaf_dtype(leaf))
        shape = tuple(np.shape(leaf))
        size = math.prod(shape)
        after = size * (wire or dtype).itemsize
        leaves.append(LeafStats(leaf_name(path), shape, 0, size * dtype.itemsize, after))
    return CompressionStats(tuple(leaves))


def needed_replicas(replicas: int | None) -> int:
    """Returns the number of replicas, which arrays are cut into as many shares by; refuses None."""
    if replicas is None:
        raise ValueError(
            "`replicas` is missing: with integers on the wire arrays are cut into one share for "
            "each replica. Pass how many there are."
        )
    return replicas


def _ratio(before: int, after: int) -> float:
    if not after:
        return 1.0
    return before / after
