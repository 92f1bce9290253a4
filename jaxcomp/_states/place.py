"""Places states outside of mapped functions: per-replica leaves get a leading axis of replicas.

This layout is explicit: an array ``(n, *leaf)`` is saved and restored as it is, and cannot be
mistaken for a replicated array. `state_axes` and `state_specs` describe the layout to JAX's mapping
functions; `stack_replicas` makes it without a mesh, `shard_state` with one. Both take a state of
any number of replicas, since the mean of the residuals is all that counts.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxcomp._base.checks import answers_other_names, check_axis_name, check_int, is_traced
from jaxcomp._base.leaves import check_values, leaf_name, named_dtype
from jaxcomp._base.typing import Array, Axes, AxisName, KeyPath, PyTree
from jaxcomp._mesh.collectives import axis_tuple
from jaxcomp._mesh.meshes import check_mesh_axes, known_sharding, over_axes, replicas_on
from jaxcomp._mesh.per_replica import (
    OWNER,
    REPLICATED,
    has_foreign,
    has_replica_axis,
    leaves_marked,
    map_per_replica,
    marks,
    reducer_states,
)
from jaxcomp._reducers.reducer import check_state, differences
from jaxcomp._states.consolidate import Layout, consolidate, layout_of


@answers_other_names
def state_axes(state: PyTree) -> PyTree:
    """Returns the axis of replicas of each leaf, for ``in_axes`` of pmap and vmap.

    Args:
      state: Any tree that holds jaxcomp states, of arrays or shape structs.

    Returns:
      The same tree with 0 for each per-replica leaf and None for each replicated leaf. Also pass it
      as ``out_axes``: replicated leaves then come back once and per-replica leaves as
      ``(n, *leaf)``, which `consolidate` accepts.

    Raises:
      ValueError: If the state has lost its classes.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomp
      >>> state = jaxcomp.powersgd(axis_name="data").init({"w": jnp.zeros((8, 8))})
      >>> axes = jaxcomp.state_axes(state)
      >>> axes.residual["w"], axes.q["w"]
      (0, None)
    """
    return jax.tree.map(lambda mark: None if mark == REPLICATED else 0, marks(state))


@answers_other_names
def state_specs(state: PyTree, axis_name: AxisName) -> PyTree:
    """Returns the PartitionSpecs of a state, for ``in_specs`` and ``out_specs`` of `jax.shard_map`.

    ``jax.NamedSharding(mesh, spec)`` makes each spec a sharding for `jax.jit`.

    Args:
      state: Any tree that holds jaxcomp states, of arrays or shape structs.
      axis_name: The mesh axis or axes of the replicas.

    Returns:
      The same tree with ``P(axis_name)`` for each per-replica leaf, which has a leading axis of
      replicas, and ``P()`` for each replicated leaf. In the mapped function a replica sees its row
      ``(1, *leaf)``; every reducer accepts and returns rows.

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
            "optax.MultiSteps cannot handle the leading axis that shard_map leaves on its "
            "accumulated gradients, and it runs the reducer on every micro-batch. Use "
            "jaxcomp.accumulate(tx, k)."
        )
    specs = {REPLICATED: PartitionSpec()}
    return jax.tree.map(lambda mark: specs.get(mark, PartitionSpec(axis_name)), marks(state))


@answers_other_names
def stack_replicas(state: PyTree, replicas: int) -> PyTree:
    """Gives per-replica leaves a leading axis of replicas, without a mesh.

    Args:
      state: Fresh, consolidated, or of any number of replicas.
      replicas: The number of replicas that the result is for.

    Returns:
      The same tree; a per-replica leaf has shape ``(replicas, *leaf)``. It is unchanged if it
      already had that number of replicas; else it holds equal copies of the mean.

    Raises:
      ValueError: If `replicas` is not a positive integer, or the state is that of one replica only.

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
    return map_per_replica(lambda x: jnp.broadcast_to(x, (replicas, *np.shape(x))), state)


@answers_other_names
def shard_state(
    state: PyTree, mesh: Any, axis_name: AxisName, *, like: PyTree | None = None
) -> PyTree:
    """Places a state on a mesh, whatever number of replicas it comes from.

    Arrays keep their shardings over other axes of the mesh (tensor or FSDP parallel). No device
    holds more than its own shard, with one exception: an array from devices outside the mesh is
    copied whole to each device for a moment.

    Args:
      state: Fresh from ``init``, consolidated, or with a leading axis of any number of replicas:
        JAX arrays, NumPy arrays or tracers. In a run of several processes every process passes the
        same values.
      mesh: The mesh that the training step runs on.
      axis_name: The mesh axis or axes of the replicas.
      like: A fresh state, ``reducer.init(params)``, with the expected shapes and dtypes, and the
        shardings over other axes. None takes them from `state`.

    Returns:
      The same tree of global arrays. A per-replica leaf has shape ``(n, *leaf)`` for ``n``
      replicas. It is unchanged if the state already had ``n`` replicas; else it holds equal copies
      of the mean, because updates depend on the mean only.

    Raises:
      ValueError: If the mesh lacks an axis, the state is that of one replica only, a leaf is
        sharded over the axis of the replicas, or the state does not fit `like` (the message lists
        the leaves). Also if it is one of `optax.MultiSteps` without a reducer's state.

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
    replicas = replicas_on(mesh, axes)
    if has_foreign(state) and not reducer_states(state):
        raise ValueError(
            "Nothing shows whether optax.MultiSteps accumulates averaged gradients. If so, put "
            "jaxcomp.hold_state(reducer) before it: optax.chain(hold_state(reducer), "
            "optax.MultiSteps(...)). To accumulate local gradients use jaxcomp.accumulate(tx, k)."
        )
    if like is not None:
        _check_structure(state, like)
    state, has_axis = _for_replicas(state, replicas, like)
    if like is not None:
        of_one = state
        if has_axis:
            of_one = map_per_replica(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state)
        check_state(of_one, like)

    def place(path: KeyPath, leaf: Any, mark: str, expected: Any) -> Any:
        named_dtype(path, leaf)  # refuses other objects than arrays
        # The sharding over other axes; for a tracer on Auto axes it is unknown.
        parts = tuple(known_spec(expected, mesh))
        if mark != REPLICATED and has_axis and like is None:
            parts = parts[1:]  # the spec is of the leaf with its axis of replicas
        check_not_spread(path, expected, PartitionSpec(*parts), axes)
        if mark == REPLICATED:
            return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*parts)))
        if leaf.dtype != expected.dtype:
            leaf = leaf.astype(expected.dtype)  # saved with another residual_dtype
        sharding = NamedSharding(mesh, PartitionSpec(axis_name, *parts))
        if has_axis:
            return jax.device_put(leaf, sharding)
        return _repeated(leaf, replicas, sharding)

    return jax.tree.map_with_path(place, state, marks(state), state if like is None else like)


