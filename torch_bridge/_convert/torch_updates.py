"""What torch's optimizers do and optax's do not: dampening, and no update without a gradient."""

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
    """`inner` from the first gradient on that is not zero.

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
    """No updates; the state of `inner` stays as it is, as torch keeps that of a frozen parameter.

    Args:
      inner: What made the state.
    """

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        return jax.tree.map(jnp.zeros_like, updates), state

    return optax.GradientTransformation(inner.init, update)


class DampenedTraceState(NamedTuple):
    """State of `dampened_trace`."""

    trace: Any  # tree like params, of its shapes and dtypes: torch's momentum_buffer; replicated
    started: Any  # tree like params, bool scalars: whether the leaf has had a gradient; replicated


def dampened_trace(decay: float, dampening: float) -> optax.GradientTransformation:
    r"""Momentum as in ``torch.optim.SGD(momentum=decay, dampening=dampening)``.

    .. math:: b_1 = g_1, \qquad b_t = \text{decay}\; b_{t-1} + (1 - \text{dampening})\; g_t

    The first gradient is not dampened, which `optax.trace` cannot express.

    Args:
      decay: What is kept of the buffer at each step.
      dampening: What is taken off each gradient but the first.

    Returns:
      An Optax transformation whose updates are the buffer.
    """

    def init(params: Any) -> DampenedTraceState:
        started = jax.tree.map(lambda _: jnp.zeros((), bool), params)
        return DampenedTraceState(jax.tree.map(jnp.zeros_like, params), started)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, DampenedTraceState]:
        del params
        trace = jax.tree.map(
            lambda g, b, on: jnp.where(on, decay * b + (1 - dampening) * g, g).astype(b.dtype),
            updates,
            state.trace,
            state.started,
        )
        return trace, DampenedTraceState(trace, jax.tree.map(jnp.ones_like, state.started))

    return optax.GradientTransformation(init, update)
