"""The arguments of one call of `data_parallel`: which of them are arrays, and how each is split.

What is not an array stays where it is: a flag that the function branches on, a ConfigDict, a
module. A tree of arrays has None in the place of such a leaf.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxcomp._base.leaves import leaf_name
from jaxcomp._base.typing import AxisName, PyTree
from jaxcomp._mesh.collectives import axis_tuple, mesh_axes
from jaxcomp._states.place import known_spec

# In the place of a specification that nobody gave. Not None, which is an empty tree.
_AS_IT_LIES = object()


def is_array(leaf: Any) -> bool:
    """Tells whether a leaf is split or shared at all: a flag, a function, a ConfigDict is not."""
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic))


def arrays_only(tree: PyTree) -> PyTree:
    """Returns the tree with None in the place of what is not an array."""
    return jax.tree.map(lambda x: x if is_array(x) else None, tree)


def with_arrays(tree: PyTree, arrays: PyTree) -> PyTree:
    """Returns the tree with other arrays in the places that `arrays_only` left; the rest stays."""

    def chosen(leaf: Any, array: Any) -> Any:
        return _on_replica(leaf) if array is None else array

    return jax.tree.map(chosen, tree, arrays, is_leaf=lambda x: x is None)


def positions(args: tuple[Any, ...], argnums: int | tuple[int, ...]) -> tuple[int, ...]:
    """Returns which arguments are the parameters, counted from the first.

    Raises:
      ValueError: If some are missing.
    """
    several = argnums if isinstance(argnums, tuple) else (argnums,)
    if not all(-len(args) <= index < len(args) for index in several):
        raise ValueError(
            f"This was called with {len(args)} arguments behind the state, and argnums={argnums}. "
            "Call it as (state, params, *batch), parameters by position."
        )
    return tuple(index % len(args) for index in several)


def params_of(args: tuple[Any, ...], argnums: int | tuple[int, ...]) -> PyTree:
    """Returns what gradients are taken of, arrays only: a tuple if `argnums` is one."""
    several = tuple(arrays_only(args[i]) for i in positions(args, argnums))
    return several if isinstance(argnums, tuple) else several[0]


def check_keywords(kwargs: dict[str, Any]) -> None:
    """Refuses a batch that comes by keyword.

    Raises:
      ValueError: Naming it.
    """
    for path, leaf in jax.tree_util.tree_flatten_with_path(kwargs)[0]:
        if not is_shared(leaf):
            raise ValueError(
                f"The keyword argument {leaf_name(path)} holds an array with axes. Pass it by "
                "position, where `batch_specs` says how it is split between the replicas."
            )


def split_specs(
    args: tuple[Any, ...],
    chosen: tuple[int, ...],
    batch_specs: Any,
    axis_name: AxisName,
    *,
    mesh: Any = None,
    replicas: int = 1,
) -> PyTree:
    """Finds how each array is split: as `batch_specs` says, or as it lies on the mesh.

    Args:
      args: What the call got by position.
      chosen: Which of them are the parameters.
      batch_specs: As for `data_parallel`.
      axis_name: The axis or axes of the replicas.
      mesh: The mesh. None where arrays are one replica's already: then their examples lie so.
      replicas: How many replicas there are.

    Returns:
      A tree like `args` with a specification over the axes of the replicas for each array, P() for
      what they share, and None for what is not an array.

    Raises:
      ValueError: If there are too few specifications or too many, an array cannot be split so, it
        is not clear what is a batch, or nothing is.
    """
    each = _one_each(batch_specs, args, chosen)
    for spec in jax.tree.leaves(each):
        if spec is not _AS_IT_LIES:
            _check_spec(spec, axis_name, mesh)
    rows: list[tuple[str, int]] = []
    keys: list[str] = []

    def spec_of(path: Any, leaf: Any, spec: Any) -> PartitionSpec | None:
        name = f"{leaf_name(path[1:])} of argument {path[0].idx}"
        if spec is not _AS_IT_LIES:
            kept = split_spec(name, leaf, spec, axis_name, replicas)
            return kept if is_array(leaf) else None
        kept = split_spec(name, leaf, _as_it_lies(leaf, axis_name, mesh), axis_name, replicas)
        axis = split_axis(kept)
        if axis is not None:
            rows.append((name, np.shape(leaf)[axis]))
        elif _is_raw_key(leaf):
            keys.append(name)
        return kept if is_array(leaf) else None

    specs = jax.tree_util.tree_map_with_path(spec_of, args, jax.tree.broadcast(each, args))
    if mesh is not None:
        _check_rows(rows, keys)
        if all(split_axis(spec) is None for spec in jax.tree.leaves(specs)):
            # Every replica would compute the whole batch: that saves nobody any work.
            raise ValueError(
                "No argument is split between the replicas: each would compute the whole batch. "
                "Pass the batch as an argument, not in a closure, with batch_specs that name "
                f"{axis_name!r}. A function that makes its own examples takes keys that are split, "
                "jax.random.split(key, replicas)."
            )
    return specs


def shared_specs(tree: PyTree) -> PyTree:
    """Returns a tree of P() for what is split nowhere."""
    return jax.tree.map(lambda x: PartitionSpec(), arrays_only(tree))


def lengths(arrays: PyTree, specs: PyTree) -> dict[int, int]:
    """Returns how many examples there are, by the axis that they lie along."""
    by_axis: dict[int, int] = {}
    for x, spec in zip(jax.tree.leaves(arrays), jax.tree.leaves(specs), strict=True):
        axis = split_axis(spec)
        if axis is not None:
            by_axis[axis] = x.shape[axis]
    return by_axis


def weight_spec(weight: Any, rows: dict[int, int], axis_name: AxisName, replicas: int) -> Any:
    """Finds how weights are split: a number for each replica, or a mask or counts like the batch.

    Args:
      weight: An array, or None.
      rows: From an axis of the batch to its length.
      axis_name: The axis or axes of the replicas.
      replicas: How many there are.

    Raises:
      ValueError: If it is neither.
    """
    if weight is None:
        return None
    shape = np.shape(weight)
    if shape == (replicas,):
        return PartitionSpec(axis_name)
    other = ""
    for axis, length in rows.items():
        if len(shape) > axis and shape[axis] == length:
            return PartitionSpec(*[None] * axis, axis_name)
        other += f", or {length} along axis {axis} as the batch"
    raise ValueError(
        f"`weight` must have shape ({replicas},), a number for each replica{other}, got {shape}."
    )


def split_axis(spec: PartitionSpec) -> int | None:
    """Returns the axis along which a leaf is split; None for what all replicas see whole."""
    for axis, part in enumerate(spec):
        if part:
            return axis
    return None


def is_shared(leaf: Any) -> bool:
    """Tells what is the same for all replicas by default: a scalar, or a random key."""
    return not is_array(leaf) or not np.ndim(leaf) or _is_raw_key(leaf)


def _one_each(batch_specs: Any, args: tuple[Any, ...], chosen: tuple[int, ...]) -> tuple[Any, ...]:
    """Returns a tree of specifications for each argument: P() for parameters."""
    others = [i for i in range(len(args)) if i not in chosen]
    several = isinstance(batch_specs, (tuple, list)) and not isinstance(batch_specs, PartitionSpec)
    each = list(batch_specs) if several else [batch_specs] * len(others)
    if len(each) != len(others):
        raise ValueError(
            f"`batch_specs` has {len(each)} entries, and the function was called with "
            f"{len(others)} arguments besides the parameters. Give one specification for all of "
            "them, or a tuple with one for each."
        )
    specs: list[Any] = [PartitionSpec()] * len(args)
    for i, spec in zip(others, each, strict=True):
        specs[i] = jax.tree.map(
            lambda x: _AS_IT_LIES if x is None else x, spec, is_leaf=lambda x: x is None
        )
    return tuple(specs)


def _check_spec(spec: Any, axis_name: AxisName, mesh: Any) -> None:
    """Refuses what would split nothing without a word: not a PartitionSpec, or an unknown axis."""
    if not isinstance(spec, PartitionSpec):
        raise ValueError(
            f"`batch_specs` must be a PartitionSpec such as jax.P({axis_name!r}), or a tree of "
            f"them, got a {type(spec).__name__}: {spec!r}."
        )
    if mesh is None:
        return
    for part in spec:
        for name in part if isinstance(part, tuple) else (part,):
            if isinstance(name, str) and name not in mesh.axis_names:
                raise ValueError(
                    f"`batch_specs` names the axis {name!r}; the mesh has "
                    f"{', '.join(map(repr, mesh.axis_names))}."
                )


def _as_it_lies(leaf: Any, axis_name: AxisName, mesh: Any) -> PartitionSpec:
    """Returns how a leaf is known to be split between the replicas, else along axis 0."""
    if is_shared(leaf):
        return PartitionSpec()
    known = () if mesh is None else known_spec(leaf, mesh)
    parts = [_only(part, axis_tuple(axis_name)) for part in known]
    return PartitionSpec(*parts) if any(parts) else PartitionSpec(axis_name)


def split_spec(
    name: str, leaf: Any, spec: PartitionSpec, axis_name: AxisName, replicas: int
) -> PartitionSpec:
    """Returns the part of a specification that is about the axes of the replicas.

    Raises:
      ValueError: If an axis of the leaf cannot be split so, with its `name`.
    """
    kept = [_only(part, axis_tuple(axis_name)) for part in spec]
    if not any(kept):
        return PartitionSpec()
    shape = np.shape(leaf) if is_array(leaf) else ()
    for axis, part in enumerate(kept):
        if part and (axis >= len(shape) or shape[axis] % replicas):
            raise ValueError(
                f"The leaf {name} has shape {shape}, which {PartitionSpec(*kept)} cannot split "
                f"between {replicas} replicas. Give batch_specs with P() for what every replica "
                "shall see whole, or a batch that the number of replicas divides."
            )
    return PartitionSpec(*kept)


def _check_rows(rows: list[tuple[str, int]], keys: list[str]) -> None:
    """Refuses to take for a batch, by default, what is none: a table, statistics, another model.

    Args:
      rows: Of the leaves to be split without a specification, names and lengths.
      keys: Names of those that look like a random key.

    Raises:
      ValueError: If there are not as many rows in all, naming two that differ; or a leaf may be a
        key as well as two examples.
    """
    for name, length in rows[1:]:
        if length != rows[0][1]:
            raise ValueError(
                f"The leaf {name} has {length} rows, and {rows[0][0]} has {rows[0][1]}. By default "
                "everything with axes is taken for examples and split between the replicas. Give "
                "batch_specs, a PartitionSpec for each argument, with P() for what every replica "
                "shall see whole (tables, statistics, another model's weights)."
            )
    key = _raw_key()
    if keys and (not rows or rows[0][1] == key.shape[0]):
        raise ValueError(
            f"The leaf {keys[0]} is {key.dtype} of shape {key.shape}: a key of "
            "jax.random.PRNGKey, or as many examples. Pass jax.random.key(seed), or batch_specs "
            "with P() for a key and the axis of the replicas for examples."
        )


def _is_raw_key(leaf: Any) -> bool:
    """Tells a key of `jax.random.PRNGKey`, whose axis is not one of examples."""
    raw = _raw_key()
    return is_array(leaf) and (np.shape(leaf), leaf.dtype) == (raw.shape, raw.dtype)


def _raw_key() -> jax.ShapeDtypeStruct:
    return jax.eval_shape(jax.random.PRNGKey, 0)


def _only(part: Any, axes: tuple[str, ...]) -> Any:
    """Returns one entry of a specification with these axes alone."""
    names = part if isinstance(part, tuple) else (part,)
    kept = tuple(name for name in names if name in axes)
    return kept[0] if len(kept) == 1 else kept or None


def _on_replica(leaf: Any) -> Any:
    """Returns what is not an array as one replica takes it.

    A sharding loses the axes that are mapped, as the shardings of arrays do.
    """
    mapped = mesh_axes(AxisType.Manual)
    if not (isinstance(leaf, NamedSharding) and mapped):
        return leaf
    mesh = jax.sharding.get_abstract_mesh()
    others = tuple(name for name in mesh.axis_names if name not in mapped)
    parts = [_only(part, others) for part in leaf.spec]
    return NamedSharding(mesh, PartitionSpec(*parts))
