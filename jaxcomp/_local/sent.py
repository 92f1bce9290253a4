"""What an average of local SGD puts on the wire."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp._base.leaves import compute_dtype, leaf_dtype
from jaxcomp._base.stats import CompressionStats, LeafStats, dense_leaves
from jaxcomp._base.typing import PyTree


def exact_leaves(tree: PyTree, prefix: str = "") -> list[LeafStats]:
    """What `average` sends: float32, or the leaf's own dtype where that is wider."""
    wide = jax.tree.map(
        lambda x: (
            jax.ShapeDtypeStruct(np.shape(x), compute_dtype(leaf_dtype(x)))
            if jnp.issubdtype(leaf_dtype(x), jnp.floating)
            else x
        ),
        tree,
    )
    return [dataclasses.replace(leaf, path=prefix + leaf.path) for leaf in dense_leaves(wide)]


def combined(params: PyTree, parts: Iterable[list[LeafStats]]) -> CompressionStats:
    """The sum of several payloads, beside an all-reduce of the gradients."""
    found = {leaf.path: dataclasses.replace(leaf, bytes_after=0) for leaf in dense_leaves(params)}
    for leaf in (leaf for part in parts for leaf in part):
        known = found.get(leaf.path, dataclasses.replace(leaf, bytes_before=0, bytes_after=0))
        after = known.bytes_after + leaf.bytes_after
        found[leaf.path] = dataclasses.replace(
            leaf, bytes_before=known.bytes_before, bytes_after=after
        )
    return CompressionStats.of(found.values())
