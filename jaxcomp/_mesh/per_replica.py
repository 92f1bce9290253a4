"""Which leaves of a state a replica has of its own, how they lie, and whose they are.

A state class says which of its fields differ between replicas with a class attribute,
``per_replica = ("residual", "owner")``. Nothing here knows a reducer by name, so a user's own takes
part by declaring the same.

Such leaves lie in one of two ways, and the axes of `owner` tell which. Outside of a mapped function
a state that is training has a leading axis of replicas, residual ``(n, *leaf)`` and owner ``(n,)``;
a consolidated one has none. Inside, the axis is mapped away by `jax.pmap` and `jax.vmap`;
`jax.shard_map` leaves a row of it, ``(1, *leaf)`` and ``(1,)``, which the update of every
`Transformation` takes off and puts on again.

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

from jaxcomp._base.leaves import key_names, leaf_name, nodes_of
from jaxcomp._base.typing import Array, AxisName, KeyPath, PyTree
from jaxcomp._mesh.collectives import local_if_bound

# States of other libraries that hold something of each replica's own. MultiSteps accumulates local
# gradients, of which, as of a residual, only the mean matters.
_FOREIGN: dict[type, tuple[str, ...]] = {optax.MultiStepsState: ("acc_grads",)}

# What a leaf of a state is: the same for all replicas, each one's own, or whose that is.
SHARED = "shared"
LOCAL = "local"
OWNER = "owner"


def marks(tree: PyTree) -> PyTree:
    """Marks the leaves of a tree that holds states: SHARED, LOCAL or OWNER, as their classes say.

    Raises:
      ValueError: If a state in the tree has lost its class.
    """
    averaged_before = _has_averaged_before(tree)

    def mark(node: Any) -> PyTree:
        if not _is_state(node):
            return SHARED
        if _is_bare(node):
            raise ValueError(
                "The state has lost its classes, and with them what each replica has of its own: a "
                f"{type(node).__name__} holds the keys {sorted(map(str, node))}. Pass the "
                "optimizer itself or its opt_state, not nnx.state, nnx.split or a state dict of it."
            )
        local = _FOREIGN.get(type(node)) or node.per_replica
        if averaged_before and is_accumulator(node):
            local = ()
        children, treedef = jax.tree.flatten_with_path(node, lambda x: x is not node)
        marked = []
        for path, child in children:
            (field,) = key_names(path)
            below = jax.tree.map(mark, child, is_leaf=_is_state)
            if field == "owner" and field in local:
                below = jax.tree.map(lambda _: OWNER, below)
            elif field in local:
                below = jax.tree.map(lambda mark: mark if mark == OWNER else LOCAL, below)
            marked.append(below)
        return treedef.unflatten(marked)

    return jax.tree.map(mark, tree, is_leaf=_is_state)


def is_accumulator(node: Any) -> bool:
    """Tells the state of `optax.MultiSteps` and of `jaxcomp.accumulate`."""
    return hasattr(node, "acc_grads") and hasattr(node, "inner_opt_state")


def accumulators(tree: PyTree) -> list[Any]:
    """Returns the states that accumulate, in a tree."""
    return nodes_of(tree, is_accumulator)


def _has_averaged_before(tree: PyTree) -> bool:
    """Tells whether states accumulate what a reducer beside them has averaged.

    As in ``optax.chain(hold_state(reducer), optax.MultiSteps(...))``: what they hold is then the
    same on all replicas. A reducer inside of one gets what it has accumulated. `accumulate` is made
    for that, and another network's reducer may be beside it: only one in its chain counts.
    """
    nodes = accumulators(tree)
    if not nodes or reducer_states([node.inner_opt_state for node in nodes]):
        return False
    if all(type(node) in _FOREIGN for node in nodes):
        return bool(reducer_states(tree))
    return bool(nodes_of(tree, _is_chain_behind))


def _is_chain_behind(node: Any) -> bool:
    """Tells whether it is a chain's state with an accumulator, however deep, behind a reducer."""
    if type(node) is not tuple or not accumulators(node):
        return False
    return any(is_reducer_state(link) and not is_accumulator(link) for link in node)


