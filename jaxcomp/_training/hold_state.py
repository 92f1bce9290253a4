"""A reducer's state inside the optimizer's, where loops carry it along without another line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

from jaxcomp._base.typing import AxisName, PyTree
from jaxcomp._mesh.collectives import is_bound, known_equal
from jaxcomp._mesh.per_replica import is_reducer_state
from jaxcomp._reducers.reducer import Reducer


class Held(NamedTuple):
    """State of `hold_state` of a reducer that has none: it says that gradients are averaged."""

    per_replica = ()


def hold_state(reducer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Makes a link of an optimizer's chain that holds a reducer's state and changes no update.

    What saves, places, donates and returns the optimizer's state then does so with the reducer's.
    `data_parallel` finds it in any tree: pass it the whole TrainState, and get that back.

    Args:
      reducer: The `Reducer` that `data_parallel` is given.

    Returns:
      A transformation; its state is the reducer's.

    Raises:
      ValueError: If it is not a `Reducer`: the state of a chain is not found again. From
        ``update``, if nobody has averaged the gradients, in a function that is mapped over the
        replicas: there the chain takes the reducer itself.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomp, optax
      >>> mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
      >>> reducer = jaxcomp.powersgd(rank=2, axis_name="data", start_step=0)
      >>> value_and_grad = jaxcomp.value_and_grad(lambda w, x: jnp.mean((x @ w) ** 2), reducer)
      >>> tx = optax.chain(jaxcomp.hold_state(reducer), optax.sgd(0.1))
      >>> w = jnp.ones((16, 16))
      >>> opt_state = jaxcomp.shard_state(tx.init(w), mesh, "data")
      >>> (loss, grads), opt_state = jax.jit(value_and_grad)(opt_state, w, jnp.eye(16))
      >>> updates, opt_state = tx.update(grads, opt_state, w)
      >>> opt_state[0].residual.shape, int(opt_state[0].count)
      ((2, 16, 16), 1)
    """
    if not isinstance(reducer, Reducer):
        raise ValueError(
            f"`reducer` must be a jaxcomp reducer, got {type(reducer).__name__}. Where "
            "jaxcomp.data_parallel is given a chain, keep its state beside the optimizer's."
        )

    def update(updates: PyTree, state: PyTree, params: PyTree | None = None) -> Any:
        del params
        _check_averaged_before(updates, reducer.axis_name)
        return updates, state

    def init(params: PyTree) -> PyTree:
        state = reducer.init(params)
        return state if jax.tree.leaves(state) else Held()

    return optax.GradientTransformation(init, update)


def _check_averaged_before(updates: PyTree, axis_name: AxisName) -> None:
    """Refuses gradients in a mapped function, unless JAX knows them to be equal on all replicas.

    Raises:
      ValueError: With the chain to write there.
    """
    if not is_bound(axis_name):
        return
    if not all(known_equal(leaf, axis_name) for leaf in jax.tree.leaves(updates)):
        raise ValueError(
            f"hold_state averages nothing, and here, in a function that is mapped over "
            f"{axis_name!r}, each replica would go on with its own gradients. Put the reducer "
            "itself into the chain: optax.chain(reducer, optimizer). hold_state is for loops in "
            "jax.jit, where jaxcomp.data_parallel or value_and_grad has averaged before."
        )


def state_in(
    tree: PyTree, reducer: Any, params: Callable[[], PyTree]
) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
    """Returns the reducer's state in a tree, and a function that puts another one in its place.

    Raises:
      ValueError: If there is none, or more than one that may be it.
    """
    if is_reducer_state(tree) or not isinstance(reducer, Reducer):
        return tree, lambda state: state
    _check_multi_steps(tree)
    nodes, treedef = jax.tree.flatten(tree, is_leaf=is_reducer_state)
    like = jax.eval_shape(reducer.init, params())
    fresh = jax.tree.structure(like)
    if fresh == jax.tree.structure(tree):
        return tree, lambda state: state
    if not fresh.num_leaves:
        return fresh.unflatten([]), lambda state: tree
    places = [i for i, node in enumerate(nodes) if jax.tree.structure(node) == fresh]
    if len(places) != 1:
        raise ValueError(_not_one_state(tree, nodes, type(like), len(places)))

    def put_back(state: PyTree) -> PyTree:
        replaced = list(nodes)
        replaced[places[0]] = state
        return treedef.unflatten(replaced)

    return nodes[places[0]], put_back


def _check_multi_steps(tree: PyTree) -> None:
    """Refuses a state that is held inside of an `optax.MultiSteps`.

    Raises:
      ValueError: If one is.
    """
    is_multi_steps = lambda node: isinstance(node, optax.MultiStepsState)  # noqa: E731
    for node in jax.tree.leaves(tree, is_leaf=is_multi_steps):
        if not is_multi_steps(node):
            continue
        if any(map(is_reducer_state, jax.tree.leaves(node, is_leaf=is_reducer_state))):
            raise ValueError(
                "optax.MultiSteps around jaxcomp.hold_state would accumulate what is averaged "
                "already. Leave it out, and accumulate in the gradient function, as docs/adopt.md "
                "shows; or put it behind: optax.chain(hold_state(reducer), optax.MultiSteps(...))."
            )


def _not_one_state(tree: PyTree, nodes: list[Any], kind: type, fitting: int) -> str:
    """Says why no state in the tree, or more than one, is that of the reducer."""
    if not fitting and any(isinstance(node, kind) for node in nodes):
        return (
            f"The {kind.__name__} in the first argument is that of other parameters than the "
            "second: inside of optax.partition or optax.masked hold_state sees a part of them, and "
            "all of their gradients are averaged. Put it around: optax.chain(jaxcomp.hold_state("
            "reducer), optax.partition(...)). To freeze a part, pass it as an argument of its own "
            "behind the parameters, with jax.P() in batch_specs: then it has no gradient to send."
        )
    names = f"a dict of {', '.join(map(repr, tree))}" if isinstance(tree, dict) else type(tree)
    held = f"{fitting} that may be it" if fitting else "none"
    return (
        "The first argument must be the reducer's state, as init(params) gives it, or a tree that "
        f"holds it, and the second the parameters; got {names} first, which has {held}."
    )
