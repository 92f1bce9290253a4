"""Arrays across the frameworks: torch tensors to NumPy and back, bfloat16 and float8 included.

PyTorch is imported only when a tensor has to be made; reading one needs no import.
"""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np

from torch_bridge._base.framework import import_torch

# torch dtype name -> (NumPy dtype of the same bits, the integer view that both sides know)
_NARROW = {
    "bfloat16": (ml_dtypes.bfloat16, "int16"),
    "float8_e4m3fn": (ml_dtypes.float8_e4m3fn, "uint8"),
    "float8_e5m2": (ml_dtypes.float8_e5m2, "uint8"),
}


def is_tensor(value: Any) -> bool:
    """Whether `value` is a torch tensor (or parameter), without importing torch."""
    return type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "detach")


def to_numpy(value: Any) -> np.ndarray:
    """The values of a torch tensor, a JAX array or anything NumPy accepts, in the same dtype.

    A tensor on the CPU shares its memory with the result.
    """
    if not is_tensor(value):
        return np.asarray(value)
    tensor = value.detach().cpu()
    narrow = _NARROW.get(str(tensor.dtype).removeprefix("torch."))
    if narrow is None:
        return tensor.numpy()
    dtype, integers = narrow
    return tensor.view(getattr(import_torch(), integers)).numpy().view(dtype)


def to_tensor(array: np.ndarray, *, copy: bool = True) -> Any:
    """A contiguous torch tensor with the values and dtype of `array`.

    Args:
      array: The values.
      copy: If False, a writable contiguous array shares its memory with the tensor.
    """
    torch = import_torch()
    array = np.array(array, order="C") if copy else np.require(array, requirements=("C", "W"))
    for name, (dtype, integers) in _NARROW.items():
        if array.dtype == dtype:
            return torch.from_numpy(array.view(integers)).view(getattr(torch, name))
    return torch.from_numpy(array)


def shape_of(value: Any) -> tuple[int, ...]:
    """The shape of an array, a tensor, a shape struct or a Python number."""
    return tuple(int(size) for size in getattr(value, "shape", ()))


def storage_key(value: Any) -> tuple[Any, ...] | None:
    """What is equal for two names of one (tied) array; None where it cannot be told."""
    shape = shape_of(value)
    if math.prod(shape) == 0:
        return None
    if is_tensor(value):
        pointer = value.data_ptr()
        return (pointer, shape, tuple(value.stride())) if pointer else None
    if isinstance(value, np.ndarray):
        return (value.__array_interface__["data"][0], shape, value.strides)
    return None
