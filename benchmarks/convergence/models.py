"""The kinds of models that the studies train, each with its loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.common.language_model import lm

KINDS = ("transformer", "convolutions", "encoder")
_TAPS = 4  # values that a convolution sees
_MASK = lm.VOCABULARY  # the token in place of a masked byte
_MASKED = 0.15  # share of the bytes


def make(kind: str, config: lm.ModelConfig) -> tuple[nn.Module, Callable[[Any, jax.Array], Any]]:
    """Returns a model, and its loss as a function of (params, tokens).

    Args:
      kind: A name in `KINDS`.
      config: The sizes.
    """
    if kind == "encoder":
        encoder = lm.Transformer(replace(config, vocabulary=lm.VOCABULARY + 1, causal=False))
        return encoder, partial(_masked_loss, encoder)
    model: Any = lm.Transformer(config)
    if kind == "convolutions":
        model = Convolutions(config)
    return model, partial(lm.loss_fn, model)


class Convolutions(nn.Module):
    """A language model of causal convolutions; each sees four times as far as the one before."""

    config: lm.ModelConfig

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps int tokens (batch, length) to float32 logits (batch, length, vocabulary)."""
        config = self.config
        small = nn.initializers.normal(0.02)
        x = nn.Embed(config.vocabulary, config.width, embedding_init=small, name="tokens")(tokens)
        for layer in range(config.layers):
            h = nn.RMSNorm(name=f"norm_{layer}")(x)
            shape = (_TAPS, config.width, 2 * config.width)
            kernel = self.param(f"conv_{layer}", nn.initializers.lecun_normal(), shape)
            h = causal_convolution(h, kernel, dilation=_TAPS**layer)
            back = nn.Dense(config.width, use_bias=False, kernel_init=small, name=f"out_{layer}")
            x = x + back(nn.relu(h))
        x = nn.RMSNorm(name="final_norm")(x)
        return nn.Dense(config.vocabulary, use_bias=False, name="output")(x)


def causal_convolution(x: jax.Array, kernel: jax.Array, dilation: int) -> jax.Array:
    """Convolves (batch, length, width) with a kernel (taps, width, features) along the length.

    One product, because XLA's own convolutions are slow on a CPU under `jax.vmap`.
    """
    length = x.shape[1]
    padded = jnp.pad(x, ((0, 0), ((_TAPS - 1) * dilation, 0), (0, 0)))
    past = [padded[:, tap * dilation : tap * dilation + length] for tap in range(_TAPS)]
    return jnp.einsum("ntlw,twf->nlf", jnp.stack(past, axis=1), kernel)


def _masked_loss(model: nn.Module, params: Any, tokens: jax.Array) -> jax.Array:
    """Returns the mean cross-entropy of the masked bytes, in nats.

    The batch alone determines which bytes are masked, so that a run can be repeated.
    """
    tokens = tokens[:, :-1]
    masked = jax.random.bernoulli(jax.random.key(tokens.sum()), _MASKED, tokens.shape)
    logits: Any = model.apply({"params": params}, jnp.where(masked, _MASK, tokens))
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], axis=-1)[..., 0]
    return -jnp.sum(chosen * masked) / jnp.maximum(1, masked.sum())
