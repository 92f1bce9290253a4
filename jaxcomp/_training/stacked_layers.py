"""Warns about leaves that hold many layers and would be compressed as one matrix.

`DataParallel.init` calls it, the one place that sees parameters with their boxes and the reducer's
fresh state. It only guesses from names and shapes, so it warns and changes nothing; `stacked` says
for certain.
"""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from typing import Any

import jax
import numpy as np

from jaxcomp._base.leaves import leaf_name, nodes_of, unboxed
from jaxcomp._base.typing import KeyPath, PyTree, Shape
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
    matrices: set[str] = set()  # names of leaves that are compressed as a single matrix
    for node in nodes_of(state, lambda node: isinstance(node, PowerSGDState)):
        for path, q in jax.tree.leaves_with_path(node.q):
            if np.ndim(q) == 2:
                matrices.add(leaf_name(path))
    for path, leaves in _subtrees(params).items():  # from the root down
        names, shapes, first_axes = zip(*leaves, strict=True)
        lengths = {shape[:1] for shape in shapes}
        why = ""
        if min(map(len, shapes)) == 2:  # biases and norms of one layer have one axis
            why = "as stacked layers have"
        if len(set(first_axes)) == 1 and _LAYERS.fullmatch(first_axes[0]):
            why = f"called {first_axes[0]!r}"
        whole = ""  # the first leaf with two more axes after that of the layers
        for name, shape in zip(names, shapes, strict=True):
            if not whole and len(shape) > 2 and name in matrices:
                whole = name
        if len(lengths) == 1 and why and whole:
            ((length,),) = lengths
            last = jax.tree_util.keystr(path[-1:], simple=True)
            warnings.warn(
                f"All leaves in {leaf_name(path)} have a leading axis of {length}, {why}, and "
                f"{whole} is compressed as one matrix. If they are layers, pass "
                f"powersgd(matrix_dims=jaxcomp.stacked({last!r})), which compresses each layer "
                "separately and loses less.",
                stacklevel=3,
            )
            return


def _subtrees(params: PyTree) -> dict[KeyPath, list[tuple[str, Shape, str]]]:
    """Returns name and shape of each leaf in each subtree, by the path of the subtree.

    With them comes the name of the first axis in flax's metadata, an empty text if there is none.
    """
    boxes = jax.tree.leaves(params, is_leaf=_has_names)
    subtrees: dict[KeyPath, list[Any]] = defaultdict(list)
    leaves = jax.tree.leaves_with_path(unboxed(params))
    for (path, leaf), box in zip(leaves, boxes, strict=True):
        names = getattr(box, "names", ())
        first_axis = next(iter(names), None)
        # In every subtree around the leaf, because any of them may be the stack.
        for length in range(1, len(path)):
            subtrees[path[:length]].append((leaf_name(path), np.shape(leaf), first_axis or ""))
    return subtrees


def _has_names(node: Any) -> bool:
    """Returns whether a node is one of flax's boxes with names of axes."""
    return isinstance(getattr(node, "names", None), tuple)
