"""Bucket layout: which parameter lies where in the flat buffers of torch's hook state.

DDP concatenates gradients into buckets and the hook keeps one error, one P and one Q buffer per
bucket. Neither the order of the parameters nor their strides are in the file, so a layout has to
come with it (`record_layout`) or be inferred (`infer_layout`).

References: ``torch/csrc/distributed/c10d/reducer.cpp`` for the buckets, ``powerSGD_hook.py`` for P
and Q.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxcomp.extend import is_compressed
from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._base.schema import BUFFERS
from torch_bridge._base.tensors import shape_of, unwrapped

_FORMAT = {"format": "torch_bridge.BucketLayout", "version": 1}
_MAX_AXES = 64  # as torch
PARSED_BYTES = 30  # of memory, at most, for a byte of JSON
_MAX_TEXT = 1 << 24  # characters of JSON; 100 000 parameters take 10 million


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
        wide = [axis for axis, size in enumerate(self.shape) if size > 1]
        queue = iter(sorted(wide, key=lambda axis: -self.strides[axis]))
        return [next(queue) if size > 1 else axis for axis, size in enumerate(self.shape)]

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
        return buffer[self.p_start :][: self.rows * self.rank].reshape(self.rows, self.rank)

    def q(self, buffer: np.ndarray) -> np.ndarray:
        """Q, shape (cols, rank), as a view of the bucket's buffer."""
        return buffer[self.q_start :][: self.cols * self.rank].reshape(self.cols, self.rank)


