"""Storages, and the tensors that are views of them, checked and charged to a budget."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from torch_bridge._read.values import Global, Malformed, brief

DTYPES: dict[str, np.dtype] = {
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "float8_e4m3fnuz": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "float8_e5m2fnuz": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "complex64": np.dtype(np.complex64),
    "complex128": np.dtype(np.complex128),
    "int64": np.dtype(np.int64),
    "int32": np.dtype(np.int32),
    "int16": np.dtype(np.int16),
    "int8": np.dtype(np.int8),
    "uint8": np.dtype(np.uint8),
    "uint16": np.dtype(np.uint16),
    "uint32": np.dtype(np.uint32),
    "uint64": np.dtype(np.uint64),
    "bool": np.dtype(np.bool_),
}
_STORAGE_DTYPES = {
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
}
UNTYPED = np.dtype(np.uint8)
_VIEW_BYTES = 128  # of an array itself; 16 more for each axis
# torch.cuda's names appear in files of older releases; where a tensor lay does not matter here.
STORAGES: dict[str, np.dtype] = {
    f"torch.{place}{kind}Storage": DTYPES[name]
    for kind, name in _STORAGE_DTYPES.items()
    for place in ("", "cuda.")
} | {"torch.storage.UntypedStorage": UNTYPED, "torch.UntypedStorage": UNTYPED}


@dataclasses.dataclass
class Budget:
    """Counts down the bytes that a file's arrays may take.

    Attributes:
      limit: Bytes allowed.
      used: Bytes claimed so far.
    """

    limit: int
    used: int = 0

    def claim(self, nbytes: int) -> None:
        """Count `nbytes`, or raise Malformed when the limit is passed."""
        self.used += nbytes
        if self.used > self.limit:
            raise Malformed(
                f"contents that unpack to more than {self.limit} bytes, the limit for this file; "
                f"if you trust it, pass a larger `max_bytes`",
                ("max_bytes",),
            )


def default_limit(size: int) -> int:
    """The most bytes that a file of `size` bytes may take, unless the user says another limit."""
    return 3 * size + (64 << 20)


@dataclasses.dataclass
class Storage:
    """A run of bytes that tensors are views of.

    Attributes:
      raw: Uint8, shape (nbytes,).
      dtype: Element type, or `UNTYPED` when each tensor says its own.
      viewed: Bytes of all tensors so far.
    """

    raw: np.ndarray
    dtype: np.dtype
    viewed: int = 0

    def view_more(self, nbytes: int, budget: Budget) -> None:
        """Charge a tensor, which is copied sooner or later, where it is not its storage's own."""
        own = max(self.raw.size - self.viewed, 0)
        budget.claim(max(nbytes - own, 0))
        self.viewed += nbytes


def tensor_constructors(budget: Budget) -> dict[str, Callable[..., Any]]:
    """What torch's functions that rebuild a tensor mean, charged to `budget`."""

    def tensor(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> np.ndarray:
        _refuse_lazy_views(rest[2:])
        if not isinstance(storage, Storage):
            raise Malformed(f"a tensor made of a {type(storage).__name__}")
        return view(storage, storage.dtype, offset, size, stride, budget)

    def tensor_v3(
        storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, *rest
    ) -> np.ndarray:
        _refuse_lazy_views(rest)
        return view(storage, torch_dtype(dtype), offset, size, stride, budget)

    def parameter(data: Any, *_: Any) -> np.ndarray:
        if not isinstance(data, np.ndarray):
            raise Malformed(f"a parameter made of a {type(data).__name__}")
        return data

    return {
        "torch._utils._rebuild_tensor": tensor,
        "torch._utils._rebuild_tensor_v2": tensor,
        "torch._utils._rebuild_tensor_v3": tensor_v3,
        "torch._utils._rebuild_parameter": parameter,
        "torch._utils._rebuild_parameter_with_state": parameter,
        "torch._utils._rebuild_device_tensor_from_cpu_tensor": parameter,
        "torch._utils._rebuild_device_tensor_from_numpy": parameter,
    }


def torch_dtype(token: Any) -> np.dtype:
    """The NumPy dtype of a ``torch.<dtype>`` token."""
    name = token.name.removeprefix("torch.") if isinstance(token, Global) else ""
    if name not in DTYPES:
        raise Malformed(f"{name or brief(token):.60} where a dtype belongs")
    return DTYPES[name]


def view(
    storage: Any, dtype: np.dtype, offset: Any, size: Any, stride: Any, budget: Budget
) -> np.ndarray:
    """A tensor as a NumPy view of its storage, checked to lie inside it.

    Args:
      storage: A `Storage`.
      dtype: Element type.
      offset: First element, counted in elements.
      size: Length per axis.
      stride: Distance per axis, counted in elements.
      budget: Charged what all tensors of a storage have more than it; strides of 0 can make them
        larger than the file.

    Returns:
      An array of shape `size` that shares the storage's memory.

    Raises:
      Malformed: An entry is no count, or an element lies outside the storage.
    """
    if not isinstance(storage, Storage):
        raise Malformed(f"a tensor made of a {type(storage).__name__}")
    if not all(isinstance(axes, tuple | list) and len(axes) <= 64 for axes in (size, stride)):
        raise Malformed("a tensor whose sizes and strides are no tuples of at most 64")
    counts = (offset, *size, *stride)
    if any(type(count) is not int or not 0 <= count < 2**62 for count in counts):
        raise Malformed("a tensor whose offset, sizes or strides are no counts")
    if len(size) != len(stride):
        raise Malformed("a tensor whose sizes and strides differ in number")
    budget.claim(_VIEW_BYTES + 16 * len(size))
    numel = math.prod(size)
    if numel:
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        if (last + 1) * dtype.itemsize > storage.raw.size:
            raise Malformed("a tensor that reaches outside its storage")
        storage.view_more(numel * dtype.itemsize, budget)
    else:
        return np.empty(tuple(size), dtype)
    return np.ndarray(
        tuple(size),
        dtype,
        buffer=storage.raw.data,
        offset=offset * dtype.itemsize,
        strides=tuple(step * dtype.itemsize for step in stride),
    )


def _refuse_lazy_views(metadata: tuple[Any, ...]) -> None:
    for entry in metadata:
        if isinstance(entry, dict) and any(value is True for value in entry.values()):
            raise Malformed("a lazily conjugated or negated tensor; save it after resolve_conj()")
