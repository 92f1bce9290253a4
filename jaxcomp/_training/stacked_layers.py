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
from jaxcomp._base.typing import KeyPath, PyTree
from jaxcomp._reducers.powersgd import PowerSGDState

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
    has_names = lambda node: isinstance(getattr(node, "names", None), tuple)  # noqa: E731
    boxes = jax.tree.leaves(params, is_leaf=has_names)
    parts: dict[KeyPath, list[Any]] = defaultdict(list)
    for (path, leaf), box in zip(jax.tree.leaves_with_path(unboxed(params)), boxes, strict=True):
        first_axis = next(iter(getattr(box, "names", ())), None)
        # In every subtree around the leaf, because any of them may be the stack.
        for length in range(1, len(path)):
            parts[path[:length]].append((leaf_name(path), np.shape(leaf), first_axis))
    for path, leaves in parts.items():  # from the root down
        lengths = set()
        axis_names = set()
        least_axes = 3
        whole = ""  # the first leaf with two more axes after that of the layers
        for name, shape, axis_name in leaves:
            lengths.add(shape[:1])
            axis_names.add(axis_name)
            least_axes = min(least_axes, len(shape))
            if not whole and len(shape) > 2 and name in matrices:
                whole = name
        why = ""
        common = axis_names.pop() if len(axis_names) == 1 else None
        if _LAYERS.fullmatch(common or ""):
            why = f"called {common!r}"
        elif least_axes == 2:  # biases and norms of one layer have one axis
            why = "as stacked layers have"
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


def _leaves_of_one_matrix(state: PyTree) -> set[str]:
    """Returns the names of leaves that are compressed as a single matrix."""
    names: set[str] = set()
    for node in nodes_of(state, lambda node: isinstance(node, PowerSGDState)):
        for path, q in jax.tree.leaves_with_path(node.q):
            if np.ndim(q) == 2:
                names.add(leaf_name(path))
    return names
