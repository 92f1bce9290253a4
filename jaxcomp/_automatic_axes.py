"""The axes of the mesh: the mapped ones, and those left to the compiler with what lies on them."""

from __future__ import annotations

import math

import jax
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from jaxcomp._typing import Array


def mapped_mesh_axes() -> tuple[str, ...]:
    """Mesh axes over which shard_map maps here; those of vmap are no mesh axes."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind in kinds if kind == AxisType.Manual)


def other_axes(kind: AxisType | None = None) -> tuple[str, ...]:
    """Mesh axes of more than one device that are not mapped here; all, or those of one kind.

    An array may be sharded along them, and in automatic ones JAX does not say which arrays are. One
    flat vector of them all could not keep their shardings: the compiler would gather each first.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(
        name
        for name, size, found in zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
        if size > 1 and found != AxisType.Manual and kind in (None, found)
    )


def spread(xs: list[Array], thin: int) -> list[Array]:
    """The first `thin` arrays laid out over the automatic axes, where there are any.

    The compiler would copy a factor to every device that needs it and then let each of them send
    all of it.
    """
    axes = other_axes(AxisType.Auto)
    devices = math.prod(jax.sharding.get_abstract_mesh().shape[name] for name in axes)

    def lay_out(x: Array) -> Array:
        length, axis = max(
            ((n, i) for i, n in enumerate(x.shape) if n % devices == 0), default=(0, 0)
        )
        spec = [axes if i == axis else None for i in range(x.ndim)]
        return lax.with_sharding_constraint(x, PartitionSpec(*spec)) if length else x

    return [lay_out(x) if i < thin else x for i, x in enumerate(xs)] if axes else xs


def gathered(xs: list[Array], thin: int) -> list[Array]:
    """The first `thin` arrays whole on every device.

    Left in the layout of `spread`, they would move the weights that are made from them into it.
    """
    if not other_axes(AxisType.Auto):
        return xs
    whole = [lax.with_sharding_constraint(x, PartitionSpec()) for x in xs[:thin]]
    return [*whole, *xs[thin:]]
