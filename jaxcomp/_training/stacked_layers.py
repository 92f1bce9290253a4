"""Notices leaves that hold many layers and would be compressed as one matrix."""

from __future__ import annotations

import warnings
from collections import defaultdict
from typing import Any

import jax
import numpy as np

from jaxcomp._base.leaves import leaf_name, unboxed
from jaxcomp._base.typing import KeyPath, PyTree
from jaxcomp._reducers.powersgd import PowerSGDState


def note_stacked_layers(params: PyTree, state: PyTree) -> None:
    """Warns once of a subtree that looks like stacked layers and is compressed as one matrix.

    Layers in a scan (`nn.scan`, `jax.lax.scan`) lie in leaves with one leading axis in common, also
    norms and biases, which have two axes then. Of the default rule such a leaf is one matrix with
    one rank for all layers.

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
    subtrees: dict[KeyPath, list[tuple[str, tuple[int, ...]]]] = defaultdict(list)
    for path, leaf in jax.tree_util.tree_flatten_with_path(unboxed(params))[0]:
        for length in range(1, len(path)):
            subtrees[path[:length]].append((leaf_name(path), np.shape(leaf)))
    for path, leaves in subtrees.items():  # from the root down
        ranks = {len(shape) for _, shape in leaves}
        axes = {shape[:1] for _, shape in leaves}
        whole = [name for name, shape in leaves if len(shape) > 2 and name in factors]
        if len(axes) == 1 and min(ranks) == 2 and whole:
            name = _last(path)
            warnings.warn(
                f"All leaves in {leaf_name(path)} have a leading axis of {leaves[0][1][0]}, as "
                f"stacked layers have, and {whole[0]} is compressed as one matrix. If they are, "
                f"pass powersgd(matrix_dims=jaxcomp.stacked({name!r})), which compresses layer by "
                "layer and loses less.",
                stacklevel=3,
            )
            return


def _last(path: KeyPath) -> Any:
    """The name of the last part of a path."""
    return next((getattr(path[-1], k) for k in ("key", "name", "idx") if hasattr(path[-1], k)), "")
