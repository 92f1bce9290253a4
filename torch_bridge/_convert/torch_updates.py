"""Optax transformations that make no update without a gradient, as torch's optimizers do."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class UnusedState(NamedTuple):
    """State of `until_gradient`."""

    inner_state: Any  # the inner transformation's state, unchanged until `started`; replicated
    started: jax.Array  # bool scalar: True after the first nonzero gradient; replicated


def until_gradient(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Makes no updates until the first nonzero gradient, and applies `inner` from then on.

    torch skips a parameter whose ``grad`` is None. In JAX an unused leaf has a gradient of zeros,
    and `inner` alone would count steps and decay its weights.

    Args:
      inner: The transformation; its leaves start together, at the first nonzero gradient of one.
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
    """Makes no updates and keeps the state, as torch keeps the state of a frozen parameter.

    Args:
      inner: The transformation whose ``init`` makes the state.
    """

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        return jax.tree.map(jnp.zeros_like, updates), state

    return optax.GradientTransformation(inner.init, update)
