"""Leaves of a tree: their names, their dtypes, and a tree with some of them exchanged."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxcomp._base.typing import Array, KeyPath


def leaf_name(path: KeyPath) -> str:
    """A key path as users write it: ``['layer']['kernel']``, or ``(root)`` for a bare array."""
    return jax.tree_util.keystr(path) or "(root)"


def leaf_dtype(leaf: Any) -> Any:
    """The dtype of an array, a shape struct or a Python number."""
    return leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)


def replaced(leaves: list[Array], positions: list[int], values: list[Array]) -> list[Array]:
    """`leaves` with those at `positions` replaced."""
    result = list(leaves)
    for position, value in zip(positions, values, strict=True):
        result[position] = value
    return result
