"""Type aliases and the small protocols that the other modules share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

Array: TypeAlias = jax.Array
PyTree: TypeAlias = Any
KeyPath: TypeAlias = tuple[Any, ...]
DType: TypeAlias = np.dtype | type | str
Shape: TypeAlias = tuple[int, ...]
Axes: TypeAlias = tuple[str, ...]
# One mapped axis, or several that together enumerate the replicas.
AxisName: TypeAlias = str | Axes


class MatrixDims(NamedTuple):
    """Names the axes of one leaf that form rows, columns and batch of its matrices.

    Every axis of the leaf is in exactly one of the three fields. The row index of the matrix is the
    row-major index over `rows`, and likewise for columns and batch.

    Example:
        A stack of dense kernels, shape ``(layers, in, out)``, compressed layer by layer:

        >>> MatrixDims(batch=(0,), rows=(2,), cols=(1,))
        MatrixDims(batch=(0,), rows=(2,), cols=(1,))
    """

    batch: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    cols: tuple[int, ...] = ()

    def behind_an_axis(self) -> MatrixDims:
        """Returns the dims of a stack of such leaves; the new first axis is a batch axis."""
        moved = []
        for axes in self:
            # A negative axis counts from the end, which a new first axis does not move.
            moved.append(tuple(axis + 1 if axis >= 0 else axis for axis in axes))
        batch, rows, cols = moved
        return MatrixDims((0, *batch), rows, cols)


# Called with the key path of `jax.tree_util.tree_flatten_with_path` and the leaf (or its shape).
RankFn: TypeAlias = Callable[[KeyPath, Any], int | None]
MatrixDimsFn: TypeAlias = Callable[[KeyPath, Any], MatrixDims | None]
Schedule: TypeAlias = Callable[[Array], Array | float]
