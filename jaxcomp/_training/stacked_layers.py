"""Notices leaves that hold many layers and would be compressed as one matrix."""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from typing import Any

import jax
import numpy as np

from jaxcomp._base.leaves import leaf_name, unboxed
from jaxcomp._base.typing import KeyPath, PyTree
from jaxcomp._reducers.powersgd import PowerSGDState

_LAYERS = re.compile(r"layers?|stack(ed)?|repeats?|blocks?", re.IGNORECASE)


def note_stacked_layers(params: PyTree, state: PyTree) -> None:
    """Warns once of a subtree that looks like stacked layers and is compressed as one matrix.

    Layers in a scan (`nn.scan`, `jax.lax.scan`) lie in leaves with one leading axis in common, also
    norms and biases, which have two axes then; or flax's metadata names that axis. Of the default
    rule such a leaf is one matrix with one rank for all layers.

    Args:
      params: The parameters.
      state: The reducer's, fresh.
    """
    is_powersgd = lambda node: isinstance(node, PowerSGDState)  # noqa: E731
    factors = {
        leaf_name(path)
        for node in jax.tree.leaves(state, is_leaf=is_powersgd)
        if is_powersgd(node)
        for path, q in jax.tree_util.tree_flatten_with_path(node.q)[0]
        if np.ndim(q) == 2
    }
    subtrees: dict[KeyPath, list[tuple[str, tuple[int, ...], Any]]] = defaultdict(list)
    paths = jax.tree_util.tree_flatten_with_path(unboxed(params))[0]
    for (path, leaf), axes in zip(paths, _axis_names(params), strict=True):
        for length in range(1, len(path)):
            subtrees[path[:length]].append((leaf_name(path), np.shape(leaf), axes))
    for path, leaves in subtrees.items():  # from the root down
        named = {axes[0] for _, _, axes in leaves if axes}
        is_layer_axis = (
            len(named) == 1 and all(axes for *_, axes in leaves) and _LAYERS.fullmatch(*named)
        )
        alike = len({shape[:1] for _, shape, _ in leaves}) == 1
        whole = [name for name, shape, _ in leaves if len(shape) > 2 and name in factors]
        if alike and (is_layer_axis or min(len(shape) for _, shape, _ in leaves) == 2) and whole:
            name = _last(path)
            why = f"called {named.pop()!r}" if is_layer_axis else "as stacked layers have"
            warnings.warn(
                f"All leaves in {leaf_name(path)} have a leading axis of {leaves[0][1][0]}, {why}, "
                f"and {whole[0]} is compressed as one matrix. If they are layers, pass "
                f"powersgd(matrix_dims=jaxcomp.stacked({name!r})), which compresses layer by layer "
                "and loses less.",
                stacklevel=3,
            )
            return


def _axis_names(params: PyTree) -> list[tuple[str, ...]]:
    """For each leaf what flax's metadata calls its axes (`nn.Partitioned`); () if nothing."""
    has_names = lambda node: isinstance(getattr(node, "names", None), tuple)  # noqa: E731
    boxes = jax.tree.leaves(params, is_leaf=has_names)
    return [tuple(map(str, box.names)) if has_names(box) else () for box in boxes]


def _last(path: KeyPath) -> Any:
    """The name of the last part of a path."""
    return next((getattr(path[-1], k) for k in ("key", "name", "idx") if hasattr(path[-1], k)), "")
