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
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxcomp.extend import is_compressed
from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._base.schema import BUFFERS
from torch_bridge._base.tensors import shape_of, to_numpy, unwrapped

_FORMAT = {"format": "torch_bridge.BucketLayout", "version": 1}
_MAX_AXES = 64  # as torch
_COLUMNS = 128
_MAX_SIZE = 2**59  # of any array, axes of length 0 left out
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
      >>> entry.to_memory(np.array([[1, 2, 3], [4, 5, 6]]))
      array([1, 4, 2, 5, 3, 6])
    """

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns of ``tensor.view(shape[0], -1)``; an empty or scalar tensor has none."""
        rows = self.shape[0] if self.shape else 0
        return rows, self.size // rows if rows else 0

    def factor_rank(self, record: Any) -> int:
        """The rank with which the hook of a record compresses it; 0 if it does not.

        Args:
          record: A `PowerSGDRecord`, or torch's own ``PowerSGDState``.
        """
        rank = min(*self.matrix, record.matrix_approximation_rank)
        return rank if is_compressed(*self.matrix, rank, record.min_compression_rate) else 0

    def from_memory(self, flat: np.ndarray) -> np.ndarray:
        """The parameter's elements, as they lie in memory, as an array of `shape` (a view)."""
        return flat.reshape([self.shape[axis] for axis in self._memory_order]).transpose(
            np.argsort(self._memory_order)
        )

    def to_memory(self, array: np.ndarray) -> np.ndarray:
        """The inverse of `from_memory`."""
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


class BucketPart(NamedTuple):
    """What the hook keeps for one parameter, as views of the buffers of its bucket.

    Attributes:
      entry: The parameter.
      bucket: Index of its bucket.
      rank: Of its factors; 0 where it is not compressed.
      error: Of the parameter's shape; it and the factors are None where the bucket has no buffer.
      p: Shape (rows, rank), with the rows and columns of ``entry.matrix``.
      q: Shape (cols, rank).
    """

    entry: BucketEntry
    bucket: int
    rank: int
    error: np.ndarray | None
    p: np.ndarray | None
    q: np.ndarray | None

    def flaw(self, mean: np.ndarray | None, several: bool) -> str | None:
        """Why a hook cannot have left this on a rank, as `infer_layout` says; None if it can.

        Args:
          mean: The mean error of all ranks, None where they are not at hand.
          several: Whether these are more than one.
        """
        name = self.entry.name
        if not self.rank and several and mean is not None and self.error is not None:
            size = np.linalg.norm(self.error.astype(np.float64))
            if np.linalg.norm(mean) > 1e-2 * size:
                return f"the errors of {name} would not cancel over the ranks"
        if not self.rank or self.p is None:
            return None
        # Some columns show it; all of a full rank would take gigabytes and minutes.
        p = self.p[:, :_COLUMNS].astype(np.float64)
        if not np.isfinite(p).all():
            return None
        tolerance = max(64 * np.sqrt(len(p)) * float(jnp.finfo(self.p.dtype).eps), 1e-3)
        if np.abs(p.T @ p - np.eye(p.shape[1])).max() > tolerance:
            return f"the factors of {name} would not be orthonormal"
        if mean is not None:
            matrix = self.entry.to_memory(mean).reshape(len(p), -1)
            if np.linalg.norm(p.T @ matrix) > 1e-2 * np.linalg.norm(matrix) + 1e-12:
                return f"the error of {name} would not be what its factors left over"
        return None


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
        """Parameter name -> its entry, which has a shape as a tensor has; bucket after bucket."""
        return {entry.name: entry for bucket in self.buckets for entry in bucket}

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
        try:
            if len(text) > _MAX_TEXT:
                raise ValueError("too long")
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

    def parts(self, record: Any) -> dict[str, BucketPart]:
        """The buffers of a record, cut into what they hold of each parameter.

        Bucket after bucket; within one by groups of equal matrix shape in first-seen order, as the
        hook cuts P and Q. Errors lie in bucket order.

        Args:
          record: A `PowerSGDRecord` or ``PowerSGDState`` of which nothing misfits.
        """
        found = {}
        for index, bucket in enumerate(self.buckets):
            flats = (getattr(record, name).get(index) for name in BUFFERS)
            error, p, q = (None if flat is None else to_numpy(flat) for flat in flats)
            groups: dict[tuple[int, int], list[tuple[BucketEntry, int]]] = {}
            ends = itertools.accumulate(entry.size for entry in bucket)
            for entry, end in zip(bucket, ends, strict=True):
                groups.setdefault(entry.matrix, []).append((entry, end))
            p_end = q_end = 0
            for entry, end in itertools.chain(*groups.values()):
                (rows, cols), rank = entry.matrix, entry.factor_rank(record)
                p_end, q_end = p_end + rows * rank, q_end + cols * rank
                found[entry.name] = BucketPart(
                    entry,
                    index,
                    rank,
                    None if error is None else entry.from_memory(error[end - entry.size : end]),
                    None if p is None else p[p_end - rows * rank : p_end].reshape(rows, rank),
                    None if q is None else q[q_end - cols * rank : q_end].reshape(cols, rank),
                )
        return found

    def buffer_sizes(self, record: Any) -> tuple[dict[int, int], ...]:
        """Lengths of the error, P and Q buffers, a dictionary of bucket indices each."""
        factors = dict[int, int](), dict[int, int]()
        for index, bucket in enumerate(self.buckets):
            ranks = [(entry.matrix, entry.factor_rank(record)) for entry in bucket]
            for side, sizes in enumerate(factors):
                sizes[index] = sum(matrix[side] * rank for matrix, rank in ranks)
        return dict(enumerate(self.sizes)), *factors

    def misfits(self, record: Any) -> list[str]:
        """The buffers of another length than the layout gives them, a line each."""
        return [
            f"{kind} of bucket {bucket} has {len(array)} values, the layout gives it "
            f"{sizes.get(bucket, 'no such bucket')}"
            for kind, name, sizes in zip(
                ("error", "P", "Q"), BUFFERS, self.buffer_sizes(record), strict=True
            )
            for bucket, array in getattr(record, name).items()
            if len(array) != sizes.get(bucket)
        ]


def _entry(item: Any) -> BucketEntry:
    """An entry as `BucketLayout.to_json` writes it, checked; torch has no more than 64 axes."""
    with contextlib.suppress(TypeError, ValueError, KeyError):
        name, shape, strides = item["name"], tuple(item["shape"]), tuple(item["strides"])
        counts = all(type(n) is int and n >= 0 for n in (*shape, *strides))
        fits = counts and math.prod(max(n, 1) for n in shape) < _MAX_SIZE
        if fits and isinstance(name, str) and len(shape) == len(strides) <= _MAX_AXES:
            return BucketEntry(name, shape, strides)
    raise CheckpointMismatch(
        f"A layout entry must have a `name`, `shape` and `strides`, got {item!r:.80}."
    )


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
