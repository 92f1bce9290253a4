"""Bytes of a step before and after compression, for each leaf: the result of `Reducer.bytes`.

Every reducer counts its own bytes from the shapes of the parameters, and returns a
`CompressionStats`; local SGD and accumulation add and scale those of the reducers in them. A count
is the payload, what a replica hands to the collectives, and equals the sizes in the compiled
program. What a network carries beyond that depends on the algorithm of the collective, and is left
to the adviser.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp._base.leaves import is_floating, leaf_dtype, leaf_name
from jaxcomp._base.typing import PyTree, Shape


@dataclasses.dataclass(frozen=True)
class LeafStats:
    """Holds the bytes of one leaf in one step, or in a whole run."""

    path: str
    shape: Shape
    rank: int  # 0 for a leaf that is not compressed
    bytes_before: int  # plain all-reduce in the leaf's dtype
    bytes_after: int  # payload of the collectives after compression

    @property
    def size(self) -> int:
        """Returns the number of values in the leaf."""
        return math.prod(self.shape)

    @property
    def compressed(self) -> bool:
        """Returns whether the leaf is sent as two factors."""
        return self.rank > 0

    @property
    def ratio(self) -> float:
        """Returns bytes before compression / bytes after it; 1.0 for an empty leaf."""
        return _ratio(self.bytes_before, self.bytes_after)


@dataclasses.dataclass(frozen=True)
class CompressionStats:
    """Holds the bytes that each replica passes to the collectives, in a step or in a whole run."""

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
        """Multiplies the bytes of each leaf by `after` and `before`, rounded to a byte."""
        leaves = []
        for leaf in self.leaves:
            sent = round(after * leaf.bytes_after)  # `after` may be a fraction: a mean over steps
            dense = before * leaf.bytes_before
            leaves.append(dataclasses.replace(leaf, bytes_before=dense, bytes_after=sent))
        return CompressionStats(tuple(leaves))

    def plus(self, other: CompressionStats) -> CompressionStats:
        """Adds the bytes of both; a leaf gets its rank in `other`."""
        leaves = {leaf.path: leaf for leaf in self.leaves}
        for leaf in other.leaves:
            same = leaves.get(leaf.path, dataclasses.replace(leaf, bytes_before=0, bytes_after=0))
            # The later phase of a run is the compressed one, so its rank is the one to show.
            leaves[leaf.path] = dataclasses.replace(
                leaf,
                bytes_before=same.bytes_before + leaf.bytes_before,
                bytes_after=same.bytes_after + leaf.bytes_after,
            )
        return CompressionStats(tuple(leaves.values()))

    def instead_of(self, tree: PyTree) -> CompressionStats:
        """Returns the same payload with `bytes_before` of an all-reduce of `tree`."""
        dense = dense_stats(tree)
        before = {leaf.path: leaf.bytes_before for leaf in dense.leaves}
        leaves = []
        for leaf in self.leaves:
            # A leaf of another name stands for all leaves together, as in `batched_powersgd`.
            instead = before.get(leaf.path, dense.bytes_before)
            leaves.append(dataclasses.replace(leaf, bytes_before=instead))
        return CompressionStats(tuple(leaves))

    @property
    def ratio(self) -> float:
        """Returns bytes before compression / bytes after it, for all leaves together."""
        return _ratio(self.bytes_before, self.bytes_after)

    def __str__(self) -> str:
        rows: list[Sequence[str]] = [("leaf", "shape", "rank", "before", "after", "ratio")]
        for leaf in self.leaves:
            rows.append(_row(leaf.path, str(leaf.shape), str(leaf.rank or "-"), leaf))
        rows.append(_row("total", "", "", self))
        return aligned("<>>>>>", rows)


def _row(name: str, shape: str, rank: str, stats: LeafStats | CompressionStats) -> Sequence[str]:
    before = f"{stats.bytes_before:,}"
    return name, shape, rank, before, f"{stats.bytes_after:,}", f"{stats.ratio:.1f}"


def aligned(sides: str, rows: Sequence[Sequence[str]]) -> str:
    """Writes rows of texts as a table; `sides` has ``<`` or ``>`` for each column."""
    formats = []
    for side, column in zip(sides, zip(*rows, strict=True), strict=True):
        formats.append(f"{side}{max(map(len, column))}")
    lines = []
    for row in rows:
        cells = map(format, row, formats)
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def whole_run(
    count: Callable[[int], CompressionStats], steps: int, *, in_phases: bool
) -> CompressionStats:
    """Adds up the bytes of all steps of a run.

    Args:
      count: A function of a step's number, from 0, that returns the step's bytes.
      steps: The number of steps.
      in_phases: True if a number of bytes never returns once it has changed, as after exact steps.
        Then only the steps of change are searched, so a million steps are as fast as a thousand.
    """
    total = CompressionStats(())
    step = 0
    while step < steps:
        stats = count(step)
        end = step + 1
        if in_phases:
            later = range(end, steps)
            # Bisection finds the last equal step only if a number, once gone, never comes back.
            end += bisect.bisect_left(later, True, key=lambda at: count(at) != stats)
        total = total.plus(stats.scaled(end - step, end - step))
        step = end
    return total


def dense_stats(tree: PyTree, wire: Any = None) -> CompressionStats:
    """Counts the bytes of every floating leaf uncompressed, in its dtype or in `wire`."""
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
    """Returns the number of replicas; refuses None, because arrays are cut into one share each."""
    if replicas is None:
        raise ValueError(
            "`replicas` is missing: with integers on the wire, arrays are cut into one share for "
            "each replica. Pass the number of replicas."
        )
    return replicas


def _ratio(before: int, after: int) -> float:
    if not after:  # an empty leaf, or a step that sends nothing: neither gained nor lost
        return 1.0
    return before / after
