"""Leaves in groups, in the order in which the backward pass makes their gradients.

Each group has collectives of its own. Those of the first group need nothing of what the backward
pass has yet to do, and travel while it does it.
"""

from __future__ import annotations

import re
from typing import Any

import jax

from jaxcomp._base.checks import ParameterError, check_int
from jaxcomp._base.leaves import leaf_name
from jaxcomp._base.typing import BucketFn, KeyPath, PyTree

# What looks up tokens or positions comes first in a model, whatever its name's place in the tree.
_FIRST_LAYER = re.compile(r"embed|\bwte\b|\bwpe\b", re.IGNORECASE)


def checked_buckets(buckets: int | BucketFn) -> int | BucketFn:
    """The argument ``buckets``.

    Raises:
      ValueError: If it is neither a positive integer nor a function.
    """
    return buckets if callable(buckets) else check_int("buckets", buckets, 1)


def in_buckets(tree: PyTree, buckets: int | BucketFn) -> list[list[int]]:
    """Positions of the leaves of each bucket, the bucket that is sent first in front.

    A number cuts the leaves, from the last layer to the first, into runs of as many bytes but for
    the last one, which gets twice as many and the embeddings: the others shall have some of the
    backward pass left to travel behind. Layers are taken to be in the order of their names, in
    which ``block_10`` follows ``block_9``.

    Args:
      tree: The gradients, or anything else with ``shape`` and ``dtype``.
      buckets: How many, or a function of (path, leaf) that returns the bucket's number, from 0.

    Raises:
      ValueError: If the function returns anything else.
    """
    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    if callable(buckets):
        groups: dict[int, list[int]] = {}
        for i, (path, leaf) in enumerate(found):
            groups.setdefault(_number(buckets, path, leaf), []).append(i)
        return [groups[number] for number in sorted(groups)]
    order = sorted(range(len(found)), key=lambda i: _place(found[i][0]), reverse=True)
    layers = [i for i in order if not is_embedding(found[i][0])]
    sizes = {i: leaf.size * leaf.dtype.itemsize for i, (_, leaf) in enumerate(found)}
    total, before = max(sum(sizes[i] for i in layers), 1), 0
    cut: list[list[int]] = [[] for _ in range(buckets)]
    for i in layers:
        # By the middle of a leaf, so that one that is large does not pull the next ones along.
        share = int((before + sizes[i] / 2) * (buckets + 1) / total)
        cut[min(share, buckets - 1)].append(i)
        before += sizes[i]
    cut[-1] += [i for i in order if is_embedding(found[i][0])]
    return [group for group in cut if group]


def is_embedding(path: KeyPath) -> bool:
    """Whether a leaf belongs to the last bucket whatever its name's place in the tree."""
    return bool(_FIRST_LAYER.search(leaf_name(path)))


def _place(path: KeyPath) -> tuple[tuple[int, str], ...]:
    """What sorts leaves as the layers are run; numbers in names count as numbers."""
    pieces = re.split(r"(\d+)", leaf_name(path))
    return tuple((int(x), "") if x.isdigit() else (-1, x) for x in pieces)


def _number(buckets: BucketFn, path: KeyPath, leaf: Any) -> int:
    number = buckets(path, leaf)
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise ParameterError(
            "buckets",
            f"must return a non-negative integer for every leaf, got {number!r} for "
            f"{leaf_name(path)}.",
        )
    return number
