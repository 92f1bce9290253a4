"""What `benchmarks.time_to_loss` trains in JAX."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxcomp
from benchmarks.cluster.jax_trainer import AXIS
from benchmarks.common.paths import LANGUAGE_MODEL
from benchmarks.time_to_loss.task import LARGEST_NORM, WEIGHT_DECAY, Config, read_task

sys.path.insert(0, str(LANGUAGE_MODEL))
from lm import ModelConfig, Transformer, loss_fn


class Problem:
    """The language model, its text and AdamW."""

    def __init__(self, folder: str, index: int):
        """Reads what the first process wrote."""
        self._folder = Path(folder)
        self._index = index
        config = Config(**json.loads((self._folder / "config.json").read_text()))
        sizes = ModelConfig(config.layers, config.width, config.heads, config.context)
        self.loss = functools.partial(loss_fn, Transformer(sizes))
        self._evaluated = jax.jit(self.loss)
        self._task = read_task(self._folder / "0.npz")

    def params(self, seed: int) -> Any:
        """Reads the parameters of a seed, whose data are used from now on."""
        self._task = read_task(self._folder / f"{seed}.npz")
        return self._task.tree

    def optimizer(self, start: int) -> optax.GradientTransformation:
        """Makes AdamW behind clipping; from step `start` on for rounds, where that is not 0."""
        rates = jnp.asarray(self._task.rates)

        def rate(step: jax.typing.ArrayLike) -> jax.Array:
            return rates[jnp.minimum(jnp.asarray(step), len(rates) - 1)]

        def norm(step: jax.Array) -> jax.Array:
            return jnp.where(step < start, LARGEST_NORM, 2 * LARGEST_NORM)

        clip = optax.clip_by_global_norm(LARGEST_NORM)
        adam = optax.scale_by_adam()
        if start:
            clip = optax.inject_hyperparams(optax.clip_by_global_norm)(max_norm=norm)
            adam = jaxcomp.scale_by_local_adam(axis_name=AXIS, start_step=start)
        decay = optax.add_decayed_weights(WEIGHT_DECAY)
        return optax.chain(clip, adam, decay, optax.scale_by_learning_rate(rate))

    def batch(self, step: int) -> Any:
        """Returns this process's sequences."""
        return self._task.batches[step % len(self._task.batches), self._index]

    def evaluate(self, params: Any) -> jax.Array:
        """Returns the loss of a share of the held-out text, in nats per byte."""
        return self._evaluated(params, self._task.share(self._index))
