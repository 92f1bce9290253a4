"""The mesh outside of a mapped function, and its Explicit axes inside of one.

Beside Explicit axes every operation must say how its result is sharded. The arithmetic of a
reducer, with its reshapes and products, cannot: there such axes are left to the compiler.
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
    """Returns the mesh of `jax.set_mesh`, inside `jax.jit` without its devices; or None."""
    mesh = get_abstract_mesh()
    if mesh.empty:
        return None
    try:
        return jax.sharding.get_mesh()
    except ValueError:  # inside jit
        return mesh


def check_mesh_axes(mesh: Any, axis_name: AxisName) -> None:
    """Refuses what is not a mesh, and one without the axes of the replicas.

    Raises:
      ValueError: With the axes that there are.
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
    """Returns a specification that says nothing of any but these axes."""
    parts: list[Any] = []
    for part in spec:
        parts.append(tuple(name for name in axis_tuple(part) if name in axes))
    return PartitionSpec(*parts)


def split_axis(spec: PartitionSpec) -> int | None:
    """Returns the axis along which a leaf is split; None for what all replicas see whole."""
    for axis, part in enumerate(spec):
        if part:
            return axis
    return None


def resharded(x: Any, mesh: Any, spec: PartitionSpec, axes: tuple[str, ...]) -> Any:
    """Lays `x` out as `spec` says over `axes`, and as before over the other Explicit ones.

    `jax.shard_map` does this by itself for automatic axes; for Explicit ones it wants to be asked.
    """
    if set(axes).isdisjoint(mesh_axes(AxisType.Explicit, mesh)):
        return x
    before = jax.typeof(x).sharding.spec
    others = tuple(name for name in mesh.axis_names if name not in axes)
    parts = []
    for part, kept in itertools.zip_longest(over_axes(spec, axes), over_axes(before, others)):
        parts.append(axis_tuple(part) + axis_tuple(kept))
    after = PartitionSpec(*parts)
    if after == before:
        return x
    return jax.sharding.reshard(x, NamedSharding(mesh, after))


def known_sharding(leaf: Any) -> Any:
    """Returns how a leaf is known to lie: of a tracer only what its type says, of NumPy nothing."""
    if is_traced(leaf):
        return jax.typeof(leaf).sharding
    return getattr(leaf, "sharding", None)


def call_on_automatic_axes(function: Callable[..., Any], shardings: PyTree, /, *args: Any) -> Any:
    """Calls `function` with the Explicit axes of the mesh left to the compiler while it runs.

    Args:
      function: Takes trees by position. Its arrays may be sharded in their types.
      shardings: What the results are typed as afterwards, a prefix of them.
      *args: What `function` is called with.
    """

    def inside(arrays: PyTree) -> Any:
        return function(*with_arrays(args, arrays))

    axes = mesh_axes(AxisType.Explicit)
    return jax.sharding.auto_axes(inside, axes=axes, out_sharding=shardings)(arrays_only(args))


def typed_specs(tree: PyTree) -> PyTree:
    """Returns how the types of arrays say that they are sharded: over Explicit axes only."""
    return jax.tree.map(lambda x: jax.typeof(x).sharding.spec, tree)


class Boundary:
    """The way into a `jax.shard_map` over some axes of a mesh, beside Explicit ones.

    JAX before 0.12 gathers whatever enters or leaves along the Explicit axes. With such a JAX
    these axes are made automatic around the `shard_map`, and Explicit again inside of it, for the
    user's function.
    """

    def __init__(self, mesh: Any, axes: tuple[str, ...]):
        """Finds the Explicit axes beside those that are mapped, `axes`."""
        explicit = mesh_axes(AxisType.Explicit, mesh)
        self._beside = tuple(name for name in explicit if name not in axes)
        self._around = ()
        self.outer = mesh
        self.axes = axes
        self.mesh = mesh
        if self._beside and jax.__version_info__ < (0, 12):
            self._around = self._beside
            self.mesh = None  # the one of the context

    def explicit(self, function: Callable[..., Any], specs: PyTree) -> Callable[..., Any]:
        """Wraps a function, inside, so that its arrays are typed as outside, by `specs`."""
        if not self._around:
            return function
        kept = jax.tree.map(lambda spec: over_axes(spec, self._around), specs)
        return jax.sharding.explicit_axes(function, axes=self._around, in_sharding=(kept,))

    def automatic(self, mapped: Callable[..., Any], like: PyTree) -> Callable[..., Any]:
        """Wraps the mapped function, outside, so that its results are typed as `like`."""
        if self._around:
            shardings = jax.tree.map(lambda spec: NamedSharding(self.outer, spec), like)
            mapped = jax.sharding.auto_axes(mapped, axes=self._around, out_sharding=shardings)
        if self._beside:
            # Outside of `jax.jit` it would run op by op, where arrays keep the types of the whole
            # mesh.
            return jax.jit(mapped)
        return mapped
