"""The torch side: DistributedDataParallel with its hooks and AdamW, over gloo."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks.cluster import torch_trainer as cluster
from benchmarks.cluster.plan import Strategy
from benchmarks.time_to_loss.task import LARGEST_NORM, WEIGHT_DECAY, Config, Task, read_task

_PORT = 29_511


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
        """From and to (batch, context, width)."""
        batch, context, width = x.shape
        qkv = self.qkv(self.attention_norm(x))
        q, k, v = qkv.view(batch, context, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, context, width))
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
        """From (batch, context) to (batch, context, vocabulary)."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for layer in range(self.layers):
            x = self.get_submodule(f"block_{layer}")(x)
        return self.output(self.final_norm(x))


def make_model(config: Config, params: dict[str, np.ndarray]) -> Transformer:
    """The model with the parameters of the Flax model."""
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
    """See `lm.loss_fn`."""
    logits = model(tokens[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class TorchTrainer:
    """One process of a torch job; see `process.Trainer`."""

    def __init__(self, folder: Path, index: int, processes: int, address: str):
        """Joins the other processes."""
        cluster.join(index, processes, f"{address}:{_PORT}")
        self._folder, self._index = folder, index
        self._config = Config(**json.loads((folder / "config.json").read_text()))
        self.parameters = sum(x.size for x in read_task(folder / "0.npz").params.values())
        self._steps = 0

    def start(self, strategy: Strategy, seed: int) -> None:
        """See `process.Trainer`."""
        self._task: Task = read_task(self._folder / f"{seed}.npz")
        self._wrapped: Any = None
        self._model = make_model(self._config, self._task.params)
        self._wrapped = cluster.data_parallel(self._model, strategy)
        self._optimizer: Any = torch.optim.AdamW(
            self._model.parameters(), lr=0.0, weight_decay=WEIGHT_DECAY, fused=True
        )
        self._optimizer = cluster.averaged_locally(self._optimizer, strategy)
        self._steps, self._call = 0, strategy.round_steps

    def train(self, steps: Sequence[int]) -> list[float]:
        """See `process.Trainer`."""
        seconds = []
        for step in steps:
            tokens = self._task.batches[step % len(self._task.batches), self._index]
            batch = torch.from_numpy(tokens).long()
            rate = float(self._task.rates[min(self._steps, len(self._task.rates) - 1)])
            began = time.perf_counter()
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.zero_grad()
            loss_of(self._wrapped, batch).backward()
            nn.utils.clip_grad_norm_(self._model.parameters(), LARGEST_NORM)
            self._optimizer.step()
            seconds.append(time.perf_counter() - began)
            self._steps += 1
        calls = range(0, len(seconds), self._call)
        return [sum(seconds[first : first + self._call]) for first in calls]

    def held_out_loss(self) -> float:
        """See `process.Trainer`."""
        own = torch.from_numpy(self._task.share(self._index)).long()
        with torch.no_grad():
            loss = loss_of(self._model, own).item()
        if not math.isfinite(loss):
            raise FloatingPointError("the held-out loss is not finite")
        return loss
