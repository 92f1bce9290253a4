"""The task: which handwritten digit stands in a cluttered image; a small residual network.

scikit-learn ships 1,797 digits of 8 x 8 pixels. Each is turned, sheared, resized and placed
anywhere in a larger image, partly hidden behind a piece of another digit, with noise. Training
images are drawn anew in every step, so that no image comes twice and the task is not learnt by
heart; held-out images are made of digits that are never trained on.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.scipy.ndimage import map_coordinates
from sklearn.datasets import load_digits

SIZE = 16  # rows and columns of an image
CLASSES = 10
HELD_OUT = 500  # digits

Tree = Any


class Digits(NamedTuple):
    """Digits as they come; (n, 8, 8) float32 in [0, 1] and (n,) int32."""

    images: np.ndarray
    labels: np.ndarray


@functools.cache
def digits() -> tuple[Digits, Digits]:
    """Those to train on and those held out, the last 500, which other people wrote."""
    bunch: Any = load_digits()
    images = np.asarray(bunch.images / 16, np.float32)
    labels = np.asarray(bunch.target, np.int32)
    return Digits(images[:-HELD_OUT], labels[:-HELD_OUT]), Digits(
        images[-HELD_OUT:], labels[-HELD_OUT:]
    )


def draw(source: Digits, key: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Images made of random digits.

    Args:
      source: The digits.
      key: Of all that is random.
      count: How many.

    Returns:
      ``(count, SIZE, SIZE, 1)`` float32 and the labels, ``(count,)`` int32.
    """
    keys = jax.random.split(key, count)
    images, labels = map(jnp.asarray, source)
    return jax.vmap(functools.partial(_draw_one, images, labels))(keys)


def _draw_one(images: jax.Array, labels: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    which, place, other, hides, noise = jax.random.split(key, 5)
    chosen, hiding = jax.random.randint(which, (2,), 0, len(labels))
    image = _placed(images[chosen], place)
    # A band of another digit, somewhere across the image.
    first = jax.random.randint(hides, (), 0, SIZE - 3)
    band = (jnp.arange(SIZE) >= first) & (jnp.arange(SIZE) < first + 3)
    hidden = jnp.maximum(image, _placed(images[hiding], other))
    image = jnp.where(band[:, None], hidden, image)
    image += 0.1 * jax.random.normal(noise, image.shape)
    return image[..., None] - 0.2, labels[chosen]


def _placed(digit: jax.Array, key: jax.Array) -> jax.Array:
    """The digit turned by up to 30 degrees, sheared, resized and shifted, in a larger image."""
    low = jnp.array([-0.52, -0.3, 0.55, -2.0, -2.0])
    high = jnp.array([0.52, 0.3, 0.8, 2.0, 2.0])
    angle, shear, step, down, right = jax.random.uniform(key, (5,), minval=low, maxval=high)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    turn = step * jnp.array([[cos, shear * cos - sin], [sin, shear * sin + cos]])
    lines = jnp.arange(SIZE, dtype=jnp.float32)
    grid = jnp.stack(jnp.meshgrid(lines, lines, indexing="ij"), -1)
    offset = grid - (SIZE - 1) / 2 - jnp.stack([down, right])
    at = offset @ turn.T + (digit.shape[0] - 1) / 2
    return map_coordinates(digit, list(jnp.moveaxis(at, -1, 0)), order=1, mode="constant")


class Conv(nn.Module):
    """A convolution as one matrix product of patches, and so fast on CPU in loops and under vmap.

    Its kernel has the layout of `flax.linen.Conv`, ``(*window, in, out)``.
    """

    features: int
    window: int = 3
    stride: int = 1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """``(n, rows, cols, in)`` to ``(n, rows / stride, cols / stride, features)``."""
        shape = (self.window, self.window, x.shape[-1], self.features)
        kernel = self.param("kernel", nn.initializers.he_normal(), shape)
        rows, cols = x.shape[1:3]
        edge = self.window // 2
        padded = jnp.pad(x, ((0, 0), (edge, edge), (edge, edge), (0, 0)))
        patches = [
            padded[:, i : i + rows : self.stride, j : j + cols : self.stride]
            for i in range(self.window)
            for j in range(self.window)
        ]
        return jnp.concatenate(patches, -1) @ kernel.reshape(-1, self.features)


class ResNet(nn.Module):
    """A strided stem and three stages of residual blocks with group normalisation."""

    widths: tuple[int, ...] = (16, 32, 64)
    blocks: int = 2

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Logits ``(n, CLASSES)`` of images ``(n, SIZE, SIZE, 1)``."""
        norm = functools.partial(nn.GroupNorm, num_groups=8)
        x = Conv(self.widths[0], stride=2, name="stem")(images)
        for stage, width in enumerate(self.widths):
            for block in range(self.blocks):
                name, stride = f"stage{stage}_block{block}", 1 + bool(stage and not block)
                h = nn.relu(norm(name=f"{name}_norm1")(x))
                if stride > 1:
                    x = Conv(width, 1, stride, name=f"{name}_shortcut")(h)
                h = Conv(width, stride=stride, name=f"{name}_conv1")(h)
                h = nn.relu(norm(name=f"{name}_norm2")(h))
                x = x + Conv(width, name=f"{name}_conv2")(h)
        x = nn.relu(norm(name="norm")(x)).mean((1, 2))
        return nn.Dense(CLASSES, name="output")(x)


def init_params(model: ResNet, seed: int) -> Tree:
    """The network's parameters before the first step."""
    return model.init(jax.random.key(seed), jnp.zeros((1, SIZE, SIZE, 1)))["params"]


def logits_of(model: ResNet, params: Tree, images: jax.Array) -> jax.Array:
    """What the network says of images."""
    return model.apply({"params": params}, images)  # pyright: ignore[reportReturnType]


def loss_fn(model: ResNet, params: Tree, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Mean cross entropy in nats."""
    images, labels = batch
    logits = logits_of(model, params, images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
