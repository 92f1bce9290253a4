"""What goes into a function that maps itself over the replicas, inside `jax.jit`."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxcomp._base.leaves import leaf_name
from jaxcomp._base.typing import AxisName, KeyPath, PyTree
from jaxcomp._mesh.axes import axis_tuple
from jaxcomp._mesh.explicit import check_mesh_axes, context_mesh
from jaxcomp._mesh.per_replica import map_leaves
from jaxcomp._states.place import check_not_spread, known_spec


def the_mesh(given: Any, axis_name: AxisName, *trees: PyTree) -> Any:
    """The mesh: given, of the context, or on which the arrays of the trees lie.

    Raises:
      ValueError: If there is none, or it lacks an axis.
    """
    mesh = context_mesh() if given is None else given
    for leaf in jax.tree.leaves(trees) if mesh is None else ():
        sharding = jax.typeof(leaf).sharding if isinstance(leaf, jax.core.Tracer) else None
        sharding = getattr(leaf, "sharding", None) if sharding is None else sharding
        found = getattr(sharding, "mesh", None)
        if found is not None and set(axis_tuple(axis_name)) <= set(found.axis_names):
            mesh = found
            break
    if mesh is None:
        raise ValueError(
            "There is no mesh. Place the state with jaxcomp.shard_state(state, mesh, axis_name), "
            "pass mesh=, or call this under jax.set_mesh(mesh)."
        )
    check_mesh_axes(mesh, axis_name)
    return mesh


def check_params(params: PyTree, mesh: Any, axes: tuple[str, ...]) -> None:
    """Refuses parameters that lie along the axis of the replicas.

    Raises:
      ValueError: Naming the leaf.
    """
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        check_not_spread(path, leaf, known_spec(leaf, mesh), axes)


def check_differentiable(params: PyTree) -> None:
    """Refuses what has no gradient: counters, keys, masks among the parameters.

    Raises:
      ValueError: Naming the leaf.
    """
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        dtype = jnp.result_type(leaf)
        if not jnp.issubdtype(dtype, jnp.inexact):
            raise ValueError(
                f"The leaf {leaf_name(path)} of the parameters has dtype {dtype} and no gradient. "
                "Differentiate what is trained alone, nnx.split(model, nnx.Param, ...) or "
                "eqx.partition(model, eqx.is_inexact_array), and pass the rest as another argument "
                "of `fun`."
            )


def check_batch_specs(specs: PyTree, mesh: Any) -> None:
    """Refuses what would split nothing without a word: an axis that the mesh lacks.

    Raises:
      ValueError: Naming it, or what is no PartitionSpec.
    """

    def is_spec(node: Any) -> bool:
        return node is None or isinstance(node, PartitionSpec)

    for spec in jax.tree.leaves(specs, is_leaf=is_spec):
        if not is_spec(spec):
            raise ValueError(
                f"`batch_specs` must be a PartitionSpec such as jax.P({mesh.axis_names[0]!r}), or "
                f"a tree of them, got a {type(spec).__name__}: {spec!r}."
            )
        for part in spec or ():
            for name in part if isinstance(part, tuple) else (part,):
                if isinstance(name, str) and name not in mesh.axis_names:
                    raise ValueError(
                        f"`batch_specs` names the axis {name!r}; the mesh has "
                        f"{', '.join(map(repr, mesh.axis_names))}."
                    )


def batch_spec(
    spec: Any, arg: Any, index: int, mesh: Any, axis_name: AxisName, replicas: int
) -> PyTree:
    """A PartitionSpec for each leaf of an argument, of the axes of the replicas only.

    Args:
      spec: What the user says; None for as the arrays are known to lie, else along axis 0.
      arg: The argument.
      index: Its place, for messages.
      mesh: The mesh; None where the arrays are those of one replica.
      axis_name: Its axis or axes of the replicas.
      replicas: How many there are.

    Raises:
      ValueError: If an axis of a leaf cannot be split so.
    """
    axes = axis_tuple(axis_name)

    def found(leaf: Any) -> PartitionSpec:
        if is_shared(leaf):
            return PartitionSpec()
        known = () if mesh is None else known_spec(leaf, mesh)
        lies = PartitionSpec(*(only(part, axes) for part in known))
        return lies if any(lies) else PartitionSpec(axis_name)

    if spec is None:
        specs = jax.tree.map(found, arg)
    else:
        specs = jax.tree.broadcast(spec, arg, is_leaf=lambda x: isinstance(x, PartitionSpec))

    def checked(path: KeyPath, leaf: Any, spec: PartitionSpec) -> PartitionSpec:
        kept = [only(part, axes) for part in spec]
        used = [d for d, part in enumerate(kept) if part]
        shape = np.shape(leaf) if is_array(leaf) else ()
        if any(d >= len(shape) or shape[d] % replicas for d in used):
            raise ValueError(
                f"The leaf {leaf_name(path)} of argument {index} has shape {shape}, which "
                f"{PartitionSpec(*kept)} cannot split between {replicas} replicas. Give "
                "batch_specs with P() for what every replica shall see whole, or a batch that the "
                "number of replicas divides."
            )
        return PartitionSpec(*kept) if used else PartitionSpec()

    return jax.tree_util.tree_map_with_path(checked, arg, specs)


def split_axis(spec: PartitionSpec) -> int | None:
    """The axis along which a leaf is split between the replicas; None for what all see whole."""
    return next((axis for axis, part in enumerate(spec) if part), None)


def check_something_is_split(specs: list[PartitionSpec], axis_name: AxisName) -> None:
    """Refuses a batch that every replica would compute whole: it works, and saves nobody any work.

    Raises:
      ValueError: If every argument is the same for all replicas.
    """
    if all(split_axis(spec) is None for spec in specs):
        raise ValueError(
            "No argument is split between the replicas: each would compute the whole batch. Pass "
            "the batch as an argument, not in a closure, with batch_specs that name "
            f"{axis_name!r}. A function that makes its own examples takes keys that are split, "
            "jax.random.split(key, replicas)."
        )


# What JAX says inside of a `jax.shard_map` that the user has not written, and what to do then.
_NOTES = {
    "manual axis types": (
        "In jaxcomp.data_parallel the arguments are each replica's own, and what a loop carries, "
        "or a custom_vjp returns, must keep that type: zeros_like(x) has the type of x, "
        "zeros(shape) has not. Or pass check_vma=False: the same gradients."
    ),
    "Closing over inputs to shard_map": (
        "What the function closes over lies on a mesh of Explicit axes. Pass it as an argument "
        "behind the batch: scalars and random keys are the same for all replicas."
    ),
    "Going from `Manual` AxisType": (
        "A layer calls jax.sharding.auto_axes, as flax's Embed does with out_sharding=; JAX allows "
        "that in no mapped function. Call it without out_sharding."
    ),
    "manual_axis_type|AxisType.Manual|only refer to Auto axes|context mesh": (
        "In jaxcomp.data_parallel a function runs on one replica; its shardings must not name "
        "{axes}, nor hold a mesh on which it is an axis like any other: write jax.P(None, 'model') "
        "where there was NamedSharding(mesh, P('data', 'model')), and take the axis out of the "
        "rules for logical names."
    ),
    "only valid for values of rank at least": (
        "flax's DenseGeneral with nn.with_partitioning fails like this wherever a mesh is set, as "
        "inside jaxcomp.data_parallel: it makes a kernel of two axes under a specification of "
        "three. Name its axes by nn.with_logical_partitioning, or apply a module made without "
        "metadata; only init needs it."
    ),
}


@contextlib.contextmanager
def errors_explained(axes: tuple[str, ...]) -> Iterator[None]:
    """Says what to do about a function that JAX refuses inside of a `jax.shard_map` over `axes`."""
    try:
        yield
    except (TypeError, ValueError, NotImplementedError) as error:
        notes = (note for words, note in _NOTES.items() if re.search(words, str(error)))
        if note := next(notes, None):
            error.add_note(note.replace("{axes}", " or ".join(map(repr, axes))))
        raise


def check_same_rows(args: dict[int, Any], specs: dict[int, PyTree]) -> None:
    """Refuses to take for a batch, unasked, what is none: a table, statistics, another model.

    Args:
      args: By position, those that nobody said how to split.
      specs: For each a PartitionSpec for every leaf.

    Raises:
      ValueError: If the leaves to be split have not as many rows, naming two that differ; or a
        leaf may be a key as well as two examples.
    """
    rows: list[tuple[str, int]] = []
    keys: list[str] = []
    for i, arg in args.items():
        leaves = jax.tree_util.tree_flatten_with_path(arg)[0]
        for (path, leaf), spec in zip(leaves, jax.tree.leaves(specs[i]), strict=True):
            name, axis = f"{leaf_name(path)} of argument {i}", split_axis(spec)
            if axis is not None:
                rows.append((name, np.shape(leaf)[axis]))
            elif _is_raw_key(leaf):
                keys.append(name)
    for name, length in rows[1:]:
        if length != rows[0][1]:
            raise ValueError(
                f"The leaf {name} has {length} rows, and {rows[0][0]} has {rows[0][1]}. By default "
                "everything with axes is taken for examples and split between the replicas. Give "
                "batch_specs, a PartitionSpec for each argument, with P() for what every replica "
                "shall see whole (tables, statistics, another model's weights)."
            )
    if keys and (not rows or rows[0][1] == _raw_key().shape[0]):
        raise ValueError(
            f"The leaf {keys[0]} is {_raw_key().dtype} of shape {_raw_key().shape}: a key of "
            "jax.random.PRNGKey, or as many examples. Pass jax.random.key(seed), or batch_specs "
            "with P() for a key and the axis of the replicas for examples."
        )


def is_array(leaf: Any) -> bool:
    """Whether a leaf is split or shared at all; a flag, a function, a ConfigDict is neither."""
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic))


def is_shared(leaf: Any) -> bool:
    """Whether a leaf of the batch is the same for all by default: a scalar, or a random key."""
    return not is_array(leaf) or not np.ndim(leaf) or _is_raw_key(leaf)


def _is_raw_key(leaf: Any) -> bool:
    """A key of `jax.random.PRNGKey` has an axis, which is not one of examples."""
    raw = _raw_key()
    return is_array(leaf) and (np.shape(leaf), leaf.dtype) == (raw.shape, raw.dtype)


def _raw_key() -> jax.ShapeDtypeStruct:
    return jax.eval_shape(jax.random.PRNGKey, 0)


def only(part: Any, axes: tuple[str, ...]) -> Any:
    """One entry of a specification with these axes alone."""
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
                f"{replicas} replicas need a leading axis of that length. Place the state with "
                "jaxcomp.shard_state(state, mesh, axis_name)."
            )

    map_leaves(check, state)


def weight_spec(weight: Any, rows: dict[int, int], axis_name: AxisName, replicas: int) -> Any:
    """How the weights are split: a number for each replica, or a mask or counts like the batch.

    Args:
      weight: An array, or None.
      rows: From an axis of the batch to its length.
      axis_name: The axis or axes of the replicas.
      replicas: How many there are.

    Raises:
      ValueError: If it is neither.
    """
    shape = np.shape(weight)
    if weight is None or shape == (replicas,):
        return PartitionSpec(axis_name)
    for axis, length in rows.items():
        if len(shape) > axis and shape[axis] == length:
            return PartitionSpec(*[None] * axis, axis_name)
    wanted = "".join(
        f", or {length} along axis {axis} as the batch" for axis, length in rows.items()
    )
    raise ValueError(
        f"`weight` must have shape ({replicas},), a number for each replica{wanted}, got {shape}."
    )


def named_axis(reducer: Any, axis_name: AxisName | None) -> AxisName:
    """The axis of the replicas.

    Raises:
      ValueError: If `reducer` is none, or does not say along which axis it reduces.
    """
    if not (hasattr(reducer, "init") and hasattr(reducer, "update")):
        made = getattr(reducer, "__name__", None)
        hint = f": call it, {made}(axis_name=...)" if callable(reducer) and made else ""
        raise ValueError(f"`reducer` must be a jaxcomp reducer, got {reducer!r}{hint}.")
    axis_name = getattr(reducer, "axis_name", None) if axis_name is None else axis_name
    if axis_name is None:
        raise ValueError(
            f"A {type(reducer).__name__} does not say along which axis it reduces. Pass a jaxcomp "
            "reducer; or, for a chain that begins with one, axis_name=."
        )
    return axis_name
