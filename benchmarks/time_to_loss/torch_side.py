"""What `benchmarks.time_to_loss` trains in torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks.time_to_loss.task import LARGEST_NORM, WEIGHT_DECAY, Config, read_task


class Block(nn.Module):
    """See `lm.Block`; the names are those of the Flax model."""

    def __init__(self, config: Config):
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.attention_norm = nn.RMSNorm(width, eps=1e-6)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width, eps=1e-6)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (batch, context, width) to the same."""
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp_out(functional.relu(self.mlp_in(self.mlp_norm(x))))


class Transformer(nn.Module):
    """See `lm.Transformer`."""

    def __init__(self, config: Config, vocabulary: int):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        for layer in range(config.layers):
            self.add_module(f"block_{layer}", Block(config))
        self.layers = config.layers
        self.final_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.output = nn.Linear(config.width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Maps (batch, context) to (batch, context, vocabulary)."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for layer in range(self.layers):
            x = self.get_submodule(f"block_{layer}")(x)
        return self.output(self.final_norm(x))


def make_model(config: Config, params: dict[str, np.ndarray]) -> Transformer:
    """Makes the model with the parameters of the Flax model."""
    model = Transformer(config, len(params["tokens/embedding"]))
    state = {}
    for path, leaf in params.items():
        *parents, name = path.split("/")
        # Flax multiplies from the right; a torch kernel lies the other way round.
        state[".".join([*parents, "weight"])] = torch.from_numpy(
            np.ascontiguousarray(leaf.T if name == "kernel" else leaf)
        )
    model.load_state_dict(state)
    return model


def loss_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Computes `lm.loss_fn`."""
    logits = model(tokens[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Problem:
    """The language model, its text and AdamW."""

    largest_norm = LARGEST_NORM

    def __init__(self, folder: str, index: int):
        """Reads what the first process wrote."""
        self._folder = Path(folder)
        self._index = index
        self._config = Config(**json.loads((self._folder / "config.json").read_text()))
        self._task = read_task(self._folder / "0.npz")
        self.loss = loss_of

    def model(self, seed: int) -> nn.Module:
        """Makes the model with the parameters of a seed, whose data are used from now on."""
        self._task = read_task(self._folder / f"{seed}.npz")
        return make_model(self._config, self._task.params)

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        """Makes AdamW."""
        return torch.optim.AdamW(parameters, lr=0.0, weight_decay=WEIGHT_DECAY, fused=True)

    def rate(self, step: int) -> float:
        """Returns the learning rate of a step."""
        return float(self._task.rates[min(step, len(self._task.rates) - 1)])

    def batch(self, step: int) -> torch.Tensor:
        """Returns this process's sequences."""
        tokens = self._task.batches[step % len(self._task.batches), self._index]
        return torch.from_numpy(tokens).long()

    def evaluate(self, model: nn.Module) -> torch.Tensor:
        """Returns the loss of a share of the held-out text, in nats per byte."""
        return loss_of(model, torch.from_numpy(self._task.share(self._index)).long())
