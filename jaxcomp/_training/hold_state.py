"""A reducer's state inside the optimizer's, where loops carry it along without another line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax

from jaxcomp._base.typing import PyTree
from jaxcomp._mesh.per_replica import is_reducer_state
from jaxcomp._reducers.reducer import Reducer


def hold_state(reducer: optax.GradientTransformation) -> optax.GradientTransformation:
    """A link of an optimizer's chain that holds a reducer's state and leaves updates as they are.

    What saves, places, donates and returns the optimizer's state then does so with the reducer's.
    `data_parallel` finds it in any tree: pass it the whole TrainState, and get that back.

    Args:
      reducer: The `Reducer` that `data_parallel` is given.

    Returns:
      A transformation; its state is the reducer's.

    Raises:
      ValueError: If it is no `Reducer`: the state of a chain is not found again.

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
        return updates, state

    return optax.GradientTransformation(reducer.init, update)


def state_in(
    tree: PyTree, reducer: Any, params: Callable[[], PyTree]
) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
    """The reducer's state in a tree, and a function that puts another one in its place.

    Raises:
      ValueError: If there is none, or more than one that may be it.
    """
    if is_reducer_state(tree) or not isinstance(reducer, Reducer):
        return tree, lambda state: state
    is_multi_steps = lambda node: isinstance(node, optax.MultiStepsState)  # noqa: E731
    for node in filter(is_multi_steps, jax.tree.leaves(tree, is_leaf=is_multi_steps)):
        if any(map(is_reducer_state, jax.tree.leaves(node, is_leaf=is_reducer_state))):
            raise ValueError(
                "optax.MultiSteps around jaxcomp.hold_state would accumulate what is averaged "
                "already. Leave it out, and accumulate in the gradient function, as docs/adopt.md "
                "shows."
            )
    nodes, treedef = jax.tree.flatten(tree, is_leaf=is_reducer_state)
    fresh = jax.tree.structure(jax.eval_shape(reducer.init, params()))
    if fresh == jax.tree.structure(tree):
        return tree, lambda state: state
    if not fresh.num_leaves:
        return fresh.unflatten([]), lambda state: tree
    places = [i for i, node in enumerate(nodes) if jax.tree.structure(node) == fresh]
    if len(places) == 1:
        (place,) = places
        return nodes[place], lambda state: treedef.unflatten(
            [state if i == place else node for i, node in enumerate(nodes)]
        )
    names = f"a dict of {', '.join(map(repr, tree))}" if isinstance(tree, dict) else type(tree)
    found = f"{len(places)} that may be it" if places else "none"
    raise ValueError(
        "The first argument must be the reducer's state, as init(params) gives it, or a tree that "
        f"holds it, and the second the parameters; got {names} first, which has {found}."
    )
