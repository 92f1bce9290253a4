"""The arguments of one call of `data_parallel`, flat: parameters, arrays, and how each is split."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxcomp._base.leaves import leaf_name
from jaxcomp._base.typing import Array, AxisName, PyTree
from jaxcomp._mesh.collectives import as_local, axis_tuple, mesh_axes
from jaxcomp._states.place import known_spec

_AS_IT_LIES = object()  # in the place of a specification that nobody gave


class Arguments:
    """What a gradient function is called with: arrays, by their places among all leaves, and more.

    What is no array stays as it is: a flag that the function branches on, a ConfigDict, a module.
    """

    arrays: dict[int, Any]
    specs: dict[int, PartitionSpec]  # of each array, over the replicas' axes; P() if all see it

    def __init__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], argnums: int | tuple[int, ...]
    ):
        """Takes them apart.

        Raises:
          ValueError: If parameters are missing, or a batch comes by keyword.
        """
        several = argnums if isinstance(argnums, tuple) else (argnums,)
        if not all(-len(args) <= index < len(args) for index in several):
            raise ValueError(
                f"This was called with {len(args)} arguments behind the state, and argnums="
                f"{argnums}. Call it as (state, params, *batch), parameters by position."
            )
        for path, leaf in jax.tree_util.tree_flatten_with_path(kwargs)[0]:
            if not is_shared(leaf):
                raise ValueError(
                    f"The keyword argument {leaf_name(path)} holds an array with axes. Pass it by "
                    "position, where `batch_specs` says how it is split between the replicas."
                )
        self._args, self._argnums = args, argnums
        self._chosen = [index % len(args) for index in several]
        self._leaves, self._treedef = jax.tree.flatten((args, kwargs))
        self.arrays = {i: x for i, x in enumerate(self._leaves) if is_array(x)}

    def split_by(
        self, given: Any, axis_name: AxisName, *, mesh: Any = None, replicas: int = 1
    ) -> None:
        """Finds how each array is split: as `batch_specs` says, or as it lies on the mesh.

        Without a mesh, where arrays are one replica's already, that is where their examples lie.

        Raises:
          ValueError: If there are too few specifications or too many, an array cannot be split so,
            it is not clear what is a batch, or nothing is.
        """
        others = [i for i in range(len(self._args)) if i not in self._chosen]
        if not isinstance(given, (tuple, list)) or isinstance(given, PartitionSpec):
            given = [given] * len(others)
        if len(given) != len(others):
            raise ValueError(
                f"`batch_specs` has {len(given)} entries, and the function was called with "
                f"{len(others)} arguments besides the parameters. Give one specification for all "
                "of them, or a tuple with one for each."
            )
        asked = jax.tree.map(
            lambda spec: _AS_IT_LIES if spec is None else _checked(spec, axis_name, mesh),
            dict(zip(others, given, strict=True)),
            is_leaf=lambda x: x is None,
        )
        wanted = tuple(asked.get(i, PartitionSpec()) for i in range(len(self._args)))
        wanted = jax.tree.leaves(jax.tree.broadcast(wanted, self._args))
        self.specs = dict.fromkeys(self.arrays, PartitionSpec())
        rows, keys = list[tuple[str, int]](), list[str]()
        paths = jax.tree_util.tree_flatten_with_path(self._args)[0]
        for i, ((path, leaf), spec) in enumerate(zip(paths, wanted, strict=True)):
            name = f"{leaf_name(path[1:])} of argument {path[0].idx}"
            lies = _as_it_lies(leaf, axis_name, mesh) if spec is _AS_IT_LIES else spec
            found = split_spec(name, leaf, lies, axis_name, replicas)
            if i in self.arrays:
                self.specs[i] = found
            if spec is _AS_IT_LIES and (axis := split_axis(found)) is not None:
                rows.append((name, np.shape(leaf)[axis]))
            elif spec is _AS_IT_LIES and _is_raw_key(leaf):
                keys.append(name)
        if mesh is not None:
            _check_rows(rows, keys)
            self._check_something_is_split(axis_name)

    def _check_something_is_split(self, axis_name: AxisName) -> None:
        """Refuses a batch that every replica would compute whole: that saves nobody any work."""
        if not self.batch(self.arrays):
            raise ValueError(
                "No argument is split between the replicas: each would compute the whole batch. "
                "Pass the batch as an argument, not in a closure, with batch_specs that name "
                f"{axis_name!r}. A function that makes its own examples takes keys that are split, "
                "jax.random.split(key, replicas)."
            )

    def batch(self, arrays: dict[int, Any]) -> dict[int, int]:
        """Of these arrays those that hold examples, with the axis of them."""
        axes = {i: split_axis(self.specs[i]) for i in arrays}
        return {i: axis for i, axis in axes.items() if axis is not None}

    def rows(self, arrays: dict[int, Any]) -> dict[int, int]:
        """How many examples there are, by the axis that they lie along."""
        return {axis: arrays[i].shape[axis] for i, axis in self.batch(arrays).items()}

    def with_twice_the_batch(self, arrays: dict[int, Any]) -> dict[int, Any]:
        """These arrays with the same examples once more behind them; to be traced only."""
        return {**arrays, **{i: _twice(arrays[i], axis) for i, axis in self.batch(arrays).items()}}

    def params(self, arrays: dict[int, Any]) -> PyTree:
        """What gradients are taken of; None for what is no array, as functions in a model."""
        args, _ = self.rebuilt(arrays)
        several = tuple(arrays_only(args[i]) for i in self._chosen)
        return several if isinstance(self._argnums, tuple) else several[0]

    def rebuilt(self, arrays: dict[int, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Arguments by position and by name, with these arrays in their places."""
        args, kwargs = self._treedef.unflatten(
            [arrays[i] if i in arrays else _on_replica(x) for i, x in enumerate(self._leaves)]
        )
        return list(args), kwargs

    def local(
        self, arrays: dict[int, Any], axis_name: AxisName
    ) -> tuple[list[Any], dict[str, Any]]:
        """The same on one replica: parameters are typed as its own."""
        args, kwargs = self.rebuilt(arrays)
        for i in self._chosen:
            args[i] = jax.tree.map(lambda x: as_local(x, axis_name) if is_array(x) else x, args[i])
        return args, kwargs


