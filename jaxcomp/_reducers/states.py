"""Whether a state is that of a reducer and fits its gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from jaxcomp._base.leaves import leaf_name
from jaxcomp._base.typing import PyTree


def other_state(reducer: str, kind: str, state: PyTree) -> ValueError:
    """The refusal of a state that is not this reducer's own."""
    return ValueError(
        f"{reducer}'s update needs its own {kind}, got {type(state).__name__}. Inside an "
        "optax.chain the chain's update takes the chain's state; jaxcomp.adapt_state turns another "
        "reducer's into this one's."
    )


class Field(NamedTuple):
    """One field of a state, with what the gradients say about it."""

    name: str
    tree: PyTree  # as the gradients, with `optax.MaskedNode` where a leaf has nothing
    shapes: list[tuple[int, ...] | None]  # expected, in flattening order; None: nothing


def fitted(kind: str, updates: PyTree, fields: list[Field], hint: str) -> list[list[Any]]:
    """The leaves of each field in the order of the gradients.

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
    found = []
    for field in fields:
        try:
            found.append(treedef.flatten_up_to(field.tree))
        except ValueError as error:
            raise ValueError(
                f"The gradients and the {kind}'s {field.name} have different tree structures: "
                f"{_difference(paths, field.tree)}. Make the state with init() of a tree like the "
                "gradients."
            ) from error
    wrong = []
    for field, values in zip(fields, found, strict=True):
        for path, value, expected in zip(paths, values, field.shapes, strict=True):
            shape = None if isinstance(value, optax.MaskedNode) else tuple(np.shape(value))
            if shape != expected:
                shapes = f"expected {expected or 'none'}, got {shape or 'none'}"
                wrong.append(f"{field.name}{path}: {shapes}")
    if wrong:
        listed = "\n  ".join(wrong)
        if any(line.startswith("residual") for line in wrong):
            hint = (
                "A residual that has an axis of replicas too many or lacks one was not placed with "
                f"jaxcomp.shard_state and mapped with jaxcomp.state_specs. {hint}"
            )
        raise ValueError(
            f"The {kind} does not fit these gradients and arguments:\n  {listed}\n{hint}"
        )
    return found


def _difference(want: list[str], tree: PyTree) -> str:
    """The leaves that only one of the two trees has, by their paths."""
    nodes = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda x: isinstance(x, optax.MaskedNode)
    )[0]
    have = [leaf_name(path) for path, _ in nodes]
    only = [f"only among the gradients {name}" for name in want if name not in have]
    only += [f"only in the state {name}" for name in have if name not in want]
    return ", ".join(only) or "the same leaves in other containers"
