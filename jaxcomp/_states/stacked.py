"""States whose per-replica leaves have a leading axis of replicas, ``(n, ...)``, as global arrays.

The form that says what it holds: an array of this shape is saved and restored as it is, and nobody
can take it for a replicated one. `jaxcomp.value_and_grad` keeps its state so; under `jax.vmap` and
`jax.pmap` with `state_axes` it is what the arrays look like from outside.
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

from jaxcomp._base.checks import check_int
from jaxcomp._base.leaves import compute_dtype, leaf_name
from jaxcomp._base.typing import Array, AxisName, KeyPath, PyTree
from jaxcomp._mesh.axes import axis_tuple
from jaxcomp._mesh.per_replica import map_leaves


def state_axes(state: PyTree) -> PyTree:
    """Where a state has its axis of replicas, for ``in_axes`` and ``out_axes`` of pmap and vmap.

    Args:
      state: Any tree that holds jaxcomp states, of arrays or shape structs.

    Returns:
      The same tree with 0 for each leaf that a replica has of its own and None for the others.
      What is mapped so leaves one copy of what the replicas share, and ``(n, ...)`` of the rest:
      a state to save as it is.

    Raises:
      ValueError: If the state has lost its classes.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomp
      >>> state = jaxcomp.powersgd(axis_name="data").init({"w": jnp.zeros((8, 8))})
      >>> axes = jaxcomp.state_axes(state)
      >>> axes.residual["w"], axes.q["w"]
      (0, None)
    """
    return map_leaves(lambda path, leaf, local: 0 if local else None, state)


def stack_replicas(state: PyTree, replicas: int) -> PyTree:
    """A consolidated state with an axis of replicas in front where `state_axes` says 0.

    Args:
      state: A consolidated state: from ``init``, a checkpoint, or `consolidate`.
      replicas: How many there are.

    Returns:
      The same tree; a leaf that a replica has of its own is ``(replicas, ...)``, equal copies.

    Raises:
      ValueError: If `replicas` is not a positive integer.

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

    def repeated(path: KeyPath, leaf: Any, local: bool) -> Any:
        return jnp.broadcast_to(leaf, (replicas, *np.shape(leaf))) if local else leaf

    return map_leaves(repeated, state)


def mean_of_replicas(state: PyTree) -> PyTree:
    """`consolidate` outside of a mapped function: means over the leading axis of replicas.

    Raises:
      ValueError: If the per-replica leaves have no common leading axis, are those of one replica
        only, or a shared leaf differs between replicas.
    """
    local: dict[str, Any] = {}
    shared: dict[str, Any] = {}

    def sort(path: KeyPath, leaf: Any, own: bool) -> None:
        (local if own else shared)[leaf_name(path)] = leaf

    map_leaves(sort, state)
    if not local or _is_consolidated(local):
        return state
    lengths = {np.shape(leaf)[:1] for leaf in local.values()}
    if len(lengths) != 1 or lengths == {()}:
        shapes = "\n  ".join(f"{name}: {np.shape(leaf)}" for name, leaf in local.items())
        raise ValueError(
            "Outside of a mapped function what each replica has of its own needs one leading axis "
            f"of replicas, the same for all:\n  {shapes}\nPass what pmap or "
            "jaxcomp.value_and_grad returned, or call consolidate(state, axis_name) inside the "
            "mapped function."
        )
    # pmap returns everything with an axis of replicas, unless out_axes says otherwise. Some shared
    # leaf is a scalar in nearly every state; where none is, rows that differ are refused.
    stacked = all(np.shape(leaf)[:1] in lengths for leaf in shared.values())
    if stacked:
        differing = [name for name, leaf in shared.items() if not _equal_rows(leaf)]
        if differing:
            raise ValueError(
                f"The leaf {differing[0]}, which the replicas share, differs between them. Check "
                "the replicas with jaxcomp.check_replicas; or, if it has no axis of replicas, call "
                "consolidate(state, axis_name) inside the mapped function."
            )

    def collapse(path: KeyPath, leaf: Any, own: bool) -> Any:
        del path
        if own:
            return mean_of_rows(leaf)
        return leaf[0] if stacked else leaf

    return map_leaves(collapse, state)


