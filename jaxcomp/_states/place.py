"""Places states outside of mapped functions: what differs by replica gets a leading axis.

The layout that says what it holds: an array ``(n, *leaf)`` is saved and restored as it is, and
nobody can take it for a replicated one.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxcomp._base.checks import check_axis_name, check_int
from jaxcomp._base.leaves import leaf_name
from jaxcomp._base.typing import Array, AxisName, KeyPath, PyTree
from jaxcomp._mesh.collectives import axis_tuple
from jaxcomp._mesh.explicit import check_mesh_axes
from jaxcomp._mesh.per_replica import has_foreign, has_rows, map_leaves, owners_of
from jaxcomp._states.consolidate import Layout, consolidate, layout_of


def state_axes(state: PyTree) -> PyTree:
    """Says where a state has its axis of replicas, for ``in_axes`` of pmap and vmap.

    Args:
      state: Any tree that holds jaxcomp states, of arrays or shape structs.

    Returns:
      The same tree with 0 for each leaf that a replica has of its own and None for the others.
      What is mapped so leaves one copy of what the replicas share, and ``(n, *leaf)`` of the rest:
      a state for `consolidate`.

    Raises:
      ValueError: If the state has lost its classes.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomp
      >>> state = jaxcomp.powersgd(axis_name="data").init({"w": jnp.zeros((8, 8))})
      >>> axes = jaxcomp.state_axes(state)
      >>> axes.residual["w"], axes.q["w"]
      (0, None)
    """

    def axis_of(path: KeyPath, leaf: Any, local: bool) -> int | None:
        del path, leaf
        return 0 if local else None

    return map_leaves(axis_of, state)


def state_specs(state: PyTree, axis_name: AxisName) -> PyTree:
    """Returns PartitionSpecs of a state, for ``in_specs`` and ``out_specs`` of `jax.shard_map`.

    With ``jax.NamedSharding(mesh, spec)`` of each they are shardings for `jax.jit`.

    Args:
      state: Any tree that holds jaxcomp states, of arrays or shape structs.
      axis_name: The mesh axis or axes of the replicas.

    Returns:
      The same tree with ``P(axis_name)`` for each leaf that a replica has of its own, whose leading
      axis is that of the replicas, and ``P()`` for the others. In the mapped function a replica
      sees its row ``(1, *leaf)``, which every reducer takes and gives back.

    Raises:
      ValueError: If the state has lost its classes, or holds one of `optax.MultiSteps`.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomp
      >>> state = jaxcomp.powersgd(axis_name="data").init({"w": jnp.zeros((8, 8))})
      >>> specs = jaxcomp.state_specs(state, "data")
      >>> specs.residual["w"] == jax.P("data"), specs.q["w"] == jax.P()
      (True, True)
    """
    check_axis_name(axis_name)
    if has_foreign(state):
        raise ValueError(
            "optax.MultiSteps cannot take the rows of its accumulated gradients that shard_map "
            "leaves, and runs the reducer on every micro-batch. Use jaxcomp.accumulate(tx, k)."
        )

    def spec_of(path: KeyPath, leaf: Any, local: bool) -> PartitionSpec:
        del path, leaf
        return PartitionSpec(axis_name) if local else PartitionSpec()

    return map_leaves(spec_of, state)


def stack_replicas(state: PyTree, replicas: int) -> PyTree:
    """Gives a state a leading axis of replicas where `state_axes` says 0; no mesh is needed.

    Args:
      state: Fresh, consolidated, or of any number of replicas.
      replicas: How many there are to be.

    Returns:
      The same tree; a leaf that a replica has of its own is ``(replicas, *leaf)``: as it was for
      as many replicas, else equal copies of the mean.

    Raises:
      ValueError: If `replicas` is not a positive integer, or as `shard_state`.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomp
      >>> tx = jaxcomp.powersgd(rank=1, axis_name="data", start_step=0)
      >>> state = jaxcomp.stack_replicas(tx.init({"w": jnp.zeros((8, 8))}), 2)
      >>> axes = jaxcomp.state_axes(state)
      >>> step = jax.vmap(tx.update, in_axes=(0, axes), out_axes=(None, axes), axis_name="data")
      >>> means, state = step({"w": jnp.ones((2, 8, 8))}, state)
      >>> means["w"].shape, state.residual["w"].shape, state.q["w"].shape
      ((8, 8), (2, 8, 8), (8, 1))
    """
    replicas = check_int("replicas", replicas, 1)
    state, has_axis = _for_replicas(state, replicas)

    if has_axis:
        return state

    def repeated(path: KeyPath, leaf: Any, local: bool) -> Any:
        del path
        return jnp.broadcast_to(leaf, (replicas, *np.shape(leaf))) if local else leaf

    return map_leaves(repeated, state)


def shard_state(
    state: PyTree, mesh: Any, axis_name: AxisName, *, like: PyTree | None = None
) -> PyTree:
    """Places a state on a mesh, whatever number of replicas it comes from: the way back in.

    Shardings that the arrays already have over other axes of the mesh (tensor or FSDP parallel) are
    kept. No device holds more than its own shard, but for what comes from other devices than the
    mesh's: of that each has a whole leaf for a moment.

    Args:
      state: Fresh from ``init``, consolidated, or with a leading axis of any number of replicas:
        arrays of devices or of NumPy, or tracers. In a run of several processes each passes the
        same values.
      mesh: The mesh that the training step runs on.
      axis_name: Its axis or axes along which the replicas lie.
      like: A fresh state, ``reducer.init(params)``, that says which shapes and dtypes are expected
        and how leaves lie over the other axes; by default `state` itself says so.

    Returns:
      The same tree of global arrays. What a replica has of its own is ``(n, *leaf)`` for ``n``
      replicas: as it was for as many, else equal copies of the mean, on which alone updates depend.

    Raises:
      ValueError: If the mesh lacks an axis; the state is that of one replica only, or does not fit
        `like`, listing every leaf; or a leaf is sharded over the axis of the replicas.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomp
      >>> state = jaxcomp.powersgd(axis_name="data").init({"w": jnp.zeros((8, 8))})
      >>> mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
      >>> jaxcomp.shard_state(state, mesh, "data").residual["w"].shape
      (2, 8, 8)
    """
    check_mesh_axes(mesh, axis_name)
    check_axis_name(axis_name)
    axes = axis_tuple(axis_name)
    replicas = math.prod(mesh.shape[name] for name in axes)
    if like is not None:
        _check_structure(state, like)
    state, has_axis = _for_replicas(state, replicas, like)
    if like is not None:
        _check_shapes(state, like, replicas if has_axis else None)

    def place(path: KeyPath, leaf: Any, local: bool, expected: Any) -> Any:
        # How it lies over the other axes; of what is traced that is unknown, if they are Auto.
        parts = list(known_spec(expected, mesh))
        parts += [None] * (np.ndim(expected) - len(parts))
        if local and has_axis and like is None:
            parts = parts[1:]  # the leaf itself says so, behind its axis of replicas
        check_not_spread(path, expected, PartitionSpec(*parts), axes)
        if not local:
            return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*parts)))
        if like is not None and leaf.dtype != expected.dtype:
            leaf = leaf.astype(expected.dtype)  # another residual_dtype than it was saved with
        sharding = NamedSharding(mesh, PartitionSpec(axis_name, *parts))
        if has_axis:
            return jax.device_put(leaf, sharding)
        return _repeated(leaf, replicas, sharding)

    return map_leaves(place, state, state if like is None else like)


def _for_replicas(state: PyTree, replicas: int, like: PyTree | None = None) -> tuple[PyTree, bool]:
    """Returns a state of so many replicas, or a consolidated one; and whether it has their axis."""
    fresh = None if like is None else lambda: like
    if not has_rows(state, fresh):
        if owners_of(state):
            layout_of(state)  # refuses the residual of one replica
        return state, False
    if layout_of(state) == Layout(replicas, everything=False):
        return state, True
    return consolidate(state), False


def _check_structure(state: PyTree, like: PyTree) -> None:
    """Refuses another reducer's state, or one that has lost its classes."""
    if jax.tree.structure(state) == jax.tree.structure(like):
        return
    expected = type(like).__name__
    kind = type(state).__name__
    if kind == expected:
        raise ValueError(
            f"The {kind} is that of other parameters, or of another chain of transformations."
        )
    raise ValueError(
        f"The state must be a {expected}, got a {kind}. A checkpoint that was restored without its "
        "classes needs a target, such as jax.eval_shape(reducer.init, params); another reducer's "
        "state goes through jaxcomp.adapt_state."
    )


