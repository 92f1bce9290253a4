"""Trains the repository's language model on simulated replicas, for the convergence study.

All replicas are on one device under ``jax.vmap(axis_name=)``, which runs the code of a cluster.
Arrays that are equal on all replicas (parameters, optimizer state, right factors) are stored once.
"""

from __future__ import annotations

import functools
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcomp
from benchmarks.common.arguments import check_multiples
from benchmarks.common.language_model import lm
from benchmarks.convergence import models

AXIS = "data"
Tree = Any

# Both come with every Python: its library's source, and the C headers that extensions include.
TEXTS = {"library": (None, ".py"), "headers": (Path(sysconfig.get_path("include")), ".h")}

_EVALUATED_AT_ONCE = 64  # sequences


@dataclass(frozen=True)
class Config:
    """The setting that all runs of a study share.

    Attributes:
      steps: The number of steps in a run; the learning rate's schedule depends on it.
      eval_every: Steps between evaluations; divides `steps`.
      replicas: The number of simulated replicas.
      batch_size: Sequences of one replica in a step.
      layers: Transformer blocks.
      width: Features of the model; a multiple of `heads`.
      heads: Attention heads.
      context: Bytes in a sequence.
      learning_rate: The highest learning rate of strategies without their own.
      eval_sequences: Held-out sequences in an evaluation, a multiple of 64.
      text: A name in `TEXTS`.
      kind: A name in `models.KINDS`.
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
    kind: str = "transformer"

    def check(self) -> None:
        """Raises a `ValueError` that names the wrong fields."""
        check_multiples(self, steps="eval_every", width="heads")
        if self.eval_sequences % _EVALUATED_AT_ONCE:
            raise ValueError(f"eval_sequences must be a multiple of {_EVALUATED_AT_ONCE}")
        if self.text not in TEXTS:
            raise ValueError(f"text must be one of {', '.join(TEXTS)}, got {self.text!r}")
        if self.kind not in models.KINDS:
            raise ValueError(f"kind must be one of {', '.join(models.KINDS)}, got {self.kind!r}")

    @property
    def model(self) -> Any:
        """Makes the model."""
        return models.make(self.kind, self._sizes)[0]

    @property
    def loss(self) -> Callable[[Tree, jax.Array], jax.Array]:
        """Makes the loss, a function of (params, tokens)."""
        return models.make(self.kind, self._sizes)[1]

    @property
    def _sizes(self) -> lm.ModelConfig:
        return lm.ModelConfig(self.layers, self.width, self.heads, self.context)

    @property
    def tokens(self) -> int:
        """Counts the tokens in a step of all replicas together."""
        return self.replicas * self.batch_size * self.context

    def params(self) -> Tree:
        """Returns the shapes of the parameters."""
        return jax.eval_shape(partial(lm.init_params, self.model), 0)


class Trainer:
    """A transformation, compiled once for all seeds and learning rates."""

    def __init__(self, config: Config, tx: optax.GradientTransformation, *, local: bool = False):
        """Stores the arguments; compiles nothing.

        Args:
          config: The setting.
          tx: The whole transformation, from local gradients to updates. A transformation that
            differs only in its state, as `optimizer` makes for another rate, may replace it.
          local: Whether parameters differ between replicas.
        """
        self.config = config
        self.tx = tx
        self._local = local
        self._corpus = corpus(config.text)
        specs = jaxcomp.state_specs(jax.eval_shape(tx.init, config.params()), AXIS)

        # What is the same everywhere is not mapped, and so computed once. Local SGD has one type
        # for both branches of its conditional, the one that differs.
        def axis_of(spec: jax.P) -> int | None:
            return 0 if local or spec == jax.P(AXIS) else None

        axes = jax.tree.map(axis_of, specs, is_leaf=lambda x: isinstance(x, jax.P))
        self._axes = (0 if local else None, axes)
        self._chunk = jax.jit(partial(self._steps, tx.update), donate_argnums=0)
        self._evaluate = jax.jit(config.loss)

    def run(self, seed: int, carry: Tree = None, first: int = 0) -> list[tuple[int, float]]:
        """Trains to the end; the seed determines the parameters and the data.

        Args:
          seed: The seed.
          carry: Parameters and state before step `first`; None for those of `start`.
          first: The number of steps that were made.

        Returns:
          (steps, held-out loss in nats per byte) for every evaluation.
        """
        if carry is None:
            carry = self.start(seed)
        curve = []
        every = self.config.eval_every
        for last in range(every, self.config.steps + 1, every):
            carry = self.advance(carry, seed, first, last)
            curve.append((last, self.held_out_loss(carry[0])))
            first = last
        return curve

    def start(self, seed: int) -> Tree:
        """Returns parameters and state before the first step."""
        params = lm.init_params(self.config.model, seed)
        return self.place((params, self.tx.init(params)))

    def place(self, carry: Tree) -> Tree:
        """Gives every replica a copy of what differs between replicas."""

        def placed(axis: int | None, tree: Tree) -> Tree:
            if axis is not None:
                tree = jax.tree.map(lambda x: jnp.stack([x] * self.config.replicas), tree)
            # Copies, because the steps donate them and no buffer may be donated twice.
            return jax.tree.map(jnp.array, tree)

        return jax.tree.map(placed, self._axes, carry, is_leaf=lambda x: x is None)

    def advance(self, carry: Tree, seed: int, first: int, last: int) -> Tree:
        """Takes the steps from number `first` to before `last`."""
        config = self.config
        size = config.replicas * config.batch_size
        options = {"seed": seed, "size": size, "context": config.context}
        batches = []
        for step in range(first, last):
            batch = lm.training_batch(self._corpus.train, step, **options)
            batches.append(batch.reshape(config.replicas, config.batch_size, -1))
        return self._chunk(carry, np.stack(batches)) if batches else carry

    def _steps(self, update: Any, carry: Tree, batches: jax.Array) -> Tree:
        gradient = jax.grad(self.config.loss)

        def one(carry: Tree, batch: jax.Array) -> tuple[Tree, None]:
            params, state = carry
            updates, state = update(gradient(params, batch), state, params)
            return (optax.apply_updates(params, updates), state), None

        step = jax.vmap(one, (self._axes, 0), (self._axes, None), axis_name=AXIS)
        return jax.lax.scan(step, carry, batches)[0]

    def held_out_loss(self, params: Tree) -> float:
        """Evaluates the replicas' mean parameters, in nats per byte."""
        if self._local:
            params = jax.tree.map(lambda x: x.mean(0), params)
        batches = lm.held_out_batches(
            self._corpus.held_out,
            count=self.config.eval_sequences // _EVALUATED_AT_ONCE,
            size=_EVALUATED_AT_ONCE,
            context=self.config.context,
        )
        return float(np.mean([self._evaluate(params, batch) for batch in batches]))


@functools.cache
def corpus(text: str) -> lm.Corpus:
    """Reads one of `TEXTS`; a second call returns the same."""
    return lm.load_corpus(*TEXTS[text])
