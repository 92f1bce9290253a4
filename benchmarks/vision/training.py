"""One run of the vision study, on replicas simulated as in `benchmarks.convergence`."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcomp
from benchmarks.convergence.training import AXIS
from benchmarks.vision.task import ResNet, Tree, digits, draw, init_params, logits_of, loss_fn

_EVALUATED_AT_ONCE = 500  # images


@dataclass(frozen=True)
class Config:
    """What all runs have in common.

    Attributes:
      steps: Length of a run; the learning rate's schedule depends on it.
      eval_every: Steps between evaluations; divides `steps`.
      replicas: Simulated replicas.
      batch_size: Images in a step, of one replica.
      blocks: Residual blocks in each of the three stages.
      eval_images: Held-out images in an evaluation, a multiple of 500.
    """

    steps: int = 600
    eval_every: int = 200
    replicas: int = 4
    batch_size: int = 8
    blocks: int = 2
    eval_images: int = 2000

    @property
    def model(self) -> ResNet:
        """The network."""
        return ResNet(blocks=self.blocks)

    def params(self) -> Tree:
        """Shapes of the parameters."""
        return jax.eval_shape(functools.partial(init_params, self.model), 0)


def sgd(config: Config, rate: float) -> optax.GradientTransformation:
    """SGD with momentum 0.9, 5% linear warm-up and a cosine decay to zero."""
    warm = max(1, config.steps // 20)
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, warm, config.steps)
    return optax.sgd(schedule, momentum=0.9)


class Trainer:
    """A reducer in front of SGD. Drawing, gradients and evaluation are compiled once for all."""

    def __init__(self, config: Config, reducer: Any, rate: float):
        """Compiles nothing yet."""
        self.config = config
        self.tx = optax.chain(reducer, sgd(config, rate))
        specs = jaxcomp.state_specs(jax.eval_shape(self.tx.init, config.params()), AXIS)
        own = lambda spec: 0 if spec == jax.P(AXIS) else None  # noqa: E731
        self._axes = jax.tree.map(own, specs, is_leaf=lambda x: isinstance(x, jax.P))
        axes = None, self._axes
        self._apply = jax.jit(jax.vmap(self._one, (*axes, 0), axes, axis_name=AXIS))

    def run(self, seed: int) -> tuple[list[tuple[int, float, float]], float]:
        """Trains from the beginning.

        Args:
          seed: Of the parameters and of the data.

        Returns:
          (steps, held-out loss in nats, held-out accuracy) of every evaluation, and the seconds.
        """
        began, carry, curve = time.monotonic(), self.start(seed), []
        for first in range(0, self.config.steps, self.config.eval_every):
            carry = self.advance(carry, seed, first)
            curve.append((first + self.config.eval_every, *held_out(self.config, carry[0])))
        return curve, time.monotonic() - began

    def start(self, seed: int) -> Tree:
        """Parameters and state before the first step."""
        params = init_params(self.config.model, seed)

        def place(axis: int | None, part: Tree) -> Tree:
            n = self.config.replicas
            return jax.tree.map(lambda x: x if axis is None else jnp.stack([x] * n), part)

        state = jax.tree.map(place, self._axes, self.tx.init(params), is_leaf=lambda x: x is None)
        return params, state

    def advance(self, carry: Tree, seed: int, first: int) -> Tree:
        """The `eval_every` steps from number `first` on."""
        params, state = carry
        for step in range(first, first + self.config.eval_every):
            gradients = _gradients(self.config, params, seed, step)
            params, state = self._apply(params, state, gradients)
        return params, state

    def _one(self, params: Tree, state: Tree, gradients: Tree) -> tuple[Tree, Tree]:
        updates, state = self.tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state


@functools.partial(jax.jit, static_argnums=0)
def _gradients(config: Config, params: Tree, seed: jax.Array, step: jax.Array) -> Tree:
    """Of every replica, of images that no other step and no other replica has."""
    key = jax.random.fold_in(jax.random.key(seed), step)
    shape = config.replicas, config.batch_size
    drawn = draw(digits()[0], key, shape[0] * shape[1])
    batches = jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), drawn)
    gradient = jax.grad(functools.partial(loss_fn, config.model))
    return jax.vmap(gradient, (None, 0))(params, batches)


def held_out(config: Config, params: Tree) -> tuple[float, float]:
    """Loss and accuracy over the same images in every run."""
    parts = range(config.eval_images // _EVALUATED_AT_ONCE)
    return tuple(np.mean([_measured(config, params, part) for part in parts], axis=0).tolist())


@functools.partial(jax.jit, static_argnums=0)
def _measured(config: Config, params: Tree, part: jax.Array) -> jax.Array:
    images, labels = draw(digits()[1], jax.random.key(part), _EVALUATED_AT_ONCE)
    logits = logits_of(config.model, params, images)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.stack([losses.mean(), (logits.argmax(-1) == labels).mean()])
