"""One parameter inside a bucket: its strides, the matrix that the hook sees, its factors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class BucketEntry:
    """One parameter in a bucket.

    Attributes:
      name: Its name in the model, without ``module.``.
      shape: Length per axis.
      strides: Distance per axis in elements, as the gradient lies in the bucket.

    Example:
      >>> entry = BucketEntry("w", (2, 3), (1, 2))  # its columns lie one after the other
      >>> entry.flatten(np.array([[1, 2, 3], [4, 5, 6]]))
      array([1, 4, 2, 5, 3, 6])
    """

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def unflatten(self, flat: np.ndarray) -> np.ndarray:
        """The parameter's elements, stored in memory order, as an array of `shape` (a view)."""
        return flat.reshape([self.shape[axis] for axis in self._memory_order]).transpose(
            np.argsort(self._memory_order)
        )

    def flatten(self, array: np.ndarray) -> np.ndarray:
        """The inverse of `unflatten`."""
        return np.ascontiguousarray(array.transpose(self._memory_order)).reshape(-1)

    @property
    def _memory_order(self) -> list[int]:
        # Slowest axis first; an axis of length 1 may carry any stride, so it keeps its place.
        axes = range(len(self.shape))
        wide = sorted((a for a in axes if self.shape[a] > 1), key=lambda a: -self.strides[a])
        queue = iter(wide)
        return [next(queue) if self.shape[axis] > 1 else axis for axis in axes]

    def column_order(self) -> np.ndarray | None:
        """Columns of the hook's matrix, as positions in ``array.reshape(shape[0], -1)``.

        The hook reads the bucket's memory as ``(shape[0], -1)``, whatever the strides. For a
        channels_last kernel its columns are therefore ``(kh, kw, I)`` instead of ``(I, kh, kw)``.

        Returns:
          Positions, shape (cols,), or None if the hook's rows are not the first axis at all.
        """
        order = self._memory_order
        if order and order[0] != 0:
            return None
        cols = np.arange(math.prod(self.shape[1:])).reshape(self.shape[1:])
        return cols.transpose([axis - 1 for axis in order[1:]]).reshape(-1)


@dataclasses.dataclass(frozen=True)
class FactorSlot:
    """Where the factors of one compressed parameter lie in its bucket.

    Attributes:
      entry: The parameter.
      bucket: Index of its bucket.
      rows, cols, rank: Sizes of the matrix and its factors.
      p_start, q_start: First element in the bucket's P and Q buffer.
    """

    entry: BucketEntry
    bucket: int
    rows: int
    cols: int
    rank: int
    p_start: int
    q_start: int

    def p(self, buffer: np.ndarray) -> np.ndarray:
        """P, shape (rows, rank), as a view of the bucket's buffer."""
        return buffer[self.p_start : self.p_start + self.rows * self.rank].reshape(
            self.rows, self.rank
        )

    def q(self, buffer: np.ndarray) -> np.ndarray:
        """Q, shape (cols, rank), as a view of the bucket's buffer."""
        return buffer[self.q_start : self.q_start + self.cols * self.rank].reshape(
            self.cols, self.rank
        )


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of ``tensor.view(shape[0], -1)``; an empty or scalar tensor has none."""
    rows = shape[0] if len(shape) else 0
    return rows, math.prod(shape) // rows if rows else 0


def dense_strides(array: Any) -> tuple[int, ...]:
    """Strides in elements with which DDP lays out the gradient of `array`.

    DDP keeps a parameter's own strides if it fills its memory without gaps (channels_last does),
    and makes the gradient contiguous otherwise.
    """
    shape = tuple(map(int, array.shape))
    if callable(getattr(array, "stride", None)):
        strides = tuple(map(int, array.stride()))
    elif isinstance(array, np.ndarray):
        strides = tuple(step // array.itemsize for step in array.strides)
    else:
        return contiguous_strides(shape)
    expected = 1
    for axis in sorted(range(len(shape)), key=lambda a: (strides[a], shape[a])):
        if shape[axis] > 1:
            if strides[axis] != expected:
                return contiguous_strides(shape)
            expected *= shape[axis]
    return strides


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides in elements of a row-major array."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
