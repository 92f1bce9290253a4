"""The axes of the mesh: the mapped ones, and those left to the compiler with what lies on them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType

from jaxcomp._base.typing import Array, AxisName, PyTree

T = TypeVar("T")


def mesh_axes(kind: AxisType) -> tuple[str, ...]:
    """Axes of one kind: `jax.shard_map` maps over Manual ones; those of vmap are no mesh axes."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, found in kinds if found == kind)


def other_axes(*kinds: AxisType) -> tuple[str, ...]:
    """Mesh axes of more than one device that are not mapped here; all, or those of some kinds.

    An array may be sharded along them, and in automatic ones JAX does not say which arrays are. One
    flat vector of them all could not keep their shardings: the compiler would gather each first.
    """
    shape = jax.sharding.get_abstract_mesh().shape
    found = map(mesh_axes, kinds or (AxisType.Auto, AxisType.Explicit))
    return tuple(name for names in found for name in names if shape[name] > 1)


def known_equal(x: Any, axis_name: AxisName) -> bool:
    """Whether JAX knows `x` to be the same on all replicas: only ever under `check_vma=True`."""
    known = axes_known_equal(x, axis_name)
    return bool(known) and known == vma_axes(axis_name)


def axes_known_equal(x: Any, axis_name: AxisName) -> tuple[str, ...]:
    """Those of the axes over which JAX knows `x` to be the same."""
    known = varying(x)
    return tuple(name for name in vma_axes(axis_name) if name not in known)


def axis_tuple(axis_name: AxisName) -> tuple[str, ...]:
    """The mapped axes as a tuple of names."""
    return axis_name if isinstance(axis_name, tuple) else (axis_name,)


def axis_size(axis_name: AxisName) -> int:
    """Number of replicas along `axis_name`.

    Raises:
      ValueError: If an axis is not bound where this is called.
    """
    try:
        return math.prod(lax.axis_size(name) for name in axis_tuple(axis_name))
    except NameError as error:
        raise ValueError(
            f"The axis {axis_name!r} is not bound here. Call update() inside jax.pmap, "
            f"jax.shard_map or jax.vmap with axis_name={axis_name!r}, or pass the axis name that "
            "you mapped over."
        ) from error


def is_bound(axis_name: AxisName) -> bool:
    """Whether this runs inside a function that is mapped over `axis_name`."""
    try:
        axis_size(axis_name)
    except ValueError:
        return False
    return True


def varying(x: Any) -> frozenset[str]:
    """The mesh axes over which JAX knows `x` to differ; empty unless shard_map checks them."""
    aval = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    kind = getattr(aval, "manual_axis_type", None)  # jax >= 0.10
    return kind.varying if kind is not None else getattr(aval, "vma", frozenset())


def vma_axes(axis_name: AxisName) -> tuple[str, ...]:
    """The axes whose replication JAX tracks here: all under `check_vma=True`, else none."""
    axis_size(axis_name)
    return tuple(name for name in axis_tuple(axis_name) if name in varying(lax.axis_index(name)))


def as_local(tree: PyTree, axis_name: AxisName) -> PyTree:
    """Marks every array as this replica's own value. Costs nothing; values do not change.

    `local_value_and_grad` does this to the parameters. Do it yourself before anything else that
    differentiates with respect to them, for example flax's ``DynamicScale.value_and_grad``.

    Args:
      tree: Any tree of arrays.
      axis_name: The mapped axis or axes of the replicas.

    Returns:
      The same tree; under ``shard_map(check_vma=True)`` typed as varying over the axes, so that a
      gradient with respect to it stays local. Elsewhere gradients are local anyway.

    Raises:
      ValueError: If the axis is not bound.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomp
      >>> def gradient(w, x):
      ...     return jax.grad(lambda w: jnp.sum(w * x))(jaxcomp.as_local(w, "data"))
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> specs = {"in_specs": (jax.P(), jax.P("data")), "out_specs": jax.P("data")}
      >>> jax.shard_map(gradient, mesh=mesh, **specs)(jnp.ones(2), jnp.arange(2.0)).tolist()
      [0.0, 1.0]
    """
    axes = frozenset(vma_axes(axis_name))
    return jax.tree.map(lambda x: _marked(x, axes), tree) if axes else tree


def local_if_bound(tree: PyTree, axis_name: AxisName) -> PyTree:
    """A fresh state, `as_local` where it is made inside of the mapped function.

    Under ``check_vma=True`` a scan can then carry it.
    """
    return as_local(tree, axis_name) if is_bound(axis_name) else tree


def _marked(x: Any, axes: frozenset[str]) -> Any:
    """`x`, typed as varying over these axes too."""
    missing = tuple(sorted(axes - varying(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def typed_like(x: Array, tree: PyTree) -> Array:
    """`x`, typed as varying over all axes over which any array, or shape, of the tree does.

    What a loop carries must have one type before and after, and an argument of the loop's body may
    vary over axes over which the carried array did not.
    """
    return _marked(x, frozenset().union(*map(varying, jax.tree.leaves(tree))))


def switch(index: Array, branches: Sequence[Callable[[], T]]) -> T:
    """`lax.switch` whose branches may differ in what JAX knows to be local; index 0 is the first.

    A branch that ends in an average has replicated results where one that does not has this
    replica's own, and under ``check_vma=True`` a conditional wants one type for both.
    """
    if len(branches) == 1:
        return branches[0]()
    if not mesh_axes(AxisType.Manual):
        return lax.switch(index, branches)
    shapes = [jax.eval_shape(branch) for branch in branches]
    axes = jax.tree.map(lambda *xs: frozenset().union(*map(varying, xs)), *shapes)

    def marked(branch: Callable[[], T]) -> T:
        return jax.tree.map(_marked, branch(), axes)

    return lax.switch(index, [functools.partial(marked, branch) for branch in branches])


def from_step(count: Array, step: int, before: Callable[[], T], after: Callable[[], T]) -> T:
    """`before` while ``count < step``, then `after`; with ``step=0`` there is no branch."""
    return switch((count >= step).astype(jnp.int32), [before, after]) if step else after()
