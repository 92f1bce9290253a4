"""The setting of a run, and its task: the examples' language model behind AdamW."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.cluster.task import Task, make_task
from benchmarks.common.arguments import check_multiples

_LARGEST_NORM = 1.0


@dataclass(frozen=True)
class Config:
    """The setting of a run.

    Attributes:
      steps: The number of steps; the learning rate's schedule depends on it.
      eval_every: Steps between evaluations; divides `steps`.
      processes: The number of replicas, one process on one core each.
      sequences: Sequences of one process in a step.
      layers: Transformer blocks.
      width: Features; a multiple of `heads`.
      heads: Attention heads.
      context: Bytes in a sequence.
      learning_rate: The highest rate; the best of five for the exact run.
      eval_sequences: Held-out sequences in an evaluation, all processes together.
    """

    steps: int = 480
    eval_every: int = 48
    processes: int = 2
    sequences: int = 4
    layers: int = 4
    width: int = 512
    heads: int = 8
    context: int = 64
    learning_rate: float = 5e-4
    eval_sequences: int = 512

    def check(self) -> None:
        """Raises a `ValueError` that names the wrong fields."""
        check_multiples(self, steps="eval_every", width="heads", eval_sequences="processes")


def task_of(config: Config, seed: int) -> Task:
    """Draws the parameters and the data of a seed."""
    from benchmarks.common.language_model import lm
    from benchmarks.convergence.optimizers import schedule

    text = lm.load_corpus()
    model = lm.ModelConfig(config.layers, config.width, config.heads, config.context)
    params = lm.init_params(lm.Transformer(model), seed)
    rate = schedule(config.steps, config.learning_rate)
    together = config.processes * config.sequences
    batches = []
    rates = []
    for step in range(config.steps):
        options = {"seed": seed, "size": together, "context": config.context}
        batches.append(lm.training_batch(text.train, step, **options))
        rates.append(rate(step))
    tokens = np.reshape(batches, (config.steps, config.processes, config.sequences, -1))
    (held_out,) = lm.held_out_batches(
        text.held_out, count=1, size=config.eval_sequences, context=config.context
    )
    others = {"rates": np.array(rates, np.float32), "heads": config.heads}
    return make_task(params, tokens, held_out, largest_norm=_LARGEST_NORM, **others)
