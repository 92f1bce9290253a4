"""What `benchmarks.cluster` trains in torch."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.common.models import LEARNING_RATE, SIZES, Transformer, make_batches


class Block(nn.Module):
    """A pre-norm transformer block; see `common.models.Transformer`."""

    def __init__(self, sizes: Transformer):
        super().__init__()
        width = sizes.width
        self.heads = sizes.heads
        self.norm_1 = nn.LayerNorm(width)
        self.norm_2 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (batch, context, width) to the same."""
        heads = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class TorchTransformer(nn.Module):
    """See `common.models.Transformer`."""

    def __init__(self, sizes: Transformer):
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Embedding(sizes.context, sizes.width)
        self.blocks = nn.Sequential(*(Block(sizes) for _ in range(sizes.layers)))
        self.norm = nn.LayerNorm(sizes.width)
        self.out = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Maps (batch, context) to (batch, context, vocabulary)."""
        positions = torch.arange(tokens.shape[1])
        return self.out(self.norm(self.blocks(self.tokens(tokens) + self.positions(positions))))


class Problem:
    """A model, its data and its loss."""

    largest_norm = 0.0  # gradients are not clipped

    def __init__(self, model: str, index: int):
        """Draws the data of a process."""
        self._sizes = SIZES[model]
        self._batches = []
        for x, y in make_batches(self._sizes, index):
            self._batches.append((torch.from_numpy(x.copy()), torch.from_numpy(y).long()))

    def model(self, seed: int) -> nn.Module:
        """Makes the model, with the same parameters in every process."""
        torch.manual_seed(seed)
        if isinstance(self._sizes, Transformer):
            return TorchTransformer(self._sizes)
        layers: list[nn.Module] = []
        for inputs, outputs in itertools.pairwise(self._sizes.widths):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        """Makes the optimizer."""
        return torch.optim.SGD(parameters, lr=LEARNING_RATE)

    def rate(self, step: int) -> float:
        """Returns the learning rate of a step."""
        del step
        return LEARNING_RATE

    def batch(self, step: int) -> Any:
        """Returns inputs and targets."""
        return self._batches[step % len(self._batches)]

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Returns the mean cross-entropy."""
        x, y = batch
        return functional.cross_entropy(model(x).flatten(0, -2), y.flatten())

    def evaluate(self, model: nn.Module) -> torch.Tensor:
        """Returns the loss of the first batch."""
        return self.loss(model, self._batches[0])
