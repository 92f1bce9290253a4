"""torch's matrices, for `jaxcomp.powersgd`: every leaf cut as ``view(shape[0], -1)`` cuts it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from jaxcomp import MatrixDims
from torch_bridge._pairing.layers import words_of
from torch_bridge._pairing.leaves import plain_path
from torch_bridge._pairing.pairs import Pair

MatrixDimsFn: TypeAlias = Callable[[Any, Any], MatrixDims | None]
_TRANSPOSED_WORDS = frozenset({"convtranspose", "transpose", "transposed", "deconv", "tconv"})
# DenseGeneral layers of attention with several output axes, (embed, heads, head_dim) and the like.
_SPLIT_OUTPUTS = frozenset({"query", "key", "value", "qkv", "in_proj"})


def torch_matrix_dims(path: Any, leaf: Any) -> MatrixDims | None:
    """Cuts a leaf as torch's PowerSGD does: a ``matrix_dims`` for `jaxcomp.powersgd`.

    Rows are the leaf axes that torch's first axis becomes: the output axis of a kernel (the input
    axis of a ConvTranspose), the heads of an attention projection, the vocabulary of an embedding.
    jaxcomp's own rule gives the same matrix for all but unusual shapes: it makes ``(64, 36)`` of a
    ``(3, 3, 4, 64)`` kernel as torch does, and ``(1536, 49)`` of a ``(7, 7, 512, 3)`` one, of which
    torch makes ``(3, 25088)``. Columns stay in the leaf's order, which changes nothing but the
    order of the rows of Q, so a state made for one rule fits the other wherever both cut alike.

    The path alone tells a ConvTranspose (a module named ``ConvTranspose_0``, ``deconv1``, ...) and
    the projections of attention (``query``, ``key``, ``value``, ``qkv``). For other names use
    `matrix_dims_of`.

    Args:
      path: A JAX key path, or the path as strings.
      leaf: An array or anything with a ``shape``.

    Returns:
      The axes, or None (not compressed) for fewer than two axes.

    Example:
        >>> import numpy as np
        >>> torch_matrix_dims(("Conv_0", "kernel"), np.zeros((3, 3, 4, 8)))
        MatrixDims(batch=(), rows=(3,), cols=(0, 1, 2))
        >>> torch_matrix_dims(("Embed_0", "embedding"), np.zeros((50, 4)))
        MatrixDims(batch=(), rows=(0,), cols=(1,))
    """
    names = plain_path(tuple(path))
    ndim = len(np.shape(leaf))
    if ndim < 2:
        return None
    module = names[-2] if len(names) > 1 else ""
    rows: tuple[int, ...] = (0,)  # an embedding or a bare parameter keeps torch's shape
    if names[-1:] == ("kernel",):
        rows = (ndim - 1,)
        if module in _SPLIT_OUTPUTS and ndim > 2:
            rows = tuple(range(1, ndim))
        elif ndim > 2 and _TRANSPOSED_WORDS.intersection(words_of((module.lower(),))[0]):
            rows = (ndim - 2,)
    return MatrixDims(rows=rows, cols=tuple(axis for axis in range(ndim) if axis not in rows))


def matrix_dims_of(pairs: Sequence[Pair]) -> MatrixDimsFn:
    """Makes a `torch_matrix_dims` for the leaves of one model, whatever they are called.

    Args:
      pairs: As `pair` found them.

    Returns:
      A function for the ``matrix_dims`` argument of `jaxcomp.powersgd`. Leaves without a pair
      are left to `torch_matrix_dims`.

    Example:
        >>> from torch_bridge import pair
        >>> like = {"up": {"kernel": np.zeros((3, 3, 4, 8))}}
        >>> matrix_dims_of(pair({"up.weight": np.zeros((4, 8, 3, 3))}, like))(
        ...     ("up", "kernel"), like["up"]["kernel"]
        ... )
        MatrixDims(batch=(), rows=(2,), cols=(0, 1, 3))
    """
    by_path = {pair.path: pair for pair in pairs}

    def matrix_dims(path: Any, leaf: Any) -> MatrixDims | None:
        pair = by_path.get(plain_path(tuple(path)))
        if pair is None or len(np.shape(leaf)) < 2:
            return torch_matrix_dims(path, leaf)
        rows, cols = pair.matrix_axes()
        return MatrixDims(rows=rows, cols=cols) if rows and cols else None

    return matrix_dims
