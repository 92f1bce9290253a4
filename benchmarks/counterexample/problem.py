r"""A convex problem on which the warm-started factor of PowerSGD goes blind.

The example is our own, in the spirit of Xie, Chen and Yuan (arXiv 2509.11254), who show that
PowerSGD need not converge. Let :math:`\Pi` project onto all but the last :math:`s` of :math:`n`
coordinates. Each of three replicas minimises the same function, with noise where the function is
flat:

.. math::
    f(X) = \tfrac{1}{2(n-s)} \|\Pi X \Pi - \Pi\|_F^2, \qquad
    G_w = \Pi X \Pi - \Pi + \sigma\, \xi_w (I - \Pi), \qquad \xi_w = \pm 1 \text{ evenly}

The mean over the replicas has the mean gradient that descent needs and a bounded variance, and its
noise is never zero, because three signs cannot cancel. Plain gradient descent ignores the noise:
it moves :math:`X` where :math:`f` does not look.

PowerSGD of a rank :math:`r \le s` sees the noise first. Split the right factor into its part
:math:`q = \Pi Q` and the rest, of size 1. While the residual on :math:`\Pi` has a size
:math:`a < \sigma`, an update multiplies :math:`q` by a power of :math:`a / \sigma`.

- **Without error feedback** :math:`a` is the gradient, for ever too small: nothing of it is sent.
- **With it** :math:`a` grows by the gradient's size :math:`g` in each update and exceeds
  :math:`\sigma` after some :math:`\sigma / g` of them. In exact arithmetic :math:`q` then grows
  again, and what was kept goes out all at once, that many steps late. In floating point :math:`q`
  has long been lost in the mean over the replicas, where the noise that they keep cancels: it is
  exactly zero. Then :math:`M Q` and :math:`M^\top P` have no part in :math:`\Pi` either,
  :math:`q` stays zero and the residual grows without a bound.

The exact zero needs noise and gradient in different rows and columns. Rotated by two orthogonal
matrices, the same problem keeps a rounding error in :math:`q`, and error feedback saves it.

A factor that is orthogonal to the gradient is no danger in itself: where :math:`M Q = 0`,
`orthogonalize` takes dense directions, and :math:`M^\top P` sees everything. The noise is what
keeps :math:`M Q` from being zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxcomp

AXIS = "data"
REPLICAS = 3  # odd, so that the noise does not cancel
RATE = 0.01


@dataclass(frozen=True)
class Problem:
    """The problem of this module.

    Attributes:
      sigma: The noise, as a multiple of the gradient at the start.
      noisy: Rank of the noise, s.
      size: Rows and columns, n.
      rotated: Whether noise and gradient share rows and columns.
    """

    sigma: float = 300.0
    noisy: int = 1
    size: int = 32
    rotated: bool = False

    def descend(self, reducer: Any, steps: int, seed: int = 0) -> tuple[np.ndarray, Any]:
        """Gradient descent from zero, with the replicas simulated by `jax.vmap`.

        Args:
          reducer: What averages the gradients.
          steps: How many.
          seed: Of the noise and of the rotation.

        Returns:
          f after every step, which is 1/2 at zero, as a multiple of that; the reducer's last state.
        """
        n, signal = self.size, self.size - self.noisy
        random = np.random.default_rng(seed)
        projection = jnp.diag((jnp.arange(n) < signal).astype(jnp.float32))
        noise = self.sigma * (jnp.eye(n) - projection)
        left, right = (self._rotation(random) for _ in range(2))
        params = jnp.zeros((n, n))
        state = reducer.init(params)
        own = lambda spec: 0 if spec == jax.P(AXIS) else None  # noqa: E731
        specs = jaxcomp.state_specs(state, AXIS)
        axes = jax.tree.map(own, specs, is_leaf=lambda x: isinstance(x, jax.P))
        copied = lambda axis, x: x if axis is None else jnp.stack([x] * REPLICAS)  # noqa: E731
        state = jax.tree.map(
            lambda axis, part: jax.tree.map(lambda x: copied(axis, x), part),
            axes,
            state,
            is_leaf=lambda x: x is None,
        )

        def missing(x: jax.Array) -> jax.Array:
            return projection @ (left.T @ x @ right) @ projection - projection

        def one(x: jax.Array, state: Any, sign: jax.Array) -> tuple[jax.Array, Any]:
            gradient = left @ (missing(x) + sign * noise) @ right.T
            mean, state = reducer.update(gradient, state, x)
            return x - RATE * mean, state

        mapped = jax.vmap(one, (None, axes, 0), (None, axes), axis_name=AXIS)

        def step(carry: Any, signs: jax.Array) -> tuple[Any, jax.Array]:
            x, state = carry
            x, state = mapped(x, state, signs)
            return (x, state), jnp.sum(jnp.square(missing(x))) / signal

        signs = random.choice(np.array([-1, 1], np.float32), (steps, REPLICAS))
        with jax.default_matmul_precision("float32"):
            (_, state), losses = jax.jit(lambda c, s: jax.lax.scan(step, c, s))(
                (params, state), signs
            )
        return np.asarray(losses), jax.device_get(state)

    def _rotation(self, random: np.random.Generator) -> jax.Array:
        """An orthogonal matrix."""
        if not self.rotated:
            return jnp.eye(self.size)
        matrix = random.standard_normal((self.size, self.size))
        return jnp.asarray(np.linalg.qr(matrix)[0], jnp.float32)