def _is_consolidated(local: dict[str, Any]) -> bool:
    """Whether the marks beside the residuals say that these are means already.

    Raises:
      ValueError: If they say that they are those of one replica.
    """
    marks = {name: x for name, x in local.items() if name.endswith(".mark") and x.shape == (1,)}
    if any(isinstance(mark, jax.core.Tracer) for mark in marks.values()):
        return bool(marks)
    alone = [name for name, mark in marks.items() if float(mark[0])]
    if alone:
        raise ValueError(
            f"The state holds the residual of one replica only (its mark {alone[0]} is "
            f"{float(marks[alone[0]][0]):g}, and 0 stands for the mean of all). Arrays that claim "
            "to be replicated and differ come from pmap(out_axes=None) and from "
            "shard_map(check_vma=False) with P(): give those jaxcomp.state_axes(state) or "
            "jaxcomp.state_specs(state, axis_name). Of copies of a state do not take the first, as "
            "flax's unreplicate does, but consolidate them."
        )
    return bool(marks)


def _equal_rows(leaf: Any) -> bool:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return bool(((leaf == leaf[:1]) | (leaf != leaf)).all())


def mean_of_rows(leaf: Any) -> Any:
    """The mean over axis 0 in float32 at least; the largest of what has no mean."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        words = jax.random.key_data(leaf).max(axis=0)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(leaf))
    leaf = jnp.asarray(leaf)
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf.max(axis=0)
    return leaf.astype(compute_dtype(leaf.dtype)).mean(axis=0).astype(leaf.dtype)


def unstack(state: PyTree) -> PyTree:
    """Inside a function mapped over the replicas: this replica's own state."""
    return map_leaves(lambda path, leaf, local: leaf[0] if local else leaf, state)


def stack(state: PyTree) -> PyTree:
    """The inverse of `unstack`."""
    return map_leaves(lambda path, leaf, local: leaf[None] if local else leaf, state)


def place_stacked(
    state: PyTree, mesh: Any, axis_name: AxisName, like: PyTree | None = None
) -> PyTree:
    """A state as global arrays on `mesh`, per-replica leaves with a leading axis of replicas.

    No device holds more than its own shard.

    Args:
      state: Consolidated, or with a leading axis of any number of replicas.
      mesh: The mesh.
      axis_name: Its axis or axes of the replicas.
      like: A consolidated state that says how leaves lie over the other axes; by default `state`.

    Raises:
      ValueError: If the shape of a leaf fits neither form, leaves are of both forms, or one is
        spread over `axis_name`.
    """
    axes = axis_tuple(axis_name)
    replicas = math.prod(mesh.shape[name] for name in axes)
    wrong: list[str] = []
    own: dict[bool, str] = {}  # a per-replica leaf with an axis of replicas, and one without

    def compare(path: KeyPath, wanted: Any, local: bool, leaf: Any) -> None:
        shape, one = np.shape(leaf), np.shape(wanted)
        if local:
            own[len(shape) > len(one)] = leaf_name(path)
        if shape != one and not (local and len(shape) == len(one) + 1 and shape[1:] == one):
            forms = f"{one}" + f" or (replicas, *{one})" * local
            wrong.append(f"{leaf_name(path)}: expected {forms}, got {shape}")

    def place(path: KeyPath, wanted: Any, local: bool, leaf: Any) -> Any:
        spec = _present_spec(path, wanted, mesh, axes)
        if not local:
            return jax.device_put(leaf, NamedSharding(mesh, spec))
        if leaf is not wanted and leaf.dtype != wanted.dtype:
            leaf = leaf.astype(wanted.dtype)  # another residual_dtype than the run was saved with
        sharding = NamedSharding(mesh, PartitionSpec(axis_name, *spec))
        if np.ndim(leaf) > np.ndim(wanted):
            if np.shape(leaf)[0] == replicas:
                return jax.device_put(leaf, sharding)
            leaf = mean_of_rows(leaf)
        return _repeated(leaf, replicas, sharding)

    like = state if like is None else like
    try:
        map_leaves(compare, like, state)
    except (TypeError, ValueError):  # of other nodes; JAX's own message prints their arrays
        raise ValueError(_other_structure(like, state)) from None
    if wrong:
        what = "\n  ".join(wrong)
        raise ValueError(
            f"The state does not fit these parameters and this reducer:\n  {what}\nPass what "
            "value_and_grad or consolidate returned; for another rank, jaxcomp.adapt_state first."
        )
    if len(own) == 2:
        raise ValueError(
            f"The leaf {own[True]} of the state has an axis of replicas and {own[False]} has none: "
            "x[0] of a residual is one replica's, and what the others had not sent would be lost. "
            "Pass the state as value_and_grad returned it, or jaxcomp.consolidate of it."
        )
    return map_leaves(place, like, state)


