"""Ranks by spectrum in the middle of a run, from the momentum that it has by then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from jaxcomp._base.checks import check_function
from jaxcomp._base.leaves import leaf_dtype, leaf_name, unboxed
from jaxcomp._base.typing import DType, MatrixDimsFn, PyTree
from jaxcomp._bytes.ranks import Ranks, ranks_by_spectrum
from jaxcomp._local.state import LocalSGDState
from jaxcomp._mesh.per_replica import of_reducer
from jaxcomp._states.adapt import fitted
from jaxcomp._states.forms import form_of

# Fields of Optax's states that hold a running mean of gradients: Adam, Lion, Muon and their
# relatives; SGD with momentum.
_MOMENTA = ("mu", "trace")
_GIVE_IT = "Pass momentum=, a tree of gradients like the parameters."


def adapt_ranks(
    state: PyTree,
    params: PyTree,
    make: Callable[[Ranks], optax.GradientTransformation],
    *,
    ratio: float,
    momentum: PyTree | None = None,
    comm_dtype: DType | None = None,
    adaptive: bool = True,
    min_compression_rate: float = 2.0,
    matrix_dims: MatrixDimsFn | None = None,
) -> tuple[optax.GradientTransformation, PyTree, Ranks]:
    """Gives a run ranks by the spectrum of its own momentum, and goes on with them.

    Call it once between two steps of a training loop, after a tenth of the steps or so. It finds
    the optimizer's momentum in the state, chooses ranks with `ranks_by_spectrum`, builds the new
    transformation and fits the state to it with `adapt_state`: residuals, momenta and step counts
    stay, factors are cut or padded. No other run is needed, and every byte of this one is in
    ``tx.bytes``: of the first transformation for the steps before, of the second for those after.

    The state may be consolidated or as it stands in the loop, with the residuals of all replicas;
    the new one has the same form, lies on the same mesh, and goes into the next step. Each
    replica keeps its own residual. Where a leaf is sent whole from now on, what it had not sent yet
    is dropped. The step has to be traced again, with the new transformation.

    In a run of several processes all of them call it at the same step. A momentum that is sharded
    over axes of the mesh is gathered leaf by leaf, and the ranks of process 0 count for all.

    Args:
      state: The state of the transformation so far: an `optax.chain` that begins with a reducer,
        or that of a reducer alone, as `value_and_grad` keeps it.
      params: The parameters, one copy.
      make: A function from the rank to the whole new transformation: the old one but for ranks, or
        for its reducers.
      ratio: How many times fewer bytes (values, without `comm_dtype`), as for `ranks_by_spectrum`.
      momentum: Where the gradients' mean is, if not in `state`: the optimizer's own state, or any
        tree of gradients like the parameters.
      comm_dtype: As for `ranks_by_spectrum`; pass the same to the reducer, as the last two.
      adaptive: As for `ranks_by_spectrum`: False for SGD.
      min_compression_rate: As for `powersgd`.
      matrix_dims: As for `powersgd`.

    Returns:
      The new transformation, its state, and the ranks that `make` was given. Save ``by_leaf`` of
      those beside checkpoints: a restart makes the transformation with `Ranks` of it.

    Raises:
      ValueError: If no momentum is found, several are, or it is still zero; for states of
        `local_sgd`, whose momenta differ between replicas; inside of `jax.jit`; and as
        `ranks_by_spectrum` and `adapt_state`.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomp, optax
      >>> def make(rank):
      ...     return optax.chain(
      ...         jaxcomp.powersgd(rank, axis_name="data", start_step=0), optax.adam(1e-3))
      >>> params = {"flat": jnp.zeros((32, 32)), "sharp": jnp.zeros((32, 32))}
      >>> grads = {"flat": jnp.eye(32), "sharp": jnp.ones((32, 32))}
      >>> tx = make(4)
      >>> def step(grads, state):
      ...     return tx.update(grads, state, params)[1]
      >>> axes = jaxcomp.state_axes(tx.init(params))
      >>> state = jaxcomp.stack_replicas(tx.init(params), 2)
      >>> state = jax.vmap(step, (None, axes), axes, axis_name="data", axis_size=2)(grads, state)
      >>> tx, state, rank = jaxcomp.adapt_ranks(state, params, make, ratio=4.0)
      >>> rank.by_leaf
      {"['flat']": 4, "['sharp']": 1}
      >>> state[0].residual["flat"].shape, state[0].q["sharp"].shape
      ((2, 32, 32), (32, 1))
    """
    check_function("make", make)
    _check_not_local((state, momentum))
    form = form_of(state)
    gradients = _momentum(state, momentum, params)
    rank = ranks_by_spectrum(
        gradients,
        ratio=ratio,
        adaptive=adaptive,
        comm_dtype=comm_dtype,
        min_compression_rate=min_compression_rate,
        matrix_dims=matrix_dims,
    )
    rank = _common(rank)
    tx = make(rank)
    if not hasattr(tx, "init"):
        raise ValueError(
            f"`make` must return an Optax transformation, got {type(tx).__name__}. Return the "
            "whole new one, with jaxcomp.powersgd(rank, ...) in it."
        )
    fresh = tx.init(params)
    if not any(map(of_reducer, jax.tree.leaves(fresh, is_leaf=of_reducer))):
        raise ValueError(
            "`make(rank)` has no reducer: replicas would no longer average anything. Return the "
            "whole new transformation, with jaxcomp.powersgd(rank, ...) in it."
        )
    return tx, fitted(state, fresh, form), rank


def _check_not_local(trees: PyTree) -> None:
    """Refuses local SGD.

    Raises:
      ValueError: If one of its states is there.
    """
    is_local = lambda node: isinstance(node, LocalSGDState)  # noqa: E731
    if any(map(is_local, jax.tree.leaves(trees, is_leaf=is_local))):
        raise ValueError(
            "The state is one of jaxcomp.local_sgd, where each replica has a momentum of its own, "
            "and the reducer gets differences of parameters. Choose ranks from an earlier run, "
            "with jaxcomp.ranks_by_spectrum."
        )


def _momentum(state: PyTree, momentum: PyTree | None, params: PyTree) -> PyTree:
    """The momentum in the form of the parameters, on the host; where there is none, MaskedNode.

    Raises:
      ValueError: If there is not exactly one that is not zero.
    """
    nodes, treedef = jax.tree_util.tree_flatten_with_path(unboxed(params))
    wanted = {leaf_name(path): leaf for path, leaf in nodes}
    found = {} if momentum is None else _by_name(momentum)
    if not found or not found.keys() <= wanted.keys():
        where = "`state`" if momentum is None else "`momentum`"
        found = _found(state if momentum is None else momentum, where)
    wrong = [f"{name}: no such parameter" for name in found.keys() - wanted.keys()]
    wrong += [
        f"{name}: {np.shape(leaf)}, and the parameter is {np.shape(wanted[name])}"
        for name, leaf in found.items()
        if name in wanted and np.shape(leaf) != np.shape(wanted[name])
    ]
    if wrong:
        raise ValueError(
            "The momentum does not fit the parameters:\n  "
            + "\n  ".join(sorted(wrong))
            + "\nPass one copy of the parameters, and of a state in which also what the replicas "
            "share has an axis of them jaxcomp.consolidate(state); or pass momentum=."
        )
    host = {name: _on_host(leaf, leaf_dtype(wanted[name])) for name, leaf in found.items()}
    if not any(map(np.any, host.values())):
        raise ValueError(
            "The momentum is zero everywhere: no step was taken yet. Call adapt_ranks after some "
            "tens of steps."
        )
    return treedef.unflatten([host.get(name, optax.MaskedNode()) for name in wanted])


def _by_name(tree: PyTree) -> dict[str, Any]:
    """Leaves by the names that they have as parameters; a masked one is none."""
    return {
        leaf_name(path): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(unboxed(tree))[0]
    }


def _found(state: PyTree, where: str) -> dict[str, Any]:
    """All momenta in a state together, as `optax.partition` gives each group of leaves its own.

    Raises:
      ValueError: If there is none, or a leaf has two.
    """
    found: dict[str, Any] = {}
    places: dict[str, str] = {}
    for path, node in jax.tree_util.tree_flatten_with_path(state, is_leaf=_has_momentum)[0]:
        if not _has_momentum(node):
            continue
        field = next(name for name in _MOMENTA if hasattr(node, name))
        place = leaf_name((*path, jax.tree_util.GetAttrKey(field)))
        for name, leaf in _by_name(getattr(node, field)).items():
            if name in found:
                raise ValueError(
                    f"The leaf {name} has two momenta in {where}, {places[name]} and {place}. "
                    + _GIVE_IT
                )
            found[name], places[name] = leaf, place
    if not found:
        raise ValueError(
            f"There is no momentum in {where}: no field {' or '.join(_MOMENTA)} of an Optax state. "
            "Where the optimizer is apart from the reducer, pass its state as momentum=. Without "
            "momentum, pass a mean of gradients there."
        )
    return found


def _has_momentum(node: Any) -> bool:
    return not set(getattr(type(node), "_fields", ())).isdisjoint(_MOMENTA)


def _on_host(leaf: Any, dtype: Any) -> np.ndarray:
    """The whole leaf, in the dtype of its gradient, of which bytes are counted."""
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        assert isinstance(leaf.sharding, NamedSharding)
        everywhere = NamedSharding(leaf.sharding.mesh, PartitionSpec())
        leaf = jax.jit(lambda x: x, out_shardings=everywhere)(leaf)
    return np.asarray(leaf).astype(dtype)


def _common(rank: Ranks) -> Ranks:
    """The ranks of process 0: other processors may round a spectrum otherwise."""
    if jax.process_count() == 1:
        return rank
    own = np.array([r or 0 for r in rank.by_leaf.values()], np.int32)
    common = np.asarray(multihost_utils.broadcast_one_to_all(own))
    return Ranks({name: int(r) or None for name, r in zip(rank.by_leaf, common, strict=True)})
