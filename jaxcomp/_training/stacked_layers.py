"""Notices leaves that hold many layers and would be compressed as one matrix."""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from typing import NamedTuple

import jax
import numpy as np

from jaxcomp._base.leaves import leaf_name, unboxed
from jaxcomp._base.typing import KeyPath, PyTree
from jaxcomp._reducers.powersgd import PowerSGDState

_LAYERS = re.compile(r"layers?|stack(ed)?|repeats?|blocks?", re.IGNORECASE)


class _Leaf(NamedTuple):
    """What is looked at of a leaf."""

    name: str
    shape: tuple[int, ...]
    first_axis: str | None  # what flax's metadata calls it


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
        why = _why_stacked(leaves)
        whole = [leaf.name for leaf in leaves if leaf.name in matrices and len(leaf.shape) > 2]
        if why and whole:
            last = jax.tree_util.keystr(path[-1:], simple=True)
            warnings.warn(
                f"All leaves in {leaf_name(path)} have a leading axis of {leaves[0].shape[0]}, "
                f"{why}, and {whole[0]} is compressed as one matrix. If they are layers, pass "
                f"powersgd(matrix_dims=jaxcomp.stacked({last!r})), which compresses layer by layer "
                "and loses less.",
                stacklevel=3,
            )
            return


def _why_stacked(leaves: list[_Leaf]) -> str:
    """Says by what leaves are taken for stacked layers; nothing if they are not."""
    if len({leaf.shape[:1] for leaf in leaves}) != 1:
        return ""
    names = {leaf.first_axis for leaf in leaves}
    name = names.pop()
    if not names and name is not None and _LAYERS.fullmatch(name):
        return f"called {name!r}"
    if min(len(leaf.shape) for leaf in leaves) == 2:
        return "as stacked layers have"
    return ""


def _leaves_of_one_matrix(state: PyTree) -> set[str]:
    """Returns the names of the leaves that are compressed as one matrix each."""
    names: set[str] = set()
    is_powersgd = lambda node: isinstance(node, PowerSGDState)  # noqa: E731
    for node in filter(is_powersgd, jax.tree.leaves(state, is_leaf=is_powersgd)):
        leaves = jax.tree_util.tree_leaves_with_path(node.q)
        names.update(leaf_name(path) for path, q in leaves if np.ndim(q) == 2)
    return names


def _subtrees(params: PyTree) -> dict[KeyPath, list[_Leaf]]:
    """Returns the leaves of each part of a tree, by the path of the part."""
    subtrees: dict[KeyPath, list[_Leaf]] = defaultdict(list)
    has_names = lambda node: isinstance(getattr(node, "names", None), tuple)  # noqa: E731
    boxes = jax.tree.leaves(params, is_leaf=has_names)
    paths = jax.tree_util.tree_leaves_with_path(unboxed(params))
    for (path, leaf), box in zip(paths, boxes, strict=True):
        first_axis = next(iter(getattr(box, "names", ())), None)
        for length in range(1, len(path)):
            subtrees[path[:length]].append(_Leaf(leaf_name(path), np.shape(leaf), first_axis))
    return subtrees
