"""The arguments of one call of `data_parallel`: which of them are arrays, and how each is split.

What is not an array stays where it is: a flag that the function branches on, a ConfigDict, a
module. A tree of arrays has None in the place of such a leaf.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxcomp._base.leaves import leaf_name
from jaxcomp._base.typing import AxisName, PyTree
from jaxcomp._mesh.collectives import axis_tuple, mesh_axes
from jaxcomp._mesh.weights import is_real, refuse_misspelt_weight
from jaxcomp._states.place import known_spec


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

    return jax.tree.map(chosen, tree, arrays)


def positions(args: tuple[Any, ...], argnums: int | tuple[int, ...]) -> tuple[int, ...]:
    """Returns which arguments are the parameters, counted from the first.

    Raises:
      ValueError: If some are missing.
    """
    several = np.atleast_1d(argnums).tolist()
    if not all(-len(args) <= index < len(args) for index in several):
        raise ValueError(
            f"This was called with {len(args)} arguments behind the state, and argnums={argnums}. "
            "Call it as (state, params, *batch), parameters by position."
        )
    return tuple(index % len(args) for index in several)


def params_of(args: tuple[Any, ...], argnums: int | tuple[int, ...]) -> PyTree:
    """Returns what gradients are taken of, arrays only: a tuple if `argnums` are several."""
    several = tuple(arrays_only(args[i]) for i in positions(args, argnums))
    return several if np.ndim(argnums) else several[0]


def check_keywords(kwargs: dict[str, Any], function: Callable[..., Any]) -> None:
    """Refuses a batch that comes by keyword, and a weight under another name.

    Raises:
      ValueError: Naming it.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(kwargs):
        if not is_shared(leaf):
            raise ValueError(
                f"The keyword argument {leaf_name(path)} holds an array with axes. Pass it by "
                "position, where `batch_specs` says how it is split between the replicas."
            )
    if kwargs:
        known = inspect.signature(function).parameters
        refuse_misspelt_weight([name for name in kwargs if name not in known])


def split_specs(
    args: tuple[Any, ...],
    params_at: tuple[int, ...],
    batch_specs: Any,
    axis_name: AxisName,
    mesh: Any,
    replicas: int,
) -> PyTree:
    """Finds how each array is split: as `batch_specs` says, or as it lies on the mesh.

    Args:
      args: What the call got by position.
      params_at: Which of them are the parameters.
      batch_specs: As for `data_parallel`.
      axis_name: The axis or axes of the replicas.
      mesh: The mesh. None where arrays are one replica's already: then their examples lie so.
      replicas: How many replicas there are.

    Returns:
      A tree like `args` with a specification over the axes of the replicas for each array, P() for
      what they share, and None for what is not an array.

    Raises:
      ValueError: If there are too few specifications or too many, if an array cannot be split as
        specified, or if no array is a batch or it is not clear which one is.
    """
    axes = axis_tuple(axis_name)
    examples: dict[str, int] = {}  # of each leaf that is split without a specification
    keys: dict[str, Any] = {}

    def spec_of(path: Any, leaf: Any, given: PartitionSpec | None) -> PartitionSpec | None:
        name = f"{leaf_name(path[1:])} of argument {path[0].idx}"
        if given is not None:
            spec = split_spec(name, leaf, given, axis_name, replicas)
            return spec if is_array(leaf) else None
        if is_shared(leaf):
            if _is_raw_key(leaf):
                keys[name] = leaf
            return PartitionSpec() if is_array(leaf) else None
        spec = PartitionSpec(axis_name)
        if mesh is not None:
            known = over_axes(known_spec(leaf, mesh), axes)
            spec = spec if split_axis(known) is None else known
        spec = split_spec(name, leaf, spec, axis_name, replicas)
        axis = split_axis(spec)
        if axis is not None:
            examples[name] = np.shape(leaf)[axis]
        return spec

    each = _one_each(batch_specs, args, params_at, axis_name, mesh)
    each = jax.tree.broadcast(each, args, is_leaf=lambda node: node is None)
    specs = jax.tree_util.tree_map_with_path(spec_of, args, each)
    if mesh is not None:
        _check_examples(examples, keys)
        if all(split_axis(spec) is None for spec in jax.tree.leaves(specs)):
            # Every replica would compute the whole batch: that saves nobody any work.
            raise ValueError(
                "No argument is split between the replicas: each would compute the whole batch. "
                "Pass the batch as an argument, not in a closure, with batch_specs that name "
                f"{axis_name!r}. A function that makes its own examples takes keys that are split, "
                "jax.random.split(key, replicas)."
            )
    return specs


def _one_each(
    batch_specs: Any,
    args: tuple[Any, ...],
    params_at: tuple[int, ...],
    axis_name: AxisName,
    mesh: Any,
) -> tuple[Any, ...]:
    """Returns a tree of specifications for each argument: P() for parameters, None if not given."""
    for spec in jax.tree.leaves(batch_specs):
        if not isinstance(spec, PartitionSpec):
            raise ValueError(
                f"`batch_specs` must be a PartitionSpec such as jax.P({axis_name!r}), or a tree of "
                f"them, got a {type(spec).__name__}: {spec!r}."
            )
        if mesh is None:
            continue
        unknown = [name for name in jax.tree.leaves(tuple(spec)) if name not in mesh.axis_names]
        if unknown:
            raise ValueError(
                f"`batch_specs` names the axis {unknown[0]!r}; the mesh has "
                f"{', '.join(map(repr, mesh.axis_names))}."
            )
    others = len(args) - len(params_at)
    several = isinstance(batch_specs, (tuple, list)) and not isinstance(batch_specs, PartitionSpec)
    each = list(batch_specs) if several else [batch_specs] * others
    if len(each) != others:
        raise ValueError(
            f"`batch_specs` has {len(each)} entries, and the function was called with {others} "
            "arguments besides the parameters. Give one specification for all of them, or a tuple "
            "with one for each."
        )
    for i in sorted(params_at):
        each.insert(i, PartitionSpec())
    return tuple(each)


