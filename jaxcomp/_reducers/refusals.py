"""Gradients and states that no reducer can take: refused with the leaf and the remedy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp._base.leaves import leaf_name
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


def check_state(state: PyTree, fresh: PyTree) -> None:
    """Refuses a state that is not of the kind and the shapes of a fresh one for these gradients.

    Raises:
      ValueError: If it is another reducer's; listing every leaf that only one of the two has, or
        whose shape is off.
    """
    if type(state) is not type(fresh):
        raise ValueError(
            f"The reducer's update needs its own {type(fresh).__name__}, got "
            f"{type(state).__name__}. Inside an optax.chain the chain's update takes the chain's "
            "state; jaxcomp.adapt_state turns another reducer's into this one's."
        )
    shapes = _shapes(state)
    expected = _shapes(fresh)
    wrong = []
    for name in dict.fromkeys([*expected, *shapes]):
        shape = shapes.get(name)
        if shape != expected.get(name):
            line = f"{name}: expected {expected.get(name)}, got {shape}"
            wrong.append(line.replace("None", "none"))
    if not wrong and jax.tree.structure(state) != jax.tree.structure(fresh):
        wrong.append("its trees are made of other containers than those of the gradients")
    if not wrong:
        return
    hint = (
        "Make the state with init() of a tree like the gradients and use the arguments that it was "
        "made with, or bring it to others with jaxcomp.adapt_state"
    )
    if any("residual" in line for line in wrong):
        hint += (
            "; if a residual has an axis of replicas too many or lacks one, place the state with "
            "jaxcomp.shard_state and map it with jaxcomp.state_specs"
        )
    listed = "\n  ".join(wrong)
    raise ValueError(
        f"The {type(fresh).__name__} does not fit these gradients and arguments:\n  {listed}\n"
        f"{hint}."
    )


def _shapes(state: PyTree) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the leaves by their paths."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {leaf_name(path).removeprefix("."): np.shape(leaf) for path, leaf in leaves}