@dataclasses.dataclass(frozen=True)
class BucketLayout:
    """The parameters of each bucket, in order; the position of a bucket is its index in torch.

    Names go without the prefixes of wrappers (``module.``, ``_orig_mod.``), as in a `Checkpoint`.

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
        names = iter(unwrapped(self.names))
        buckets = tuple(
            tuple(dataclasses.replace(entry, name=next(names)) for entry in bucket)
            for bucket in self.buckets
        )
        object.__setattr__(self, "buckets", buckets)
        counts = collections.Counter(self.names)
        if twice := sorted(name for name, count in counts.items() if count > 1):
            raise CheckpointMismatch(
                f"A layout names each parameter once; {', '.join(twice)} appears again. A tied "
                f"parameter goes by its first name only."
            )

    @property
    def names(self) -> tuple[str, ...]:
        """All parameters, bucket after bucket."""
        return tuple(entry.name for bucket in self.buckets for entry in bucket)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements per bucket."""
        return tuple(sum(entry.size for entry in bucket) for bucket in self.buckets)

    @functools.cached_property
    def entries(self) -> dict[str, BucketEntry]:
        """Parameter name -> its entry, bucket after bucket."""
        return {entry.name: entry for bucket in self.buckets for entry in bucket}

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Parameter name -> shape, in place of a model whose values are not at hand."""
        return {
            name: jax.ShapeDtypeStruct(entry.shape, np.float32)
            for name, entry in self.entries.items()
        }

    @classmethod
    def from_order(cls, order: Sequence[Sequence[str]], model: Mapping[str, Any]) -> BucketLayout:
        """A layout from the names per bucket.

        Args:
          order: A list of parameter names per bucket.
          model: Name -> array or tensor, for the shapes and strides.

        Raises:
          CheckpointMismatch: A name is not in `model`; all such names are listed.
        """
        if missing := [name for bucket in order for name in bucket if name not in model]:
            raise CheckpointMismatch(
                "The order names parameters that the model does not have. Use the names of "
                "model.named_parameters().",
                missing=missing,
            )

        def entry(name: str) -> BucketEntry:
            return BucketEntry(name, shape_of(model[name]), dense_strides(model[name]))

        return cls(tuple(tuple(map(entry, bucket)) for bucket in order))

    def to_json(self) -> str:
        """The layout as JSON text."""
        buckets = [[dataclasses.asdict(entry) for entry in bucket] for bucket in self.buckets]
        return json.dumps({**_FORMAT, "buckets": buckets})

    @classmethod
    def from_json(cls, text: str) -> BucketLayout:
        """The inverse of `to_json`.

        Raises:
          CheckpointMismatch: The text is no layout, or of a later version.
        """
        # Brackets cost 30 times their size as lists: count them first.
        brackets = text.count("[") + text.count("{")
        try:
            if len(text) > _MAX_TEXT or brackets > 4 * text.count('"name"') + 10_000:
                raise ValueError("more brackets than names")
            document = json.loads(text)
            if document.get("format") != _FORMAT["format"]:
                raise ValueError("another format")
            buckets = [list(bucket) for bucket in document.get("buckets", ())]
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointMismatch(
                "A bucket layout must be JSON text as BucketLayout.to_json() writes it."
            ) from error
        if document.get("version") != _FORMAT["version"]:
            raise CheckpointMismatch(
                f"This bucket layout has version {document.get('version')!r:.20}; this release "
                f"reads version {_FORMAT['version']}. Upgrade it."
            )
        return cls(tuple(tuple(map(_entry, bucket)) for bucket in buckets))

    def split(self, bucket: int, flat: np.ndarray) -> dict[str, np.ndarray]:
        """Cut a bucket's error buffer into named parameters (views of `flat`)."""
        ends = np.cumsum([entry.size for entry in self.buckets[bucket]])
        return {
            entry.name: entry.unflatten(flat[end - entry.size : end])
            for entry, end in zip(self.buckets[bucket], ends, strict=True)
        }

    def factor_slots(self, rank: int, min_compression_rate: float) -> Iterator[FactorSlot]:
        """Where the factors of the compressed parameters lie, bucket after bucket.

        The hook cuts P and Q by groups of equal matrix shape in first-seen order, not in bucket
        order.

        Args:
          rank: Torch's ``matrix_approximation_rank``.
          min_compression_rate: Torch's argument of this name.
        """
        for index, bucket in enumerate(self.buckets):
            groups: dict[tuple[int, int], list[BucketEntry]] = {}
            for entry in bucket:
                groups.setdefault(matrix_shape(entry.shape), []).append(entry)
            p_start = q_start = 0
            for (rows, cols), members in groups.items():
                used = min(rows, cols, rank)
                if is_compressed(rows, cols, used, min_compression_rate):
                    for entry in members:
                        yield FactorSlot(entry, index, rows, cols, used, p_start, q_start)
                        p_start += rows * used
                        q_start += cols * used

    def slots_of(self, record: Any) -> dict[str, FactorSlot]:
        """`factor_slots` by parameter, with the rank and the rate of a record.

        Args:
          record: A `PowerSGDRecord`, or torch's own ``PowerSGDState``.
        """
        rank, rate = record.matrix_approximation_rank, record.min_compression_rate
        return {slot.entry.name: slot for slot in self.factor_slots(rank, rate)}

    def buffer_sizes(self, record: Any) -> tuple[dict[int, int], ...]:
        """Length of the error, P and Q buffer of each bucket, as for `slots_of`.

        Returns:
          Three dictionaries, bucket index -> values; a bucket without factors has no P and Q.
        """
        ps, qs = dict[int, int](), dict[int, int]()
        for slot in self.slots_of(record).values():  # the last one of a bucket stays
            ps[slot.bucket] = slot.p_start + slot.rows * slot.rank
            qs[slot.bucket] = slot.q_start + slot.cols * slot.rank
        return dict(enumerate(self.sizes)), ps, qs

    def misfits(self, record: Any) -> list[str]:
        """The buffers of another length than the layout gives them, a line each."""
        lines, sizes = [], self.buffer_sizes(record)
        for kind, own, name in zip(("error", "P", "Q"), sizes, BUFFERS, strict=True):
            wanted = dict.fromkeys(range(len(self.buckets)), 0) | own
            for bucket, array in getattr(record, name).items():
                if len(array) != wanted.get(bucket):
                    lines.append(
                        f"{kind} of bucket {bucket} has {len(array)} values, the layout gives it "
                        f"{wanted.get(bucket, 'no such bucket')}"
                    )
        return lines


def _entry(item: Any) -> BucketEntry:
    """An entry as `BucketLayout.to_json` writes it, checked; torch has no more than 64 axes."""
    with contextlib.suppress(TypeError, ValueError, KeyError):
        name, shape, strides = item["name"], tuple(item["shape"]), tuple(item["strides"])
        counts = all(type(n) is int and 0 <= n < 2**62 for n in (*shape, *strides))
        if counts and isinstance(name, str) and len(shape) == len(strides) <= _MAX_AXES:
            return BucketEntry(name, shape, strides)
    raise CheckpointMismatch(
        f"A layout entry must have a `name`, `shape` and `strides`, got {item!r:.80}."
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
    shape = shape_of(array)
    strides = contiguous = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    if callable(getattr(array, "stride", None)):
        strides = tuple(map(int, array.stride()))
    elif isinstance(array, np.ndarray):
        strides = tuple(step // array.itemsize for step in array.strides)
    expected = 1
    for axis in sorted(range(len(shape)), key=lambda a: (strides[a], shape[a])):
        if shape[axis] > 1:
            if strides[axis] != expected:
                return contiguous
            expected *= shape[axis]
    return strides
