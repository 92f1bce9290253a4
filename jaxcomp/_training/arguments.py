"""Finds the arrays among the arguments of a `data_parallel` call, and how each array is split.

A user's function takes anything: parameters, a batch, flags that it branches on, a ConfigDict, a
module. Only arrays can pass through `jax.shard_map`, so a call takes them out, with None in the
place of other leaves, and puts them back on each replica. Each array needs a PartitionSpec: from
`batch_specs`, from its sharding, or by the rule that arrays with axes are examples. Where the rule
could be wrong (tables, raw keys, lists of numbers) the call is refused, because a batch that is not
split is trained on by every replica and costs speed only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec, get_abstract_mesh

from jaxcomp._base.leaves import has_texts, is_array, leaf_name, with_arrays
from jaxcomp._base.typing import AxisName, PyTree
from jaxcomp._mesh.collectives import axis_tuple, mesh_axes
from jaxcomp._mesh.meshes import over_axes, split_axis
from jaxcomp._mesh.weights import as_weights, refuse_misspelt_weight
from jaxcomp._states.place import known_spec


class Inputs(NamedTuple):
    """Describes the arguments of a call without their arrays, which no compiled call must hold."""

    static: PyTree  # the arguments, with ``...`` in place of arrays
    params_at: list[int]  # positions of the parameters
    specs: PyTree  # the PartitionSpec of each array over the axes of the replicas
    examples: dict[int, int]  # number of examples along each axis that is split


def arguments_of_replica(arguments: PyTree, arrays: PyTree) -> PyTree:
    """Puts one replica's arrays into the arguments, whose shardings lose their mapped axes."""
    mapped = mesh_axes(AxisType.Manual)
    mesh = get_abstract_mesh()
    others = tuple(name for name in mesh.axis_names if name not in mapped)

    def without_mapped(leaf: Any) -> Any:
        if mapped and isinstance(leaf, NamedSharding):
            return NamedSharding(mesh, over_axes(leaf.spec, others))
        return leaf

    return with_arrays(jax.tree.map(without_mapped, arguments), arrays)


def positions(args: tuple[Any, ...], argnums: int | tuple[int, ...]) -> list[int]:
    """Returns the non-negative positions of the parameters among the arguments.

    Raises:
      ValueError: If parameters are missing, or named twice.
    """
    several = np.atleast_1d(argnums)  # an integer or a tuple
    if several.min() < -len(args) or several.max() >= len(args):
        raise ValueError(
            f"This was called with {len(args)} arguments after the state, and argnums={argnums}. "
            "Call it as (state, params, *batch), parameters by position."
        )
    at = (several % len(args)).tolist()
    if len(set(at)) < len(at):
        raise ValueError(
            f"argnums={argnums} names one of {len(args)} arguments twice. Name each once."
        )
    return at


def check_keywords(kwargs: dict[str, Any], function: Callable[..., Any]) -> None:
    """Refuses a batch that is passed by keyword, and a misspelt `weight`.

    Raises:
      ValueError: If it finds one; the message names it.
    """
    if not kwargs:  # not every callable has a signature
        return
    # A function may have a parameter of such a name.
    refuse_misspelt_weight(kwargs.keys() - inspect.signature(function).parameters)
    for path, leaf in jax.tree.leaves_with_path(kwargs):
        if not is_shared(leaf):
            raise ValueError(
                f"The keyword argument {leaf_name(path)} holds an array with axes. Pass it by "
                "position, where `batch_specs` says how it is split between the replicas."
            )


