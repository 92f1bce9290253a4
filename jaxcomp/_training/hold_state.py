"""Holds a reducer's state inside the optimizer's state, so that loops need not carry it.

`hold_state` is a link of a chain that does nothing but have a state. `data_parallel` searches the
tree that it is passed, a TrainState for example, for that state, and returns the tree with the new
state in its place. The state is found by its structure, which is that of a fresh state for the same
parameters; none, or several that fit, are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

from jaxcomp._base.checks import answers_other_names
from jaxcomp._base.leaves import (
    boxed_as,
    is_array,
    is_floating,
    nodes_of,
    replaced,
    unboxed,
)
from jaxcomp._base.typing import PyTree
from jaxcomp._mesh.collectives import is_bound, known_equal
from jaxcomp._mesh.per_replica import is_accumulator, is_reducer_state, reducer_states
from jaxcomp._reducers.reducer import Reducer, check_reducer, differences


class Held(NamedTuple):
    """State of `hold_state` for a reducer without a state; it marks gradients as averaged."""

    # An empty tuple, as optax.EmptyState is, could be the state of any link.

    per_replica = ()


@answers_other_names
def hold_state(reducer: Reducer) -> optax.GradientTransformation:
    """Makes a link of an optimizer's chain that holds a reducer's state and changes no update.

    Code that saves, places, donates and returns the optimizer's state then handles the reducer's
    state too. `data_parallel` finds the state in any tree: pass the whole TrainState, which it
    returns.

    Args:
      reducer: The `Reducer` that is passed to `data_parallel`.

    Returns:
      A transformation; its state is the reducer's.

    Raises:
      ValueError: If it is not a `Reducer`, because the state of a chain could not be found again.
        ``update`` raises it in a mapped function if the gradients are not averaged yet; there, put
        the reducer itself into the chain.

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
    beside = "Where data_parallel is given a chain, keep its state beside the optimizer's."
    check_reducer(reducer, beside)

    def update(updates: PyTree, state: PyTree, params: PyTree | None = None) -> Any:
        del params
        axis_name = reducer.axis_name
        leaves = jax.tree.leaves(updates)
        if is_bound(axis_name) and not all(known_equal(leaf, axis_name) for leaf in leaves):
            raise ValueError(
                "hold_state does not average gradients, and in this function, which is mapped over "
                f"{axis_name!r}, JAX does not know that they are averaged. Put the reducer itself "
                "into the chain: optax.chain(reducer, optimizer). hold_state belongs to loops in "
                "jax.jit that call jaxcomp.data_parallel or value_and_grad. In a mapped function "
                "it works with these only under jax.shard_map with check_vma=True."
            )
        return updates, state

    def init(params: PyTree) -> PyTree:
        state = reducer.init(params)
        if not jax.tree.leaves(state):
            return Held()
        return state

    return optax.GradientTransformation(init, update)


def is_state_itself(tree: PyTree, reducer: Any) -> bool:
    """Returns whether a tree is the reducer's state, and not a larger tree that holds it."""
    if not isinstance(reducer, Reducer):
        return True  # the state of a chain is not searched for
    return is_reducer_state(tree) and not nodes_of(tree, is_accumulator)


def state_in(
    tree: PyTree, reducer: Any, params: PyTree
) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
    """Returns the reducer's state in a tree, and a function that replaces it in the tree.

    Raises:
      ValueError: If the tree holds no fitting state, or several.
    """
    if not isinstance(reducer, Reducer):
        return tree, lambda state: state
    if is_state_itself(tree, reducer):
        return unboxed(tree), lambda state: boxed_as(state, tree)
    for node in nodes_of(tree, is_accumulator):
        if reducer_states(node.inner_opt_state):
            raise ValueError(
                f"{type(node).__name__} around jaxcomp.hold_state would accumulate gradients that "
                "are already averaged. Accumulate in the gradient function, as docs/adopt.md "
                "shows, or after hold_state: optax.chain(hold_state(reducer), "
                "optax.MultiSteps(...))."
            )
    if is_reducer_state(params):
        raise ValueError(_not_one_state(tree, None, 0))
    fresh_state = jax.eval_shape(reducer.init, params)
    fresh = jax.tree.structure(fresh_state)
    expected = [fresh]
    if not fresh.num_leaves:
        expected.append(jax.tree.structure(Held()))

    def is_it(node: Any) -> bool:
        structure = jax.tree.structure(node)
        # Only where it may help, because this is called for every node of the tree.
        if structure.num_leaves == fresh.num_leaves and structure not in expected:
            structure = jax.tree.structure(unboxed(node))  # nnx.Optimizer puts it into boxes
        return structure in expected

    states = nodes_of(tree, is_it)  # outermost, so a state in a state is not counted twice
    if not fresh.num_leaves:
        # A reducer without a state accepts any tree, except one that can only be the parameters.
        # These are passed first if the state was forgotten.
        leaves = jax.tree.leaves(tree)
        like_params = bool(leaves) and all(is_array(x) and is_floating(x) for x in leaves)
        if states or not like_params:
            return fresh_state, lambda state: tree
    if len(states) != 1:
        raise ValueError(_not_one_state(tree, fresh_state, len(states)))
    (held,) = states

    def put_back(state: PyTree) -> PyTree:
        return replaced(tree, held, boxed_as(state, held))

    return unboxed(held), put_back


def _not_one_state(tree: PyTree, fresh: PyTree | None, fitting: int) -> str:
    """Returns the message for a tree with no fitting state, or with several."""
    kind = type(fresh)
    same_kind = list(filter(lambda node: type(node) is kind, reducer_states(tree)))
    # A state of the right class that does not fit is the likely one, so the message is about it.
    if not fitting and same_kind:
        held = unboxed(same_kind[0])
        alone, others = differences(held, fresh, any_axes=True)
        listed = "\n  ".join(alone + others)
        hint = "Make it with init of these parameters, outside of optax.flatten."
        if not alone:
            hint = (
                "Inside of optax.partition or optax.masked, hold_state gets only a part of the "
                "parameters. Put it outside: optax.chain(jaxcomp.hold_state(reducer), "
                "optax.partition(...)). To freeze a part, pass it as a separate argument after the "
                "parameters, with jax.P() in batch_specs; then it has no gradient to send."
            )
        return (
            f"The {kind.__name__} in the first argument does not fit the parameters:\n  {listed}\n"
            f"{hint}"
        )
    held = "none"
    if fitting:
        held = f"{fitting} that may be it"
    names = f"a {type(tree).__name__}"
    if isinstance(tree, dict):
        names += f" of {', '.join(map(repr, tree))}"
    return (
        "The first argument must be the reducer's state, as init(params) gives it, or a tree that "
        f"holds it, and the second the parameters. The first is {names}, which holds {held}."
    )
