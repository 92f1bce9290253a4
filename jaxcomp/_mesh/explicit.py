"""Handles meshes outside of mapped functions, and Explicit axes inside of them.

`data_parallel`, rounds of local SGD and the functions that place states call this module; the
reducers do so only through `Reducer.reduce`. On a mesh with Explicit axes every operation must
state the sharding of its result. The reshapes and products of a reducer cannot do that, so these
axes become Auto while a reducer runs. Afterwards each result gets the type of the value that it
replaces.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec, get_abstract_mesh

from jaxcomp._base.checks import is_traced
from jaxcomp._base.leaves import arrays_only, with_arrays
from jaxcomp._base.typing import AxisName, PyTree
from jaxcomp._mesh.collectives import axis_tuple, mesh_axes


def context_mesh() -> Any:
    """Returns the mesh of `jax.set_mesh` (inside `jax.jit` an abstract mesh), or None."""
    mesh = get_abstract_mesh()
    if mesh.empty:
        return None
    try:
        return jax.sharding.get_mesh()
    except ValueError:  # inside jit
        return mesh


def check_mesh_axes(mesh: Any, axis_name: AxisName) -> None:
    """Refuses an object that is not a mesh, and a mesh without the axes of the replicas.

    Raises:
      ValueError: If it is one of these; the message lists the mesh's axes.
    """
    if not hasattr(mesh, "axis_types"):
        kind = type(mesh).__name__
        raise ValueError(f"`mesh` must be a mesh, as jax.make_mesh makes it, got a {kind}.")
    missing = [name for name in axis_tuple(axis_name) if name not in mesh.shape]
    if missing:
        raise ValueError(
            f"The mesh has no axis {missing[0]!r}; its axes are {tuple(mesh.shape)}. Make the "
            "reducer with an axis of this mesh, or pass the mesh that has it."
        )


def replicas_on(mesh: Any, axis_name: AxisName) -> int:
    """Counts the replicas along the axes of a mesh."""
    return math.prod(mesh.shape[name] for name in axis_tuple(axis_name))


def over_axes(spec: PartitionSpec, axes: tuple[str, ...]) -> PartitionSpec:
    """Returns the part of a PartitionSpec that names these axes."""
    parts: list[Any] = []
    for part in spec:  # an entry is a name, a tuple of names or None
        parts.append(tuple(name for name in axis_tuple(part) if name in axes))
    return PartitionSpec(*parts)


def split_axis(spec: PartitionSpec) -> int | None:
    """Returns the first axis that a spec splits, or None if it splits no axis."""
    for axis, part in enumerate(spec):
        if part:
            return axis
    return None


def resharded(x: Any, mesh: Any, spec: PartitionSpec, axes: tuple[str, ...]) -> Any:
    """Reshards `x` to `spec` over `axes`, and leaves its sharding over other Explicit axes.

    `jax.shard_map` reshards Auto axes by itself, but not Explicit axes.
    """
    # The types of arrays name Explicit axes only, so there is nothing to compare.
    if set(axes).isdisjoint(mesh_axes(AxisType.Explicit, mesh)):
        return x
    before = jax.typeof(x).sharding.spec
    others = tuple(name for name in mesh.axis_names if name not in axes)
    parts = []
    for part, kept in itertools.zip_longest(over_axes(spec, axes), over_axes(before, others)):
        parts.append(axis_tuple(part) + axis_tuple(kept))
    after = PartitionSpec(*parts)
    if after == before:  # keeps the step's program free of a sharding constraint
        return x
    return jax.sharding.reshard(x, NamedSharding(mesh, after))


def known_sharding(leaf: Any) -> Any:
    """Returns the known sharding of a leaf: a tracer's is in its type, a NumPy array has None."""
    if is_traced(leaf):
        return jax.typeof(leaf).sharding
    return getattr(leaf, "sharding", None)


def call_on_automatic_axes(function: Callable[..., Any], shardings: PyTree, /, *args: Any) -> Any:
    """Calls `function` with the Explicit axes of the mesh as Auto axes.

    Args:
      function: A function of trees by position, whose arrays may be sharded over Explicit axes.
      shardings: The shardings of the results afterwards; a tree prefix of the results.
      *args: The arguments of `function`.
    """

    def inside(arrays: PyTree) -> Any:
        return function(*with_arrays(args, arrays))

    axes = mesh_axes(AxisType.Explicit)
    # `auto_axes` takes arrays only, and some arguments are None or a user's static values.
    return jax.sharding.auto_axes(inside, axes=axes, out_sharding=shardings)(arrays_only(args))


def typed_specs(tree: PyTree) -> PyTree:
    """Returns the PartitionSpecs in the types of arrays, which name Explicit axes only."""
    return jax.tree.map(lambda x: jax.typeof(x).sharding.spec, tree)


class Boundary:
    """Wraps a `jax.shard_map` and the function in it, for meshes with further Explicit axes.

    JAX before 0.12 gathers all inputs and outputs along the Explicit axes. With such a JAX these
    axes become Auto around the `shard_map`, and Explicit again inside of it, for the user's
    function.
    """

    def __init__(self, mesh: Any, axes: tuple[str, ...]):
        """Finds the Explicit axes of a mesh other than the mapped `axes`."""
        self._explicit = mesh_axes(AxisType.Explicit, mesh)
        self._beside = tuple(name for name in self._explicit if name not in axes)
        self._around = ()
        self.outer = mesh
        self.axes = axes
        self.mesh = mesh
        if self._beside and jax.__version_info__ < (0, 12):
            self._around = self._beside
            self.mesh = None  # the mesh of the context, where these axes are Auto

    def explicit(self, function: Callable[..., Any], specs: PyTree) -> Callable[..., Any]:
        """Wraps a function inside of the `shard_map` so that its arrays have the types `specs`."""
        if not self._around:
            return function
        kept = jax.tree.map(lambda spec: over_axes(spec, self._around), specs)
        return jax.sharding.explicit_axes(function, axes=self._around, in_sharding=(kept,))

    def automatic(self, mapped: Callable[..., Any], like: PyTree) -> Callable[..., Any]:
        """Wraps the `shard_map` so that its results have the types `like`."""
        if self._around:

            def sharding(spec: PartitionSpec) -> NamedSharding:
                # Types name only Explicit axes, and the axes of the replicas may be Auto.
                return NamedSharding(self.outer, over_axes(spec, self._explicit))

            shardings = jax.tree.map(sharding, like)
            mapped = jax.sharding.auto_axes(mapped, axes=self._around, out_sharding=shardings)
        if self._beside:
            # Without `jax.jit` it would run operation by operation, and arrays would keep the types
            # of the whole mesh.
            return jax.jit(mapped)
        return mapped
