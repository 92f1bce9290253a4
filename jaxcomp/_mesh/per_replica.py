"""Which leaves of a state a replica has of its own.

A state class says which of its fields differ between replicas with a class attribute,
``per_replica = ("residual",)``. Nothing here knows a reducer by name, so a user's own takes part by
declaring the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

from jaxcomp._base.typing import AxisName, PyTree
from jaxcomp._mesh.axes import as_local

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


def mark_local(state: PyTree, axis_name: AxisName) -> PyTree:
    """Marks what a replica has of its own as such, so that two branches of a conditional agree."""
    return map_leaves(lambda path, leaf, local: as_local(leaf, axis_name) if local else leaf, state)


def of_reducer(node: Any) -> bool:
    """Whether it is the state of a reducer, of the package or of a user: its class says so."""
    return isinstance(getattr(type(node), "per_replica", None), tuple)


def _fields(node: Any) -> tuple[str, ...] | None:
    """Names of the per-replica fields that the class of `node` declares, or None."""
    declared = _FOREIGN.get(type(node), getattr(type(node), "per_replica", None))
    return declared if isinstance(declared, tuple) else None


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
