"""States across replicas: to one copy for a checkpoint, and back onto any number of replicas.

A state class says which of its fields differ between replicas with a class attribute,
``per_replica = ("residual",)``. Nothing here knows a reducer by name, so a user's own takes part by
declaring the same.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxcomp._base.checks import check_axis_name
from jaxcomp._base.leaves import compute_dtype, leaf_name
from jaxcomp._base.typing import AxisName, KeyPath, PyTree
from jaxcomp._mesh.axes import as_local, axis_tuple
from jaxcomp._mesh.collectives import largest
from jaxcomp._mesh.per_replica import map_leaves
from jaxcomp._mesh.weights import mean_each
from jaxcomp._states.stacked import mean_of_replicas


def consolidate(state: PyTree, axis_name: AxisName | None = None) -> PyTree:
    """Replaces what differs between replicas by its mean: the one state to save.

    Outputs depend on the residuals only through their mean, so every replica may start again from
    it, on any number of replicas. Inside a mapped function, with `axis_name`, that is one
    all-reduce; under ``shard_map(check_vma=True)`` the result is replicated, and ``out_specs=P()``
    gives the one copy. Outside, without `axis_name`, it takes what `jaxcomp.value_and_grad`,
    `jax.pmap` or `jax.vmap` returned, with a leading axis of replicas. Counters, flags and random
    keys, which have no mean, take the largest value among the replicas: the common one, wherever
    the replicas agree.

    Args:
      state: Any tree that holds jaxcomp states: a whole `optax.chain` state, a ``TrainState``.
      axis_name: The mapped axis or axes of the replicas; None outside of a mapped function. There
        only what each replica has of its own needs the axis of replicas; if everything has one, as
        out of `jax.pmap`, it is taken away from everything.

    Returns:
      The same tree, equal on every replica; outside of a mapped function one copy of it.

    Raises:
      ValueError: If the axis is not bound; outside of a mapped function, if what each replica has
        of its own has no axis of replicas, is replicated in name only, or a shared leaf differs.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomp, optax
      >>> tx = jaxcomp.powersgd(axis_name="data", start_step=0)
      >>> def step(grads, state):
      ...     updates, state = tx.update(grads, state)
      ...     return jaxcomp.consolidate(state, "data")
      >>> grads = jax.random.normal(jax.random.key(0), (2, 8, 8))
      >>> state = jax.vmap(step, in_axes=(0, None), out_axes=None, axis_name="data")(
      ...     grads, tx.init(grads[0]))
      >>> state.residual.shape
      (8, 8)
    """
    if axis_name is None:
        return mean_of_replicas(state)
    check_axis_name(axis_name)
    own: list[Any] = []

    def collect(path: KeyPath, leaf: Any, local: bool) -> Any:
        del path
        if local and jnp.issubdtype(leaf.dtype, jnp.floating):
            own.append(as_local(leaf, axis_name))
        return leaf

    def replace(path: KeyPath, leaf: Any, local: bool) -> Any:
        del path
        if not local:
            return leaf
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        return next(queue) if floating else largest(leaf, axis_name)

    map_leaves(collect, state)
    # Averaged in float32 even where stored narrower, then back to the stored dtype.
    means = mean_each([leaf.astype(compute_dtype(leaf.dtype)) for leaf in own], axis_name)
    queue = iter([mean.astype(leaf.dtype) for mean, leaf in zip(means, own, strict=True)])
    return map_leaves(replace, state)


def state_specs(state: PyTree, axis_name: AxisName) -> PyTree:
    """PartitionSpecs of a state, for the ``in_specs`` and ``out_specs`` of `jax.shard_map`.

    Args:
      state: Any tree that holds jaxcomp states, of arrays or shape structs.
      axis_name: The mesh axis or axes of the replicas.

    Returns:
      The same tree with ``P(axis_name)`` for each leaf that a replica has of its own and ``P()``
      for the others. A global per-replica array is ``n`` replicas' blocks along axis 0.

    Raises:
      ValueError: If a per-replica leaf has no axes to lay the replicas along.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomp
      >>> state = jaxcomp.powersgd(axis_name="data").init({"w": jnp.zeros((8, 8))})
      >>> specs = jaxcomp.state_specs(state, "data")
      >>> specs.residual["w"] == jax.P("data"), specs.q["w"] == jax.P()
      (True, True)
    """
    check_axis_name(axis_name)

    def spec(path: KeyPath, leaf: Any, local: bool) -> PartitionSpec:
        if not local:
            return PartitionSpec()
        if not np.ndim(leaf):
            raise ValueError(
                f"The per-replica leaf {leaf_name(path)} is a scalar, and under shard_map the "
                "replicas' values are laid along axis 0. Give it an axis of length 1, or map with "
                "pmap or vmap."
            )
        return PartitionSpec(axis_name)

    return map_leaves(spec, state)


def shard_state(state: PyTree, mesh: Mesh, axis_name: AxisName) -> PyTree:
    """Places a consolidated state on a mesh, ready for a function with `state_specs`.

    Every replica gets the same copy of what it then has of its own. Shardings that the arrays
    already have over other axes of the mesh (tensor or FSDP parallel) are kept.

    Args:
      state: A consolidated state: from ``init``, a checkpoint, or `consolidate`. In a run of
        several processes, each passes the same values.
      mesh: The mesh that `jax.shard_map` runs on.
      axis_name: Its axis or axes along which the replicas lie.

    Returns:
      The same tree of global arrays. A per-replica leaf of shape ``(d, ...)`` becomes
      ``(n * d, ...)`` for ``n`` replicas.

    Raises:
      ValueError: If the mesh lacks an axis, or a per-replica leaf is a scalar.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomp
      >>> state = jaxcomp.powersgd(axis_name="data").init({"w": jnp.zeros((8, 8))})
      >>> mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
      >>> jaxcomp.shard_state(state, mesh, "data").residual["w"].shape
      (16, 8)
    """
    axes = axis_tuple(axis_name)
    missing = [name for name in axes if name not in mesh.shape]
    if missing:
        raise ValueError(
            f"The mesh has no axis {missing[0]!r}; its axes are {tuple(mesh.shape)}. Pass the "
            "axis_name that the reducer was made with, on the mesh that shard_map uses."
        )
    replicas = int(np.prod([mesh.shape[name] for name in axes]))
    specs = state_specs(state, axis_name)

    def place(path: KeyPath, leaf: Any, local: bool, spec: PartitionSpec) -> jax.Array:
        spec = _merged_spec(leaf_name(path), leaf, mesh, axes if local else ())
        return _tiled(leaf, replicas if local else 1, NamedSharding(mesh, spec))

    return map_leaves(place, state, specs)


def _merged_spec(name: str, leaf: Any, mesh: Mesh, axes: tuple[str, ...]) -> PartitionSpec:
    """The leaf's present spec on this mesh, with `axes` put in front on axis 0.

    Raises:
      ValueError: If the leaf is already spread over one of the axes.
    """
    sharding = getattr(leaf, "sharding", None)
    present: tuple[Any, ...] = ()
    if isinstance(sharding, NamedSharding) and sharding.mesh == mesh:
        present = tuple(sharding.spec)
    if not axes:
        return PartitionSpec(*present)
    first = present[0] if present else None
    first = () if first is None else first if isinstance(first, tuple) else (first,)
    if set(first) & set(axes):
        raise ValueError(
            f"The per-replica leaf {name} is already spread over {axes}: the state is not "
            "consolidated. Call jaxcomp.consolidate inside shard_map with out_specs=P() first."
        )
    return PartitionSpec((*axes, *first), *present[1:])


def _tiled(leaf: Any, times: int, sharding: NamedSharding) -> jax.Array:
    """`leaf` repeated along axis 0; no device holds more than its own shard."""
    if isinstance(leaf, jax.Array):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            # Laid out as the keys; a key's own words, in one more axis at the end, stay together.
            words = _tiled(jax.random.key_data(leaf), times, sharding)
            return jax.random.wrap_key_data(words, impl=jax.random.key_impl(leaf))
        if not (leaf.is_fully_addressable or leaf.is_fully_replicated):
            raise ValueError(
                f"An array of shape {leaf.shape} in the state is spread over several processes. "
                "Consolidate the state (out_specs=P() under shard_map) before placing it."
            )
    host = np.asarray(leaf)
    if times == 1:
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index or ()])
    rows = host.shape[0]

    def block(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None  # None stands for a scalar, which has no axis to tile
        start, stop, _ = index[0].indices(times * rows)
        offset = start % max(rows, 1)
        return host[(slice(offset, offset + stop - start), *index[1:])]

    return jax.make_array_from_callback((times * rows, *host.shape[1:]), sharding, block)
