"""Whether a state fits the gradients that it is used with, said leaf by leaf."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from jaxcomp._base.trees import leaf_name
from jaxcomp._base.typing import PyTree


class Field(NamedTuple):
    """One field of a state, with what the gradients say about it."""

    name: str
    tree: PyTree  # as the gradients, with `optax.MaskedNode` where a leaf has nothing
    shapes: list[tuple[int, ...] | None]  # expected, in flattening order; None: nothing


def fitted(kind: str, updates: PyTree, fields: list[Field], hint: str) -> list[list[Any]]:
    """The leaves of each field beside those of the gradients.

    Args:
      kind: Name of the state's class.
      updates: The gradients.
      fields: The fields.
      hint: What to do about a shape that is off, one sentence.

    Raises:
      ValueError: Listing every leaf that only one of the trees has, or whose shape is off.
    """
    paths = [leaf_name(path) for path, _ in jax.tree_util.tree_flatten_with_path(updates)[0]]
    treedef = jax.tree.structure(updates)
    try:
        beside = [treedef.flatten_up_to(field.tree) for field in fields]
    except ValueError as error:
        difference = "; ".join(_difference(paths, field.tree) for field in fields[:1])
        raise ValueError(
            f"The gradients and the {kind} have different tree structures: {difference}. Make the "
            "state with init() of a tree like the gradients."
        ) from error
    wrong = []
    for field, values in zip(fields, beside, strict=True):
        for path, value, expected in zip(paths, values, field.shapes, strict=True):
            found = None if isinstance(value, optax.MaskedNode) else tuple(np.shape(value))
            if found != expected:
                shapes = f"expected {expected or 'none'}, got {found or 'none'}"
                wrong.append(f"{field.name}{path}: {shapes}")
    if wrong:
        raise ValueError(
            f"The {kind} does not fit these gradients and arguments:\n  "
            + "\n  ".join(wrong)
            + "\nA residual whose first axis is off by the number of replicas was not placed with "
            f"jaxcomp.shard_state and jaxcomp.state_specs. {hint}"
        )
    return beside


def _difference(want: list[str], tree: PyTree) -> str:
    """The leaves that only one of the two trees has, by their paths."""
    nodes = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda x: isinstance(x, optax.MaskedNode)
    )[0]
    have = [leaf_name(path) for path, _ in nodes]
    only = [f"only among the gradients {name}" for name in want if name not in have]
    only += [f"only in the state {name}" for name in have if name not in want]
    return ", ".join(only) or "the same leaves in other containers"
