"""What goes into a function that maps itself over the replicas, inside `jax.jit`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxcomp._base.leaves import leaf_name
from jaxcomp._base.typing import AxisName, KeyPath, PyTree
from jaxcomp._mesh.axes import axis_tuple
from jaxcomp._mesh.explicit import check_mesh_axes, context_mesh
from jaxcomp._mesh.per_replica import map_leaves
from jaxcomp._states.stacked import check_not_spread, known_spec


def the_mesh(given: Any, axis_name: AxisName) -> Any:
    """The mesh, from the arguments or the context.

    Raises:
      ValueError: If there is none, or it lacks an axis.
    """
    mesh = context_mesh() if given is None else given
    if mesh is None:
        raise ValueError("There is no mesh. Pass mesh=, or call this under jax.set_mesh(mesh).")
    check_mesh_axes(mesh, axis_name)
    return mesh


def check_params(params: PyTree, mesh: Any, axes: tuple[str, ...]) -> None:
    """Refuses parameters that lie along the axis of the replicas.

    Raises:
      ValueError: Naming the leaf.
    """
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        check_not_spread(path, leaf, known_spec(leaf, mesh), axes)


def batch_spec(spec: Any, arg: Any, index: int, axis_name: AxisName, replicas: int) -> PyTree:
    """A PartitionSpec for each leaf of an argument, of the axes of the replicas only.

    Raises:
      ValueError: If an axis of a leaf cannot be split so.
    """
    axes = axis_tuple(axis_name)
    if spec is None:
        spec = PartitionSpec(axis_name)
        specs = jax.tree.map(lambda x: PartitionSpec() if is_common(x) else spec, arg)
    else:
        specs = jax.tree.broadcast(spec, arg, is_leaf=lambda x: isinstance(x, PartitionSpec))

    def checked(path: KeyPath, leaf: Any, spec: PartitionSpec) -> PartitionSpec:
        kept = [_only(part, axes) for part in spec]
        used = [d for d, part in enumerate(kept) if part]
        shape = np.shape(leaf)
        if any(d >= len(shape) or shape[d] % replicas for d in used):
            raise ValueError(
                f"The leaf {leaf_name(path)} of argument {index} has shape {shape}, which "
                f"{PartitionSpec(*kept)} cannot split between {replicas} replicas. Give "
                "batch_specs with P() for what every replica shall see whole, or a batch that the "
                "number of replicas divides."
            )
        return PartitionSpec(*kept)

    return jax.tree_util.tree_map_with_path(checked, arg, specs)


def check_something_is_split(specs: list[PartitionSpec]) -> None:
    """Refuses a batch that a function closes over: it works, and saves nobody any work.

    Raises:
      ValueError: If every argument is the same for all replicas.
    """
    if not any(len(spec) for spec in specs):
        raise ValueError(
            "No argument of `fun` is split between the replicas: a batch that it closes over is "
            "computed whole by each of them. Call value_and_grad(state, params, batch); if `fun` "
            "makes its own examples, pass batch_specs=P()."
        )


def is_common(leaf: Any) -> bool:
    """Whether a leaf of the batch is the same for all by default: a scalar, or a random key."""
    return not np.ndim(leaf) or _is_raw_key(leaf)


def _is_raw_key(leaf: Any) -> bool:
    """A key of `jax.random.PRNGKey` has an axis, which is not one of examples."""
    raw = jax.eval_shape(jax.random.PRNGKey, 0)
    return np.shape(leaf) == raw.shape and jnp.result_type(leaf) == raw.dtype


def _only(part: Any, axes: tuple[str, ...]) -> Any:
    """One entry of a specification without the axes that are left to the compiler."""
    names = part if isinstance(part, tuple) else (part,)
    kept = tuple(name for name in names if name in axes)
    return kept[0] if len(kept) == 1 else kept or None


def check_replica_axis(state: PyTree, replicas: int) -> None:
    """Refuses a state that was not made for so many replicas.

    Raises:
      ValueError: Naming a leaf.
    """

    def check(path: KeyPath, leaf: Any, local: bool) -> None:
        if local and np.shape(leaf)[:1] != (replicas,):
            raise ValueError(
                f"The leaf {leaf_name(path)} of the state has shape {np.shape(leaf)}, and "
                f"{replicas} replicas need a leading axis of that length. Make the state with "
                "init(params); for that of a checkpoint, restore(state, params)."
            )

    map_leaves(check, state)


def replica_weights(weight: Any, replicas: int) -> Any:
    """The weights of all replicas; None if they were not given.

    Raises:
      ValueError: If they are not as many.
    """
    if weight is None:
        return None
    if np.shape(weight) != (replicas,):
        raise ValueError(
            f"`weight` must have shape ({replicas},), a number for each replica, got "
            f"{np.shape(weight)}."
        )
    return jnp.asarray(weight)