def split_spec(
    name: str, leaf: Any, spec: PartitionSpec, axis_name: AxisName, replicas: int
) -> PartitionSpec:
    """Returns the part of a specification that is about the axes of the replicas.

    Raises:
      ValueError: If an axis of the leaf cannot be split so, with its `name`.
    """
    kept = over_axes(spec, axis_tuple(axis_name))
    axis = split_axis(kept)
    if axis is None:
        return PartitionSpec()
    shape = np.shape(leaf) if is_array(leaf) else ()
    if axis >= len(shape) or shape[axis] % replicas:
        raise ValueError(
            f"The leaf {name} has shape {shape}, which {kept} cannot split between {replicas} "
            "replicas. Give batch_specs with P() for what every replica shall see whole, or a "
            "batch that the number of replicas divides."
        )
    return kept


def over_axes(spec: PartitionSpec, axes: tuple[str, ...]) -> PartitionSpec:
    """Returns a specification that says nothing of any but these axes."""
    parts: list[Any] = []
    for part in spec:
        names = tuple(name for name in axis_tuple(part) if name in axes)
        parts.append(names[0] if len(names) == 1 else names or None)
    return PartitionSpec(*parts)


def split_axis(spec: PartitionSpec) -> int | None:
    """Returns the axis along which a leaf is split; None for what all replicas see whole."""
    return next((axis for axis, part in enumerate(spec) if part), None)


def is_shared(leaf: Any) -> bool:
    """Tells what is the same for all replicas by default: a scalar, or a random key."""
    return not is_array(leaf) or not np.ndim(leaf) or _is_raw_key(leaf)


def _is_raw_key(leaf: Any) -> bool:
    """Tells whether a leaf is a key of `jax.random.PRNGKey`: its axis is not one of examples."""
    key = jax.eval_shape(jax.random.PRNGKey, 0)
    return is_array(leaf) and (np.shape(leaf), leaf.dtype) == (key.shape, key.dtype)


def _check_examples(examples: dict[str, int], keys: dict[str, Any]) -> None:
    """Refuses to take for a batch, by default, what is none: a table, statistics, another model.

    Args:
      examples: How many there are in each leaf that is split without a specification, by name.
      keys: Leaves that look like a random key, by name.

    Raises:
      ValueError: If there are not as many in all, naming two that differ; or a leaf may be a key
        as well as examples.
    """
    first = next(iter(examples), "")
    for name, length in examples.items():
        if length != examples[first]:
            raise ValueError(
                f"The leaf {name} has {length} rows, and {first} has {examples[first]}. By default "
                "everything with axes is taken for examples and split between the replicas. Give "
                "batch_specs, a PartitionSpec for each argument, with P() for what every replica "
                "shall see whole (tables, statistics, another model's weights)."
            )
    for name, key in keys.items():
        if examples.get(first, len(key)) == len(key):
            raise ValueError(
                f"The leaf {name} is {key.dtype} of shape {key.shape}: a key of "
                "jax.random.PRNGKey, or as many examples. Pass jax.random.key(seed), or "
                "batch_specs with P() for a key and the axis of the replicas for examples."
            )


def lengths(arrays: PyTree, specs: PyTree) -> dict[int, int]:
    """Returns how many examples there are, by the axis that they lie along."""
    by_axis: dict[int, int] = {}
    for x, spec in zip(jax.tree.leaves(arrays), jax.tree.leaves(specs), strict=True):
        axis = split_axis(spec)
        if axis is not None:
            by_axis[axis] = x.shape[axis]
    return by_axis


def weight_spec(
    weight: Any, examples: dict[int, int], axis_name: AxisName, replicas: int
) -> PartitionSpec:
    """Finds how weights are split: a number for each replica, or a mask or counts like the batch.

    Args:
      weight: An array.
      examples: How many there are, by the axis of the batch along which they lie.
      axis_name: The axis or axes of the replicas.
      replicas: How many there are.

    Raises:
      ValueError: If it is neither, or not of real numbers.
    """
    shape = np.shape(weight)
    if not is_real(weight.dtype):
        raise ValueError(f"`weight` must hold real numbers, got dtype {weight.dtype}.")
    if shape == (replicas,):
        return PartitionSpec(axis_name)
    other = ""
    for axis, length in examples.items():
        if shape[axis : axis + 1] == (length,):
            return PartitionSpec(*[None] * axis, axis_name)
        other += f", or {length} along axis {axis} as the batch"
    raise ValueError(
        f"`weight` must have shape ({replicas},), a number for each replica{other}, got {shape}."
    )


def _on_replica(leaf: Any) -> Any:
    """Returns what is not an array as one replica takes it.

    A sharding loses the axes that are mapped, as the shardings of arrays do.
    """
    mapped = mesh_axes(AxisType.Manual)
    if not (isinstance(leaf, NamedSharding) and mapped):
        return leaf
    mesh = jax.sharding.get_abstract_mesh()
    others = tuple(name for name in mesh.axis_names if name not in mapped)
    return NamedSharding(mesh, over_axes(leaf.spec, others))