def _other_structure(like: PyTree, state: PyTree) -> str:
    wanted, found = type(like).__name__, type(state).__name__
    if wanted == found:
        return f"The {found} is that of other parameters, or of another chain of transformations."
    return (
        f"The state must be a {wanted}, got a {found}. A checkpoint that was restored without its "
        "classes needs a target, such as jax.eval_shape(value_and_grad.init, params); another "
        "reducer's state goes through jaxcomp.adapt_state."
    )


def check_not_spread(path: KeyPath, leaf: Any, spec: PartitionSpec, axes: tuple[str, ...]) -> None:
    """Refuses parameters, or a state, that lie along the axis of the replicas.

    Raises:
      ValueError: Naming the leaf.
    """
    used = {name for part in spec for name in (part if isinstance(part, tuple) else (part,))}
    if used & set(axes):
        raise ValueError(
            f"The leaf {leaf_name(path)} of shape {np.shape(leaf)} is sharded over "
            f"{sorted(used & set(axes))}, the axis of the replicas: the compiler would gather it "
            "on every step, over the links that compression relieves. Shard parameters over "
            "another axis of the mesh (FSDP within a host, compression between hosts)."
        )


def known_spec(leaf: Any, mesh: Any) -> PartitionSpec:
    """How a leaf is known to lie on a mesh: of a tracer only what its type says."""
    if isinstance(leaf, jax.core.Tracer):
        return jax.typeof(leaf).sharding.spec
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, NamedSharding) and sharding.mesh.axis_names == mesh.axis_names:
        return sharding.spec
    return PartitionSpec()


def _present_spec(path: KeyPath, leaf: Any, mesh: Any, axes: tuple[str, ...]) -> PartitionSpec:
    """How the leaf lies on this mesh; nothing is known of traced values on automatic axes."""
    spec = known_spec(leaf, mesh)
    check_not_spread(path, leaf, spec, axes)
    return PartitionSpec(*spec, *[None] * (np.ndim(leaf) - len(spec)))


def _repeated(leaf: Any, times: int, sharding: NamedSharding) -> Array:
    """`times` copies along a new axis 0, each made where it lies."""
    traced = isinstance(leaf, jax.core.Tracer) or not isinstance(leaf, jax.Array)
    if not traced and leaf.sharding.device_set != sharding.device_set:
        leaf = jax.device_put(leaf, NamedSharding(sharding.mesh, PartitionSpec()))
    shape = (times, *np.shape(leaf))
    if isinstance(leaf, jax.core.Tracer):
        copies = jnp.broadcast_to(leaf, shape)
        first = sharding.spec[0]
        axes = first if isinstance(first, tuple) else (first,)
        kinds = dict(zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True))
        if all(kinds[name] == AxisType.Explicit for name in axes):
            return jax.sharding.reshard(copies, sharding)
        return lax.with_sharding_constraint(copies, sharding)
    return jax.jit(partial(jnp.broadcast_to, shape=shape), out_shardings=sharding)(leaf)
