"""The task of a run for both frameworks: parameters, batches, learning rates."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

LEARNING_RATE = 0.01
WEIGHT_DECAY = 0.01  # of AdamW
# Different batches that a process trains on in turn, where nothing is to be learnt from them.
_BATCHES = 16
_SEPARATOR = "/"
# Widths of dense layers, from the input to the classes: 10,020,874 parameters.
MLPS = {"mlp": (784, 2048, 2048, 2048, 10), "tiny-mlp": (64, 128, 128, 10)}
# Layers, width, heads and context: 10,838,400 parameters.
TRANSFORMERS = {"transformer": (6, 384, 6, 64), "tiny-transformer": (1, 32, 2, 16)}


class Task(NamedTuple):
    """The arrays of a run, in the form that both frameworks read."""

    params: dict[str, np.ndarray]  # float32, by their path in Flax, as "block_0/qkv/kernel"
    # (steps, processes, examples, ...): float32 features and int32 classes of each example, or
    # int32 tokens and those that follow
    inputs: np.ndarray
    targets: np.ndarray
    held_inputs: np.ndarray  # (examples, ...), of which each process evaluates its share
    held_targets: np.ndarray
    rates: np.ndarray  # float32 (steps,) learning rates
    heads: Any  # of the transformer's attention; 0 for dense layers with ReLU between them
    largest_norm: Any  # of the gradient before AdamW, beyond which it is clipped; 0 for plain SGD

    @property
    def layers(self) -> int:
        """Counts the transformer's blocks."""
        return sum(name.endswith("qkv/kernel") for name in self.params)

    def rate(self, step: int) -> float:
        """Returns the learning rate of a step; after the last step, the last rate."""
        return float(self.rates[min(step, len(self.rates) - 1)])

    def batch(self, step: int, process: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns inputs and targets of a process."""
        place = (step % len(self.inputs), process)
        return self.inputs[place], self.targets[place]

    def share(self, process: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the inputs and targets that a process evaluates: equally many for each."""
        some = slice(process, None, self.inputs.shape[1])
        return self.held_inputs[some], self.held_targets[some]

    def write(self, path: Path) -> None:
        """Writes the arrays, for `read_task`."""
        arrays = self._asdict()
        for name, leaf in arrays.pop("params").items():
            arrays[_SEPARATOR + name] = leaf
        np.savez(path, allow_pickle=False, **arrays)


def read_task(path: Path) -> Task:
    """Reads a task from the file of `Task.write`."""
    params = {}
    arrays = {}
    with np.load(path) as file:
        for name, array in file.items():
            into = params if name[0] == _SEPARATOR else arrays
            into[name.lstrip(_SEPARATOR)] = array
    return Task(params, **arrays)


def make_task(params: Any, tokens: np.ndarray, held_out: np.ndarray, **others: Any) -> Task:
    """Makes the task of a language model.

    Args:
      params: The parameters of the Flax model.
      tokens: The training data, int32 (steps, processes, sequences, context + 1).
      held_out: The held-out data, int32 (sequences, context + 1).
      **others: The learning rates, the number of heads and the largest norm.
    """
    from flax.traverse_util import flatten_dict  # whose JAX torch does not need

    flat: Any = flatten_dict(params, sep=_SEPARATOR)
    text = (tokens[..., :-1], tokens[..., 1:], held_out[:, :-1], held_out[:, 1:])
    return Task(flat, *text, **others)


def timed_task(model: str, processes: int) -> Task:
    """Draws random data for timing only.

    Args:
      model: A name in `MLPS` or `TRANSFORMERS`.
      processes: The number of processes.
    """
    rng = np.random.default_rng(0)
    others = {"rates": np.full(1, LEARNING_RATE, np.float32), "largest_norm": 0.0}
    if model in TRANSFORMERS:
        from benchmarks.common.language_model import lm

        *_, heads, context = TRANSFORMERS[model]
        params = lm.init_params(lm.Transformer(lm.ModelConfig(*TRANSFORMERS[model])), seed=0)
        shape = (_BATCHES, processes, 2, context + 1)
        tokens = rng.integers(lm.VOCABULARY, size=shape, dtype=np.int32)
        return make_task(params, tokens, tokens[0, :, 0], heads=heads, **others)
    widths = MLPS[model]
    params = {}
    for layer, (inputs, outputs) in enumerate(pairwise(widths)):
        kernel = inputs**-0.5 * rng.standard_normal((inputs, outputs), np.float32)
        params[f"dense_{layer}/kernel"] = kernel
        params[f"dense_{layer}/bias"] = np.zeros(outputs, np.float32)
    x = rng.standard_normal((_BATCHES, processes, 32, widths[0]), np.float32)
    y = rng.integers(widths[-1], size=x.shape[:3], dtype=np.int32)
    return Task(params, x, y, x[0, :, 0], y[0, :, 0], heads=0, **others)
