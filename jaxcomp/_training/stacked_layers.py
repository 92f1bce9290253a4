"""Warns about leaves that hold many layers and would be compressed as one matrix.

`DataParallel.init` calls it, the one place that sees parameters with their boxes and the reducer's
fresh state. It only guesses from names and shapes, so it warns and changes nothing; `stacked` says
for certain.
"""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxcomp._base.leaves import leaf_name, nodes_of, unboxed
from jaxcomp._base.typing import KeyPath, PyTree
from jaxcomp._reducers.powersgd import PowerSGDState

# Names that flax's models give to the axis of scanned layers in their metadata.
_LAYERS = re.compile(r"layers?|stack(ed)?|repeats?|blocks?", re.IGNORECASE)


def note_stacked_layers(params: PyTree, state: PyTree) -> None:
    """Warns once about a subtree that looks like stacked layers and is compressed as one matrix.

    Scanned layers (`nn.scan`, `jax.lax.scan`) have leaves with a common leading axis, so that norms
    and biases have two axes; or flax's metadata names that axis. By the default rule such a leaf is
    one matrix with one rank for all layers.

    Args:
      params: The parameters.
      state: The reducer's fresh state.
    """
    matrices = _leaves_of_one_matrix(state)
    for path, leaves in _subtrees(params).items():  # from the root down
        lengths = {leaf.shape[:1] for leaf in leaves}
        why = _looks_like_layers(leaves)
        whole = ""  # the first leaf with two more axes after that of the layers
        for leaf in leaves:
            if not whole and len(leaf.shape) > 2 and leaf.name in matrices:
                whole = leaf.name
        if len(lengths) == 1 and why and whole:
            ((length,),) = lengths
            last = jax.tree_util.keystr(path[-1:], simple=True)
            warnings.warn(
                f"All leaves in {leaf_name(path)} have a leading axis of {length}, {why}, "
                f"and {whole} is compressed as one matrix. If they are layers, pass "
                f"powersgd(matrix_dims=jaxcomp.stacked({last!r})), which compresses layer by layer "
                "and loses less.",
                stacklevel=3,
            )
            return


class _Leaf(NamedTuple):
    """Describes one parameter."""

    name: str
    shape: tuple[int, ...]
    first_axis: str | None  # its name in flax's metadata, if there is one


def _subtrees(params: PyTree) -> dict[KeyPath, list[_Leaf]]:
    """Returns the leaves in each subtree of the parameters, by the path of the subtree."""
    boxes = jax.tree.leaves(params, is_leaf=_has_names)
    subtrees: dict[KeyPath, list[_Leaf]] = defaultdict(list)
    leaves = jax.tree.leaves_with_path(unboxed(params))
    for (path, leaf), box in zip(leaves, boxes, strict=True):
        names = getattr(box, "names", ())
        first_axis = next(iter(names), None)
        described = _Leaf(leaf_name(path), np.shape(leaf), first_axis)
        # In every subtree around the leaf, because any of them may be the stack.
        for length in range(1, len(path)):
            subtrees[path[:length]].append(described)
    return subtrees


def _has_names(node: Any) -> bool:
    """Tells whether a node is one of flax's boxes with names of axes."""
    return isinstance(getattr(node, "names", None), tuple)


def _looks_like_layers(leaves: Sequence[_Leaf]) -> str:
    """Returns what shows that the first axis counts layers, in words; an empty text if nothing."""
    names = {leaf.first_axis for leaf in leaves}
    if len(names) == 1:
        (name,) = names
        if _LAYERS.fullmatch(name or ""):
            return f"called {name!r}"
    # Biases and norms of one layer have one axis.
    if min(len(leaf.shape) for leaf in leaves) == 2:
        return "as stacked layers have"
    return ""


def _leaves_of_one_matrix(state: PyTree) -> set[str]:
    """Returns the names of leaves that are compressed as a single matrix."""
    names: set[str] = set()
    for node in nodes_of(state, lambda node: isinstance(node, PowerSGDState)):
        for path, q in jax.tree.leaves_with_path(node.q):
            if np.ndim(q) == 2:
                names.add(leaf_name(path))
    return names
