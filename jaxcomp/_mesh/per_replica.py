"""Which leaves of a state a replica has of its own, how they lie, and whose they are.

A state class says which of its fields differ between replicas with a class attribute,
``per_replica = ("residual", "owner")``. Nothing here knows a reducer by name, so a user's own takes
part by declaring the same.

Such leaves lie in one of two ways, and the axes of `owner` tell which. Outside of a mapped function
a state that is training has a leading axis of replicas, residual ``(n, *leaf)`` and owner ``(n,)``;
a consolidated one has none. Inside, the axis is mapped away by `jax.pmap` and `jax.vmap`;
`jax.shard_map` leaves a row of it, ``(1, *leaf)`` and ``(1,)``, which whoever maps takes off, or
else the door of a reducer.

The owner is 0 for what is everybody's, as in a consolidated state; else the replica's index less
the number of replicas, which is never 0. A step writes it with what it keeps. It is read where a
state is consolidated or placed: `flax.jax_utils.unreplicate` and ``x[0]`` give one replica's
residual, which on every replica would be a gradient that nobody computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

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


class StateLeaf(NamedTuple):
    """A leaf of a tree that holds states."""

    path: KeyPath
    value: Any
    declared_by: type | None  # the outermost state that has it as a replica's own; None: shared
    is_owner: bool


def state_leaves(tree: PyTree) -> list[StateLeaf]:
    """Lists the leaves of a tree in flattening order, with what its state classes say of each.

    Raises:
      ValueError: If a state in the tree has lost its class.
    """
    leaves = _leaves_below(tree, (), None)
    if not _has_averaged_before(tree):
        return leaves
    return [
        leaf._replace(declared_by=None) if is_accumulator(leaf.declared_by) else leaf
        for leaf in leaves
    ]


def is_accumulator(node: Any) -> bool:
    """Tells the state, or its class, of `optax.MultiSteps` and of `jaxcomp.accumulate`."""
    return hasattr(node, "acc_grads") and hasattr(node, "inner_opt_state")


def _has_averaged_before(tree: PyTree) -> bool:
    """Tells whether states accumulate what a reducer beside them has averaged.

    As in ``optax.chain(hold_state(reducer), optax.MultiSteps(...))``: what they hold is then the
    same on all replicas. A reducer inside of one gets what it has accumulated. `accumulate` is made
    for that, and another network's reducer may be beside it: only one in its chain counts.
    """
    nodes = jax.tree.leaves(tree, is_leaf=_is_state)
    accumulators = list(filter(is_accumulator, nodes))
    inside = jax.tree.leaves([node.inner_opt_state for node in accumulators], is_leaf=_is_state)
    if any(map(is_reducer_state, inside)):
        return False
    foreign = all(type(node) in _FOREIGN for node in accumulators)
    chains = jax.tree.leaves(tree, is_leaf=_is_chain_behind)
    return (foreign and any(map(is_reducer_state, nodes))) or any(map(_is_chain_behind, chains))


def _is_chain_behind(node: Any) -> bool:
    """Tells whether it is a chain's state with an accumulator behind a reducer."""
    if type(node) is not tuple or not any(map(is_accumulator, node)):
        return False
    return any(is_reducer_state(link) and not is_accumulator(link) for link in node)


def _leaves_below(tree: PyTree, path: KeyPath, declared_by: type | None) -> list[StateLeaf]:
    """Lists the leaves of a tree at `path` in another, of which a state may have declared all."""
    leaves: list[StateLeaf] = []
    for inner, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_state):
        place = (*path, *inner)
        if not _is_state(node):
            leaves.append(StateLeaf(place, node, declared_by, is_owner=False))
            continue
        if _is_bare(node):
            raise ValueError(
                "The state has lost its classes, and with them what each replica has of its own: a "
                f"{type(node).__name__} holds the keys {sorted(map(str, node))}. Pass the "
                "optimizer itself or its opt_state, not nnx.state, nnx.split or a state dict of it."
            )
        kind = type(node)
        declared = _FOREIGN.get(kind) or kind.per_replica
        children = jax.tree_util.tree_leaves_with_path(
            node, is_leaf=lambda x, node=node: x is not node
        )
        for (key,), child in children:
            field = getattr(key, "name", getattr(key, "key", None))
            is_local = field in declared
            outermost = declared_by or (kind if is_local else None)
            below = _leaves_below(child, (*place, key), outermost)
            if field == "owner" and is_local:
                below = [leaf._replace(is_owner=True) for leaf in below]
            leaves += below
    return leaves


