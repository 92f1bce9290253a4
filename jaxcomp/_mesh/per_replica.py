"""Finds per-replica leaves of a state, their axes of replicas, and the replica that owns them.

A state class names the fields that differ between replicas in a class attribute,
``per_replica = ("residual", "owner")``. This module knows no reducer by name, so the state of a
user's reducer only needs the same attribute.

Per-replica leaves have an axis of replicas or not; the axes of `owner` show it. Outside of a mapped
function, the state of a running training has a leading axis of replicas, residual ``(n, *leaf)``
and owner ``(n,)``. A consolidated state has no such axis. Inside, `jax.pmap` and `jax.vmap` remove
the axis. `jax.shard_map` leaves it with length 1, ``(1, *leaf)`` and ``(1,)``; the update of every
`Transformation` removes it and adds it again.

The owner is 0 if all replicas share the values, as in a consolidated state. Else it is the
replica's index minus the number of replicas, which is never 0. A step writes it together with the
residual. Functions that consolidate or place a state read it, because `flax.jax_utils.unreplicate`
and ``x[0]`` return the residual of one replica only. On every replica, that residual would be a
wrong gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcomp._base.leaves import key_names, leaf_name, nodes_of
from jaxcomp._base.typing import Array, AxisName, PyTree
from jaxcomp._mesh.collectives import local_if_bound

# States of other libraries with per-replica fields. MultiSteps accumulates local gradients; like
# residuals, they matter only through their mean.
_FOREIGN: dict[type, tuple[str, ...]] = {optax.MultiStepsState: ("acc_grads",)}

# Kinds of leaves: replicated, per replica, or the owner of per-replica leaves.
REPLICATED = "replicated"
PER_REPLICA = "per replica"
OWNER = "owner"


def marks(tree: PyTree) -> PyTree:
    """Returns the kind of each leaf, REPLICATED, PER_REPLICA or OWNER, as state classes say.

    Raises:
      ValueError: If a state in the tree has lost its class.
    """
    averaged_before = _has_averaged_before(tree)

    def mark(node: Any) -> PyTree:
        if not _is_state(node):
            return REPLICATED
        if _is_bare(node):
            raise ValueError(
                "The state has lost its classes, which name its per-replica leaves: a "
                f"{type(node).__name__} holds the keys {sorted(map(str, node))}. Pass the "
                "optimizer itself or its opt_state, not nnx.state, nnx.split or a state dict of it."
            )
        local = _FOREIGN.get(type(node)) or node.per_replica
        if averaged_before and is_accumulator(node):
            local = ()
        # One level, because the class names its own fields only.
        children, treedef = jax.tree.flatten_with_path(node, lambda x: x is not node)
        marked = []
        for path, child in children:
            (field,) = key_names(path)
            below = jax.tree.map(mark, child, is_leaf=_is_state)
            if field == "owner" and field in local:
                below = jax.tree.map(lambda _: OWNER, below)
            elif field in local:
                # A nested state, as of a reducer in the inner optimizer, has its own owner.
                below = jax.tree.map(lambda mark: mark if mark == OWNER else PER_REPLICA, below)
            marked.append(below)
        return treedef.unflatten(marked)

    return jax.tree.map(mark, tree, is_leaf=_is_state)


def is_accumulator(node: Any) -> bool:
    """Returns whether a node is a state of `optax.MultiSteps` or `jaxcomp.accumulate`."""
    return hasattr(node, "acc_grads") and hasattr(node, "inner_opt_state")


def _has_averaged_before(tree: PyTree) -> bool:
    """Returns whether accumulators hold gradients that a reducer has already averaged.

    In ``optax.chain(hold_state(reducer), optax.MultiSteps(...))`` the accumulated gradients are
    equal on all replicas. If the reducer is inside of the accumulator, it gets local gradients. For
    `accumulate`, which is made to hold a reducer, only a reducer before it in its chain counts: one
    elsewhere in the tree may belong to another network.
    """
    nodes = nodes_of(tree, is_accumulator)
    if not nodes or reducer_states([node.inner_opt_state for node in nodes]):
        return False
    if all(type(node) in _FOREIGN for node in nodes):
        # `optax.MultiSteps` around a reducer was excluded above, so the reducer came before it.
        return bool(reducer_states(tree))
    return bool(nodes_of(tree, _is_chain_behind))


def _is_chain_behind(node: Any) -> bool:
    """Returns whether a node is a chain's state with a reducer and, behind it, an accumulator."""
    if type(node) is not tuple:  # the state of optax.chain; named tuples are states of one link
        return False
    averaged = False
    for link in node:
        if averaged and nodes_of(link, is_accumulator):
            return True
        averaged |= is_reducer_state(link) and not is_accumulator(link)
    return False


