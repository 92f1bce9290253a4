"""The two models, as sizes and data: the frameworks' files build the same ones from these."""

from __future__ import annotations

import dataclasses

import numpy as np

LEARNING_RATE = 0.01
# Different batches that a process trains on in turn.
BATCHES = 16


@dataclasses.dataclass(frozen=True)
class MLP:
    """Dense layers with biases, ReLU between them; softmax cross-entropy."""

    widths: tuple[int, ...]  # from the input to the classes
    batch: int  # examples per process and step


@dataclasses.dataclass(frozen=True)
class Transformer:
    """GPT: pre-norm blocks, packed qkv, GELU, untied output without a bias, no dropout."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    context: int
    batch: int  # sequences per process and step


FULL = {
    # 10,020,874 parameters
    "mlp": MLP(widths=(784, 2048, 2048, 2048, 10), batch=32),
    # 10,868,736 parameters
    "transformer": Transformer(layers=6, width=384, heads=6, vocabulary=256, context=64, batch=2),
}
TINY = {
    "mlp": MLP(widths=(64, 128, 128, 10), batch=8),
    "transformer": Transformer(layers=1, width=32, heads=2, vocabulary=64, context=16, batch=2),
}
SIZES = FULL | {f"tiny-{name}": sizes for name, sizes in TINY.items()}


def make_batches(model: MLP | Transformer, process: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Draws inputs and targets of one process: what is learnt from them is of no interest here.

    Returns:
      `BATCHES` pairs: for the MLP (batch, inputs) float32 and (batch,) int32, for the transformer
      (batch, context) int32 twice.
    """
    rng = np.random.default_rng(process)
    pairs = []
    for _ in range(BATCHES):
        if isinstance(model, MLP):
            x = rng.standard_normal((model.batch, model.widths[0]), np.float32)
            y = rng.integers(model.widths[-1], size=model.batch, dtype=np.int32)
        else:
            shape = (model.batch, model.context + 1)
            tokens = rng.integers(model.vocabulary, size=shape, dtype=np.int32)
            x, y = tokens[:, :-1], tokens[:, 1:]
        pairs.append((x, y))
    return pairs
