"""The leaves of a Flax tree: linen dicts, ``nnx.State`` and nnx modules through one door.

JAX's own key paths name the leaves, so no Flax import is needed.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._base.tensors import shape_of

# The collections of linen variables that hold what a torch state dict holds.
COLLECTIONS = ("params", "batch_stats")
_SMALL = 1024  # values; what is smaller may be a step count or a seed
# Decoding caches of attention: floating point, but not parameters.
_CACHES = frozenset({"cached_key", "cached_value", "cache_index"})


def plain_path(path: tuple[Any, ...]) -> tuple[str, ...]:
    """Writes a JAX key path as strings, without what is not a module.

    That is the collection of linen variables, and the entry under which nnx keeps an array.
    """
    last = path[-1] if len(path) > 1 else None
    if isinstance(last, jax.tree_util.GetAttrKey) and last.name in ("value", "raw_value"):
        path = path[:-1]
    return without_collection(tuple(jax.tree_util.keystr((key,), simple=True) for key in path))


def without_collection(path: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the path of a leaf as it is where the tree has no collections."""
    if len(path) > 1 and path[0] in COLLECTIONS:
        return path[1:]
    return path


def leaves_by_path(tree: Any) -> dict[tuple[str, ...], Any]:
    """Collects every leaf of a tree by its path."""
    return {plain_path(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


@dataclasses.dataclass(frozen=True)
class Tree:
    """A flattened Flax tree.

    Attributes:
      shapes: Path, without the collection -> shape of every leaf that corresponds to a torch
        parameter or buffer, in natural order: ``Dense_10`` after ``Dense_9``.
      leaves: Path -> leaf, in JAX's order, those included that correspond to nothing in torch.
      treedef: Their structure.
      collections: Whether it is of linen variables, ``{'params': ..., ...}``.
    """

    shapes: Mapping[tuple[str, ...], tuple[int, ...]]
    leaves: Mapping[tuple[str, ...], Any]
    treedef: Any
    collections: bool

    @property
    def has_statistics(self) -> bool:
        """Tells whether running statistics have a place in the tree."""
        names = {path[-1] for path in self.shapes if path}
        return bool(names & {"mean", "var"})

    def with_leaves(self, leaves: Mapping[tuple[str, ...], Any]) -> Any:
        """Returns the tree with some leaves exchanged and all others as they are."""
        values = dict(self.leaves)
        for path in values.keys() & leaves.keys():
            values[path] = leaves[path]
        return self.treedef.unflatten(list(values.values()))


def trained(tree: Any) -> Any:
    """Selects what an optimizer gets of a Flax tree: parameters without running statistics."""
    if any(kind.__module__.startswith("flax.nnx") for kind in type(tree).__mro__):
        from flax import nnx

        state = nnx.state(tree) if isinstance(tree, nnx.Module) else tree
        return nnx.filter_state(state, nnx.Param)
    return tree["params"] if flatten(tree).collections else tree


def flatten(tree: Any) -> Tree:
    """Flattens a Flax tree.

    Args:
      tree: A linen parameter dict, linen variables ``{'params': ..., 'batch_stats': ...}``, an
        ``nnx.State`` or an nnx module; arrays or anything with ``shape`` and ``dtype``.

    Returns:
      The flattened tree. Random-number state, caches and other collections are kept in `leaves`
      and have no shape in `shapes`.

    Raises:
      CheckpointMismatch: Leaves have one name, as those of the keys 1 and "1", or those of one
        name in several collections.
    """
    flat, treedef = jax.tree.flatten_with_path(tree)
    leaves = {plain_path(path): value for path, value in flat}
    if len(leaves) < len(flat):
        counts = collections.Counter(plain_path(path) for path, _ in flat)
        raise CheckpointMismatch(
            "Several leaves of the Flax tree have one name. Rename all but one.",
            ambiguous=["/".join(path) for path, count in counts.items() if count > 1],
        )
    of_variables = isinstance(tree, Mapping) and isinstance(tree.get("params"), Mapping)
    part = {name: tree[name] for name in COLLECTIONS if name in tree} if of_variables else tree
    shapes: dict[tuple[str, ...], tuple[int, ...]] = {}
    for path, value in leaves_by_path(part).items():
        if _is_parameter(path, value):
            shapes[path] = shape_of(value)
    ordered = {path: shapes[path] for path in sorted(shapes, key=_natural_key)}
    return Tree(ordered, leaves, treedef, of_variables)


def hollow(tree: Any) -> Any:
    """Replaces shapes and large arrays of a tree by arrays of the same that take no memory."""

    def emptied(leaf: Any) -> Any:
        small = hasattr(leaf, "__array__") and np.size(leaf) <= _SMALL
        if small or not hasattr(leaf, "dtype"):
            return leaf
        return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)

    return jax.tree.map(emptied, tree)


def _natural_key(words: tuple[str, ...]) -> tuple[Any, ...]:
    """Returns what sorts names as people do: ``Dense_10`` after ``Dense_9``."""
    key: list[tuple[tuple[int, str], ...]] = []
    for word in words:
        pieces: list[tuple[int, str]] = []
        for piece in re.split(r"(\d+)", word):
            pieces.append((int(piece), "") if piece.isdigit() else (-1, piece))
        key.append(tuple(pieces))
    return tuple(key)


def _is_parameter(path: tuple[str, ...], value: Any) -> bool:
    if _CACHES.intersection(path):
        return False
    dtype = getattr(value, "dtype", None) or np.result_type(value)
    return bool(jnp.issubdtype(dtype, jnp.inexact))
