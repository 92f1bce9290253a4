"""The arguments of one call of `data_parallel`, flat: parameters, arrays, and how each is split."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxcomp._base.leaves import leaf_name
from jaxcomp._base.typing import Array, AxisName, PyTree
from jaxcomp._mesh.axes import as_local, mesh_axes
from jaxcomp._training.on_mesh import (
    batch_spec,
    check_same_rows,
    check_something_is_split,
    is_array,
    is_shared,
    only,
    split_axis,
)


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
        asked = dict(zip(others, given, strict=True))
        specs = [
            batch_spec(asked[i], arg, i, mesh, axis_name, replicas)
            if i in asked
            else jax.tree.map(lambda _: PartitionSpec(), arg)
            for i, arg in enumerate(self._args)
        ]
        flat = jax.tree.leaves(specs)  # those of arguments by name follow, and are shared
        self.specs = {i: flat[i] if i < len(flat) else PartitionSpec() for i in self.arrays}
        if mesh is not None:
            unasked = [i for i, spec in asked.items() if spec is None]
            check_same_rows({i: self._args[i] for i in unasked}, {i: specs[i] for i in unasked})
            check_something_is_split(list(self.specs.values()), axis_name)

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
