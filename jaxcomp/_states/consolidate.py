"""From the states of all replicas to the one to save: means of what each has of its own."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jaxcomp._base.checks import check_axis_name
from jaxcomp._base.leaves import compute_dtype, leaf_name
from jaxcomp._base.typing import Array, AxisName, KeyPath, PyTree
from jaxcomp._mesh.collectives import as_local, axis_size, largest, mean_each, mesh_axes, owner_id
from jaxcomp._mesh.per_replica import has_rows, map_leaves, owners_of, without_row


def consolidate(state: PyTree, axis_name: AxisName | None = None) -> PyTree:
    """Replaces what differs between replicas by its mean: the one state to save.

    Outputs depend on the residuals only through their mean, so every replica may start again from
    it, on any number of replicas. Outside of mapped functions, without `axis_name`, this takes a
    state as `jaxcomp.data_parallel`, `jax.pmap`, `jax.vmap` or `jax.shard_map` returned it, with a
    leading axis of replicas. Inside of one, with `axis_name`, it is one all-reduce; under
    ``shard_map(check_vma=True)`` the result is replicated, and ``out_specs=P()`` gives the one
    copy. Of a replica's own counters, flags and random keys, which have no mean, the largest
    stays.

    Args:
      state: Any tree that holds jaxcomp states: a whole `optax.chain` state, a ``TrainState``.
      axis_name: The mapped axis or axes of the replicas; None outside of a mapped function. If
        there everything has an axis of replicas, as out of `jax.pmap`, it is taken away from
        everything.

    Returns:
      The same tree without an axis of replicas, equal on every replica.

    Raises:
      ValueError: If the axis is not bound; inside of a mapped function, if it was not given;
        outside, if what each replica has of its own has no axis of replicas, is that of one replica
        only or of one several times, or a shared leaf differs. Of traced values that cannot be
        known: the owner of the result is then NaN, which `shard_state` refuses.

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
    if axis_name is not None:
        check_axis_name(axis_name)
        return _over_axis(state, axis_name)
    _check_not_mapped(state)
    layout = layout_of(state)
    owners = owners_of(state)
    if layout.replicas is None:
        if not owners and (local := _leaves(state)[True]):
            raise ValueError(_no_axis(local))
        return state

    def collapse(path: KeyPath, leaf: Any, local: bool) -> Any:
        if leaf_name(path) in owners:
            return _owner_of_all(jnp.asarray(leaf))
        if local:
            return _mean_of_rows(leaf)
        return leaf[0] if layout.everything else leaf

    return map_leaves(collapse, state)


class Layout(NamedTuple):
    """How a state lies outside of mapped functions."""

    replicas: int | None  # how many, along axis 0 of what each has of its own; None without one
    everything: bool  # whether what they share has that axis too, as `jax.pmap` returns it


def layout_of(state: PyTree) -> Layout:
    """How a state lies; refuses one whose rows do not belong together.

    Raises:
      ValueError: If per-replica leaves have no common leading axis, are those of one replica only,
        or of one several times; or rows of what replicas share differ.
    """
    owners, leaves = owners_of(state), _leaves(state)
    local, shared = leaves[True], leaves[False]
    lengths = {np.shape(leaf)[:1] for leaf in (owners or local).values()}
    if not owners and (len(lengths) != 1 or lengths == {()}):
        return Layout(None, everything=False)
    for name, owner in owners.items():
        common = _owner_of_all(jnp.asarray(owner))
        if not isinstance(common, jax.core.Tracer) and float(common) != 0:
            raise ValueError(_one_replica(name, owner))
    if lengths == {()}:
        return Layout(None, everything=False)
    lengths |= {np.shape(leaf)[:1] for leaf in local.values()}
    if len(lengths) != 1:
        raise ValueError(_no_axis(local))
    # Some shared leaf is a scalar in nearly every state.
    everything = bool(shared) and lengths == {np.shape(leaf)[:1] for leaf in shared.values()}
    for name, leaf in shared.items() if everything else ():
        if not isinstance(leaf, jax.core.Tracer) and not _equal_rows(leaf):
            raise ValueError(
                f"The leaf {name}, which the replicas share, differs between them. Start every "
                "replica from the same values; or, if it has no axis of replicas, call "
                "consolidate(state, axis_name) inside the mapped function."
            )
    ((length,),) = lengths
    return Layout(length, everything)


