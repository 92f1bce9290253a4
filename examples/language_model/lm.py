"""Byte-level language modelling on the source of Python's own standard library.

This file has the data, the model, the loss and the held-out evaluation of every example and study
in this repository. Nothing is downloaded: the text is the `.py` files of the interpreter. Devices
and communication are in `training.py`.
"""

from __future__ import annotations

import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

VOCABULARY = 256  # one token per byte value

# Tests are a third of the library and repetitive; the other folders are not Python's own source.
SKIPPED_DIRECTORIES = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
)
HELD_OUT_SHARE = 10  # one file in ten is never trained on


class Corpus(NamedTuple):
    """The text, as bytes (uint8), split by file."""

    train: np.ndarray
    held_out: np.ndarray  # only evaluated on


def source_files(root: Path | None = None, suffix: str = ".py") -> list[tuple[str, bytes]]:
    """Lists (path, content) of the source files below a directory, in the order of the paths.

    `root` is the running interpreter's standard library by default, which is the same on every
    machine with the same Python. Unreadable and empty files are left out.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    files = []
    for path in root.rglob(f"*{suffix}"):
        relative = path.relative_to(root)
        # `_sysconfigdata` is written when Python is built and differs from machine to machine.
        if SKIPPED_DIRECTORIES & set(relative.parts) or path.name.startswith("_sysconfigdata"):
            continue
        try:
            content = path.read_bytes()
        except OSError:
            continue
        if content:
            files.append((relative.as_posix(), content))
    return sorted(files)


def load_corpus(root: Path | None = None, suffix: str = ".py") -> Corpus:
    """Reads the corpus and splits it by file.

    Only a checksum of its path decides whether a file is held out. So a file stays on its side
    when other files come or go, and training never uses a held-out file.

    Raises:
      ValueError: There is no text (some distributions have the library without its source).
    """
    sides: tuple[list[bytes], list[bytes]] = ([], [])
    for name, content in source_files(root, suffix):
        sides[zlib.crc32(name.encode()) % HELD_OUT_SHARE == 0].append(content)
    if not (sides[0] and sides[1]):
        raise ValueError(
            "the standard library's source was not found next to this interpreter; "
            "use a Python that ships its .py files"
        )
    train, held_out = (np.frombuffer(b"\n".join(side), np.uint8) for side in sides)
    return Corpus(train, held_out)


def training_batch(
    text: np.ndarray, step: int, *, seed: int, size: int, context: int
) -> np.ndarray:
    """Draws the global batch of one step: int32 (size, context + 1).

    The last token of a row is only a target. The batch depends on the seed and the step, and not on
    earlier batches or on the number of replicas. So a resumed run on any number of devices sees the
    same data as an uninterrupted run.
    """
    starts = np.random.default_rng((seed, step)).integers(0, len(text) - context, size)
    return text[starts[:, None] + np.arange(context + 1)].astype(np.int32)


def held_out_batches(text: np.ndarray, *, count: int, size: int, context: int) -> list[np.ndarray]:
    """Returns `count` evenly spaced batches, shaped as for training, the same for every run."""
    starts = np.linspace(0, len(text) - context - 1, count * size).astype(np.int64)
    windows = text[starts[:, None] + np.arange(context + 1)].astype(np.int32)
    return list(windows.reshape(count, size, context + 1))


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the transformer."""

    layers: int = 4
    width: int = 256  # features of the residual stream; a multiple of `heads`
    heads: int = 4
    context: int = 128  # longest sequence, in bytes
    dtype: Any = jnp.float32  # of the activations; parameters and the loss stay in float32
    vocabulary: int = VOCABULARY
    causal: bool = True  # False: every byte attends to the whole row, as in an encoder


class Block(nn.Module):
    """One pre-norm transformer block: self-attention, then a ReLU layer of four widths."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (batch, length, width) to the same shape."""
        config = self.config
        dense = {"use_bias": False, "dtype": config.dtype}
        # Each addition to the stream starts small, so depth does not change the stream's scale.
        to_stream = nn.initializers.normal(0.02 / np.sqrt(2 * config.layers))

        h = nn.RMSNorm(dtype=config.dtype, name="attention_norm")(x)
        # One packed kernel: a larger matrix compresses better than three small ones.
        qkv = nn.Dense(3 * config.width, name="qkv", **dense)(h)
        qkv = qkv.reshape(*qkv.shape[:-1], 3, config.heads, config.width // config.heads)
        h = jax.nn.dot_product_attention(*jnp.moveaxis(qkv, -3, 0), is_causal=config.causal)
        h = h.reshape(x.shape)
        x = x + nn.Dense(config.width, kernel_init=to_stream, name="attention_out", **dense)(h)

        h = nn.RMSNorm(dtype=config.dtype, name="mlp_norm")(x)
        h = nn.relu(nn.Dense(4 * config.width, name="mlp_in", **dense)(h))
        return x + nn.Dense(config.width, kernel_init=to_stream, name="mlp_out", **dense)(h)


class Transformer(nn.Module):
    """A decoder-only transformer over bytes, with learned positions and untied output layer."""

    config: ModelConfig

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps int tokens (batch, length) to float32 logits (batch, length, vocabulary)."""
        config = self.config
        small = nn.initializers.normal(0.02)
        dense = {"use_bias": False, "dtype": config.dtype}
        embed = {"features": config.width, "embedding_init": small, "dtype": config.dtype}
        x = nn.Embed(config.vocabulary, name="tokens", **embed)(tokens)
        x = x + nn.Embed(config.context, name="positions", **embed)(jnp.arange(tokens.shape[-1]))
        for layer in range(config.layers):
            x = Block(config, name=f"block_{layer}")(x)
        x = nn.RMSNorm(dtype=config.dtype, name="final_norm")(x)
        logits = nn.Dense(config.vocabulary, name="output", **dense)(x)
        return logits.astype(jnp.float32)


def init_params(model: Transformer, seed: int) -> Any:
    """Makes the initial float32 parameters; they depend on the seed only."""
    # Under `jit`, because one by one the initialisers' operations take longer to compile.
    return jax.jit(model.init)(jax.random.key(seed), jnp.zeros((1, 1), jnp.int32))["params"]


def loss_fn(model: Transformer, params: Any, tokens: jax.Array) -> jax.Array:
    """Returns the mean cross-entropy of each next byte, in nats; tokens: (batch, context + 1)."""
    logits = model.apply({"params": params}, tokens[:, :-1])
    assert isinstance(logits, jax.Array)  # for the type checker: nothing mutable was asked for
    log_probabilities = jax.nn.log_softmax(logits)
    targets = tokens[:, 1:, None]
    return -jnp.take_along_axis(log_probabilities, targets, axis=-1).mean()
