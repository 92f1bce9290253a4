"""The bucket layout: the place of each parameter in the flat buffers of torch's hook state.

DDP concatenates gradients into buckets. For each bucket the hook keeps one buffer of errors, one of
P and one of Q. torch's files hold neither the order of the parameters nor their strides. So a
layout must be recorded in the torch job (`record_layout`) or inferred (`infer_layout`).

References: ``torch/csrc/distributed/c10d/reducer.cpp`` for the buckets, ``powerSGD_hook.py`` for P
and Q.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxcomp.extend import is_compressed
from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._base.schema import BUFFERS
from torch_bridge._base.tensors import is_tensor, names_in_model, shape_of, to_numpy

_KINDS = {"error_dict": "error", "p_memory_dict": "P", "q_memory_dict": "Q"}
_FORMAT = {"format": "torch_bridge.BucketLayout", "version": 1}
_MAX_AXES = 64  # torch's limit
_MAX_SIZE = 2**59  # elements of an array, not counting axes of length 0
PARSED_BYTES = 30  # the most bytes of memory for parsing one byte of JSON
_MAX_TEXT = 1 << 24  # characters of JSON; 100 000 parameters take 10 million


@dataclasses.dataclass(frozen=True)
class BucketEntry:
    """Describes one parameter in a bucket.

    Attributes:
      name: The parameter's name in the model.
      shape: The length of each axis.
      strides: The stride of each axis in the bucket, in elements.

    Example:
      >>> entry = BucketEntry("w", (2, 3), (1, 2))  # stored column after column
      >>> entry.to_memory(np.array([[1, 2, 3], [4, 5, 6]]))
      array([1, 4, 2, 5, 3, 6])
    """

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def __post_init__(self) -> None:
        if not _are_dense(self.shape, self.strides):
            raise CheckpointMismatch(
                f"A layout has strides with gaps or overlaps: {self.name} {self.shape}, "
                f"{self.strides}. Record it with torch_bridge.record_layout."
            )

    @functools.cached_property
    def size(self) -> int:
        """Returns the number of elements."""
        return math.prod(self.shape)

    @functools.cached_property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns of ``tensor.view(shape[0], -1)``; an empty or scalar tensor has none."""
        rows = self.shape[0] if self.shape else 0
        return rows, self.size // rows if rows else 0

    def factor_rank(self, record: Any) -> int:
        """Returns the rank of the parameter's factors; 0 if the hook does not compress it.

        Args:
          record: A `PowerSGDRecord`, or torch's own ``PowerSGDState``.
        """
        rows, cols = self.matrix
        rank = min(rows, cols, record.matrix_approximation_rank)
        if not is_compressed(rows, cols, rank, record.min_compression_rate):
            return 0
        return rank

    def from_memory(self, flat: np.ndarray) -> np.ndarray:
        """Returns a view of the parameter's elements, flat in memory order, with its `shape`."""
        steps = tuple(np.multiply(self.strides, flat.itemsize).tolist())
        return np.lib.stride_tricks.as_strided(flat, self.shape, steps)

    def to_memory(self, array: np.ndarray) -> np.ndarray:
        """Returns an array's elements flat, in memory order: the inverse of `from_memory`."""
        flat = np.empty(self.size, array.dtype)
        self.from_memory(flat)[...] = array
        return flat

    def columns(self) -> np.ndarray | None:
        """Returns the hook's column for each column of ``array.reshape(shape[0], -1)``.

        The hook reads the bucket's memory as ``(shape[0], -1)`` and ignores the strides. So for a
        channels_last kernel its columns are ``(kh, kw, I)`` instead of ``(I, kh, kw)``.

        Returns:
          int array of shape (cols,), or None if the hook's rows are not the first axis.
        """
        rows, cols = self.matrix
        if rows > 1 and self.strides[0] != cols:
            return None
        row = BucketEntry(self.name, self.shape[1:], self.strides[1:])
        return row.from_memory(np.arange(cols)).reshape(-1)


class BucketPart(NamedTuple):
    """The error and the factors of one parameter, as views of its bucket's buffers.

    Attributes:
      entry: The parameter.
      bucket: Index of the bucket.
      rank: The rank of the factors; 0 if the hook does not compress the parameter.
      error: The error, with the parameter's shape; None if the bucket has no such buffer.
      p: The P factor, shape (rows, rank), with the rows of ``entry.matrix``; or None likewise, and
        if the parameter is not compressed.
      q: The Q factor, shape (cols, rank), with the columns of ``entry.matrix``; or None, as for P.
    """

    entry: BucketEntry
    bucket: int
    rank: int
    error: np.ndarray | None
    p: np.ndarray | None
    q: np.ndarray | None