def _for_replicas(state: PyTree, replicas: int, like: PyTree | None = None) -> tuple[PyTree, bool]:
    """Returns the state with an axis of `replicas` and True, or consolidated and False."""
    check_values("state", state)
    if has_replica_axis(state, None if like is None else lambda: like):
        # The rows stay if they are those of these replicas, so that a restart changes nothing.
        if layout_of(state) == Layout(replicas, everything=False):
            return state, True
        return consolidate(state), False
    if leaves_marked(state, OWNER):
        layout_of(state)  # refuses the residual of one replica
    return state, False


def _check_structure(state: PyTree, like: PyTree) -> None:
    """Refuses the state of another reducer, and a state that has lost its classes."""
    if jax.tree.structure(state) == jax.tree.structure(like):
        return
    expected = type(like).__name__
    kind = type(state).__name__
    if kind == expected:
        alone, others = differences(state, like, any_axes=True)
        listed = "\n  ".join(alone + others)
        raise ValueError(
            f"The {kind} does not fit the parameters and the reducer:\n  {listed}\nPass those that "
            "it was made for, or begin with a new state, init(params)."
        )
    raise ValueError(
        f"The state must be a {expected}, got a {kind}. To keep the classes, restore a checkpoint "
        "with a target, such as jax.eval_shape(reducer.init, params). Convert another reducer's "
        "state with jaxcomp.adapt_state."
    )


def check_not_spread(path: KeyPath, leaf: Any, spec: PartitionSpec, axes: Axes) -> None:
    """Refuses a leaf that is sharded over the axis of the replicas; the message names it."""
    along = list(filter(None, over_axes(spec, axes)))
    if along:
        raise ValueError(
            f"The leaf {leaf_name(path)} of shape {np.shape(leaf)} is sharded over {along}, the "
            "axis of the replicas: the compiler would gather it in every step, over the slow "
            "links. Shard parameters over another axis of the mesh (FSDP within a host, "
            "compression between hosts)."
        )


def known_spec(leaf: Any, mesh: Any) -> PartitionSpec:
    """Returns the PartitionSpec of a leaf on `mesh`, which may be None; ``P()`` if unknown."""
    sharding = known_sharding(leaf)
    # Names are compared, because a tracer's mesh is abstract and equals no concrete one.
    names = getattr(mesh, "axis_names", ())
    if isinstance(sharding, NamedSharding) and sharding.mesh.axis_names == names:
        return sharding.spec
    return PartitionSpec()


def _repeated(leaf: Any, times: int, sharding: NamedSharding) -> Array:
    """Makes `times` copies of a leaf along a new axis 0, each on its own device."""
    # `jax.jit` refuses arrays from devices that are not those of its results.
    concrete = isinstance(leaf, jax.Array) and not is_traced(leaf)
    if concrete and leaf.sharding.device_set != sharding.device_set:
        leaf = jax.device_put(leaf, NamedSharding(sharding.mesh, PartitionSpec()))
    # Laid out where they are made, so that no device holds more than its own copy.
    copies = jax.jit(jnp.broadcast_to, static_argnames="shape", out_shardings=sharding)
    laid_out = copies(leaf, shape=(times, *np.shape(leaf)))
    return jax.device_put(laid_out, sharding)  # gives the type for Explicit axes inside jit
