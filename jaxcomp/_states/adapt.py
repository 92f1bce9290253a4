"""A training state for another compression: another rank, compression newly on, or newly off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcomp._base.leaves import leaf_name
from jaxcomp._base.typing import Array, KeyPath, PyTree
from jaxcomp._lowrank.orthogonalize import orthogonalize
from jaxcomp._mesh.per_replica import has_rows
from jaxcomp._reducers.acp_sgd import ACPSGDState
from jaxcomp._reducers.error_feedback import ErrorFeedbackState
from jaxcomp._reducers.powersgd import PowerSGDState
from jaxcomp._states.consolidate import consolidate

_REDUCERS = (PowerSGDState, ACPSGDState, ErrorFeedbackState)


def adapt_state(state: PyTree, params: PyTree, tx: optax.GradientTransformation) -> PyTree:
    """Fits the state of an earlier run to a transformation with another compression.

    What is no reducer's (momenta, step counts) is taken over as it is. Of the reducers' states,

    * factors are cut to their first columns for a lower rank, which the power iteration has
      ordered by importance, and padded with fresh orthonormal columns for a higher one;
    * residuals are taken over wherever the leaf still has one, also between `powersgd` and
      `error_feedback`. Where it no longer has, what was not sent yet is dropped;
    * a reducer that is new or of another kind starts afresh but for that, with its own
      ``start_step`` still to come.

    Reducers are matched in order, each with one of the same kind; those with a residual that are
    left then with each other. `batched_powersgd`, whose residual is one matrix made of all leaves,
    goes with its like only. Restore a checkpoint with the transformation that it was written with,
    then adapt it, then `shard_state` it.

    Args:
      state: The state of the earlier transformation: consolidated, or as it stands between two
        steps, when it is consolidated here.
      params: The parameters, the same for both.
      tx: The new transformation: the old one but for its reducers.

    Returns:
      A consolidated state with the structure of ``tx.init(params)``.

    Raises:
      ValueError: Listing every leaf that differs outside of the reducers, or whose residual has
        another shape.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomp, optax
      >>> params = {"w": jnp.zeros((32, 16))}
      >>> def optimizer(rank):
      ...     return optax.chain(jaxcomp.powersgd(rank, axis_name="data"), optax.adam(1e-3))
      >>> state = optimizer(rank=2).init(params)
      >>> wider = jaxcomp.adapt_state(state, params, optimizer(rank=4))
      >>> wider[0].q["w"].shape, bool(jnp.all(wider[0].q["w"][:, :2] == state[0].q["w"]))
      ((32, 4), True)
    """
    if has_rows(state):
        state = consolidate(state)
    fresh = tx.init(params)
    old, new = _nodes(state), _nodes(fresh)
    _check_others(_others(old), _others(new))
    kept = iter([value for _, value in _others(old)])
    reducers = [v for _, v in old if _is_reducer(v)]
    adapted = iter(_matched(reducers, [v for _, v in new if _is_reducer(v)]))
    leaves = [next(adapted if _is_reducer(node) else kept) for _, node in new]
    return jax.tree.structure(fresh, is_leaf=_is_reducer).unflatten(leaves)


def _check_others(old: list[tuple[KeyPath, Any]], new: list[tuple[KeyPath, Any]]) -> None:
    """Refuses states that differ in what is no reducer's, listing everything that does."""
    have, want = [_key(path) for path, _ in old], [_key(path) for path, _ in new]
    if have == want:
        wrong = [
            f"{leaf_name(path)}: {np.shape(a)} in the state, {np.shape(b)} for `tx`"
            for (path, a), (_, b) in zip(old, new, strict=True)
            if np.shape(a) != np.shape(b)
        ]
    else:
        wrong = [f"{name}: only in the state" for name in have if name not in want]
        wrong += [f"{name}: only for `tx`" for name in want if name not in have]
        wrong = wrong or ["the same leaves, in another order"]
    if wrong:
        raise ValueError(
            "The state does not fit `tx` outside of its reducers:\n  "
            + "\n  ".join(wrong)
            + "\nPass a transformation that differs from the old one in its reducers only."
        )


def _is_reducer(node: Any) -> bool:
    return isinstance(node, _REDUCERS)


