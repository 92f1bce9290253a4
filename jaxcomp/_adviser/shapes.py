"""Guesses a model's shapes from its number of parameters, and finds its typical width.

`advise` and `measure` take a number in the place of parameters, for a first answer before there is
a model. What matters are the sizes of matrices, so one kind of transformer stands for all. A width
goes the other way: the laws of loss ask for one number, and real models have leaves of many shapes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp._base.typing import MatrixDimsFn, PyTree
from jaxcomp._bytes.units import parse
from jaxcomp._lowrank.matrices import plan_leaves

# Those of GPT-2 small: width 768 has 12 layers.
_HEAD_WIDTH = 64
_VOCABULARY = 50_257
# Numbers outside of these are more likely a slip, such as 124 for "124M", than a model.
_SMALLEST = 10_000
_LARGEST = 10**12


def shapes_of(params: PyTree) -> tuple[PyTree, str]:
    """Returns the parameters; or, for a number, shapes of a transformer of about that size.

    The transformer resembles GPT-2 small. It has one layer for every 64 of width. Its embedding is
    shared with the output and has 50,257 rows, or a third of the parameters if these are few.

    Args:
      params: Arrays or shapes; or a number of parameters, 124_000_000 or ``"124M"``.

    Returns:
      The tree, and a sentence with the assumptions (empty if `params` is a tree).

    Raises:
      ValueError: If the number is below 10,000 or above 10^12.
    """
    if not isinstance(params, (int, np.integer, str)):
        return params, ""
    count = round(parse("params", params))
    if not _SMALLEST <= count <= _LARGEST:
        raise ValueError(
            f"Shapes are guessed for {_SMALLEST:,} to {_LARGEST:.0e} parameters, got {count:,}. "
            "Pass the parameters, or their shapes, to jaxcomp.advise."
        )
    width = 4  # the largest multiple of 4 that fits
    while _least_values(width + 4, count) <= count:
        width += 4
    layers = _layers(width)
    left = count - _values(width)
    rows = min(_VOCABULARY, left // width)
    layer = []
    for inputs, outputs in ((1, 3), (1, 1), (1, 4), (4, 1)):  # qkv, out, up, down
        layer.append(jax.ShapeDtypeStruct((inputs * width, outputs * width), jnp.float32))
    layer.append(jax.ShapeDtypeStruct((13 * width,), jnp.float32))  # biases and norms
    embedding = jax.ShapeDtypeStruct((rows, width), jnp.float32)
    total = _values(width) + rows * width
    assumption = (
        f"shapes assumed: a transformer of {layers} layers of width {width:,} and an embedding of "
        f"{rows:,} x {width:,}, {total:,} parameters in float32; better pass yours to "
        "jaxcomp.advise"
    )
    return {"embedding": embedding, "layers": layers * [layer]}, assumption


def _layers(width: int) -> int:
    return max(1, width // _HEAD_WIDTH)


def _values(width: int) -> int:
    """Counts the parameters of all layers: kernels, biases and norms."""
    return _layers(width) * width * (12 * width + 13)


def _least_values(width: int, count: int) -> int:
    """Counts the parameters of a model of this width, with the smallest embedding it may have."""
    embedding = min(_VOCABULARY * width, count // 3)
    return _values(width) + embedding


def typical_width(params: PyTree, matrix_dims: MatrixDimsFn | None = None) -> int:
    """Returns the median, over all compressible values, of the smaller side of their matrix.

    For a transformer this is its width. Without a compressible leaf it is 1.
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
