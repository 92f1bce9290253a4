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
    """A JAX key path as strings, without what is no module.

    That is the collection of linen variables, and the entry under which nnx keeps an array.
    """
    if len(path) > 1 and isinstance(path[-1], jax.tree_util.GetAttrKey):
        is_variable = path[-1].name in ("value", "raw_value")
        path = path[:-1] if is_variable else path
    attributes = ("key", "name", "idx")
    found = (next((getattr(k, a) for a in attributes if hasattr(k, a)), k) for k in path)
    return without_collection(tuple(map(str, found)))


def without_collection(path: tuple[str, ...]) -> tuple[str, ...]:
    """The path of a leaf as it is where the tree has no collections."""
    return path[1:] if len(path) > 1 and path[0] in COLLECTIONS else path


def leaves_by_path(tree: Any) -> dict[tuple[str, ...], Any]:
    """Every leaf of a tree by its path."""
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
        """Whether running statistics have a place in the tree."""
        return any(path[-1:] in (("mean",), ("var",)) for path in self.shapes)

    def with_leaves(self, leaves: Mapping[tuple[str, ...], Any]) -> Any:
        """The tree with the given leaves exchanged and all others as they are."""
        return self.treedef.unflatten([leaves.get(p, value) for p, value in self.leaves.items()])


def trained(tree: Any) -> Any:
    """The part of a Flax tree that an optimizer gets: parameters without running statistics."""
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
    found = leaves_by_path(part).items()
    shapes = {path: shape_of(value) for path, value in found if _is_parameter(path, value)}
    ordered = {path: shapes[path] for path in sorted(shapes, key=_natural_key)}
    return Tree(ordered, leaves, treedef, of_variables)


def hollow(tree: Any) -> Any:
    """The tree with shapes and large arrays replaced by arrays of the same that take no memory."""

    def emptied(leaf: Any) -> Any:
        small = hasattr(leaf, "__array__") and np.size(leaf) <= _SMALL
        if small or not hasattr(leaf, "dtype"):
            return leaf
        return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)

    return jax.tree.map(emptied, tree)


def _natural_key(words: tuple[str, ...]) -> tuple[Any, ...]:
    split = (re.split(r"(\d+)", word) for word in words)
    return tuple(tuple((int(p), "") if p.isdigit() else (-1, p) for p in word) for word in split)


def _is_parameter(path: tuple[str, ...], value: Any) -> bool:
    dtype = getattr(value, "dtype", None) or np.result_type(value)
    return bool(jnp.issubdtype(dtype, jnp.inexact)) and not _CACHES.intersection(path)