def _check_shapes(state: PyTree, like: PyTree, replicas: int | None) -> None:
    """Refuses leaves of other shapes, behind their axis of replicas if they have one.

    Raises:
      ValueError: Listing them.
    """
    wrong: list[str] = []

    def compare(path: KeyPath, expected: Any, local: bool, leaf: Any) -> None:
        shape = np.shape(expected)
        with_axis = shape
        if local and replicas is not None:
            with_axis = (replicas, *shape)
        if np.shape(leaf) != with_axis:
            either = f"{shape} or (replicas, *{shape})" if local else f"{shape}"
            wrong.append(f"\n  {leaf_name(path)}: expected {either}, got {np.shape(leaf)}")

    map_leaves(compare, like, state)
    if wrong:
        raise ValueError(
            f"The state does not fit these parameters and this reducer:{''.join(wrong)}\nPass what "
            "the training step or consolidate returned; for another rank, jaxcomp.adapt_state "
            "first."
        )


def check_not_spread(path: KeyPath, leaf: Any, spec: PartitionSpec, axes: tuple[str, ...]) -> None:
    """Refuses a leaf that lies along the axis of the replicas, and names it."""
    along: list[str] = []
    for part in spec:
        names = part if isinstance(part, tuple) else (part,)
        along += [name for name in names if name in axes]
    if along:
        raise ValueError(
            f"The leaf {leaf_name(path)} of shape {np.shape(leaf)} is sharded over "
            f"{sorted(along)}, the axis of the replicas: the compiler would gather it on every "
            "step, over the links that compression relieves. Shard parameters over another axis of "
            "the mesh (FSDP within a host, compression between hosts)."
        )


def known_spec(leaf: Any, mesh: Any) -> PartitionSpec:
    """Returns how a leaf is known to lie on a mesh: of a tracer only what its type says."""
    if isinstance(leaf, jax.core.Tracer):
        return jax.typeof(leaf).sharding.spec
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, NamedSharding) and sharding.mesh.axis_names == mesh.axis_names:
        return sharding.spec
    return PartitionSpec()


def _repeated(leaf: Any, times: int, sharding: NamedSharding) -> Array:
    """Makes `times` copies along a new axis 0, each where it lies."""
    shape = (times, *np.shape(leaf))
    if isinstance(leaf, jax.core.Tracer):
        copies = jnp.broadcast_to(leaf, shape)
        kinds = dict(zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True))
        if all(kinds[name] == AxisType.Explicit for name in axis_tuple(sharding.spec[0])):
            return jax.sharding.reshard(copies, sharding)
        return lax.with_sharding_constraint(copies, sharding)
    if isinstance(leaf, jax.Array) and leaf.sharding.device_set != sharding.device_set:
        leaf = jax.device_put(leaf, NamedSharding(sharding.mesh, PartitionSpec()))
    return jax.jit(partial(jnp.broadcast_to, shape=shape), out_shardings=sharding)(leaf)
