"""What torch's optimizers do and optax's do not: no update without a gradient."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class UnusedState(NamedTuple):
    """State of `until_gradient`."""

    inner_state: Any  # as the inner transformation made it, until it starts; replicated
    started: jax.Array  # bool scalar: whether there has been a gradient; replicated


def until_gradient(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Applies `inner` from the first gradient on that is not zero.

    torch skips a parameter whose ``grad`` is None, while JAX gives an unused leaf a gradient of
    zeros, which would count steps and let weight decay act.

    Args:
      inner: The transformation of leaves that are used, or not, together.
    """

    def init(params: Any) -> UnusedState:
        return UnusedState(inner.init(params), jnp.zeros((), bool))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, UnusedState]:
        nonzero = jnp.stack([jnp.any(leaf != 0) for leaf in jax.tree.leaves(updates)])
        started = state.started | jnp.any(nonzero)
        moved, after = inner.update(updates, state.inner_state, params)
        moved = jax.tree.map(lambda new: jnp.where(started, new, jnp.zeros_like(new)), moved)
        after = jax.tree.map(
            lambda new, old: jnp.where(started, new, old), after, state.inner_state
        )
        return moved, UnusedState(after, started)

    return optax.GradientTransformation(init, update)


def held(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Makes no updates and keeps the state of `inner`, as torch keeps that of a frozen parameter.

    Args:
      inner: What made the state.
    """

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        return jax.tree.map(jnp.zeros_like, updates), state

    return optax.GradientTransformation(inner.init, update)
