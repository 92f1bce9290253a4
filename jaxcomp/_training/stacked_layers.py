"""Notices leaves that hold many layers and would be compressed as one matrix."""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxcomp._base.leaves import leaf_name, unboxed
from jaxcomp._base.typing import KeyPath, PyTree
from jaxcomp._reducers.powersgd import PowerSGDState

_LAYERS = re.compile(r"layers?|stack(ed)?|repeats?|blocks?", re.IGNORECASE)


def note_stacked_layers(params: PyTree, state: PyTree) -> None:
    """Warns once of a subtree that looks like stacked layers and is compressed as one matrix.

    Layers in a scan (`nn.scan`, `jax.lax.scan`) lie in leaves with one leading axis in common, also
    norms and biases, which have two axes then; or flax's metadata names that axis. By the default
    rule such a leaf is one matrix with one rank for all layers.

    Args:
      params: The parameters.
      state: The reducer's, fresh.
    """
    matrices = _leaves_of_one_matrix(state)
    for path, leaves in _subtrees(params).items():  # from the root down
        lengths = {leaf.shape[:1] for leaf in leaves}
        whole = [leaf.name for leaf in leaves if len(leaf.shape) > 2 and leaf.name in matrices]
        if len(lengths) != 1 or not whole:
            continue
        axis = _name_of_first_axis(leaves)
        if axis is not None and _LAYERS.fullmatch(axis):
            why = f"called {axis!r}"
        elif min(len(leaf.shape) for leaf in leaves) == 2:
            why = "as stacked layers have"
        else:
            continue
        warnings.warn(
            f"All leaves in {leaf_name(path)} have a leading axis of {leaves[0].shape[0]}, {why}, "
            f"and {whole[0]} is compressed as one matrix. If they are layers, pass "
            f"powersgd(matrix_dims=jaxcomp.stacked({_last_name(path)!r})), which compresses layer "
            "by layer and loses less.",
            stacklevel=3,
        )
        return


class _Leaf(NamedTuple):
    """What is looked at of a leaf."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]  # what flax's metadata calls its axes; () if nothing


def _leaves_of_one_matrix(state: PyTree) -> set[str]:
    """Returns the names of the leaves that are compressed as one matrix each."""
    names: set[str] = set()
    is_powersgd = lambda node: isinstance(node, PowerSGDState)  # noqa: E731
    for node in jax.tree.leaves(state, is_leaf=is_powersgd):
        if not is_powersgd(node):
            continue
        for path, q in jax.tree_util.tree_flatten_with_path(node.q)[0]:
            if np.ndim(q) == 2:
                names.add(leaf_name(path))
    return names


def _subtrees(params: PyTree) -> dict[KeyPath, list[_Leaf]]:
    """Returns the leaves of each part of a tree, by the path of the part."""
    subtrees: dict[KeyPath, list[_Leaf]] = defaultdict(list)
    has_names = lambda node: isinstance(getattr(node, "names", None), tuple)  # noqa: E731
    boxes = jax.tree.leaves(params, is_leaf=has_names)
    paths = jax.tree_util.tree_flatten_with_path(unboxed(params))[0]
    for (path, leaf), box in zip(paths, boxes, strict=True):
        axes = tuple(map(str, box.names)) if has_names(box) else ()
        for length in range(1, len(path)):
            subtrees[path[:length]].append(_Leaf(leaf_name(path), np.shape(leaf), axes))
    return subtrees


def _name_of_first_axis(leaves: list[_Leaf]) -> str | None:
    """Returns the name of the first axis of all leaves, if all have the same."""
    names = {leaf.axes[:1] for leaf in leaves}
    if len(names) != 1 or names == {()}:
        return None
    return leaves[0].axes[0]


def _last_name(path: KeyPath) -> Any:
    """Returns the name of the last part of a path."""
    for attribute in ("key", "name", "idx"):
        if hasattr(path[-1], attribute):
            return getattr(path[-1], attribute)
    return ""