@dataclasses.dataclass(frozen=True)
class BucketLayout:
    """Lists the parameters of each bucket in order; the position of a bucket is its index in torch.

    A `Checkpoint` has the layout with the names of its model. `named_as` does the same for another
    model, whose names may have other prefixes of wrappers (``module.``, ``_orig_mod.``).

    Example:
      >>> import numpy as np
      >>> model = {"w": np.zeros((8, 4)), "b": np.zeros(8)}
      >>> layout = BucketLayout.from_order([["b", "w"]], model)
      >>> layout.buckets[0][1]
      BucketEntry(name='w', shape=(8, 4), strides=(4, 1))
      >>> BucketLayout.from_json(layout.to_json()) == layout
      True
    """

    buckets: tuple[tuple[BucketEntry, ...], ...]

    def __post_init__(self) -> None:
        counts = collections.Counter(self.names)
        twice = counts - collections.Counter(set(self.names))
        if twice:
            raise CheckpointMismatch(
                f"A layout names each parameter once; {', '.join(sorted(twice))} appears again. "
                "Name a tied parameter by its first name only."
            )

    def __iter__(self) -> Iterator[BucketEntry]:
        """Iterates over all parameters, bucket after bucket."""
        return itertools.chain.from_iterable(self.buckets)

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the names of all parameters, bucket after bucket."""
        return tuple(entry.name for entry in self)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Returns the number of elements of each bucket."""
        sizes = []
        for bucket in self.buckets:
            sizes.append(sum(entry.size for entry in bucket))
        return tuple(sizes)

    @functools.cached_property
    def entries(self) -> dict[str, BucketEntry]:
        """Returns the entry of each parameter by its name, bucket after bucket."""
        return {entry.name: entry for entry in self}

    @classmethod
    def from_order(cls, order: Sequence[Sequence[str]], model: Mapping[str, Any]) -> BucketLayout:
        """Makes a layout from the parameter names of each bucket.

        Args:
          order: One list of parameter names for each bucket.
          model: Name -> array or tensor, for the shapes and strides.

        Raises:
          CheckpointMismatch: Names are not in `model`; the error lists all. Or `order` holds a name
            where a list of names belongs.
        """
        for names in order:
            if isinstance(names, str):
                raise CheckpointMismatch(
                    "`order` must hold a list of names for each bucket, and has a name where a "
                    "list belongs. Write [[...]] if there is one bucket."
                )
        missing = set(itertools.chain(*order)) - model.keys()
        if missing:
            raise CheckpointMismatch(
                "The order names parameters that the model does not have. Use the names of "
                "model.named_parameters().",
                missing=sorted(missing),
            )
        entries = {}
        for name in itertools.chain(*order):
            entries[name] = BucketEntry(name, shape_of(model[name]), dense_strides(model[name]))
        return cls(tuple(tuple(map(entries.__getitem__, names)) for names in order))

    def named_as(self, model: Collection[str]) -> BucketLayout:
        """Returns the same layout, with another model's names for the parameters.

        Args:
          model: The names of a model's tensors.
        """
        names = iter(names_in_model(self.names, model))
        buckets = []
        for bucket in self.buckets:
            entries = []
            for entry in bucket:
                entries.append(dataclasses.replace(entry, name=next(names)))
            buckets.append(tuple(entries))
        return BucketLayout(tuple(buckets))

    def to_json(self) -> str:
        """Writes the layout as JSON text."""
        document: dict[str, Any] = dict(_FORMAT)
        document["buckets"] = [list(map(dataclasses.asdict, bucket)) for bucket in self.buckets]
        return json.dumps(document)

    @classmethod
    def from_json(cls, text: str) -> BucketLayout:
        """Makes the layout from the JSON text of `to_json`.

        Raises:
          CheckpointMismatch: The text is not a layout, or has a later version.
        """
        try:
            if len(text) > _MAX_TEXT:
                raise ValueError("too long")
            document = json.loads(text)
            if document.get("format") != _FORMAT["format"]:
                raise ValueError("another format")
            buckets = list(map(list, document.get("buckets", ())))
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointMismatch(
                "A bucket layout must be JSON text as BucketLayout.to_json() writes it."
            ) from error
        if document.get("version") != _FORMAT["version"]:
            raise CheckpointMismatch(
                f"This bucket layout has version {document.get('version')!r:.20}; this release "
                f"reads version {_FORMAT['version']}. Upgrade torch_bridge."
            )
        return cls(tuple(tuple(map(_entry, bucket)) for bucket in buckets))

    def parts(self, record: Any) -> dict[str, BucketPart]:
        """Cuts the buffers of a record into the parts of each parameter.

        The errors are in the bucket's order. P and Q are in the hook's order: parameters of one
        matrix shape stand together, and the shapes are in the order in which they first occur.

        Args:
          record: A `PowerSGDRecord` or ``PowerSGDState`` for which `misfits` is empty.

        Returns:
          Parameter name -> part, bucket after bucket, in each bucket in the hook's order.
        """
        parts = {}
        for index, bucket in enumerate(self.buckets):
            buffers = [getattr(record, name).get(index) for name in BUFFERS]
            error, p, q = map(_Cursor, buffers)
            errors = {}
            for entry in bucket:
                errors[entry] = error.take(entry.size)
            for entry in in_hook_order(bucket):
                rank = entry.factor_rank(record)
                rows, cols = entry.matrix
                whole = errors[entry]
                if whole is not None:
                    whole = entry.from_memory(whole)
                part = BucketPart(entry, index, rank, whole, p.take(rows, rank), q.take(cols, rank))
                parts[entry.name] = part
        return parts

    def buffer_sizes(self, record: Any) -> dict[str, dict[int, int]]:
        """Returns the lengths of torch's buffers: name of the buffers -> bucket -> elements."""
        sizes = {}
        for name in BUFFERS:
            sizes[name] = dict.fromkeys(range(len(self.buckets)), 0)
        for index, bucket in enumerate(self.buckets):
            for entry in bucket:
                rank = entry.factor_rank(record)
                rows, cols = entry.matrix
                sizes["error_dict"][index] += entry.size
                sizes["p_memory_dict"][index] += rows * rank
                sizes["q_memory_dict"][index] += cols * rank
        return sizes

    def misfits(self, record: Any) -> list[str]:
        """Lists the buffers whose length does not fit the layout, one line of text for each."""
        lines = []
        for name, sizes in self.buffer_sizes(record).items():
            for bucket, array in getattr(record, name).items():
                size = sizes.get(bucket, "no such bucket")
                if len(array) != size:
                    lines.append(
                        f"{_KINDS[name]} of bucket {bucket} has {len(array)} values, the layout "
                        f"gives it {size}"
                    )
        return lines


