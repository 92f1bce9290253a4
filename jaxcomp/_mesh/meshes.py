"""Handles meshes outside of mapped functions, and Explicit axes inside of them.

`data_parallel`, rounds of local SGD and the functions that place states call this module; the
reducers do so only through `Reducer.reduce`. On a mesh with Explicit axes JAX infers the sharding
of each result from the operands, and refuses reshapes and products where it cannot. A reducer has
such ones, so these axes become Auto while it runs. Afterwards each result gets the type of the
value that it replaces.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec, get_abstract_mesh

from jaxcomp._base.checks import is_traced
from jaxcomp._base.leaves import arrays_only, with_arrays
from jaxcomp._base.typing import Axes, AxisName, PyTree
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
    for name in axis_tuple(axis_name):
        if not isinstance(name, str) or name not in mesh.shape:
            raise ValueError(
                f"The mesh has no axis {name!r}; its axes are {tuple(mesh.shape)}. Make the "
                "reducer with an axis of this mesh, or pass the mesh that has it."
            )


def replicas_on(mesh: Any, axis_name: AxisName) -> int:
    """Counts the replicas along the axes of a mesh."""
    return math.prod(mesh.shape[name] for name in axis_tuple(axis_name))


def over_axes(spec: PartitionSpec, axes: Axes) -> PartitionSpec:
    """Returns the part of a PartitionSpec that names these axes."""
    # An entry of a spec is a name, a tuple of names or None.
    entries = []
    for part in spec:
        entries.append(tuple(filter(axes.__contains__, axis_tuple(part))))
    return PartitionSpec(*entries)


def split_axis(spec: PartitionSpec) -> int | None:
    """Returns the first axis that a spec splits, or None if it splits no axis."""
    for axis, part in enumerate(spec):
        if part:
            return axis
    return None


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


def explicit_inside(
    function: Callable[..., Any], specs: PyTree, mesh: Any, axes: Axes
) -> Callable[..., Any]:
    """Wraps a function of one replica so that axes beside `axes` are Explicit in it again.

    Args:
      function: A function of one tree of arrays.
      specs: The PartitionSpecs of the arrays' types.
      mesh: The mesh.
      axes: The axes of the replicas.
    """
    beside = tuple(itertools.filterfalse(axes.__contains__, mesh_axes(AxisType.Explicit, mesh)))
    if not beside:
        return function
    kept = jax.tree.map(lambda spec: over_axes(spec, beside), specs)
    return jax.sharding.explicit_axes(function, axes=beside, in_sharding=(kept,))
