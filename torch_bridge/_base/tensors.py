"""Torch tensors: to NumPy and back, bfloat16 and float8 included, and the names that they have.

PyTorch is imported only when a tensor has to be made; reading one needs no import.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._base.framework import import_torch

# torch dtype name -> (NumPy dtype of the same bits, the integer view that both sides know)
_NARROW = {
    "bfloat16": (ml_dtypes.bfloat16, "int16"),
    "float8_e4m3fn": (ml_dtypes.float8_e4m3fn, "uint8"),
    "float8_e5m2": (ml_dtypes.float8_e5m2, "uint8"),
}
# What DDP, FSDP and torch.compile put into the names of parameters.
_WORDS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_HEADS = _WORDS | {"module"}
# What a normalisation keeps in buffers, which have no gradient; nothing else marks them.
STATISTICS = ("running_mean", "running_var")
BUFFER_NAMES = (*STATISTICS, "num_batches_tracked")


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


def tied(tensors: Mapping[str, Any]) -> dict[str, str]:
    """Tensors of one memory: each further name -> the first one."""
    first: dict[Any, str] = {}
    keys = {name: storage_key(value) for name, value in tensors.items()}
    named = {name: first.setdefault(key, name) for name, key in keys.items() if key is not None}
    return {name: other for name, other in named.items() if name != other}


def trainable(model: Mapping[str, Any]) -> list[str]:
    """What can be a parameter, in the order of the model: no buffer, and tied ones once.

    Integers (``position_ids``) and float8 have no gradient in torch.
    """
    again = tied(model)
    return [
        name
        for name, value in model.items()
        if name not in again
        and name.rpartition(".")[2] not in BUFFER_NAMES
        # A shape alone has no dtype.
        and re.search(r"(float|complex)\d\d", str(getattr(value, "dtype", "float32")))
    ]


def equal_matrices(tensors: Mapping[str, Any]) -> dict[str, str]:
    """Matrices of equal values: what is tied, where a file has no shared storage."""
    seen: dict[Any, list[str]] = {}
    equal: dict[str, str] = {}
    for name, value in tensors.items():
        shape = shape_of(value)
        if len(shape) < 2 or 0 in shape or not (is_tensor(value) or isinstance(value, np.ndarray)):
            continue
        array = to_numpy(value)
        row = array[0]
        if np.all(row == row.flat[0]):
            continue  # constant values are fresh ones, not tied
        alike = seen.setdefault((shape, array.dtype, row.tobytes()), [])
        found = next((n for n in alike if np.array_equal(to_numpy(tensors[n]), array)), None)
        if found is None:
            alike.append(name)
        else:
            equal[name] = found
    return equal


def unwrapped(names: Sequence[str]) -> list[str]:
    """The names without the wrappers' words that all of them begin with.

    Example:
      >>> unwrapped(["module._orig_mod.fc.weight", "module._orig_mod.fc.bias"])
      ['fc.weight', 'fc.bias']
    """
    shared = os.path.commonprefix(list(names)).split(".")[:-1]  # noqa: RUF071 (of characters)
    length = next((k for k, word in enumerate(shared) if word not in _HEADS), len(shared))
    cut = sum(len(word) + 1 for word in shared[:length])
    return [name[cut:] for name in names]


def clean_names(names: Sequence[str]) -> dict[str, str]:
    """Each name with what it reads without the wrappers' words, wherever they stand.

    Raises:
      CheckpointMismatch: Names become one, so that a tensor would be lost; all such are listed.
    """
    kept = [".".join(word for word in name.split(".") if word not in _WORDS) for name in names]
    cleaned = dict(zip(names, unwrapped(kept), strict=True))
    first = {clean: name for name, clean in reversed(cleaned.items())}
    if len(first) < len(cleaned):
        raise CheckpointMismatch(
            "Names become one without the words of DDP, FSDP and torch.compile. Rename or drop one "
            "of each two before the conversion.",
            ambiguous=[
                f"{first[clean]} and {name}"
                for name, clean in cleaned.items()
                if first[clean] != name
            ],
        )
    return cleaned