def is_reducer_state(node: Any) -> bool:
    """Returns whether a node's class declares its per-replica fields, as state classes do."""
    return isinstance(getattr(type(node), "per_replica", None), tuple)


def reducer_states(tree: PyTree) -> list[Any]:
    """Returns the outermost reducer states in a tree."""
    return nodes_of(tree, is_reducer_state)


def _is_state(node: Any) -> bool:
    return is_reducer_state(node) or type(node) in _FOREIGN or _is_bare(node)


def _is_bare(node: Any) -> bool:
    """Returns whether a node is a reducer's state that became a mapping, as nnx.state makes it."""
    return isinstance(node, Mapping) and "residual" in node and ("q" in node or "inner" in node)


def has_foreign(tree: PyTree) -> bool:
    """Returns whether the tree has per-replica leaves in a state of another library.

    Such a state does not support rows. A state inside of a per-replica field, such as the optimizer
    of local steps, is not counted, because its row is removed together with that of the field.
    """
    kinds = map(type, nodes_of(tree, _is_state))
    return not _FOREIGN.keys().isdisjoint(kinds) and not _has_averaged_before(tree)


def leaves_marked(state: PyTree, *kinds: str) -> dict[str, Any]:
    """Returns the leaves of a state of these kinds, by path."""
    chosen = {}
    leaves = jax.tree.leaves_with_path(state)
    for (path, leaf), mark in zip(leaves, jax.tree.leaves(marks(state)), strict=True):
        if mark in kinds:
            chosen[leaf_name(path)] = leaf
    return chosen


def map_per_replica(function: Callable[[Any], Any], state: PyTree) -> PyTree:
    """Maps a function over the per-replica leaves of a state; replicated leaves stay."""

    def mapped(leaf: Any, mark: str) -> Any:
        if mark == REPLICATED:
            return leaf
        return function(leaf)

    return jax.tree.map(mapped, state, marks(state))


def no_owner(axis_name: AxisName) -> Array:
    """Returns the owner of a fresh residual: float32 scalar 0."""
    return local_if_bound(jnp.zeros([], jnp.float32), axis_name)


def has_replica_axis(state: PyTree, fresh: Callable[[], PyTree] | None = None) -> bool:
    """Returns whether per-replica leaves have a leading axis (of length 1 in a mapped function).

    Args:
      state: Any tree that holds states.
      fresh: A function that makes a state without this axis, to compare with if there is no owner.
    """
    owners = leaves_marked(state, OWNER)
    if owners or fresh is None:
        # An owner is a scalar, so an axis can only be that of the replicas.
        return any(map(np.ndim, owners.values()))
    local = leaves_marked(state, PER_REPLICA)
    if not local:
        return False
    without = leaves_marked(jax.eval_shape(fresh), PER_REPLICA)
    if local.keys() != without.keys():  # of other parameters; another check refuses it
        return False
    return all(np.ndim(leaf) == 1 + np.ndim(without[name]) for name, leaf in local.items())


def without_replica_axis(state: PyTree) -> PyTree:
    """Removes the leading axis of 1 of per-replica leaves, inside of a mapped function.

    Raises:
      ValueError: If a leaf has rows of several replicas.
    """
    for name, leaf in leaves_marked(state, PER_REPLICA, OWNER).items():
        if leaf.shape[0] != 1:
            fix = (
                "Map the state over the replicas: place it with jaxcomp.shard_state and give "
                "jax.shard_map jaxcomp.state_specs(state, axis_name), or give jax.vmap and "
                "jax.pmap in_axes=jaxcomp.state_axes(state)."
            )
            if is_accumulator(state):
                fix = (
                    "If the gradients are already averaged, put jaxcomp.hold_state(reducer) "
                    "before the accumulation as a link of the same optax.chain: "
                    "optax.chain(hold_state(reducer), accumulate(...)). The state of an "
                    "optax.named_chain, or of hold_state in a chain within the chain, does not "
                    f"show that they are averaged. If they are not: {fix}"
                )
            raise ValueError(
                f"The leaf {name} of the state has the rows of {leaf.shape[0]} "
                f"replicas, but this function runs on one replica. {fix}"
            )
    return map_per_replica(lambda leaf: leaf.reshape(leaf.shape[1:]), state)


def with_replica_axis(state: PyTree) -> PyTree:
    """Inverts `without_replica_axis`."""
    return map_per_replica(lambda leaf: jnp.expand_dims(leaf, 0), state)