def _mean_of_rows(leaf: Any) -> Any:
    """The mean over axis 0 in float32 at least; the largest of what has no mean."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        words = jax.random.key_data(leaf).max(axis=0)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(leaf))
    leaf = jnp.asarray(leaf)
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf.max(axis=0)
    return leaf.astype(compute_dtype(leaf.dtype)).mean(axis=0).astype(leaf.dtype)


def _over_axis(state: PyTree, axis_name: AxisName) -> PyTree:
    local = _leaves(state)[True]
    replicas, own = axis_size(axis_name), owner_id(axis_name)
    # A state of classes without an owner: under shard_map what it has of its own is a row of 1.
    rows = all(np.shape(leaf)[:1] == (1,) for leaf in local.values())
    owners = owners_of(state)
    if has_rows(state) or (local and not owners and rows):
        state = without_row(state)
    averaged: list[Array] = []

    def collect(path: KeyPath, leaf: Any, local: bool) -> None:
        if leaf_name(path) in owners:
            # Equal to (1, 0) everywhere if it is that of this replica, (0, 1) if everybody's.
            leaf = jnp.stack([leaf == own, leaf == 0]).astype(jnp.float32)
        if local and jnp.issubdtype(leaf.dtype, jnp.floating):
            averaged.append(as_local(leaf, axis_name))

    def replace(path: KeyPath, leaf: Any, local: bool) -> Any:
        if not local:
            return leaf
        if leaf_name(path) in owners:
            whole = next(means) > 1 - 0.5 / replicas
            return jnp.where(whole.any(), 0.0, jnp.nan)
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        return next(means).astype(leaf.dtype) if floating else largest(leaf, axis_name)

    map_leaves(collect, state)
    # Averaged in float32 even where stored narrower.
    wide = [leaf.astype(compute_dtype(leaf.dtype)) for leaf in averaged]
    means = iter(mean_each(wide, axis_name))
    return map_leaves(replace, state)


def _owner_of_all(owners: Array) -> Array:
    """0 for the owners of all replicas, in any order, or of everybody; NaN for any other set."""
    wanted = jnp.arange(owners.size, dtype=jnp.float32) - owners.size
    # Not sorted: on an Explicit mesh nothing is, along an axis of it.
    each = bool(owners.ndim) & (jnp.atleast_1d(owners)[:, None] == wanted[None]).any(axis=0).all()
    return jnp.where(each | (owners == 0).all(), 0.0, jnp.nan).astype(jnp.float32)


def _check_not_mapped(state: PyTree) -> None:
    """Refuses to consolidate one replica's view without its axis."""
    inside = bool(mesh_axes(jax.sharding.AxisType.Manual))
    for owner in owners_of(state).values():
        if isinstance(owner, jax.core.Tracer) and (inside or not owner.ndim):
            raise ValueError(
                "Inside a mapped function consolidate needs the axis of the replicas: "
                "consolidate(state, axis_name). A state that is consolidated already needs none."
            )


def _leaves(state: PyTree) -> dict[bool, dict[str, Any]]:
    """The leaves by their paths: those that a replica has of its own, and those that they share."""
    found: dict[bool, dict[str, Any]] = {True: {}, False: {}}
    map_leaves(lambda path, leaf, own: found[own].update({leaf_name(path): leaf}), state)
    return found


def _equal_rows(leaf: Any) -> bool:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return bool(((leaf == leaf[:1]) | (leaf != leaf)).all())


def _no_axis(local: dict[str, Any]) -> str:
    shapes = "\n  ".join(f"{name}: {np.shape(leaf)}" for name, leaf in local.items())
    return (
        "Outside of a mapped function what each replica has of its own needs one leading axis of "
        f"replicas, the same for all:\n  {shapes}\nPass what pmap or jaxcomp.data_parallel "
        "returned, or call consolidate(state, axis_name) inside the mapped function."
    )


def _one_replica(name: str, owner: Any) -> str:
    what = (
        "the owners of its rows are not all different" if np.ndim(owner) else "its owner is not 0"
    )
    return (
        f"The state holds the residual of one replica only ({what}: {name}), and what the others "
        "had not sent would be lost. Of copies of a state do not take the first, as flax's "
        "unreplicate does, but consolidate them. Arrays that claim to be replicated and differ "
        "come from pmap(out_axes=None) and from shard_map(check_vma=False) with P(): give those "
        "jaxcomp.state_axes(state) or jaxcomp.state_specs(state, axis_name)."
    )
