"""One run of the convergence study: the repository's language model on simulated replicas.

All replicas live on one device under ``jax.vmap(axis_name=)``, which runs the code of a cluster.
What they hold alike (parameters, the optimizer's state, right factors) is there once.
"""

from __future__ import annotations

import functools
import sys
import sysconfig
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcomp
from benchmarks.common.arguments import check_sizes
from benchmarks.common.paths import LANGUAGE_MODEL
from benchmarks.convergence.optimizers import optimizer

sys.path.insert(0, str(LANGUAGE_MODEL))
from lm import (
    Corpus,
    ModelConfig,
    Transformer,
    held_out_batches,
    init_params,
    load_corpus,
    loss_fn,
    training_batch,
)

AXIS = "data"
Tree = Any

# Both come with every Python: its library's source, and the C headers that extensions include.
TEXTS = {"library": (None, ".py"), "headers": (Path(sysconfig.get_path("include")), ".h")}

_EVALUATED_AT_ONCE = 64  # sequences


@dataclass(frozen=True)
class Config:
    """What all runs of a study have in common.

    Attributes:
      steps: Length of a run; the learning rate's schedule depends on it.
      eval_every: Steps between evaluations; divides `steps`.
      replicas: Simulated replicas.
      batch_size: Sequences in a step, of one replica.
      layers: Transformer blocks.
      width: Features of the model; a multiple of `heads`.
      heads: Attention heads.
      context: Bytes in a sequence.
      learning_rate: The highest learning rate of the strategies that have no other.
      eval_sequences: Held-out sequences in an evaluation, a multiple of 64.
      text: Of `TEXTS`.
    """

    steps: int = 480
    eval_every: int = 60
    replicas: int = 4
    batch_size: int = 4
    layers: int = 2
    width: int = 128
    heads: int = 4
    context: int = 64
    learning_rate: float = 2e-3
    eval_sequences: int = 256
    text: str = "library"

    def check(self) -> None:
        """Raises a `ValueError` that names what cannot work."""
        check_sizes(self, ("steps", "eval_every"), ("width", "heads"))
        if self.eval_sequences % _EVALUATED_AT_ONCE:
            raise ValueError(f"eval_sequences must be a multiple of {_EVALUATED_AT_ONCE}")
        if self.text not in TEXTS:
            raise ValueError(f"text must be one of {', '.join(TEXTS)}, got {self.text!r}")

    @property
    def model(self) -> Transformer:
        """Makes the language model."""
        return Transformer(ModelConfig(self.layers, self.width, self.heads, self.context))

    def params(self) -> Tree:
        """Returns the shapes of the parameters."""
        return jax.eval_shape(partial(init_params, self.model), 0)


def adamw(config: Config) -> optax.GradientTransformation:
    """Makes AdamW with clipping, 10% warm-up and a cosine decay to 5%, as in the examples."""
    return optimizer("adamw", config.steps, config.learning_rate, 0.9)


class Trainer:
    """A transformation, compiled once for all seeds."""

    def __init__(self, config: Config, tx: optax.GradientTransformation, *, local: bool):
        """Compiles nothing yet.

        Args:
          config: The setting.
          tx: The whole transformation, from local gradients to updates.
          local: Whether parameters differ between replicas.
        """
        self.config = config
        self.tx = tx
        self.local = local
        self.corpus = corpus(config.text)
        specs = jaxcomp.state_specs(jax.eval_shape(tx.init, config.params()), AXIS)

        # What is the same everywhere is not mapped, and so computed once. Local SGD has one type
        # for both branches of its conditional, the one that differs.
        def axis_of(spec: jax.P) -> int | None:
            return 0 if local or spec == jax.P(AXIS) else None

        axes = jax.tree.map(axis_of, specs, is_leaf=lambda x: isinstance(x, jax.P))
        self._axes = (0 if local else None, axes)
        self._chunk = jax.jit(self._steps, donate_argnums=0)
        self._evaluate = jax.jit(partial(loss_fn, config.model))

    def run(self, seed: int) -> list[tuple[int, float]]:
        """Trains from the beginning; the seed is that of the parameters and of the data.

        Returns:
          (steps, held-out loss in nats per byte) of every evaluation.
        """
        carry = self.start(seed)
        curve = []
        for first in range(0, self.config.steps, self.config.eval_every):
            last = first + self.config.eval_every
            carry = self.advance(carry, seed, first, last)
            curve.append((last, self.held_out_loss(carry[0])))
        return curve

    def start(self, seed: int) -> Tree:
        """Returns parameters and state before the first step."""
        params = init_params(self.config.model, seed)

        def placed(axis: int | None, tree: Tree) -> Tree:
            if axis is not None:
                tree = jax.tree.map(lambda x: jnp.stack([x] * self.config.replicas), tree)
            # Copies, because the steps donate them and no buffer may be donated twice.
            return jax.tree.map(jnp.array, tree)

        state = jax.tree.map(placed, self._axes[1], self.tx.init(params), is_leaf=_is_none)
        return placed(self._axes[0], params), state

    def advance(self, carry: Tree, seed: int, first: int, last: int) -> Tree:
        """Takes the steps from number `first` to before `last`."""
        config = self.config
        batches = []
        for step in range(first, last):
            size = config.replicas * config.batch_size
            text = self.corpus.train
            batch = training_batch(text, step, seed=seed, size=size, context=config.context)
            batches.append(batch.reshape(config.replicas, config.batch_size, -1))
        return self._chunk(carry, np.stack(batches)) if batches else carry

    def _steps(self, carry: Tree, batches: jax.Array) -> Tree:
        loss = partial(loss_fn, self.config.model)

        def one(params: Tree, state: Tree, batch: jax.Array) -> tuple[Tree, Tree]:
            updates, state = self.tx.update(jax.grad(loss)(params, batch), state, params)
            return optax.apply_updates(params, updates), state

        mapped = jax.vmap(one, (*self._axes, 0), self._axes, axis_name=AXIS)

        def step(carry: Tree, batch: jax.Array) -> tuple[Tree, None]:
            params, state = carry
            return mapped(params, state, batch), None

        return jax.lax.scan(step, carry, batches)[0]

    def held_out_loss(self, params: Tree) -> float:
        """Evaluates the replicas' mean parameters, in nats per byte."""
        if self.local:
            params = jax.tree.map(lambda x: x.mean(0), params)
        batches = held_out_batches(
            self.corpus.held_out,
            count=self.config.eval_sequences // _EVALUATED_AT_ONCE,
            size=_EVALUATED_AT_ONCE,
            context=self.config.context,
        )
        return float(np.mean([self._evaluate(params, batch) for batch in batches]))


def _is_none(x: Any) -> bool:
    return x is None


@functools.cache
def corpus(text: str) -> Corpus:
    """Reads one of `TEXTS`, once."""
    return load_corpus(*TEXTS[text])


def after_a_quarter(config: Config, tx: optax.GradientTransformation) -> tuple[Tree, Tree]:
    """Returns parameters and state a quarter into a run, of a seed that no other run has."""
    seed = 7
    quarter = max(1, config.steps // 4)
    trainer = Trainer(config, tx, local=False)
    carry = trainer.start(seed)
    for first in range(0, quarter, config.eval_every):
        carry = trainer.advance(carry, seed, first, min(first + config.eval_every, quarter))
    return carry


@functools.cache
def early_momentum(config: Config) -> Tree:
    """Returns Adam's first moment after a quarter of an exact run."""
    tx = optax.chain(jaxcomp.allreduce(axis_name=AXIS), adamw(config))
    return jax.device_get(optax.tree.get(after_a_quarter(config, tx)[1], "mu"))
