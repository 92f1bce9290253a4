"""Gradients and states that no reducer can take: refused with the leaf and the remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp._base.leaves import is_masked, leaf_name
from jaxcomp._base.typing import AxisName, PyTree
from jaxcomp._mesh.collectives import varying, vma_axes


def check_gradients(updates: PyTree, axis_name: AxisName) -> None:
    """Refuses what no reducer can average.

    ``float0`` leaves, the gradients of integer parameters, carry nothing and pass. Under
    ``shard_map(check_vma=True)`` the gradient with respect to a replicated parameter arrives summed
    over the axis: reducing it again would put nothing new on the wire and save nothing.

    Raises:
      ValueError: If a leaf is neither floating nor ``float0``, or was already reduced over the
        axis, or the axis is not bound. The message names the leaves.
    """
    axes = vma_axes(axis_name)
    wrong = []
    leaves = jax.tree_util.tree_leaves_with_path(updates)
    for path, leaf in leaves:
        dtype = getattr(leaf, "dtype", None)
        if dtype is None:
            wrong.append(f"{leaf_name(path)} is a {type(leaf).__name__} and no array")
        elif not jnp.issubdtype(dtype, jnp.floating) and dtype != jax.dtypes.float0:
            wrong.append(f"{leaf_name(path)} has dtype {dtype}")
    if wrong:
        raise ValueError(
            f"Only floating gradients can be reduced: {'; '.join(wrong)}. Keep parameters that are "
            "not trained out with optax.masked (of an Equinox module, differentiate "
            "eqx.filter(model, eqx.is_inexact_array)); wrap the chain in "
            "optax.contrib.split_real_and_imaginary for complex ones."
        )
    for path, leaf in leaves:
        summed = [name for name in axes if name not in varying(leaf)]
        if summed and leaf.dtype != jax.dtypes.float0:
            raise ValueError(
                f"The gradient {leaf_name(path)} is the same on every replica along "
                f"{summed[0]!r}: it was already summed, by jax.grad inside "
                "shard_map(check_vma=True) or a pmean of your own, so there is nothing left to "
                "reduce. Leave the pmean out, or take the gradient with "
                f"jaxcomp.local_value_and_grad(loss, {axis_name!r}), or mark the parameters with "
                f"jax.lax.pcast(params, {axis_name!r}, to='varying') before jax.grad."
            )


def check_shapes(gradients: PyTree, params: PyTree) -> None:
    """Refuses gradients of other shapes than the parameters of their names.

    Raises:
      ValueError: With the first of them.
    """
    shapes = {leaf_name(path): np.shape(x) for path, x in jax.tree.leaves_with_path(params)}
    for path, gradient in jax.tree.leaves_with_path(gradients):
        name = leaf_name(path)
        shape = shapes.get(name, gradient.shape)
        if shape != gradient.shape:
            raise ValueError(
                f"The gradient of {name} has shape {gradient.shape}, the parameter has {shape}. "
                "Gradients must be those of the parameters, averaged over this replica's examples."
            )


def fitted(
    kind: type,
    state: Any,
    updates: PyTree,
    shapes: Mapping[str, Sequence[tuple[int, ...] | None]],
) -> list[list[Any]]:
    """Returns the leaves of fields of a state, in the order of the gradients.

    Args:
      kind: The state's class.
      state: What the user passed.
      updates: The gradients.
      shapes: The shapes of the leaves of each field that is a tree like the gradients; None where a
        leaf has nothing and the field has an `optax.MaskedNode`.

    Raises:
      ValueError: If it is another class; listing every leaf that only one of the trees has, or
        whose shape is off.
    """
    if not isinstance(state, kind):
        raise other_state("The reducer", kind.__name__, state)
    paths, treedef = jax.tree_util.tree_flatten_with_path(updates)
    fields = []
    wrong = []
    for field, expected in shapes.items():
        try:
            leaves = treedef.flatten_up_to(getattr(state, field))
        except ValueError as error:
            raise _other_leaves(kind, field, updates, state) from error
        fields.append(leaves)
        for (path, _), leaf, shape in zip(paths, leaves, expected, strict=True):
            actual = None if is_masked(leaf) else np.shape(leaf)
            if actual != shape:
                line = f"{field}{leaf_name(path)}: expected {shape}, got {actual}"
                wrong.append(line.replace("None", "none"))
    if not wrong:
        return fields
    hint = "Make a new state"
    if hasattr(kind, "q"):
        hint = (
            "Use the rank, matrix_dims, error_feedback and warm_start that it was made with, or "
            "jaxcomp.adapt_state"
        )
    if any(line.startswith("residual") for line in wrong):
        hint += (
            "; if a residual has an axis of replicas too many or lacks one, place the state with "
            "jaxcomp.shard_state and map it with jaxcomp.state_specs"
        )
    listed = "\n  ".join(wrong)
    raise ValueError(
        f"The {kind.__name__} does not fit these gradients and arguments:\n  {listed}\n{hint}."
    )


def _other_leaves(kind: type, field: str, updates: PyTree, state: Any) -> ValueError:
    """Makes the refusal of a tree that has not the gradients' leaves, which it names."""
    of_gradients = _leaf_names(updates)
    of_state = _leaf_names(getattr(state, field))
    only = [f"only among the gradients {name}" for name in of_gradients if name not in of_state]
    only += [f"only in the state {name}" for name in of_state if name not in of_gradients]
    return ValueError(
        f"The gradients and the {kind.__name__}'s {field} have different tree structures: "
        f"{', '.join(only) or 'the same leaves in other containers'}. Make the state with init() "
        "of a tree like the gradients."
    )


def _leaf_names(tree: PyTree) -> list[str]:
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_masked)
    return [leaf_name(path) for path, _ in leaves]


def other_state(reducer: str, kind: str, state: PyTree) -> ValueError:
    """Makes the refusal of a state that is not this reducer's own."""
    return ValueError(
        f"{reducer}'s update needs its own {kind}, got {type(state).__name__}. Inside an "
        "optax.chain the chain's update takes the chain's state; jaxcomp.adapt_state turns another "
        "reducer's into this one's."
    )
