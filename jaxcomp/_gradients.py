"""Gradients of one replica, and the checks that every reducer makes on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomp._collectives import as_local, check_local
from jaxcomp._matricize import leaf_name
from jaxcomp._typing import Array, AxisName, PyTree


def local_value_and_grad(
    fun: Callable[..., Any], axis_name: AxisName, **value_and_grad_kwargs: Any
) -> Callable[..., Any]:
    """`jax.value_and_grad` that gives the gradient of this replica alone.

    Under ``shard_map(check_vma=True)`` plain `jax.grad` with respect to a replicated parameter
    returns the *sum* over the axis. That is an uncompressed all-reduce, after which a reducer has
    nothing left to save. This function marks the differentiated arguments as local first; under
    `jax.pmap`, `jax.vmap` and ``check_vma=False`` gradients are local anyway and nothing is done.

    Args:
      fun: The loss of this replica's batch: a scalar, or (scalar, auxiliary) with ``has_aux=True``.
        It should not average over the axis itself.
      axis_name: The mapped axis or axes of the replicas.
      **value_and_grad_kwargs: Passed on to `jax.value_and_grad` (``argnums``, ``has_aux``, ...).

    Returns:
      A function with the arguments of `fun` that returns ``(value, gradients)``, both this
      replica's own. Average the value with `jax.lax.pmean` to report it.

    Raises:
      ValueError: When called, if an axis is not bound.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomp
      >>> def loss(w, x):
      ...     return jnp.sum(w * x)
      >>> def step(w, x):
      ...     return jaxcomp.local_value_and_grad(loss, "data")(w, x)
      >>> value, grads = jax.vmap(step, in_axes=(None, 0), axis_name="data")(
      ...     jnp.ones(2), jnp.arange(4.0).reshape(2, 2))
      >>> grads.tolist()
      [[0.0, 1.0], [2.0, 3.0]]
    """
    value_and_grad = jax.value_and_grad(fun, **value_and_grad_kwargs)
    argnums = value_and_grad_kwargs.get("argnums", 0)
    chosen = {argnums} if isinstance(argnums, int) else set(argnums)

    def local(*args: Any, **kwargs: Any) -> Any:
        positions = {index % len(args) for index in chosen} if args else set()
        marked = [as_local(a, axis_name) if i in positions else a for i, a in enumerate(args)]
        return value_and_grad(*marked, **kwargs)

    return local


def reducible(updates: PyTree, axis_name: AxisName) -> list[int]:
    """Positions (in flattening order) of the leaves that a reducer averages.

    ``float0`` leaves, the gradients of integer parameters, carry nothing and are left out.

    Raises:
      ValueError: If a leaf is neither floating nor ``float0``, if a gradient was already reduced
        over the axis, or if the axis is not bound. The message names the leaf.
    """
    positions, wrong = [], []
    for i, (path, leaf) in enumerate(jax.tree_util.tree_flatten_with_path(updates)[0]):
        dtype = getattr(leaf, "dtype", None)
        if dtype is not None and jnp.issubdtype(dtype, jnp.floating):
            positions.append(i)
        elif dtype is None:
            wrong.append(f"{leaf_name(path)} is a {type(leaf).__name__} and no array")
        elif dtype != jax.dtypes.float0:
            wrong.append(f"{leaf_name(path)} has dtype {dtype}")
    if wrong:
        raise ValueError(
            f"Only floating gradients can be reduced: {'; '.join(wrong)}. Keep parameters that are "
            "not trained out with optax.masked; wrap the chain in "
            "optax.contrib.split_real_and_imaginary for complex ones."
        )
    check_local(updates, axis_name)
    return positions


def replaced(leaves: list[Array], positions: list[int], values: list[Array]) -> list[Array]:
    """`leaves` with those at `positions` replaced."""
    result = list(leaves)
    for position, value in zip(positions, values, strict=True):
        result[position] = value
    return result
