"""The torch models of the benchmarks over links, with the parameters of a task."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks.cluster.task import Task


class Block(nn.Module):
    """Equals `lm.Block`, with the names of the Flax model."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
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
    """Equals `lm.Transformer`."""

    def __init__(self, layers: int, vocabulary: int, context: int, width: int, heads: int):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        for layer in range(layers):
            self.add_module(f"block_{layer}", Block(width, heads))
        self.layers = layers
        self.final_norm = nn.RMSNorm(width, eps=1e-6)
        self.output = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Maps (batch, context) to (batch, context, vocabulary)."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for layer in range(self.layers):
            x = self.get_submodule(f"block_{layer}")(x)
        return self.output(self.final_norm(x))


def make_model(task: Task) -> nn.Module:
    """Makes the model of a task, with its parameters."""
    params = task.params
    if task.heads:
        vocabulary = len(params["tokens/embedding"])
        context, width = params["positions/embedding"].shape
        heads = int(task.heads)
        model: nn.Module = Transformer(task.layers, vocabulary, context, width, heads)
    else:
        parts: OrderedDict[str, nn.Module] = OrderedDict()
        for path, kernel in params.items():
            if path.endswith("kernel"):
                name = path.partition("/")[0]
                parts[name] = nn.Linear(*kernel.shape)
                parts[f"{name}_relu"] = nn.ReLU()
        parts.popitem()  # the classes have none
        model = nn.Sequential(parts)
    state = {}
    for path, leaf in params.items():
        *parents, name = path.split("/")
        # Flax multiplies from the right; a torch kernel lies the other way round.
        values = np.ascontiguousarray(leaf.T if name == "kernel" else leaf)
        kind = "bias" if name == "bias" else "weight"
        state[".".join([*parents, kind])] = torch.from_numpy(values)
    model.load_state_dict(state)
    return model
