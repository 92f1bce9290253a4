"""The shapes of a model's parameters, assumed from their number, and its width."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp._base.typing import MatrixDimsFn, PyTree
from jaxcomp._bytes.units import parse
from jaxcomp._lowrank.matrices import plan_leaves

_HEAD_WIDTH = 64
_VOCABULARY = 50_257
_SMALLEST, _LARGEST = 10_000, 10**12


def shapes_of(params: PyTree | int | str) -> tuple[PyTree, list[str]]:
    """The parameters themselves, or a transformer of about so many, shaped like GPT-2 small.

    One layer for every 64 of width; an embedding, shared with the output, of 50,257 rows, or of a
    third of the parameters where these are few.

    Returns:
      The tree, and a sentence that says what was assumed, where something was.

    Raises:
      ValueError: For a number too small for such a model, or beyond any so far.
    """
    if not isinstance(params, (int, np.integer, str)):
        return params, []
    count = round(parse("params", params))
    if not _SMALLEST <= count <= _LARGEST:
        raise ValueError(
            f"Shapes are guessed for {_SMALLEST:,} to {_LARGEST:.0e} parameters, got {count:,}. "
            "Pass the parameters, or their shapes, to jaxcomp.advise."
        )

    def layers(width: int) -> tuple[int, int]:
        number = max(1, width // _HEAD_WIDTH)
        return number, number * width * (12 * width + 13)  # kernels; biases and norms

    width = 4
    while layers(width + 4)[1] + min(_VOCABULARY * (width + 4), count // 3) <= count:
        width += 4
    number, values = layers(width)
    rows = min(_VOCABULARY, (count - values) // width)
    kernels = {"qkv": (width, 3 * width), "out": (width, width)}
    kernels |= {"up": (width, 4 * width), "down": (4 * width, width)}
    layer = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in kernels.items()}
    layer["vectors"] = jax.ShapeDtypeStruct((13 * width,), jnp.float32)
    tree: dict[str, Any] = {f"layer_{i}": layer for i in range(number)}
    tree["embedding"] = jax.ShapeDtypeStruct((rows, width), jnp.float32)
    return tree, [
        f"shapes assumed: a transformer of {number} layers of width {width:,} and an embedding of "
        f"{rows:,} x {width:,}, {values + rows * width:,} parameters in float32; better pass "
        "yours to jaxcomp.advise"
    ]


def typical_width(params: PyTree, matrix_dims: MatrixDimsFn | None = None) -> int:
    """The smaller side of a matrix, as the median over the values of all that can be compressed.

    A transformer's is its width. 1 where there is nothing to compress.
    """
    views = [plan.view for plan in plan_leaves(params, 1, 1.0, matrix_dims) if plan.view]
    sides = sorted((min(v.n_rows, v.n_cols), math.prod(v.shape)) for v in views)
    up_to = np.cumsum([values for _, values in sides])
    return sides[int(np.searchsorted(up_to, up_to[-1] / 2))][0] if sides else 1
