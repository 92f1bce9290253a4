"""Reads storages and makes the tensors, which are views of them; checks and charges both.

In a torch file a tensor is an offset, sizes and strides into a storage, and several tensors may
share one. They become NumPy views of the same bytes, so sharing survives and nothing is copied. The
numbers come from the file, so each view is checked to stay inside its storage.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from torch_bridge._base.tensors import DTYPES
from torch_bridge._read.values import Budget, Global, Malformed, brief, expect

# Files of older torch releases have the names of torch.cuda; the device does not matter here.
# A tensor in an untyped storage has a dtype of its own.
_KINDS = {
    "Double": "float64",
    "Float": "float32",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
    "Untyped": "uint8",
}
STORAGES: dict[str, np.dtype] = {}
for _place in ("", "cuda.", "storage."):
    for _kind, _name in _KINDS.items():
        STORAGES[f"torch.{_place}{_kind}Storage"] = DTYPES[_name]
_VIEW_BYTES = 128  # memory of an array object without its data; each axis takes 16 more
_MAX_COUNT = 2**62


@dataclasses.dataclass
class Storage:
    """The bytes that one or several tensors are views of.

    Attributes:
      raw: The bytes, uint8, shape (nbytes,).
      dtype: The element type of every tensor that has no dtype of its own in the file.
      viewed: The bytes of all tensors that were made from this storage so far.
    """

    raw: np.ndarray
    dtype: np.dtype
    viewed: int = 0


def storage_reader(read: Callable[[str, int], np.ndarray]) -> Callable[..., Storage]:
    """Makes the function that returns the storage for the parts of a pickle's persistent id.

    Args:
      read: Returns the bytes of an archive's entry, from its name and its size in bytes.
    """
    storages = {}

    def storage(kind: Any, name: Any, _location: Any, numel: Any, *_: Any) -> Storage:
        if not isinstance(kind, Global) or kind.name not in STORAGES:
            raise Malformed("a storage of an unknown type")
        if not isinstance(name, str) or not _is_count(numel):
            raise Malformed("a storage whose key or size is unreadable")
        dtype = STORAGES[kind.name]
        nbytes = numel * dtype.itemsize
        if name not in storages:
            storages[name] = Storage(read(f"data/{name}", nbytes), dtype)
        # A second mention may not reinterpret the bytes of the first.
        if storages[name].dtype != dtype or storages[name].raw.size != nbytes:
            raise Malformed("one storage that has two sizes or types")
        return storages[name]

    return storage


def tensor_constructors(budget: Budget) -> dict[str, Callable[..., Any]]:
    """Makes replacements for torch's functions that rebuild tensors, charged to `budget`."""

    def tensor(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> np.ndarray:
        """Returns a view of a storage; refuses one that reaches outside the storage."""
        raw = expect(storage, Storage, "as a storage").raw
        kind = storage.dtype
        # After requires_grad and hooks, which are ignored, come a dtype (v3) and dictionaries.
        for note in rest[2:]:
            if isinstance(note, Global) and note.name.removeprefix("torch.") in DTYPES:
                kind = DTYPES[note.name.removeprefix("torch.")]
            elif not isinstance(note, dict):
                name = note.name if isinstance(note, Global) else brief(note)
                raise Malformed(f"{name:.60} where a dtype that NumPy has belongs")
            elif note and True in note.values():
                raise Malformed(
                    "a lazily conjugated or negated tensor; save it after resolve_conj()"
                )
        if not all(isinstance(axes, tuple | list) and len(axes) <= 64 for axes in (size, stride)):
            raise Malformed("a tensor whose sizes and strides are not tuples of at most 64 numbers")
        if len(size) != len(stride) or not all(map(_is_count, (offset, *size, *stride))):
            raise Malformed("a tensor whose offset, sizes or strides are not counts")
        budget.claim(_VIEW_BYTES + 16 * len(size))
        nbytes = math.prod(size) * kind.itemsize
        if not nbytes:  # it reaches nothing, and may have any strides
            return np.empty(tuple(size), kind)
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        if (last + 1) * kind.itemsize > raw.size:
            raise Malformed("a tensor that reaches outside its storage")
        # The conversion copies tensors, and strides of 0 can make a small storage a large tensor.
        # So the bytes by which all tensors of a storage exceed the storage are charged.
        budget.claim(max(nbytes - max(raw.size - storage.viewed, 0), 0))
        storage.viewed += nbytes
        steps = tuple(step * kind.itemsize for step in stride)
        return np.ndarray(tuple(size), kind, raw.data, offset * kind.itemsize, steps)

    def parameter(data: Any, *_: Any) -> np.ndarray:
        return expect(data, np.ndarray, "as a parameter")

    functions: dict[str, Callable[..., Any]] = {
        "tensor": tensor,
        "tensor_v2": tensor,
        "tensor_v3": tensor,
    }
    for name in (
        *("parameter", "parameter_with_state"),
        *("device_tensor_from_cpu_tensor", "device_tensor_from_numpy"),
    ):
        functions[name] = parameter
    return {f"torch._utils._rebuild_{name}": function for name, function in functions.items()}


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX_COUNT