def in_hook_order(bucket: Iterable[BucketEntry]) -> list[BucketEntry]:
    """Sorts the parameters of a bucket as P and Q have them: those of one matrix shape together."""
    groups = {}
    for entry in bucket:
        groups.setdefault(entry.matrix, []).append(entry)
    return list(itertools.chain(*groups.values()))


class _Cursor:
    """Cuts a buffer into consecutive views; without a buffer, and of no values, they are None."""

    def __init__(self, flat: Any) -> None:
        self._flat = flat
        if flat is not None:
            self._flat = to_numpy(flat)
        self._end = 0

    def take(self, *shape: int) -> np.ndarray | None:
        start = self._end
        self._end += math.prod(shape)
        if self._flat is None or start == self._end:
            return None
        return self._flat[start : self._end].reshape(shape)


def _entry(item: Any) -> BucketEntry:
    """Makes a `BucketEntry` from its part of the JSON text of `BucketLayout.to_json`.

    Raises:
      CheckpointMismatch: `item` lacks a field, or no tensor can have its shape.
    """
    with contextlib.suppress(TypeError, ValueError, KeyError):
        name = item["name"]
        shape = tuple(item["shape"])
        strides = tuple(item["strides"])
        known = isinstance(name, str) and len(shape) <= _MAX_AXES
        for number in (*shape, *strides):
            known = known and type(number) is int and number >= 0
        if known and math.prod(filter(None, shape)) < _MAX_SIZE:
            return BucketEntry(name, shape, strides)
    raise CheckpointMismatch(
        f"A layout entry must have a `name`, `shape` and `strides`, got {item!r:.80}."
    )


def dense_strides(array: Any) -> tuple[int, ...]:
    """Returns the strides of the gradient of `array` in DDP's bucket, in elements.

    The gradient has the strides of its parameter if the parameter fills its memory without gaps
    (channels_last does). Otherwise DDP makes the gradient contiguous.
    """
    shape = shape_of(array)
    strides = ()
    if is_tensor(array):
        strides = tuple(array.stride())
    elif isinstance(array, np.ndarray):
        strides = tuple(step // array.itemsize for step in array.strides)
    if len(strides) == len(shape) and _are_dense(shape, strides):
        return strides
    contiguous = []
    for axis in range(len(shape)):
        contiguous.append(math.prod(shape[axis + 1 :]))
    return tuple(contiguous)


def _are_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Returns whether the elements fill their memory without gaps or overlaps.

    The stride of an axis of length 1 does not matter.
    """
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1 and stride != expected and 0 not in shape:
            return False
        expected *= size
    return True
