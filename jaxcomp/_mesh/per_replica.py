"""Which leaves of a state a replica has of its own, how they lie, and whose they are.

A state class says which of its fields differ between replicas with a class attribute,
``per_replica = ("residual", "owner")``. Nothing here knows a reducer by name, so a user's own takes
part by declaring the same.

Such leaves lie in one of two ways, and the axes of `owner` tell which. Outside of a mapped function
a state that is training has a leading axis of replicas, residual ``(n, *leaf)`` and owner ``(n,)``;
a consolidated one has none. Inside, the axis is mapped away by `jax.pmap` and `jax.vmap`;
`jax.shard_map` leaves a row of it, ``(1, *leaf)`` and ``(1,)``, which `takes_rows` takes off.

The owner is 0 for what is everybody's, as in a consolidated state; else the replica's index less
the number of replicas, which is never 0. A step writes it with what it keeps. It is read where a
state is consolidated or placed: `flax.jax_utils.unreplicate` and ``x[0]`` give one replica's
residual, which on every replica would be a gradient that nobody computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcomp._base.leaves import leaf_name
from jaxcomp._base.typing import Array, AxisName, KeyPath, PyTree
from jaxcomp._mesh.collectives import local_if_bound

# States of other libraries that hold something of each replica's own. MultiSteps accumulates local
# gradients, of which, as of a residual, only the mean matters.
_FOREIGN: dict[type, tuple[str, ...]] = {optax.MultiStepsState: ("acc_grads",)}


def map_leaves(function: Callable[..., Any], tree: PyTree, *rest: PyTree) -> PyTree:
    """Maps ``function(path, leaf, local, *rest)`` over a tree; `local` tells per-replica leaves."""
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    local = _local_flags(tree)
    others = [treedef.flatten_up_to(other) for other in rest]
    return treedef.unflatten(
        [
            function(path, leaf, flag, *extra)
            for (path, leaf), flag, *extra in zip(paths, local, *others, strict=True)
        ]
    )


def no_owner(axis_name: AxisName) -> Array:
    """The owner of a residual before the first step: float32 scalar 0."""
    return local_if_bound(jnp.zeros([], jnp.float32), axis_name)


def without_row(state: PyTree) -> PyTree:
    """Inside a function mapped over the replicas: this replica's own values without their axis.

    Raises:
      ValueError: If a leaf has the rows of several replicas.
    """

    def only(path: KeyPath, leaf: Any, local: bool) -> Any:
        if local and leaf.shape[0] != 1:
            raise ValueError(
                f"The leaf {leaf_name(path)} of the state has the rows of {leaf.shape[0]} replicas "
                "where one is at work. Map the state over them: place it with jaxcomp.shard_state "
                "and give jax.shard_map jaxcomp.state_specs(state, axis_name), or give jax.vmap "
                "and jax.pmap in_axes=jaxcomp.state_axes(state). Behind jaxcomp.value_and_grad, "
                "which has averaged, the chain takes jaxcomp.hold_state(reducer)."
            )
        return leaf.reshape(leaf.shape[1:]) if local else leaf

    return map_leaves(only, state)


def with_row(state: PyTree) -> PyTree:
    """The inverse of `without_row`."""
    return map_leaves(lambda path, leaf, local: jnp.expand_dims(leaf, 0) if local else leaf, state)


def has_rows(state: PyTree, fresh: Callable[[], PyTree] | None = None) -> bool:
    """Whether per-replica leaves have a leading axis: a row in a mapped function, outside all rows.

    Args:
      state: Any tree that holds states.
      fresh: Makes a state without rows, to compare with where there is no owner.
    """
    owners = owners_of(state).values()
    if owners or fresh is None:
        return any(np.ndim(owner) for owner in owners)

    def axes(tree: PyTree) -> list[int]:
        found: list[int] = []
        map_leaves(lambda path, leaf, own: found.append(np.ndim(leaf)) if own else None, tree)
        return found

    local = axes(state)
    return bool(local) and local == [ndim + 1 for ndim in axes(jax.eval_shape(fresh))]


def is_reducer_state(node: Any) -> bool:
    """Whether its class says what replicas have of their own, as those of reducers' states do."""
    return isinstance(getattr(type(node), "per_replica", None), tuple)


def owners_of(state: PyTree) -> dict[str, Any]:
    """The owners in a state, by their paths; none if no class in it declares one."""
    found: dict[str, Any] = {}
    nodes = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_reducer_state)
    for path, node in nodes:
        if not is_reducer_state(node):
            continue
        fields = jax.tree_util.tree_leaves_with_path(node, is_leaf=lambda x, own=node: x is not own)
        for field, value in fields:
            name = jax.tree_util.keystr((*path, *field))
            if name.endswith(".owner") and "owner" in type(node).per_replica:
                found[name] = value
            else:
                found |= {f"{name}{inner}": x for inner, x in owners_of(value).items()}
    return found


def _fields(node: Any) -> tuple[str, ...] | None:
    """Names of the per-replica fields that the class of `node` declares, or None."""
    declared = _FOREIGN.get(type(node), getattr(type(node), "per_replica", None))
    return declared if isinstance(declared, tuple) else None


def has_foreign(tree: PyTree) -> bool:
    """Whether a state of another library, which takes no rows, has per-replica leaves of its own.

    One that is itself in a per-replica field, as an optimizer of local steps, has none: its row is
    taken off with the field's.
    """
    for node in jax.tree.leaves(tree, is_leaf=lambda x: _fields(x) is not None):
        if type(node) in _FOREIGN:
            return True
        others = set(getattr(node, "_fields", ())) - set(_fields(node) or ())
        if _fields(node) is not None and any(has_foreign(getattr(node, f)) for f in others):
            return True
    return False


def _is_bare(node: Any) -> bool:
    """Whether this is a reducer's state turned into a mapping, as nnx.state and the like do."""
    return isinstance(node, Mapping) and "residual" in node and ("q" in node or "inner" in node)


def _local_flags(tree: PyTree) -> list[bool]:
    """For each leaf in flattening order, whether it lies in a per-replica field."""
    flags: list[bool] = []
    for node in jax.tree.leaves(tree, is_leaf=lambda x: _fields(x) is not None or _is_bare(x)):
        fields = _fields(node)
        if _is_bare(node):
            raise ValueError(
                "The state has lost its classes, and with them what each replica has of its own: "
                f"a {type(node).__name__} holds the keys {sorted(map(str, node))}. Pass the "
                "optimizer itself or its opt_state, not nnx.state, nnx.split or a state dict of it."
            )
        if fields is None:
            flags.append(False)
            continue
        children = jax.tree_util.tree_flatten_with_path(
            node, is_leaf=lambda x, node=node: x is not node
        )[0]
        for (key,), child in children:
            if getattr(key, "name", getattr(key, "key", None)) in fields:
                flags.extend([True] * len(jax.tree.leaves(child)))
            else:
                flags.extend(_local_flags(child))
    return flags