def _nodes(tree: PyTree) -> list[tuple[KeyPath, Any]]:
    return jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_reducer)[0]


def _others(nodes: list[tuple[KeyPath, Any]]) -> list[tuple[KeyPath, Any]]:
    return [(path, node) for path, node in nodes if not _is_reducer(node)]


def _key(path: KeyPath) -> str:
    """A path without positions in tuples: a reducer added to a chain moves those behind it."""
    return leaf_name(tuple(k for k in path if not isinstance(k, jax.tree_util.SequenceKey)))


def _matched(old: list[Any], new: list[Any]) -> list[Any]:
    """Each new reducer's state, adapted from an old one: of its kind, else any with a residual."""
    remaining, results = list(old), list(new)
    for same in (True, False):
        for i, node in enumerate(new):
            found = [k for k, other in enumerate(remaining) if _fits(other, node, same=same)]
            if found and results[i] is node:
                results[i] = _adapted(remaining.pop(found[0]), node)
    return results


def _fits(old: Any, new: Any, *, same: bool) -> bool:
    """Whether `old` has a residual of the form of `new`'s, and is, if it shall be, of its kind."""
    return (type(old) is type(new) or not same) and _is_one(old) == _is_one(new)


def _is_one(state: Any) -> bool:
    """Whether the residual is no tree but one array, as `batched_powersgd`'s always is."""
    structure = jax.tree.structure(state.residual, is_leaf=_is_masked)
    return jax.tree_util.treedef_is_leaf(structure)


def _adapted(old: Any, new: Any) -> Any:
    """`old` in the form of `new`, a fresh state; of another kind only its residual."""
    same = type(old) is type(new)
    fields = {
        "residual": _carried(_same_shape, old.residual, new.residual, "residual"),
        "owner": old.owner,
    }
    for name in ("p", "q"):
        if hasattr(old, name) and hasattr(new, name):
            fields[name] = _carried(_resized, getattr(old, name), getattr(new, name), name)
    if same:
        fields["count"] = old.count
    if same and isinstance(new, ErrorFeedbackState) and type(old.inner) is type(new.inner):
        inside = _is_reducer(new.inner)
        fields["inner"] = _adapted(old.inner, new.inner) if inside else old.inner
    return new._replace(**fields)


def _carried(
    function: Callable[[Array, Array], Array | None], old: PyTree, new: PyTree, field: str
) -> PyTree:
    """Maps ``function(old, new)`` over the leaves that both have; elsewhere the new one stays.

    Refuses leaves for which the function returns None, and lists them.
    """
    nodes, treedef = jax.tree_util.tree_flatten_with_path(new, is_leaf=_is_masked)
    held = jax.tree.leaves(old, is_leaf=_is_masked)
    if len(held) != len(nodes):
        raise ValueError(
            f"The {field} of the state has {len(held)} leaves and the parameters have "
            f"{len(nodes)}. Pass the parameters that the state was made for."
        )
    results, wrong = [], []
    for (path, fresh), value in zip(nodes, held, strict=True):
        both = not _is_masked(fresh) and not _is_masked(value)
        result = function(jnp.asarray(value), fresh) if both else fresh
        if result is None:
            shapes = f"{np.shape(value)} in the state, {np.shape(fresh)} for `tx`"
            wrong.append(f"{field}{leaf_name(path)}: {shapes}")
        results.append(result)
    if wrong:
        raise ValueError(
            "The state belongs to other parameters or matrix_dims:\n  " + "\n  ".join(wrong)
        )
    return treedef.unflatten(results)


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


def _same_shape(old: Array, new: Array) -> Array | None:
    return old.astype(new.dtype) if old.shape == new.shape else None


def _resized(old: Array, new: Array) -> Array | None:
    """The factor `old` with as many columns as `new`, from which fresh ones are taken."""
    if old.shape[:-1] != new.shape[:-1]:
        return None
    rank, wanted = old.shape[-1], new.shape[-1]
    if wanted <= rank:
        return old[..., :wanted].astype(new.dtype)
    old = old.astype(new.dtype)
    candidates = jnp.concatenate([old, new[..., rank:]], axis=-1)
    return jnp.concatenate([old, orthogonalize(candidates)[..., rank:]], axis=-1)
