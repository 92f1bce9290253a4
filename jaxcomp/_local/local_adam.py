"""Adam for the steps that a replica takes by itself."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxcomp._base.checks import check_int
from jaxcomp._base.typing import AxisName, PyTree
from jaxcomp._mesh.collectives import axis_size


def scale_by_local_adam(
    *,
    axis_name: AxisName,
    start_step: int = 0,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
) -> optax.GradientTransformation:
    r"""Scales as `optax.scale_by_adam`, for the inner optimizer of `local_sgd`.

    Noise makes the square of a replica's gradient up to :math:`W` times that of the mean over
    :math:`W` replicas, and Adam's steps shorter. So from `start_step` on, with its gradient `g`,

    .. math:: v_t = b_2 v_{t-1} + (1 - b_2) \, g_t^2 / W

    and everything else as in Adam. For the same reason clip from there on at :math:`\sqrt{W}` times
    the norm that is right for the mean. docs/local_sgd.md has what both save.

    Args:
      axis_name: The mapped axis (or axes) along which replicas take steps by themselves.
      start_step: That of `local_sgd`, or the steps before the first round: of means, as in Adam.
      b1: Decay of the first moment.
      b2: Decay of the second moment.
      eps: Added to its root.

    Returns:
      A transformation whose state holds that of `optax.scale_by_adam`.

    Raises:
      ValueError: If `start_step` is no count, or when traced without the axis.

    Example:
      >>> import jaxcomp, optax
      >>> adam = jaxcomp.scale_by_local_adam(axis_name="data", start_step=100)
      >>> inner = optax.chain(adam, optax.scale_by_learning_rate(3e-4))
      >>> tx = jaxcomp.local_sgd(inner, sync_every=4, start_step=100, axis_name="data")
    """
    check_int("start_step", start_step, 0)
    begin = optax.scale_by_adam(b1, b2, eps).init

    def init(params: PyTree) -> Any:
        # Where momenta begin anew the steps of a schedule go on, and so do these.
        return optax.ScaleByScheduleState(jnp.zeros([], jnp.int32)), begin(params)

    def update(updates: PyTree, state: Any, params: PyTree | None = None) -> tuple[PyTree, Any]:
        del params
        (steps,), adam = state
        local = axis_size(axis_name) ** -0.5
        scale = jnp.where(steps < start_step, 1.0, local)
        noise = jax.tree.map(lambda g: g * scale.astype(g.dtype), updates)
        mu = optax.tree.update_moment(updates, adam.mu, b1, 1)
        nu = optax.tree.update_moment(noise, adam.nu, b2, 2)
        count = optax.safe_increment(adam.count)
        adam = optax.ScaleByAdamState(count, mu, nu)
        mu = optax.tree.bias_correction(mu, b1, count)
        nu = optax.tree.bias_correction(nu, b2, count)
        updates = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps), mu, nu)
        taken = optax.ScaleByScheduleState(optax.safe_increment(steps))
        return updates, (taken, adam)

    return optax.GradientTransformation(init, update)
