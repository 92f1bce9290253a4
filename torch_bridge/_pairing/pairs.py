"""One torch tensor and its Flax leaf: the exact map between them, in both directions.

A `Pair` is data: which rows of the tensor, seen in which shape, with which axes moved and which
reversed, fill which part of the leaf. Everything else follows from it: the values, their inverse,
and the order in which the rows and columns of torch's matrix ``view(shape[0], -1)`` appear.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._base.tensors import to_numpy


@dataclasses.dataclass(frozen=True)
class Pair:
    """How one torch tensor (or some of its rows) becomes one Flax leaf (or a part of it).

    Most tensors have one pair. A packed tensor (the ``in_proj_weight`` of attention, the gates
    of an LSTM) has one per leaf, with the same `torch_name` and different `rows`; a leaf that is
    the sum of several tensors (an LSTM's two biases) has one per tensor, with the same `path`.

    Attributes:
      torch_name: Name in the torch state dict, as given.
      torch_shape: Shape of the whole torch tensor.
      path: Path of the Flax leaf, as strings, collection included.
      shape: Shape of the whole Flax leaf.
      kind: For example ``linear.weight``, ``conv.weight``, ``conv_transpose.weight``,
        ``embedding``, ``vector``, ``mha.in_proj``, ``lstm.weight_ih``, ``array``.
      split: The shape in which the selected rows are seen before the axes move.
      row_axes: How many leading axes of `split` come from torch's first axis.
      axes: The order of the axes of `split` in the leaf.
      flip: Axes, after the move, that are reversed (ConvTranspose).
      rows: The range of torch's first axis that goes to this leaf; None for all of it.
      columns: The range of the leaf's last axis that is filled; None for all of it.
      terms: How many torch tensors are summed in this part of the leaf.
      carries: On the way to torch, the tensor that gets the leaf's values; the other terms of a sum
        get zeros.
      must_be_zero: The leaf cannot hold these values: they have to be zero.
      aliases: Further torch names of the same (tied) tensor.

    Example:
      >>> kernel = Pair(
      ...     "fc.weight", (3, 2), ("fc", "kernel"), (2, 3), "linear.weight", (3, 2), (1, 0)
      ... )
      >>> kernel.to_flax(np.arange(6).reshape(3, 2))
      array([[0, 2, 4],
             [1, 3, 5]])
    """

    torch_name: str
    torch_shape: tuple[int, ...]
    path: tuple[str, ...]
    shape: tuple[int, ...]
    kind: str
    split: tuple[int, ...]
    axes: tuple[int, ...]
    row_axes: int = 1
    flip: tuple[int, ...] = ()
    rows: tuple[int, int] | None = None
    columns: tuple[int, int] | None = None
    terms: int = 1
    carries: bool = True
    must_be_zero: bool = False
    aliases: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether one whole tensor is one whole leaf, so that optimizer state maps one to one."""
        return self.rows is None and self.columns is None and self.terms == 1

    @property
    def row_range(self) -> tuple[int, int]:
        """The range of torch's first axis that this pair covers."""
        if self.rows is not None:
            return self.rows
        return (0, self.torch_shape[0] if self.torch_shape else 1)

    @property
    def part_shape(self) -> tuple[int, ...]:
        """The shape of the part of the leaf that this pair fills."""
        if self.columns is None:
            return self.shape
        return (*self.shape[:-1], self.columns[1] - self.columns[0])

    def to_flax(self, array: Any) -> np.ndarray:
        """The part of the leaf, of shape `part_shape`, that the whole torch tensor gives.

        Args:
          array: The torch tensor or a NumPy array of shape `torch_shape`.

        Returns:
          An array of the same dtype. It owns its memory: torch changes tensors in place.

        Raises:
          CheckpointMismatch: If the shape is not `torch_shape`.
        """
        values = self._checked(to_numpy(array), self.torch_shape)
        if self.rows is not None:
            values = values[self.rows[0] : self.rows[1]]
        moved = np.flip(values.reshape(self.split).transpose(self.axes), self.flip)
        return np.array(moved, order="C").reshape(self.part_shape)

    def to_torch(self, array: Any) -> np.ndarray:
        """The inverse of `to_flax`: the rows `row_range` of the torch tensor.

        Args:
          array: The part of the leaf, of shape `part_shape`.

        Returns:
          An array of the same dtype and shape ``(rows, *torch_shape[1:])``.

        Raises:
          CheckpointMismatch: If the shape is not `part_shape`.
        """
        values = self._checked(to_numpy(array), self.part_shape)
        moved = values.reshape([self.split[axis] for axis in self.axes])
        back = np.flip(moved, self.flip).transpose(np.argsort(self.axes))
        start, stop = self.row_range
        shape = (stop - start, *self.torch_shape[1:]) if self.torch_shape else ()
        return np.array(back, order="C").reshape(shape)

    def take(self, leaf: Any) -> np.ndarray:
        """The part of the whole Flax leaf that belongs to this pair."""
        values = self._checked(to_numpy(leaf), self.shape)
        return values if self.columns is None else values[..., slice(*self.columns)]

    def matrix_axes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The leaf axes that torch's first axis becomes (the rows) and the others (the columns).

        Raises:
          CheckpointMismatch: If one axis of the leaf mixes torch rows and columns.
        """
        sizes = [self.split[axis] for axis in self.axes]
        part, position = self.part_shape, 0
        rows: list[int] = []
        cols: list[int] = []
        for axis, size in enumerate(part):
            start, product = position, 1
            while position < len(sizes) and (
                product < size
                or (sizes[position] == 1 and len(sizes) - position > len(part) - axis - 1)
            ):
                product *= sizes[position]
                position += 1
            taken = range(start, position)
            roles = {self.axes[k] < self.row_axes for k in taken if sizes[k] > 1}
            roles = roles or {self.axes[k] < self.row_axes for k in taken}
            if len(roles) > 1:
                raise CheckpointMismatch(
                    f"Axis {axis} of {'/'.join(self.path)} holds rows and columns of "
                    f"{self.torch_name}, so it has no matrix in common with torch."
                )
            (rows if roles == {True} else cols).append(axis)
        return tuple(rows), tuple(cols)

    def matrix_order(
        self, rows: Sequence[int] | None = None, cols: Sequence[int] | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Where each row and column of the leaf's matrix stands in torch's ``view(shape[0], -1)``.

        With ``row, col = matrix_order()`` and ``torch_matrix = tensor.view(shape[0], -1)``, the
        matrix of the leaf (of the part that this pair fills) is ``torch_matrix[row][:, col]``.
        So a torch Q of shape ``(columns, r)`` becomes ``Q[col]`` and a P of shape ``(rows, r)``
        becomes ``P[row]``; the way back is ``Q_torch[col] = Q_flax``.

        Args:
          rows: Leaf axes that form the rows, as in ``MatrixDims``; None for `matrix_axes`.
          cols: Likewise for the columns.

        Returns:
          Two integer arrays: row indices in ``range(*row_range)`` and column indices.

        Raises:
          CheckpointMismatch: If `rows` and `cols` are not torch's own cut of this leaf.
        """
        own_rows, own_cols = self.matrix_axes()
        rows = own_rows if rows is None else tuple(rows)
        cols = own_cols if cols is None else tuple(cols)
        part = self.part_shape
        wide = {axis for axis, size in enumerate(part) if size > 1}
        if wide & set(rows) != wide & set(own_rows) or wide & set(cols) != wide & set(own_cols):
            raise CheckpointMismatch(
                f"The matrix of {'/'.join(self.path)} with rows {rows} and columns {cols} is not "
                f"torch's view(shape[0], -1) of {self.torch_name}, which has rows {own_rows} and "
                f"columns {own_cols}. Use matrix_dims=torch_bridge.torch_matrix_dims."
            )
        start, stop = self.row_range
        row_sizes = (*self.split[: self.row_axes], *[1] * (len(self.split) - self.row_axes))
        col_sizes = (*[1] * self.row_axes, *self.split[self.row_axes :])
        row_index = self._move(np.arange(start, stop), row_sizes, own_cols, rows)
        col_index = self._move(
            np.arange(math.prod(self.torch_shape[1:])), col_sizes, own_rows, cols
        )
        return row_index, col_index

    def _move(
        self, index: np.ndarray, sizes: tuple[int, ...], others: Sequence[int], order: Sequence[int]
    ) -> np.ndarray:
        moved = np.flip(index.reshape(sizes).transpose(self.axes), self.flip)
        part = [1 if axis in others else size for axis, size in enumerate(self.part_shape)]
        rest = [axis for axis in range(len(part)) if axis not in order]
        return moved.reshape(part).transpose(*order, *rest).ravel()

    def _checked(self, values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        if values.shape != shape:
            raise CheckpointMismatch(
                f"{self.torch_name} <-> {'/'.join(self.path)} ({self.kind}) takes an array of "
                f"shape {shape}, got {values.shape}. Pass the tensor that the pair was made for."
            )
        return values


def unpaired(names: Iterable[str], pairs: Sequence[Pair]) -> list[str]:
    """Those of the tensors that go to no leaf under any of their names."""
    found = {name for p in pairs for name in (p.torch_name, *p.aliases)}
    return [name for name in names if name not in found]


def leaves_from_torch(
    pairs: Sequence[Pair], tensors: Mapping[str, Any], *, mean: bool = False
) -> dict[tuple[str, ...], np.ndarray]:
    """The Flax leaves that a set of torch tensors gives, by path.

    Args:
      pairs: As `pair` found them.
      tensors: Name -> tensor, of the shapes of the pairs.
      mean: Where several tensors are one leaf (the two biases of an LSTM), take their mean, as is
        right for gradients and what is made of them, instead of their sum.

    Raises:
      CheckpointMismatch: If a tensor is missing, or holds values that Flax has no place for.
    """
    missing = sorted({p.torch_name for p in pairs} - tensors.keys())
    if missing:
        raise CheckpointMismatch("Tensors of the torch model are not there.", missing=missing)
    leaves: dict[tuple[str, ...], np.ndarray] = {}
    for pair in pairs:
        part = pair.to_flax(tensors[pair.torch_name])
        if pair.must_be_zero and not mean and np.any(part):
            raise CheckpointMismatch(
                f"{pair.torch_name} has a hidden bias for the gate n, which flax.nnx.GRUCell "
                "does not have. Use flax.linen.GRUCell, or set these values to zero in torch."
            )
        if mean and pair.terms > 1:
            part = part / np.asarray(pair.terms, part.dtype)
        if pair.columns is None and pair.terms == 1:
            leaves[pair.path] = part
            continue
        leaf = leaves.setdefault(pair.path, np.zeros(pair.shape, part.dtype))
        leaf[(..., slice(*pair.columns)) if pair.columns else ...] += part
    return leaves


def tensors_from_flax(
    pairs: Sequence[Pair], leaves: Mapping[tuple[str, ...], Any], *, mean: bool = False
) -> dict[str, np.ndarray]:
    """The torch tensors that a set of Flax leaves gives, by name, aliases included.

    Args:
      pairs: As `pair` found them.
      leaves: Path -> leaf.
      mean: Every tensor of a sum gets the leaf, the inverse of `leaves_from_torch` with
        ``mean=True``. Without it the first one gets the values and the others get zeros.
    """
    tensors: dict[str, np.ndarray] = {}
    for pair in pairs:
        part = pair.to_torch(pair.take(leaves[pair.path]))
        if not (pair.carries or mean):
            part = np.zeros_like(part)
        if pair.rows is None:
            tensors[pair.torch_name] = part
        else:
            whole = tensors.get(pair.torch_name)
            if whole is None:
                whole = tensors[pair.torch_name] = np.zeros(pair.torch_shape, part.dtype)
            whole[slice(*pair.rows)] = part
    for pair in pairs:
        for alias in pair.aliases:
            tensors[alias] = tensors[pair.torch_name]
    return tensors
