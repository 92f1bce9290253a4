"""`Pair`: a torch tensor and its Flax leaf, with the exact conversion in both directions.

A `Pair` is data. It says which rows of the tensor fill the leaf, in which order and shape, and
which axes are moved and reversed. From this follow the leaf's values, the way back, and the order
of the rows and columns of torch's matrix ``view(shape[0], -1)``.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._base.tensors import STATISTICS, to_numpy

Path: TypeAlias = tuple[str, ...]
Shape: TypeAlias = tuple[int, ...]
# Flattened maps in an array: (first position, channels, places of a channel). torch has the order
# (channels, places) and Flax (places, channels). H and W keep their order, so the places need no
# shape.
Maps: TypeAlias = tuple[tuple[int, int, int], ...]


class Packing(NamedTuple):
    """Describes the order of packed parts, such as (query, key, value), in both frameworks.

    The parts may follow each other, or every group of rows (a head of attention) has its rows of
    the first part, then of the second part, and so on.

    Attributes:
      order: For each part in Flax, its position among torch's parts.
      torch_groups: The number of groups in torch; 1 if the parts follow each other.
      flax_groups: The same in Flax.
      sizes: The relative numbers of rows of torch's parts, such as (4, 1, 1) where four heads of
        queries share a key and a value; () if all parts are equal.

    Example:
      >>> Packing((0, 1), 2, 1).torch_rows(8)
      array([0, 1, 4, 5, 2, 3, 6, 7])
    """

    order: Shape
    torch_groups: int
    flax_groups: int
    sizes: Shape = ()

    @property
    def is_likely(self) -> bool:
        """Returns whether only one side packs by groups, or two parts are exchanged.

        In the first case the parts have the same order in both frameworks.
        """
        if self.torch_groups == self.flax_groups == 1:
            return self.order == (1, 0)
        return self.is_in_order and self.torch_groups != self.flax_groups

    @property
    def is_in_order(self) -> bool:
        """Returns whether the parts have the same order in both frameworks."""
        return self.order == tuple(range(len(self.order)))

    def torch_rows(self, total: int) -> np.ndarray:
        """Returns torch's row for each of Flax's `total` rows."""
        sizes = self.sizes or (1,) * len(self.order)
        in_groups = np.arange(total).reshape(self.torch_groups, sum(sizes), -1)
        parts = []
        for place in self.order:
            start = sum(sizes[:place])
            part = in_groups[:, start : start + sizes[place]]
            parts.append(part.reshape(self.flax_groups, -1))
        return np.concatenate(parts, axis=1).ravel()


@dataclasses.dataclass(frozen=True)
class Pair:
    """Converts one torch tensor, or some of its rows, to one Flax leaf, and back.

    Most tensors have one pair. A packed tensor (the ``in_proj_weight`` of attention, the gates of
    an LSTM) has one pair for each leaf, with the same `torch_name` and different `rows`. A leaf
    that is the sum of several tensors (an LSTM's two biases) has one pair for each tensor, with the
    same `path`.

    Attributes:
      torch_name: The tensor's name in the torch state dict.
      torch_shape: The shape of the whole torch tensor.
      path: The path of the Flax leaf, as strings, without the collection.
      shape: The shape of the whole Flax leaf.
      split: The shape to which the selected rows are reshaped before the axes move.
      row_axes: The number of leading axes of `split` that come from torch's first axis.
      axes: The order of the axes of `split` in the leaf.
      flip: The axes of the leaf that are reversed (ConvTranspose).
      rows: The range of torch's first axis that goes to this leaf; None for the whole axis. With
        `packing` it is a range of the rows in the order of Flax.
      terms: The number of torch tensors whose sum is the leaf. On the way to torch the first tensor
        gets the values, and the others get zeros.
      must_be_zero: The range of torch's first axis whose values must be zero, because the leaf has
        no place for them.
      aliases: Further torch names of the same (tied) tensor, which may have leaves of their own.
      row_maps: Flattened maps in the selected rows, each ``(first row, channels, places)``. torch
        has the order ``(channels, places)``, Flax ``(places, channels)``.
      column_maps: The same for the columns of ``view(shape[0], -1)``.
      packing: The order of the parts of a packed tensor; None if it is the same in Flax.

    Example:
      >>> kernel = Pair(
      ...     "fc.weight", (3, 2), ("fc", "kernel"), (2, 3), (3, 2), (1, 0)
      ... )
      >>> kernel.to_flax(np.arange(6).reshape(3, 2))
      array([[0, 2, 4],
             [1, 3, 5]])
    """

    torch_name: str
    torch_shape: Shape
    path: Path
    shape: Shape
    split: Shape
    axes: Shape
    row_axes: int = 1
    flip: Shape = ()
    rows: tuple[int, int] | None = None
    terms: int = 1
    must_be_zero: tuple[int, int] | None = None
    aliases: tuple[str, ...] = ()
    row_maps: Maps = ()
    column_maps: Maps = ()
    packing: Packing | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Returns all names of the tensor."""
        return (self.torch_name, *self.aliases)

    @property
    def is_buffer(self) -> bool:
        """Returns True for a running statistic, which has no gradient."""
        return self.torch_name.endswith(STATISTICS)

    @property
    def row_range(self) -> slice | np.ndarray:
        """Returns the torch rows that this pair covers, in torch's order."""
        if self.packing and self.rows is not None:
            return np.sort(self._torch_rows())
        return slice(*(self.rows or (None, None)))

    def _torch_rows(self) -> np.ndarray:
        """Returns torch's row for each row of the leaf's matrix."""
        total = self.torch_shape[0]
        index = np.arange(total)
        if self.packing:
            index = self.packing.torch_rows(total)
        if self.rows is not None:
            index = index[slice(*self.rows)]
        return index[_order(self.row_maps, len(index))]

    def to_flax(self, array: Any) -> np.ndarray:
        """Makes the leaf from the whole torch tensor.

        Args:
          array: The torch tensor or a NumPy array, of shape `torch_shape`.

        Returns:
          An array of the same dtype and of shape `shape`. It has its own memory, because torch
          changes tensors in place.

        Raises:
          CheckpointMismatch: The array has another shape.
        """
        values = self._checked(to_numpy(array), self.torch_shape)
        if self.packing or self.row_maps:
            values = values[self._torch_rows()]
        elif self.rows is not None:
            values = values[self.row_range]
        if self.column_maps:
            values = values.reshape(len(values), -1)
            values = values[:, _order(self.column_maps, values.shape[1])]
        moved = np.flip(values.reshape(self.split).transpose(self.axes), self.flip)
        return np.array(moved, order="C").reshape(self.shape)

    def to_torch(self, array: Any) -> np.ndarray:
        """Makes the rows `row_range` of the torch tensor from the leaf: the inverse of `to_flax`.

        Args:
          array: The leaf, of shape `shape`.

        Returns:
          An array of the same dtype and shape ``(rows, *torch_shape[1:])``.

        Raises:
          CheckpointMismatch: The array has another shape.
        """
        values = self._checked(to_numpy(array), self.shape)
        moved = values.reshape([self.split[axis] for axis in self.axes])
        back = np.flip(moved, self.flip).transpose(np.argsort(self.axes))
        rows = math.prod(self.torch_shape[:1])
        if self.rows is not None:
            rows = self.rows[1] - self.rows[0]
        matrix = back.reshape(rows, -1)
        if self.column_maps:
            matrix = matrix[:, np.argsort(_order(self.column_maps, matrix.shape[1]))]
        if self.packing or self.row_maps:
            matrix = matrix[np.argsort(self._torch_rows())]
        shape = self.torch_shape
        if self.rows is not None:
            shape = (rows, *shape[1:])
        return np.array(matrix, order="C").reshape(shape)

    def matrix_axes(self) -> tuple[Shape, Shape]:
        """Returns the leaf axes that come from torch's first axis (the rows), and the others."""
        rows = []
        cols = []
        for axis, source in enumerate(self.axes):
            side = rows if source < self.row_axes else cols
            side.append(axis)
        return tuple(rows), tuple(cols)

    def column_order(self, cols: Sequence[int]) -> np.ndarray:
        """Returns torch's column for each column of the leaf's matrix.

        The torch matrix is ``view(shape[0], -1)``. The leaf's Q factor is ``Q[column_order(cols)]``
        of torch's factor Q, shape ``(columns, r)``.

        Args:
          cols: The leaf axes that form the columns, as in ``MatrixDims``.

        Raises:
          CheckpointMismatch: These axes are not the columns of torch's matrix.
        """
        torch_rows, torch_cols = self.matrix_axes()
        wide = {axis for axis, size in enumerate(self.shape) if size > 1}
        if wide.intersection(cols) != wide.intersection(torch_cols):
            raise CheckpointMismatch(
                f"The matrix of {'/'.join(self.path)} with columns {tuple(cols)} is not torch's "
                f"view(shape[0], -1) of {self.torch_name}, which has rows {torch_rows} and columns "
                f"{torch_cols}. Use matrix_dims=torch_bridge.torch_matrix_dims."
            )
        index = _order(self.column_maps, math.prod(self.torch_shape[1:]))
        one_row = (1,) * self.row_axes + self.split[self.row_axes :]
        moved = np.flip(index.reshape(one_row).transpose(self.axes), self.flip)
        sizes = [self.shape[axis] for axis in sorted(cols)]
        return moved.reshape(sizes).transpose(np.argsort(np.argsort(cols))).ravel()

    def _checked(self, values: np.ndarray, shape: Shape) -> np.ndarray:
        if values.shape != shape:
            raise CheckpointMismatch(
                f"{self.torch_name} <-> {'/'.join(self.path)} takes an array of shape "
                f"{shape}, got {values.shape}. Pass the tensor that the pair was made for."
            )
        return values


def _order(maps: Maps, size: int) -> np.ndarray:
    """Returns torch's position for each of Flax's `size` positions, with flattened maps."""
    order = np.arange(size)
    for start, channels, places in maps:
        stop = start + channels * places
        order[start:stop] = order[start:stop].reshape(channels, places).T.ravel()
    return order


def unpaired(names: Iterable[str], pairs: Iterable[Pair]) -> list[str]:
    """Lists the tensors that no pair names."""
    paired = set()
    for pair in pairs:
        paired.update(pair.names)
    return list(itertools.filterfalse(paired.__contains__, names))


def names_in(pairs: Iterable[Pair], known: Collection[str]) -> dict[str, str]:
    """Finds for each paired tensor the one of its names that is in `known`.

    `known` has the names of a bucket layout or an optimizer. A tensor without a name there is
    frozen, and left out.

    Returns:
      The pair's torch name -> the name in `known`, which may be an alias.
    """
    names = {}
    for pair in pairs:
        for name in pair.names:
            if name in known:
                names[pair.torch_name] = name
                break
    return names


def leaves_from_torch(
    pairs: Sequence[Pair], tensors: Mapping[str, Any], *, mean: bool = False
) -> dict[Path, np.ndarray]:
    """Makes the Flax leaves of a set of torch tensors.

    Args:
      pairs: The pairs that `pair` returned.
      tensors: Name -> tensor, with the shapes of the pairs.
      mean: Whether a leaf of several tensors (the two biases of an LSTM) gets their mean instead of
        their sum. The mean is right for gradients and moments.

    Returns:
      Path -> leaf.

    Raises:
      CheckpointMismatch: A tensor is missing, or has values without a place in Flax.
    """
    missing = sorted({pair.torch_name for pair in pairs} - tensors.keys())
    if missing:
        raise CheckpointMismatch("Tensors of the torch model are missing.", missing=missing)
    leaves = {}
    for pair in pairs:
        part = pair.to_flax(tensors[pair.torch_name])
        if pair.must_be_zero and not mean and np.any(part[slice(*pair.must_be_zero)]):
            raise CheckpointMismatch(
                f"{pair.torch_name} has a hidden bias for the gate n, which flax.nnx.GRUCell "
                "does not have. Use flax.linen.GRUCell, or set these values to zero in torch."
            )
        if mean and pair.terms > 1:
            part = part / np.asarray(pair.terms, part.dtype)
        if pair.path in leaves:
            part = leaves[pair.path] + part
        leaves[pair.path] = part
    return leaves


def tensors_from_flax(
    pairs: Sequence[Pair], leaves: Mapping[Path, Any], *, mean: bool = False
) -> dict[str, np.ndarray]:
    """Makes the torch tensors of a set of Flax leaves, by name and by all aliases.

    Args:
      pairs: The pairs that `pair` returned.
      leaves: Path -> leaf.
      mean: Whether every tensor of a sum gets the leaf: the inverse of `leaves_from_torch` with
        ``mean=True``. Otherwise the first tensor gets the leaf, and the others get zeros.
    """
    tensors = {}
    used = set()
    for pair in pairs:
        part = pair.to_torch(leaves[pair.path])
        if pair.path in used and not mean:
            part = np.zeros_like(part)
        used.add(pair.path)
        if pair.rows is None:
            tensors[pair.torch_name] = part
            continue
        if pair.torch_name not in tensors:
            tensors[pair.torch_name] = np.zeros(pair.torch_shape, part.dtype)
        tensors[pair.torch_name][pair.row_range] = part
    for pair in pairs:
        for alias in pair.aliases:  # an alias with its own leaf in Flax keeps that leaf's values
            tensors.setdefault(alias, tensors[pair.torch_name])
    return tensors
