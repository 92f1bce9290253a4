"""The shapes of a model of which only the number of parameters is known, and its width."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp._base.typing import MatrixDimsFn, PyTree
from jaxcomp._bytes.units import parse
from jaxcomp._lowrank.matrices import plan_leaves

_HEAD_WIDTH = 64
_VOCABULARY = 50_257
_SMALLEST = 10_000
_LARGEST = 10**12


def shapes_of(params: PyTree) -> tuple[PyTree, str]:
    """Returns the parameters themselves, or a transformer of about so many, like GPT-2 small.

    It has one layer for every 64 of width, and an embedding, shared with the output, of 50,257
    rows, or of a third of the parameters where these are few.

    Args:
      params: Arrays or shapes; or a number of parameters, 124_000_000 or ``"124M"``.

    Returns:
      The tree, and a sentence that says what was assumed, or none.

    Raises:
      ValueError: For a number too small for such a model, or beyond any so far.
    """
    if not isinstance(params, (int, np.integer, str)):
        return params, ""
    count = round(parse("params", params))
    if not _SMALLEST <= count <= _LARGEST:
        raise ValueError(
            f"Shapes are guessed for {_SMALLEST:,} to {_LARGEST:.0e} parameters, got {count:,}. "
            "Pass the parameters, or their shapes, to jaxcomp.advise."
        )
    width = 4
    while _values(width + 4) + min(_VOCABULARY * (width + 4), count // 3) <= count:
        width += 4
    layers = _layers(width)
    rows = min(_VOCABULARY, (count - _values(width)) // width)
    sizes = [(1, 3), (1, 1), (1, 4), (4, 1)]  # qkv, out, up, down
    shapes: list[tuple[int, ...]] = [(a * width, b * width) for a, b in sizes]
    shapes += [(13 * width,)]  # biases and norms
    layer = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    embedding = jax.ShapeDtypeStruct((rows, width), jnp.float32)
    return {"embedding": embedding, "layers": layers * [layer]}, (
        f"shapes assumed: a transformer of {layers} layers of width {width:,} and an embedding of "
        f"{rows:,} x {width:,}, {_values(width) + rows * width:,} parameters in float32; better "
        "pass yours to jaxcomp.advise"
    )


def _layers(width: int) -> int:
    return max(1, width // _HEAD_WIDTH)


def _values(width: int) -> int:
    """Counts the parameters of all layers: kernels; biases and norms."""
    return _layers(width) * width * (12 * width + 13)


def typical_width(params: PyTree, matrix_dims: MatrixDimsFn | None = None) -> int:
    """Returns the smaller side of a matrix, as the median over the values that can be compressed.

    For a transformer this is its width. It is 1 if there is nothing to compress.
    """
    sides = []
    values = []
    for plan in plan_leaves(params, 1, 1.0, matrix_dims):
        if plan.view is not None:
            sides.append(min(plan.view.n_rows, plan.view.n_cols))
            values.append(plan.size)
    if not sides:
        return 1
    return int(np.quantile(sides, 0.5, weights=values, method="inverted_cdf"))
