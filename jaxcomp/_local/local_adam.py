"""Adam for local steps, which each replica takes with its own gradient.

It goes into the inner optimizer of `local_sgd`. The second moment of a local gradient is larger
than that of the mean of many replicas, because the noise does not cancel, and Adam's steps would
shrink when the local steps begin. The squares are scaled so that they stay about as large.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxcomp._base.checks import answers_other_names, check_int, check_number
from jaxcomp._base.typing import AxisName, PyTree
from jaxcomp._mesh.collectives import axis_size


@answers_other_names
def scale_by_local_adam(
    *,
    axis_name: AxisName,
    start_step: int = 0,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
) -> optax.GradientTransformation:
    r"""Scales gradients like `optax.scale_by_adam`, corrected for the noise of local gradients.

    Use it in the inner optimizer of `local_sgd`. Because of noise, the square of one replica's
    gradient is up to :math:`W` times the square of the mean over :math:`W` replicas, which makes
    Adam's steps shorter. So from `start_step` on, with the replica's gradient :math:`g`,

    .. math:: v_t = b_2 v_{t-1} + (1 - b_2) \, g_t^2 / W

    and everything else is as in Adam. For the same reason, clip local gradients at :math:`\sqrt{W}`
    times the norm that suits the mean. docs/local_sgd.md shows how much both save.

    Args:
      axis_name: The mapped axis (or axes) of the replicas that take local steps.
      start_step: The `start_step` of `local_sgd`, or the number of steps before the first round.
        Before that step gradients are averaged, and the update is Adam's.
      b1: Decay of the first moment, below 1.
      b2: Decay of the second moment, below 1.
      eps: Added to the root of the second moment; not negative.

    Returns:
      A transformation whose state holds that of `optax.scale_by_adam`.

    Raises:
      ValueError: If an argument is unusable; when traced, if the axis is not bound.

    Example:
      >>> import jaxcomp, optax
      >>> adam = jaxcomp.scale_by_local_adam(axis_name="data", start_step=100)
      >>> inner = optax.chain(adam, optax.scale_by_learning_rate(3e-4))
      >>> tx = jaxcomp.local_sgd(inner, sync_every=4, start_step=100, axis_name="data")
    """
    check_int("start_step", start_step, 0)
    check_number("b1", b1, 0, below=1)
    check_number("b2", b2, 0, below=1)
    check_number("eps", eps, 0)
    begin = optax.scale_by_adam(b1, b2, eps).init

    def init(params: PyTree) -> Any:
        # A reset of momenta keeps the counts of schedules, so it keeps this count too.
        return optax.ScaleByScheduleState(jnp.zeros([], jnp.int32)), begin(params)

    def update(updates: PyTree, state: Any, params: PyTree | None = None) -> tuple[PyTree, Any]:
        del params
        (steps,), adam = state
        replicas = axis_size(axis_name)
        scale = jnp.where(steps < start_step, 1.0, replicas**-0.5)
        # The root of the factor, because `update_moment` squares.
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