def read_inputs(
    args: tuple[Any, ...],
    params_at: list[int],
    batch_specs: Any,
    axis_name: AxisName,
    mesh: Any,
    replicas: int,
) -> Inputs:
    """Finds how each array is split: by `batch_specs`, or by its sharding on the mesh.

    Args:
      args: The positional arguments of the call, and a dict of its keyword arguments.
      params_at: The positions of the parameters.
      batch_specs: As for `data_parallel`.
      axis_name: The axis or axes of the replicas.
      mesh: The mesh. None if the arrays already belong to one replica; specs then only find the
        axes of the examples.
      replicas: The number of replicas.

    Raises:
      ValueError: If the number of specifications is wrong, an array cannot be split as specified,
        no array is a batch, or it is not clear which array is a batch.
    """
    unsplit = [*params_at, len(args) - 1]  # every replica gets them whole
    examples: dict[int, int] = {}
    rows: dict[str, int] = {}  # number of rows of each leaf that is split without a specification
    keys: dict[str, Any] = {}

    def spec_of(path: Any, leaf: Any, specified: PartitionSpec | None) -> PartitionSpec | None:
        name = f"{leaf_name(path[1:])} of argument {path[0].idx}"
        if has_texts(leaf):
            raise ValueError(
                f"The leaf {name} has dtype {leaf.dtype}, and JAX computes with numbers only. "
                "Leave it out of the batch."
            )
        spec = specified
        if spec is None:
            spec = PartitionSpec()
            if not is_shared(leaf):
                spec = PartitionSpec(axis_name)
                known = known_spec(leaf, mesh)
                # Arrays that are not sharded over the replicas, such as NumPy's, are split too,
                # along axis 0.
                if split_axis(over_axes(known, axis_tuple(axis_name))) is not None:
                    spec = known
        spec = split_spec(name, leaf, spec, axis_name, replicas)
        axis = split_axis(spec)
        if axis is not None:
            examples[axis] = leaf.shape[axis]
        if specified is None and axis is not None:
            rows[name] = leaf.shape[axis]
        elif specified is None and is_raw_key(leaf):
            keys[name] = leaf
        if not is_array(leaf):  # checked above, because a spec for a list would do nothing
            return None
        return spec

    each = _one_each(batch_specs, len(args), unsplit, axis_name, mesh)
    # None within a tree of specs means the default, as it does for a whole argument.
    try:
        each = jax.tree.broadcast(each, args, is_leaf=lambda node: node is None)
    except ValueError as error:
        raise ValueError(
            "`batch_specs` must be a tree like the arguments besides the parameters, or a prefix "
            f"of that tree: {error}"
        ) from error
    specs = jax.tree.map_with_path(spec_of, args, each)
    if mesh is not None:  # else somebody else has split the batch
        lengths = set(rows.values())
        _check_examples(rows)
        check_keys(keys, lengths)
        _check_lists(args, unsplit, lengths)
        if not examples:
            _refuse_unsplit(args, unsplit, axis_name)
    static = jax.tree.map(lambda x: ... if is_array(x) else x, args)
    return Inputs(static, params_at, specs, examples)


def _one_each(
    batch_specs: Any, number: int, unsplit: list[int], axis_name: AxisName, mesh: Any
) -> tuple[Any, ...]:
    """Returns a tree of specs for each argument: P() for parameters, None if none is given."""
    for spec in jax.tree.leaves(batch_specs):
        if not isinstance(spec, PartitionSpec):
            raise ValueError(
                f"`batch_specs` must be a PartitionSpec such as jax.P({axis_name!r}), or a tree of "
                f"them, got a {type(spec).__name__}: {spec!r}."
            )
        for name in jax.tree.leaves(tuple(spec)):
            if mesh is not None and name not in mesh.axis_names:
                raise ValueError(
                    f"`batch_specs` names the axis {name!r}; the mesh has "
                    f"{', '.join(map(repr, mesh.axis_names))}."
                )
    others = number - len(unsplit)
    each = [batch_specs] * others
    # Exactly these types: a PartitionSpec, or a named tuple of specs, is one for all arguments.
    if type(batch_specs) in (tuple, list):
        each = list(batch_specs)
    if len(each) != others:
        raise ValueError(
            f"`batch_specs` has {len(each)} entries, and the function was called with {others} "
            "arguments besides the parameters. Pass one specification for all of them, or a tuple "
            "with one for each."
        )
    for i in sorted(unsplit):
        each.insert(i, PartitionSpec())
    return tuple(each)


def split_spec(
    name: str, leaf: Any, spec: PartitionSpec, axis_name: AxisName, replicas: int
) -> PartitionSpec:
    """Returns the part of a specification that names axes of the replicas.

    Raises:
      ValueError: If the leaf's axis cannot be split so; the message has its `name`.
    """
    kept = over_axes(spec, axis_tuple(axis_name))
    axis = split_axis(kept)
    if axis is None:
        return PartitionSpec()
    shape = getattr(leaf, "shape", ())
    if axis >= len(shape) or shape[axis] % replicas:
        raise ValueError(
            f"The leaf {name} has shape {shape}, which {kept} cannot split between {replicas} "
            "replicas. Pass a batch, as an array, whose length the number of replicas divides. For "
            "an array that every replica gets whole, pass batch_specs with P() to data_parallel; a "
            "step of local_sgd_round can close over it."
        )
    return kept


def is_shared(leaf: Any) -> bool:
    """Returns whether a leaf is by default equal on all replicas: a scalar, a key, no array."""
    return not is_array(leaf) or not leaf.ndim or is_raw_key(leaf)


