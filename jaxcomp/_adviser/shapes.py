"""The shapes of a model's parameters: from a file, or assumed from their number."""

from __future__ import annotations

import json
import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomp._base.typing import MatrixDimsFn, PyTree
from jaxcomp._lowrank.matrices import plan_leaves

_HEAD_WIDTH = 64
_VOCABULARY = 50_257
_SMALLEST, _LARGEST = 10_000, 10**12


def assumed_params(count: int) -> tuple[PyTree, str]:
    """A decoder-only transformer of about so many parameters, in the proportions of GPT-2 small.

    One layer for every 64 of width; an embedding, shared with the output, of 50,257 rows, or of a
    third of the parameters where these are few.

    Returns:
      The tree of shapes, and a sentence that says what was assumed.

    Raises:
      ValueError: For a number too small for such a model, or beyond any so far.
    """
    if count < _SMALLEST:
        raise ValueError(
            f"{count:,} parameters are too few to guess shapes from. Pass a file with the shapes, "
            "or 10k parameters and more."
        )
    if count > _LARGEST:
        raise ValueError(
            f"{count:.3g} parameters are more than the {_LARGEST:.0e} that shapes are guessed for. "
            "Pass a file with the shapes."
        )

    def layer_size(width: int) -> int:
        return 12 * width**2 + 13 * width  # kernels; biases and norms

    def size(width: int) -> float:
        embedding = min(_VOCABULARY * width, count // 3)
        return layer_size(width) * max(1, width / _HEAD_WIDTH) + embedding

    step = _HEAD_WIDTH if size(4 * _HEAD_WIDTH) < count else 4
    width = step
    while size(width + step) <= count:
        width += step
    least = min(_VOCABULARY, count // (3 * width))
    layers = max(1, (count - least * width) // layer_size(width))
    rows = min(_VOCABULARY, max(1, (count - layers * layer_size(width)) // width))
    params = _decoder(layers, width, rows)
    total = sum(leaf.size for leaf in jax.tree.leaves(params))
    return params, (
        f"shapes assumed: a transformer of {layers} layers of width {width:,} and an embedding of "
        f"{rows:,} x {width:,}, {total:,} parameters in float32; better give a file with yours"
    )


def _decoder(layers: int, width: int, rows: int) -> PyTree:
    shapes: dict[str, Any] = {"embedding": (rows, width)}
    for i in range(layers):
        kernels = {"qkv": (width, 3 * width), "out": (width, width)}
        kernels |= {"up": (width, 4 * width), "down": (4 * width, width)}
        layer = {name: {"kernel": k, "bias": k[1:]} for name, k in kernels.items()}
        norms = {f"norm_{k}": {"scale": (width,), "bias": (width,)} for k in (1, 2)}
        shapes[f"layer_{i}"] = layer | norms
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def read_params(path: pathlib.Path) -> PyTree:
    """The shapes in a JSON file: names to shapes, nested as you like.

    A leaf is ``[64, 256]`` (float32) or ``{"shape": [64, 256], "dtype": "bfloat16"}``.

    Raises:
      ValueError: If the file holds something else; the message says what.
      OSError: If it cannot be read.
    """
    try:
        content = json.loads(path.read_text())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no JSON file: {error}.") from error
    if not isinstance(content, dict):
        raise ValueError(
            f'{path} holds no names. Write {{"name": [rows, columns], ...}}, nested as you like.'
        )
    params = {name: _leaf(path, name, value) for name, value in content.items()}
    if not jax.tree.leaves(params):
        raise ValueError(f"{path} holds no parameters.")
    return params


def _leaf(path: pathlib.Path, name: str, value: Any) -> Any:
    if isinstance(value, dict) and "shape" not in value:
        return {key: _leaf(path, f"{name}/{key}", x) for key, x in value.items()}
    entry = value if isinstance(value, dict) else {"shape": value}
    shape, dtype = entry["shape"], entry.get("dtype", "float32")
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"{path}: the shape of {name} must be a list of sizes, got {shape!r}.")
    try:
        return jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype))
    except TypeError as error:
        raise ValueError(f"{path}: {name} has the unknown dtype {dtype!r}.") from error


def count_values(params: PyTree) -> int:
    """Number of floating-point values."""
    leaves = jax.tree.leaves(params)
    return sum(math.prod(x.shape) for x in leaves if jnp.issubdtype(x.dtype, jnp.floating))


def typical_width(params: PyTree, matrix_dims: MatrixDimsFn | None = None) -> float:
    """The smaller side of a matrix, as the median over the values of all that can be compressed.

    A transformer's is its width. 1 where there is nothing to compress.
    """
    views = [plan.view for plan in plan_leaves(params, 1, 1.0, matrix_dims) if plan.view]
    sides = sorted((min(v.n_rows, v.n_cols), math.prod(v.shape)) for v in views)
    half = sum(values for _, values in sides) / 2
    for side, values in sides:
        half -= values
        if half <= 0:
            return side
    return 1