def is_reducer_state(node: Any) -> bool:
    """Tells whether a class says what replicas have of their own, as those of states do."""
    return isinstance(getattr(type(node), "per_replica", None), tuple)


def _is_state(node: Any) -> bool:
    return is_reducer_state(node) or type(node) in _FOREIGN or _is_bare(node)


def _is_bare(node: Any) -> bool:
    """Tells whether this is a reducer's state turned into a mapping, as by nnx.state."""
    return isinstance(node, Mapping) and "residual" in node and ("q" in node or "inner" in node)


def map_leaves(function: Callable[..., Any], tree: PyTree, *rest: PyTree) -> PyTree:
    """Maps ``function(path, leaf, local, *rest)`` over a tree; `local` tells per-replica leaves."""
    treedef = jax.tree.structure(tree)
    others = [treedef.flatten_up_to(other) for other in rest]
    results = []
    for leaf, *extra in zip(state_leaves(tree), *others, strict=True):
        results.append(function(leaf.path, leaf.value, leaf.declared_by is not None, *extra))
    return treedef.unflatten(results)


def owners_of(state: PyTree) -> dict[str, Any]:
    """Returns the owners in a state, by their paths; none if no class in it declares one."""
    leaves = [leaf for leaf in state_leaves(state) if leaf.is_owner]
    return {leaf_name(leaf.path): leaf.value for leaf in leaves}


def has_foreign(tree: PyTree) -> bool:
    """Tells whether a state of another library, which takes no rows, has per-replica leaves.

    One that is itself in a per-replica field, as an optimizer of local steps, has none: its row is
    taken off with the field's.
    """
    return any(leaf.declared_by in _FOREIGN for leaf in state_leaves(tree))


def no_owner(axis_name: AxisName) -> Array:
    """Returns the owner of a residual before the first step: float32 scalar 0."""
    return local_if_bound(jnp.zeros([], jnp.float32), axis_name)


def has_rows(state: PyTree, fresh: Callable[[], PyTree] | None = None) -> bool:
    """Tells whether per-replica leaves have a leading axis: a row in a mapped function, or all.

    Args:
      state: Any tree that holds states.
      fresh: Makes a state without rows, to compare with where there is no owner.
    """
    owners = owners_of(state)
    if owners or fresh is None:
        return any(np.ndim(owner) > 0 for owner in owners.values())
    axes = _axes_of_local(state)
    return bool(axes) and axes == [1 + number for number in _axes_of_local(jax.eval_shape(fresh))]


def _axes_of_local(state: PyTree) -> list[int]:
    """Returns how many axes each per-replica leaf has."""
    local = [leaf for leaf in state_leaves(state) if leaf.declared_by is not None]
    return [np.ndim(leaf.value) for leaf in local]


def without_row(state: PyTree) -> PyTree:
    """Takes a replica's own values out of their row, inside a function mapped over the replicas.

    Raises:
      ValueError: If a leaf has the rows of several replicas.
    """
    leaves: list[Any] = []
    for path, value, declared_by, _ in state_leaves(state):
        if declared_by is None:
            leaves.append(value)
            continue
        if value.shape[0] != 1:
            raise ValueError(
                f"The leaf {leaf_name(path)} of the state has the rows of {value.shape[0]} "
                "replicas where one is at work. Map the state over them: place it with "
                "jaxcomp.shard_state and give jax.shard_map jaxcomp.state_specs(state, axis_name), "
                "or give jax.vmap and jax.pmap in_axes=jaxcomp.state_axes(state). Behind "
                "jaxcomp.value_and_grad, which has averaged, the chain takes "
                "jaxcomp.hold_state(reducer)."
            )
        leaves.append(value.reshape(value.shape[1:]))
    return jax.tree.structure(state).unflatten(leaves)


def off_rows(
    state: PyTree, fresh: Callable[[], PyTree] | None = None
) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
    """Returns a replica's state without rows, and a function that puts the next one as it was.

    The arguments are those of `has_rows`.
    """
    if not has_rows(state, fresh):
        return state, lambda state: state
    return without_row(state), with_row


def with_row(state: PyTree) -> PyTree:
    """Inverts `without_row`."""
    return map_leaves(lambda _, leaf, local: jnp.expand_dims(leaf, 0) if local else leaf, state)