def is_raw_key(leaf: Any) -> bool:
    """Returns whether a leaf looks like a key of `jax.random.PRNGKey`, which has no examples."""
    # Asked of JAX, because the shape depends on jax_default_prng_impl.
    key = jax.eval_shape(jax.random.PRNGKey, 0)
    return is_array(leaf) and (leaf.shape, leaf.dtype) == (key.shape, key.dtype)


def _check_examples(rows: dict[str, int]) -> None:
    """Refuses leaves without a specification that may not be a batch: tables, statistics.

    Args:
      rows: The number of rows of each leaf that is split without a specification, by name.

    Raises:
      ValueError: If two leaves have different numbers of rows; the message names them.
    """
    lengths = {length: name for name, length in rows.items()}
    if len(lengths) > 1:
        (first, batch), (second, other), *_ = lengths.items()
        raise ValueError(
            f"The leaf {other} has {second} rows, and {batch} has {first}. By default every array "
            "with axes counts as examples and is split between the replicas. Pass batch_specs, a "
            "PartitionSpec for each argument, with P() for arrays that every replica gets whole "
            "(tables, statistics, another model's weights)."
        )


def check_keys(keys: dict[str, Any], lengths: Collection[int]) -> None:
    """Refuses leaves that may be a random key, or examples.

    Args:
      keys: Leaves that look like a random key, by name.
      lengths: The numbers of rows of the leaves that are split.

    Raises:
      ValueError: If it finds one; the message names it.
    """
    for name, key in keys.items():
        # Other leaves that are split have as many rows, or there are none: it may be either.
        if set(key.shape).issuperset(lengths):
            raise ValueError(
                f"The leaf {name} is {key.dtype} of shape {key.shape}. It may be a key of "
                f"jax.random.PRNGKey, or {key.shape[0]} examples. Pass jax.random.key(seed) for a "
                "key, or int32 for examples. With data_parallel, batch_specs can also say which: "
                "P() for a key, the axis of the replicas for examples."
            )


def _check_lists(args: tuple[Any, ...], unsplit: list[int], lengths: set[int]) -> None:
    """Refuses a list of Python numbers that may be the batch, or a part of it.

    Raises:
      ValueError: If it finds one; the message names the argument.
    """
    for i, arg in enumerate(args):
        if not isinstance(arg, (list, tuple)) or i in unsplit:
            continue
        numbers = set(map(type, jax.tree.leaves(arg))) in ({int}, {float}, {int, float})
        if numbers and (not lengths or len(arg) in lengths):
            raise ValueError(
                f"Argument {i} is a {type(arg).__name__} of Python numbers, which are not split "
                "between the replicas. Pass an array: np.asarray(batch)."
            )


def _refuse_unsplit(args: tuple[Any, ...], unsplit: list[int], axis_name: AxisName) -> NoReturn:
    """Refuses a call of which every replica would compute the whole, so nothing is parallel."""
    kinds = [type(arg).__name__ for i, arg in enumerate(args) if i not in unsplit]
    raise ValueError(
        "No argument is split between the replicas: each would compute the whole batch. Beside the "
        f"parameters it got: {', '.join(kinds) or 'nothing'}. Pass the batch as an array of JAX or "
        f"NumPy, not in a closure, with batch_specs that name {axis_name!r}. A function that makes "
        "its own examples needs keys that are split, jax.random.split(key, replicas)."
    )


def weight_spec(
    weight: Any, examples: dict[int, int], axis_name: AxisName, replicas: int
) -> PartitionSpec:
    """Finds how weights are split: one number for each replica, or a mask or counts like the batch.

    Args:
      weight: An array, or a list of numbers.
      examples: The number of examples along each axis of the batch that is split.
      axis_name: The axis or axes of the replicas.
      replicas: The number of replicas.

    Raises:
      ValueError: If the shape fits neither, or these are no real numbers.
    """
    weight = as_weights(weight)
    # One number for each replica comes first: with as many examples as replicas both are the same.
    if weight.shape == (replicas,):
        return PartitionSpec(axis_name)
    other = ""
    for axis, length in examples.items():
        if weight.shape[axis : axis + 1] == (length,):
            return PartitionSpec(*[None] * axis, axis_name)
        other += f", or {length} along axis {axis} as the batch"
    raise ValueError(
        f"`weight` must have shape ({replicas},), one number for each replica{other}, got "
        f"{weight.shape}."
    )
