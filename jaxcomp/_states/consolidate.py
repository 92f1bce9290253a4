"""Makes one state to save from the states of all replicas: per-replica leaves become their mean.

Outputs depend on the residuals only through their mean, so one tree is enough, and any number of
replicas can continue from it. `consolidate` is called by users before they save, and by the
functions that place a state on another number of replicas. There are two forms of the same work:
outside of mapped functions the replicas are rows of an array (`layout_of` finds out which arrays
have rows), inside they are reached by a collective (`_over_axis`). Both check the owners, so that
the state of one replica is not taken for that of all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from jaxcomp._base.checks import answers_other_names, is_traced
from jaxcomp._base.leaves import check_values, compute_dtype, in_words, is_floating, is_key
from jaxcomp._base.typing import Array, AxisName, PyTree, Shape
from jaxcomp._mesh.collectives import axis_size, maximum, mesh_axes, owner_id
from jaxcomp._mesh.per_replica import (
    OWNER,
    PER_REPLICA,
    REPLICATED,
    leaves_marked,
    marks,
    without_replica_axis,
)
from jaxcomp._mesh.weights import averaged


@answers_other_names
def consolidate(state: PyTree, axis_name: AxisName | None = None) -> PyTree:
    """Replaces per-replica leaves by their mean over the replicas, which gives one state to save.

    Outputs depend on the residuals only through their mean, so any number of replicas can continue
    from the mean. Outside of mapped functions, call it without `axis_name` on a state with a
    leading axis of replicas, as `jaxcomp.data_parallel`, `jax.pmap`, `jax.vmap` or `jax.shard_map`
    returns it. Inside of a mapped function, pass `axis_name`: the mean is then one all-reduce.
    Under ``shard_map(check_vma=True)`` the result is replicated, and ``out_specs=P()`` returns one
    copy. Counters, flags and random keys have no mean; the largest value over the replicas is kept.

    Args:
      state: Any tree that holds jaxcomp states: a whole `optax.chain` state, a ``TrainState``.
      axis_name: The mapped axis or axes of the replicas; None outside of a mapped function. If
        every leaf has an axis of replicas there, as `jax.pmap` returns it, every leaf loses it.

    Returns:
      The same tree without an axis of replicas, equal on every replica.

    Raises:
      ValueError: If the axis is not bound, or `axis_name` is missing inside of a mapped function.
        Outside of one, if per-replica leaves have no axis of replicas or do not come from all
        replicas, or a replicated leaf differs between replicas. Traced values cannot be compared.
        For them the result's `owner` is NaN, and `shard_state` refuses that state.

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
        return _over_axis(state, axis_name)
    _check_not_mapped(state)
    layout = layout_of(state)
    if layout.replicas is None:
        # Owners have just said that nothing is missing. Without an owner nobody can say.
        local = leaves_marked(state, PER_REPLICA)
        if local and not leaves_marked(state, OWNER):
            raise ValueError(_no_axis(local))
        return state

    def collapsed(leaf: Any, mark: str) -> Any:
        if mark == OWNER:
            return _owner_of_all(jnp.asarray(leaf))
        if mark == PER_REPLICA:
            return _mean_of_rows(leaf)
        if layout.everything:
            return leaf[0]  # all rows are equal, as `layout_of` has checked
        return leaf

    return jax.tree.map(collapsed, state, marks(state))


class Layout(NamedTuple):
    """Describes the axes of replicas of a state outside of mapped functions."""

    replicas: int | None  # length of axis 0 of per-replica leaves; None: no such axis
    everything: bool  # whether replicated leaves have that axis too, as from `jax.pmap`


def layout_of(state: PyTree) -> Layout:
    """Returns the layout of a state, after checking that its rows belong together.

    Raises:
      ValueError: If per-replica leaves have no common leading axis, or do not come from all
        replicas; the rows of a replicated leaf differ; or a leaf has no values.
    """
    check_values("state", state)
    owners = leaves_marked(state, OWNER)
    local = leaves_marked(state, PER_REPLICA, OWNER)
    for name, owner in owners.items():
        if is_traced(owner):
            continue
        with jax.ensure_compile_time_eval():  # `jax.jit` would trace what is made of a closure
            owner_of_all = float(_owner_of_all(jnp.asarray(owner)))
        if owner_of_all != 0:
            raise ValueError(
                f"The state holds the residual of one replica only, as {name} shows; the residuals "
                "of the other replicas would be lost. Call jaxcomp.consolidate on the copies of "
                "all replicas, and not on the first copy, which flax's unreplicate takes. "
                "pmap(out_axes=None), and shard_map(check_vma=False) with P(), also return the "
                "arrays of one replica only. There use jaxcomp.state_axes(state) or "
                "jaxcomp.state_specs(state, axis_name)."
            )
    # Owners are scalars, so an axis is that of the replicas. Without owners a common leading axis
    # is taken for it, but leaves without one are no mistake.
    lengths = _lengths(owners or local)
    if lengths == {()} or (not owners and len(lengths) != 1):
        return Layout(None, everything=False)
    if len(lengths | _lengths(local)) != 1:
        raise ValueError(_no_axis(local))
    shared = leaves_marked(state, REPLICATED)
    # Nearly every state has a replicated scalar, so this condition is rarely met by chance.
    everything = _lengths(shared) == lengths
    for name, leaf in shared.items():
        if not everything or is_traced(leaf):
            continue
        with jax.ensure_compile_time_eval():
            rows = in_words(leaf)
            # NaN differs from itself, and a run that has diverged on all replicas may be saved.
            both_nan = (rows != rows) & (rows[:1] != rows[:1])
            all_equal = bool(((rows == rows[:1]) | both_nan).all())
        if not all_equal:
            raise ValueError(
                f"The replicated leaf {name} differs between the replicas. Start every replica "
                "from the same values; or, if the leaf has no axis of replicas, call "
                "consolidate(state, axis_name) inside the mapped function."
            )
    ((length,),) = lengths
    return Layout(length, everything)


