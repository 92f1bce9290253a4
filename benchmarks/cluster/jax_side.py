"""What `benchmarks.cluster` trains in JAX."""

from __future__ import annotations

from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from benchmarks.common.models import LEARNING_RATE, MLP, SIZES, Transformer, make_batches


class FlaxMLP(nn.Module):
    """See `common.models.MLP`."""

    sizes: MLP

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (batch, inputs) to (batch, classes)."""
        for width in self.sizes.widths[1:-1]:
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(self.sizes.widths[-1])(x)


class FlaxTransformer(nn.Module):
    """See `common.models.Transformer`."""

    sizes: Transformer

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps (batch, context) to (batch, context, vocabulary)."""
        sizes = self.sizes
        x = nn.Embed(sizes.vocabulary, sizes.width, name="tokens")(tokens)
        x = x + nn.Embed(sizes.context, sizes.width, name="positions")(jnp.arange(sizes.context))
        for _ in range(sizes.layers):
            x = self._block(x)
        return nn.Dense(sizes.vocabulary, use_bias=False)(nn.LayerNorm(epsilon=1e-5)(x))

    def _block(self, x: jax.Array) -> jax.Array:
        width = self.sizes.width
        qkv = nn.Dense(3 * width)(nn.LayerNorm(epsilon=1e-5)(x))
        heads = qkv.reshape(*x.shape[:2], 3, self.sizes.heads, width // self.sizes.heads)
        q, k, v = jnp.moveaxis(heads, 2, 0)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + nn.Dense(width)(mixed.reshape(x.shape))
        hidden = nn.gelu(nn.Dense(4 * width)(nn.LayerNorm(epsilon=1e-5)(x)), approximate=True)
        return x + nn.Dense(width)(hidden)


class Problem:
    """A model, its data and its loss."""

    def __init__(self, model: str, index: int):
        """Draws the data of a process."""
        sizes = SIZES[model]
        self._module = FlaxMLP(sizes) if isinstance(sizes, MLP) else FlaxTransformer(sizes)
        self._batches = make_batches(sizes, index)
        self.evaluated = jax.jit(self.loss)

    def params(self, seed: int) -> Any:
        """Draws parameters, on the host: every strategy starts from the same values."""
        init = jax.jit(self._module.init)
        return jax.device_get(init(jax.random.key(seed), self._batches[0][0]))

    def optimizer(self, start: int) -> optax.GradientTransformation:
        """Makes the optimizer; `start` is that of the strategy's rounds."""
        del start
        return optax.sgd(LEARNING_RATE)

    def batch(self, step: int) -> Any:
        """Returns inputs and targets."""
        return self._batches[step % len(self._batches)]

    def loss(self, params: Any, batch: Any) -> jax.Array:
        """Returns the mean cross-entropy."""
        x, y = batch
        logits = cast(jax.Array, self._module.apply(params, x))
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    def evaluate(self, params: Any) -> jax.Array:
        """Returns the loss of the first batch."""
        return self.evaluated(params, self._batches[0])
