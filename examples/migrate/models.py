"""The models of `from_torch.py` in torch and in Flax, and their data.

The names are equal (``block_0.qkv.weight`` and ``block_0/qkv/kernel``), so the bridge needs no rule
to pair them. Query, key and value are one kernel in both. The models use GELU and not ReLU: at
ReLU's kink, runs that differ by rounding would diverge sooner.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn.functional as F

VOCABULARY, CONTEXT, WIDTH, HEADS, CLASSES = 64, 24, 32, 4, 10
BATCH = 32  # of one replica


def batch(model: str, step: int, replica: int) -> dict[str, np.ndarray]:
    """Draws ``x`` and ``y`` of one replica at one step; images ("cnn") are in torch's NCHW."""
    random = np.random.default_rng([step, replica])
    if model == "cnn":
        y = random.integers(CLASSES, size=BATCH)
        coarse = np.random.default_rng(0).standard_normal((CLASSES, 3, 3, 3))
        patterns = np.kron(coarse, np.ones((4, 4)))
        x = patterns[y] + 0.3 * random.standard_normal((BATCH, 3, 12, 12))
        return {"x": x.astype(np.float32), "y": y.astype(np.int32)}
    # Each token follows from the one before it, three times out of four.
    follows = np.random.default_rng(0).permutation(VOCABULARY)
    tokens = random.integers(VOCABULARY, size=(BATCH, CONTEXT + 1))
    for position in range(1, CONTEXT + 1):
        known = random.random(BATCH) < 0.75
        tokens[known, position] = follows[tokens[known, position - 1]]
    return {"x": tokens[:, :-1].astype(np.int32), "y": tokens[:, 1:].astype(np.int32)}


def gelu(x: torch.Tensor) -> torch.Tensor:
    """Computes the same as ``flax.linen.gelu``."""
    return F.gelu(x, approximate="tanh")


class TorchCNN(torch.nn.Module):
    """Two convolutions and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = torch.nn.Conv2d(3, 16, 3, padding=1)
        self.conv2 = torch.nn.Conv2d(16, 32, 3, padding=1, stride=2)
        self.hidden = torch.nn.Linear(32, 64)
        self.output = torch.nn.Linear(64, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps images (N, 3, H, W) to logits (N, CLASSES)."""
        x = gelu(self.conv2(gelu(self.conv1(x)))).mean((2, 3))
        return self.output(gelu(self.hidden(x)))


class TorchBlock(torch.nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = torch.nn.LayerNorm(WIDTH, eps=1e-6)
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.out = torch.nn.Linear(WIDTH, WIDTH)
        self.norm2 = torch.nn.LayerNorm(WIDTH, eps=1e-6)
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (N, T, WIDTH) to itself."""
        n, t, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(n, t, WIDTH))
        return x + self.down(gelu(self.up(self.norm2(x))))


class TorchTransformer(torch.nn.Module):
    """A decoder of two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.positions = torch.nn.Embedding(CONTEXT, WIDTH)
        self.block_0 = TorchBlock()
        self.block_1 = TorchBlock()
        self.final_norm = torch.nn.LayerNorm(WIDTH, eps=1e-6)
        self.output = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps tokens (N, T) to logits (N, T, VOCABULARY)."""
        x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        return self.output(self.final_norm(self.block_1(self.block_0(x))))


TORCH_MODELS = {"cnn": TorchCNN, "transformer": TorchTransformer}


def torch_loss(model: torch.nn.Module, data: dict[str, np.ndarray]) -> torch.Tensor:
    """Returns the mean cross-entropy."""
    logits = model(torch.from_numpy(data["x"]))
    return F.cross_entropy(logits.flatten(0, -2), torch.from_numpy(data["y"]).long().flatten())


class FlaxCNN(nn.Module):
    """The same as `TorchCNN`, on images (N, H, W, 3)."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps images to logits."""
        x = nn.gelu(nn.Conv(16, (3, 3), padding=1, name="conv1")(x))
        x = nn.gelu(nn.Conv(32, (3, 3), strides=2, padding=1, name="conv2")(x)).mean((1, 2))
        return nn.Dense(CLASSES, name="output")(nn.gelu(nn.Dense(64, name="hidden")(x)))


class FlaxBlock(nn.Module):
    """The same as `TorchBlock`."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (N, T, WIDTH) to itself."""
        n, t, _ = x.shape
        qkv = nn.Dense(3 * WIDTH, name="qkv")(nn.LayerNorm(name="norm1")(x))
        q, k, v = jnp.moveaxis(qkv.reshape(n, t, 3, HEADS, -1), 2, 0)
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + nn.Dense(WIDTH, name="out")(attended.reshape(n, t, WIDTH))
        hidden = nn.gelu(nn.Dense(4 * WIDTH, name="up")(nn.LayerNorm(name="norm2")(x)))
        return x + nn.Dense(WIDTH, name="down")(hidden)


class FlaxTransformer(nn.Module):
    """The same as `TorchTransformer`."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps tokens to logits."""
        positions = nn.Embed(CONTEXT, WIDTH, name="positions")(jnp.arange(x.shape[1]))
        x = nn.Embed(VOCABULARY, WIDTH, name="tokens")(x) + positions
        x = FlaxBlock(name="block_1")(FlaxBlock(name="block_0")(x))
        x = nn.LayerNorm(name="final_norm")(x)
        return nn.Dense(VOCABULARY, use_bias=False, name="output")(x)


FLAX_MODELS = {"cnn": FlaxCNN, "transformer": FlaxTransformer}


def flax_batch(model: str, step: int, replicas: int) -> dict[str, np.ndarray]:
    """Draws the global batch: the batches of all replicas, concatenated, with images in NHWC."""
    shares = [batch(model, step, replica) for replica in range(replicas)]
    data = jax.tree.map(lambda *arrays: np.concatenate(arrays), *shares)
    if model == "cnn":
        data["x"] = np.moveaxis(data["x"], 1, -1)
    return data


def flax_loss(model: nn.Module, params: Any, data: dict[str, jax.Array]) -> jax.Array:
    """Returns the mean cross-entropy."""
    logits = model.apply({"params": params}, data["x"])
    assert isinstance(logits, jax.Array)
    return optax.softmax_cross_entropy_with_integer_labels(logits, data["y"]).mean()
