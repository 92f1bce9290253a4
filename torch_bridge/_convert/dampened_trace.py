"""The one piece of a torch optimizer that optax lacks: momentum with dampening."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


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
