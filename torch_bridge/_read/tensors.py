"""Storages, and the tensors that are views of them, checked and charged to a budget."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from torch_bridge._read.values import Budget, Global, Malformed, brief

_NUMPY = (
    "float64 float32 float16 complex64 complex128 int64 int32 int16 int8 uint8 uint16 uint32 uint64"
)
_ML_DTYPES = "bfloat16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"
DTYPES: dict[str, np.dtype] = {
    **{name: np.dtype(name) for name in (*_NUMPY.split(), "bool")},
    **{name: np.dtype(getattr(ml_dtypes, name)) for name in _ML_DTYPES.split()},
}
# torch.cuda's names appear in files of older releases; where a tensor lay does not matter here.
# Each tensor of an untyped storage says its own type.
STORAGES: dict[str, np.dtype] = {
    f"torch.{place}{kind}Storage": DTYPES[name]
    for kind, name in {
        "Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16",
        "ComplexFloat": "complex64", "ComplexDouble": "complex128", "Long": "int64",
        "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool",
        "Untyped": "uint8",
    }.items()
    for place in ("", "cuda.", "storage.")
}  # fmt: skip
_VIEW_BYTES = 128  # of an array itself; 16 more for each axis


@dataclasses.dataclass
class Storage:
    """A run of bytes that tensors are views of.

    Attributes:
      raw: Uint8, shape (nbytes,).
      dtype: Element type, where a tensor does not say its own.
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
        return view(storage, None, offset, size, stride, budget)

    def tensor_v3(
        storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, *rest
    ) -> np.ndarray:
        _refuse_lazy_views(rest)
        return view(storage, torch_dtype(dtype), offset, size, stride, budget)

    def parameter(data: Any, *_: Any) -> np.ndarray:
        if not isinstance(data, np.ndarray):
            raise Malformed(f"a parameter made of a {type(data).__name__}")
        return data

    functions = {
        "tensor": tensor,
        "tensor_v2": tensor,
        "tensor_v3": tensor_v3,
        "parameter": parameter,
        "parameter_with_state": parameter,
        "device_tensor_from_cpu_tensor": parameter,
        "device_tensor_from_numpy": parameter,
    }
    return {f"torch._utils._rebuild_{name}": function for name, function in functions.items()}


def torch_dtype(token: Any) -> np.dtype:
    """The NumPy dtype of a ``torch.<dtype>`` token."""
    name = token.name.removeprefix("torch.") if isinstance(token, Global) else brief(token)
    if name not in DTYPES or not isinstance(token, Global):
        raise Malformed(f"{name:.60} where a dtype that NumPy has belongs")
    return DTYPES[name]


def view(
    storage: Any, dtype: np.dtype | None, offset: Any, size: Any, stride: Any, budget: Budget
) -> np.ndarray:
    """A tensor of shape `size` as a view of its storage, checked to lie inside it.

    `offset` and `stride` count elements; a dtype of None is that of the storage. The budget is
    charged what all tensors of a storage have more than it, as strides of 0 can make them large.
    """
    if not isinstance(storage, Storage):
        raise Malformed(f"a tensor made of a {type(storage).__name__}")
    dtype = storage.dtype if dtype is None else dtype
    if not all(isinstance(axes, tuple | list) and len(axes) <= 64 for axes in (size, stride)):
        raise Malformed("a tensor whose sizes and strides are no tuples of at most 64")
    if any(type(n) is not int or not 0 <= n < 2**62 for n in (offset, *size, *stride)):
        raise Malformed("a tensor whose offset, sizes or strides are no counts")
    if len(size) != len(stride):
        raise Malformed("a tensor whose sizes and strides differ in number")
    budget.claim(_VIEW_BYTES + 16 * len(size))
    numel = math.prod(size)
    if not numel:
        return np.empty(tuple(size), dtype)
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if (last + 1) * dtype.itemsize > storage.raw.size:
        raise Malformed("a tensor that reaches outside its storage")
    storage.view_more(numel * dtype.itemsize, budget)
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