def arrays_only(tree: PyTree) -> PyTree:
    """The tree with None in the place of what is no array."""
    return jax.tree.map(lambda x: x if is_array(x) else None, tree)


def _checked(spec: Any, axis_name: AxisName, mesh: Any) -> PartitionSpec:
    """Refuses what would split nothing without a word: no PartitionSpec, or an unknown axis."""
    if not isinstance(spec, PartitionSpec):
        raise ValueError(
            f"`batch_specs` must be a PartitionSpec such as jax.P({axis_name!r}), or a tree of "
            f"them, got a {type(spec).__name__}: {spec!r}."
        )
    names = [n for part in spec for n in (part if isinstance(part, tuple) else (part,))]
    known = names if mesh is None else mesh.axis_names
    if unknown := [n for n in names if isinstance(n, str) and n not in known]:
        raise ValueError(
            f"`batch_specs` names the axis {unknown[0]!r}; the mesh has "
            f"{', '.join(map(repr, known))}."
        )
    return spec


def _as_it_lies(leaf: Any, axis_name: AxisName, mesh: Any) -> PartitionSpec:
    """How a leaf is known to be split between the replicas, else along axis 0."""
    if is_shared(leaf):
        return PartitionSpec()
    known = () if mesh is None else known_spec(leaf, mesh)
    lies = PartitionSpec(*(only(part, axis_tuple(axis_name)) for part in known))
    return lies if any(lies) else PartitionSpec(axis_name)


def split_spec(
    name: str, leaf: Any, spec: PartitionSpec, axis_name: AxisName, replicas: int
) -> PartitionSpec:
    """A specification for one leaf of a batch, of the axes of the replicas only.

    Raises:
      ValueError: If an axis of it cannot be split so, with its `name`.
    """
    kept = [only(part, axis_tuple(axis_name)) for part in spec]
    shape = np.shape(leaf) if is_array(leaf) else ()
    if any(part and (d >= len(shape) or shape[d] % replicas) for d, part in enumerate(kept)):
        raise ValueError(
            f"The leaf {name} has shape {shape}, which {PartitionSpec(*kept)} cannot split between "
            f"{replicas} replicas. Give batch_specs with P() for what every replica shall see "
            "whole, or a batch that the number of replicas divides."
        )
    return PartitionSpec(*kept) if any(kept) else PartitionSpec()


def split_axis(spec: PartitionSpec) -> int | None:
    """The axis along which a leaf is split between the replicas; None for what all see whole."""
    return next((axis for axis, part in enumerate(spec) if part), None)


def _check_rows(rows: list[tuple[str, int]], keys: list[str]) -> None:
    """Refuses to take for a batch, unasked, what is none: a table, statistics, another model.

    Args:
      rows: Of the leaves to be split that nobody said how to split, names and lengths.
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


def _twice(x: Array, axis: int) -> Array:
    spec = jax.typeof(x).sharding.spec
    if axis < len(spec) and spec[axis]:  # no concatenation along an Explicit axis
        free = PartitionSpec(*(None if i == axis else part for i, part in enumerate(spec)))
        x = jax.sharding.reshard(x, free)
    double = jnp.concatenate([x, x], axis)
    return jax.sharding.reshard(double, spec) if any(spec) else double


def _on_replica(leaf: Any) -> Any:
    """What is no array, on one replica: a sharding loses the axes that are mapped, as arrays do."""
    mesh, mapped = jax.sharding.get_abstract_mesh(), mesh_axes(AxisType.Manual)
    if not (isinstance(leaf, NamedSharding) and mapped):
        return leaf
    others = tuple(name for name in mesh.axis_names if name not in mapped)
    return NamedSharding(mesh, PartitionSpec(*(only(part, others) for part in leaf.spec)))