def is_reducer_state(node: Any) -> bool:
    """Tells whether a class says what replicas have of their own, as those of states do."""
    return isinstance(getattr(type(node), "per_replica", None), tuple)


def reducer_states(tree: PyTree) -> list[Any]:
    """Returns the states in a tree that are in no other."""
    return nodes_of(tree, is_reducer_state)


def _is_state(node: Any) -> bool:
    return is_reducer_state(node) or type(node) in _FOREIGN or _is_bare(node)


def _is_bare(node: Any) -> bool:
    """Tells whether this is a reducer's state turned into a mapping, as by nnx.state."""
    return isinstance(node, Mapping) and "residual" in node and ("q" in node or "inner" in node)


def has_foreign(tree: PyTree) -> bool:
    """Tells whether a state of another library, which takes no rows, has per-replica leaves.

    One that is itself in a per-replica field, as an optimizer of local steps, has none: its row is
    taken off with the field's.
    """
    kinds = map(type, nodes_of(tree, _is_state))
    return not _FOREIGN.keys().isdisjoint(kinds) and not _has_averaged_before(tree)


def leaves_marked(state: PyTree, *kinds: str) -> dict[str, Any]:
    """Returns the leaves of a state that are marked so, by path."""
    chosen = {}
    leaves = jax.tree.leaves_with_path(state)
    for (path, leaf), mark in zip(leaves, jax.tree.leaves(marks(state)), strict=True):
        if mark in kinds:
            chosen[leaf_name(path)] = leaf
    return chosen


def no_owner(axis_name: AxisName) -> Array:
    """Returns the owner of a residual before the first step: float32 scalar 0."""
    return local_if_bound(jnp.zeros([], jnp.float32), axis_name)


def has_rows(state: PyTree, fresh: Callable[[], PyTree] | None = None) -> bool:
    """Tells whether per-replica leaves have a leading axis: a row in a mapped function, or all.

    Args:
      state: Any tree that holds states.
      fresh: Makes a state without rows, to compare with where there is no owner.
    """
    owners = leaves_marked(state, OWNER)
    if owners or fresh is None:
        return any(map(np.ndim, owners.values()))
    local = leaves_marked(state, LOCAL)
    if not local:
        return False
    without = leaves_marked(jax.eval_shape(fresh), LOCAL)
    if local.keys() != without.keys():  # of other parameters, which is refused elsewhere
        return False
    return all(np.ndim(leaf) == 1 + np.ndim(without[name]) for name, leaf in local.items())


def without_row(state: PyTree) -> PyTree:
    """Takes a replica's own values out of their row, inside a function mapped over the replicas.

    Raises:
      ValueError: If a leaf has the rows of several replicas.
    """

    def taken_out(path: KeyPath, leaf: Any, mark: str) -> Any:
        if mark == SHARED:
            return leaf
        if leaf.shape[0] != 1:
            raise ValueError(
                f"The leaf {leaf_name(path)} of the state has the rows of {leaf.shape[0]} "
                "replicas where one is at work. Map the state over them: place it with "
                "jaxcomp.shard_state and give jax.shard_map jaxcomp.state_specs(state, axis_name), "
                "or give jax.vmap and jax.pmap in_axes=jaxcomp.state_axes(state). Behind "
                "jaxcomp.value_and_grad, which has averaged, the chain takes "
                "jaxcomp.hold_state(reducer)."
            )
        return leaf.reshape(leaf.shape[1:])

    return jax.tree.map_with_path(taken_out, state, marks(state))


def with_row(state: PyTree) -> PyTree:
    """Inverts `without_row`."""

    def put_in(leaf: Any, mark: str) -> Any:
        if mark == SHARED:
            return leaf
        return jnp.expand_dims(leaf, 0)

    return jax.tree.map(put_in, state, marks(state))