def _lengths(values: dict[str, Any]) -> set[Shape]:
    """Returns the set of all ``shape[:1]``; a scalar adds ()."""
    return {np.shape(value)[:1] for value in values.values()}


def _mean_of_rows(leaf: Any) -> Any:
    """Averages over axis 0 in float32 or wider; takes the maximum if the leaf is not floating."""
    if not is_floating(leaf):
        return _largest(leaf, functools.partial(jnp.max, axis=0))
    return jnp.mean(leaf, axis=0, dtype=compute_dtype(leaf.dtype)).astype(leaf.dtype)


def _largest(leaf: Any, maximum: Callable[[Array], Array]) -> Any:
    """Returns the maximum of integers, flags or random keys over the replicas."""
    if is_key(leaf):
        words = maximum(jax.random.key_data(leaf))
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(leaf))
    return maximum(leaf)


def _over_axis(state: PyTree, axis_name: AxisName) -> PyTree:
    """Consolidates a state inside of a mapped function, with one all-reduce for each dtype."""
    if layout_of(state).replicas == 1:  # the row that shard_map leaves
        state = without_replica_axis(state)
    replicas = axis_size(axis_name)
    kinds = marks(state)

    def to_average(leaf: Any, mark: str) -> Any:
        if mark == REPLICATED:
            return None
        if mark == OWNER:
            # On every replica (1, 0) if each has its own residual, or (0, 1) if all share one.
            flags = [leaf == owner_id(axis_name), leaf == 0]
            return jnp.stack(flags).astype(jnp.float32)
        if is_floating(leaf):
            return leaf
        return _largest(leaf, functools.partial(maximum, axis_name=axis_name))

    def consolidated(leaf: Any, mark: str, mean: Any) -> Any:
        if mark == OWNER:
            # One replica that disagrees lowers a mean of flags by 1 / replicas; half of that is
            # more than rounding.
            consistent = (mean > 1 - 0.5 / replicas).any()
            return jnp.where(consistent, 0.0, jnp.nan).astype(leaf.dtype)
        if mark == REPLICATED:
            return leaf
        return mean

    means, _ = averaged(jax.tree.map(to_average, state, kinds), axis_name)
    return jax.tree.map(consolidated, state, kinds, means)


def _owner_of_all(owners: Array) -> Array:
    """Returns 0 if every replica owns a row, in any order, or all rows are shared; else NaN."""
    all_of_them = jnp.arange(owners.size, dtype=jnp.float32) - owners.size
    # Compared and not sorted: JAX cannot sort along an axis that an Explicit mesh axis shards.
    rows = jnp.atleast_1d(owners)[:, None]
    present = (rows == all_of_them[None]).any(axis=0)
    each = bool(owners.ndim) & present.all()
    everybody = (owners == 0).all()
    return jnp.where(each | everybody, 0.0, jnp.nan).astype(jnp.float32)


def _check_not_mapped(state: PyTree) -> None:
    """Refuses a call without an axis name inside of a mapped function."""
    inside = bool(mesh_axes(AxisType.Manual))
    for owner in leaves_marked(state, OWNER).values():
        if is_traced(owner) and (inside or not owner.ndim):
            raise ValueError(
                "Inside a mapped function consolidate needs the axis of the replicas: "
                "consolidate(state, axis_name). A state that is already consolidated needs no call."
            )


def _no_axis(local: dict[str, Any]) -> str:
    shapes = ""
    for name, leaf in local.items():
        shapes += f"\n  {name}: {np.shape(leaf)}"
    return (
        "Outside of a mapped function every per-replica leaf of a state needs one leading axis of "
        f"replicas, of equal length:{shapes}\nPass what pmap or jaxcomp.data_parallel returned, or "
        "call consolidate(state, axis_name) inside the mapped function."
    )
