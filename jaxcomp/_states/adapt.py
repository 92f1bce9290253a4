"""Converts a training state for another rank or another kind of reducer.

`adapt_state` is for a run that changes its compression on the way: restore the state with the old
reducer, adapt it, and place it for the new one. The residual is what a run must not lose, because
it is a part of the gradients; factors only speed up the first steps. So the residual is carried
over wherever shapes allow, and everything else if both reducers are of one kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomp._base.checks import answers_other_names
from jaxcomp._base.leaves import check_values, is_masked, leaf_name, nodes_of, replaced
from jaxcomp._base.typing import Array, PyTree
from jaxcomp._lowrank.orthogonalize import orthogonalize
from jaxcomp._mesh.per_replica import has_replica_axis
from jaxcomp._reducers.error_feedback import ErrorFeedbackState
from jaxcomp._reducers.powersgd import PowerSGDState
from jaxcomp._reducers.reducer import Reducer, check_reducer, differences
from jaxcomp._states.consolidate import consolidate


@answers_other_names
def adapt_state(state: PyTree, params: PyTree, reducer: Reducer) -> PyTree:
    """Converts the state of an earlier run for a reducer with another compression.

    Only the reducer's part of the state changes:

    * For a lower rank, factors keep their first columns (the power iteration has ordered the
      columns by importance). For a higher rank, they get fresh orthonormal columns.
    * A leaf keeps its residual if it also has one under the new reducer, even from `powersgd` to
      `error_feedback` or back. Otherwise its residual is dropped.
    * A reducer of another kind keeps only the residuals. The rest of its state is fresh, so its
      ``start_step`` counts from the beginning. Between `batched_powersgd`, whose residual is one
      matrix of all leaves, and another reducer, the residual is dropped too.

    Everything else, such as momenta, stays as it is. Restore a checkpoint with the reducer that
    wrote it, then call `adapt_state`, then `shard_state`.

    Args:
      state: The earlier reducer's state, or a tree that holds it, such as a chain's state. A state
        that is not consolidated is consolidated here.
      params: The parameters, the same for both reducers.
      reducer: The new reducer.

    Returns:
      The same tree, with a consolidated state of `reducer` in it.

    Raises:
      ValueError: If the tree does not hold exactly one state of a reducer with a residual, or
        residuals have other shapes than the new ones (the message lists the leaves).

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomp, optax
      >>> params = {"w": jnp.zeros((32, 16))}
      >>> def reducer(rank):
      ...     return jaxcomp.powersgd(rank, axis_name="data")
      >>> state = optax.chain(reducer(rank=2), optax.adam(1e-3)).init(params)
      >>> wider = jaxcomp.adapt_state(state, params, reducer(rank=4))
      >>> wider[0].q["w"].shape, bool(jnp.all(wider[0].q["w"][:, :2] == state[0].q["w"]))
      ((32, 4), True)
    """
    check_reducer(reducer)
    check_values("state", state)
    if has_replica_axis(state):
        state = consolidate(state)
    states = nodes_of(state, _has_residual)
    if len(states) != 1:
        raise ValueError(
            "`state` must hold exactly one state of a reducer with a residual, but it holds "
            f"{len(states)}. Pass one state; a run that had none starts with reducer.init(params)."
        )
    (old,) = states
    new = reducer.init(params)
    if _has_residual(new) and _is_one_array(old) == _is_one_array(new):
        new = _adapted(old, new)
    return replaced(state, old, new)


def _has_residual(node: Any) -> bool:
    return isinstance(node, (PowerSGDState, ErrorFeedbackState))


def _is_one_array(state: Any) -> bool:
    """Returns whether the residual is a single array, as in `batched_powersgd`, and not a tree."""
    return jax.tree.structure(state.residual, is_leaf=is_masked).num_nodes == 1


def _adapted(old: Any, new: Any) -> Any:
    """Returns the fresh state `new` with values of `old`: only the residual, if kinds differ."""
    # The owner comes with it: it says whose the residual is.
    residual = _carried_over(_same_shape, old.residual, new.residual, "residual")
    state = new._replace(residual=residual, owner=old.owner)
    if type(old) is not type(new):
        return state
    if isinstance(new, PowerSGDState):
        q = _carried_over(_resized, old.q, new.q, "q")
        return state._replace(count=old.count, q=q)
    inner = old.inner
    if type(inner) is not type(new.inner):
        inner = new.inner
    elif _has_residual(inner):
        inner = _adapted(inner, new.inner)
    return state._replace(count=old.count, inner=inner)


def _carried_over(
    function: Callable[[Array, Array], Array | None], old: PyTree, new: PyTree, field: str
) -> PyTree:
    """Maps ``function(old, new)`` over the leaves that both trees have; other leaves stay new.

    Raises:
      ValueError: If the function returns None for a leaf; the message lists these leaves.
    """
    alone, _ = differences(old, new)
    if alone:
        listed = "\n  ".join(alone)
        raise ValueError(
            f"The {field} of the state is that of other parameters:\n  {listed}\nPass those that "
            "the state was made for."
        )
    leaves, treedef = jax.tree.flatten_with_path(new, is_leaf=is_masked)
    values = dict(jax.tree.leaves_with_path(old, is_leaf=is_masked))
    results: list[Any] = []
    wrong = ""
    for path, fresh in leaves:
        value = values[path]
        if is_masked(fresh) or is_masked(value):
            results.append(fresh)
            continue
        results.append(function(jnp.asarray(value), fresh))
        if results[-1] is None:
            wrong += f"\n  {field}{leaf_name(path)}: {value.shape} in the state, {fresh.shape} for"
            wrong += " `reducer`"
    if wrong:
        raise ValueError(f"The state belongs to other parameters or matrix_dims:{wrong}")
    return treedef.unflatten(results)


def _same_shape(old: Array, new: Array) -> Array | None:
    if old.shape != new.shape:
        return None
    return old.astype(new.dtype)


def _resized(old: Array, new: Array) -> Array | None:
    """Cuts the factor `old` to the rank of `new`, or adds orthogonalised columns of `new`."""
    if old.shape[:-1] != new.shape[:-1]:
        return None
    rank = old.shape[-1]
    old = old.astype(new.dtype)
    if new.shape[-1] <= rank:
        return old[..., : new.shape[-1]]
    # The old columns go in front, so the fresh ones become orthogonal to them and the old ones
    # stay.
    candidates = jnp.concatenate([old, new[..., rank:]], axis=-1)
    fresh = orthogonalize(candidates)[..., rank:]
    return jnp.concatenate([old, fresh], axis=-1)
