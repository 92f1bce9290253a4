"""What every run trains, written once for both frameworks: parameters, batches, learning rates."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.arguments import check_multiples
from benchmarks.common.paths import LANGUAGE_MODEL

WEIGHT_DECAY = 0.01
LARGEST_NORM = 1.0  # of the averaged gradient; beyond, it is clipped
_SEPARATOR = "/"


@dataclass(frozen=True)
class Config:
    """A run.

    Attributes:
      steps: Its length; the learning rate's schedule depends on it.
      eval_every: Steps between evaluations; divides `steps`.
      processes: Replicas, one process on one core each.
      sequences: In a step, of one process.
      layers: Transformer blocks.
      width: Features; a multiple of `heads`.
      heads: Attention heads.
      context: Bytes in a sequence.
      learning_rate: The highest; of five, the best for the exact run.
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
        """Raises a `ValueError` that names what cannot work."""
        check_multiples(self, steps="eval_every", width="heads", eval_sequences="processes")


@dataclass(frozen=True)
class Task:
    """The arrays of a run, as both frameworks read them.

    Attributes:
      params: float32 initial parameters by their path in the Flax model, as "block_0/qkv/kernel".
      batches: int32 (steps, processes, sequences, context + 1) tokens.
      held_out: int32 (eval_sequences, context + 1) tokens.
      rates: float32 (steps,) learning rates: 10% linear warm-up, cosine decay to 5%.
    """

    params: dict[str, np.ndarray]
    batches: np.ndarray
    held_out: np.ndarray
    rates: np.ndarray

    def share(self, index: int) -> np.ndarray:
        """Returns the held-out sequences that a process evaluates; equally many for each."""
        return self.held_out[index :: self.batches.shape[1]]

    @property
    def tree(self) -> Any:
        """Returns the parameters as Flax nests them."""
        from flax.traverse_util import unflatten_dict  # whose JAX torch does not need

        return unflatten_dict(self.params, sep=_SEPARATOR)


def write_task(config: Config, seed: int, path: Path) -> None:
    """Draws the parameters and the data of a seed, for `read_task`."""
    from flax.traverse_util import flatten_dict

    from benchmarks.convergence.optimizers import schedule

    sys.path.insert(0, str(LANGUAGE_MODEL))
    import lm

    text = lm.load_corpus()
    model = lm.ModelConfig(config.layers, config.width, config.heads, config.context)
    params = lm.init_params(lm.Transformer(model), seed)
    rate = schedule(config.steps, config.learning_rate)
    together = config.processes * config.sequences
    batches = []
    rates = []
    for step in range(config.steps):
        options = {"seed": seed, "size": together, "context": config.context}
        batch = lm.training_batch(text.train, step, **options)
        batches.append(batch.reshape(config.processes, config.sequences, -1))
        rates.append(rate(step))
    (held_out,) = lm.held_out_batches(
        text.held_out, count=1, size=config.eval_sequences, context=config.context
    )
    arrays = {"batches": np.stack(batches), "held_out": held_out}
    arrays["rates"] = np.array(rates, np.float32)
    for name, leaf in flatten_dict(params, sep=_SEPARATOR).items():
        arrays[_SEPARATOR + name] = np.asarray(leaf)
    np.savez(path, allow_pickle=False, **arrays)


def read_task(path: Path) -> Task:
    """Reads what `write_task` wrote."""
    with np.load(path) as file:
        params = {name[1:]: file[name] for name in file.files if name[0] == _SEPARATOR}
        return Task(params, file["batches"], file["held_out"], file["rates"])
