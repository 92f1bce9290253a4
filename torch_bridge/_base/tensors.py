"""Converts torch tensors to NumPy and back, bfloat16 and float8 included.

All other wings handle arrays, and ask this file about tensors: their dtypes, which of them share
memory, and what their names mean behind the wrappers of DDP, FSDP and torch.compile. Only the
functions that make a tensor import PyTorch; reading a tensor needs no import.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._base.framework import import_torch

_OF_NUMPY = (
    *("float64", "float32", "float16", "complex64", "complex128", "bool"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
)
_OF_ML_DTYPES = (
    *("bfloat16", "float8_e4m3fn", "float8_e5m2"),
    *("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
# Every dtype that is converted, in both directions, by torch's name.
DTYPES: dict[str, np.dtype] = {}
for _name in (*_OF_NUMPY, *_OF_ML_DTYPES):
    DTYPES[_name] = np.dtype(getattr(ml_dtypes, _name, _name))
_SAME_BITS = {1: "uint8", 2: "int16"}  # itemsize in bytes -> an integer dtype of torch and NumPy
# The words that DDP, FSDP and torch.compile add to the names of parameters.
_WORDS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_HEADS = _WORDS | {"module"}
_COUNT_OF_AVERAGES = "n_averaged"  # of AveragedModel, beside the parameters in its `module`
# torch removes these words from the names of a state dict, but not from those of parameters.
_NEVER_SAVED = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
# The buffers of normalisation layers, which have no gradient. Only their names show that.
STATISTICS = ("running_mean", "running_var")
_WITH_GRADIENT = re.compile(r"(float|complex)\d\d")
BUFFER_NAMES = (*STATISTICS, "num_batches_tracked")


def is_tensor(value: Any) -> bool:
    """Returns True for a torch tensor or parameter, without importing torch."""
    return type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "detach")


def to_numpy(value: Any) -> np.ndarray:
    """Converts a torch tensor, a JAX array or any array-like to a NumPy array of the same dtype.

    A tensor on the CPU shares its memory with the result.
    """
    if not is_tensor(value):
        return np.asarray(value)
    tensor = value.detach().cpu()
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in _OF_ML_DTYPES:
        return tensor.numpy()
    dtype = DTYPES[name]
    integers = getattr(import_torch(), _SAME_BITS[dtype.itemsize])
    return tensor.view(integers).numpy().view(dtype)


def to_tensor(array: np.ndarray, *, copy: bool = True) -> Any:
    """Returns a contiguous torch tensor with the values and dtype of an array.

    Args:
      array: The values.
      copy: If False, a writable contiguous array shares its memory with the tensor.

    Raises:
      TypeError: The installed torch does not have the array's dtype.
    """
    torch = import_torch()
    array = np.array(array, order="C") if copy else np.require(array, requirements=("C", "W"))
    name = array.dtype.name
    if name not in _OF_ML_DTYPES:
        return torch.from_numpy(array)
    if not hasattr(torch, name):
        raise TypeError(f"torch {torch.__version__} has no dtype {name}")
    integers = array.view(_SAME_BITS[array.dtype.itemsize])
    return torch.from_numpy(integers).view(getattr(torch, name))


def shape_of(value: Any) -> tuple[int, ...]:
    """Returns the shape of an array, a tensor, a shape struct or a Python number."""
    return tuple(map(int, getattr(value, "shape", ())))


def storage_key(value: Any) -> tuple[Any, ...] | None:
    """Returns a key that is equal for tied tensors (one memory); None if the memory is unknown."""
    shape = shape_of(value)
    if math.prod(shape) == 0:
        return None
    if is_tensor(value):
        pointer = value.data_ptr()  # 0 for a tensor without memory, on the meta device
        return (pointer, shape, tuple(value.stride())) if pointer else None
    if isinstance(value, np.ndarray):
        return (value.__array_interface__["data"][0], shape, value.strides)
    return None


def tied(tensors: Mapping[str, Any]) -> dict[str, str]:
    """Finds tied tensors, which share memory; maps each later name to the first name."""
    first = {}
    further = {}
    for name, value in tensors.items():
        key = storage_key(value)
        if key is None:
            continue
        other = first.setdefault(key, name)
        if other != name:
            further[name] = other
    return further


def trainable(model: Mapping[str, Any]) -> list[str]:
    """Lists the names of possible parameters, in the order of the model.

    Leaves out buffers of normalisation layers, further names of tied tensors, and dtypes that have
    no gradient in torch: integers (``position_ids``) and float8.
    """
    again = tied(model)
    names = []
    for name, value in model.items():
        is_buffer = name.rpartition(".")[2] in BUFFER_NAMES
        dtype = str(getattr(value, "dtype", "float32"))  # a bare shape has no dtype
        if name not in again and not is_buffer and _WITH_GRADIENT.search(dtype):
            names.append(name)
    return names


def equal_matrices(tensors: Mapping[str, Any]) -> dict[str, str]:
    """Finds matrices of equal values, which were tied if the file format cannot share storages.

    Returns:
      Each later name -> the first name with the same values.
    """
    seen = {}
    equal = {}
    for name, value in tensors.items():
        shape = shape_of(value)
        if len(shape) < 2 or 0 in shape or not (is_tensor(value) or isinstance(value, np.ndarray)):
            continue
        array = to_numpy(value)
        row = array[0]
        if np.all(row == row.flat[0]):
            continue  # constant values are an initialisation and do not show a tie
        # The first row finds the candidates, so that no matrix is hashed whole.
        alike = seen.setdefault((shape, array.dtype, row.tobytes()), [])
        for other in alike:
            if np.array_equal(to_numpy(tensors[other]), array):
                equal[name] = other
                break
        else:
            alike.append(name)
    return equal


def unwrapped(names: Sequence[str]) -> list[str]:
    """Removes the wrappers' words that all names begin with, and those that torch never saves.

    Example:
      >>> unwrapped(["module._orig_mod.fc.weight", "module._orig_mod.fc.bias"])
      ['fc.weight', 'fc.bias']
      >>> unwrapped(["0._checkpoint_wrapped_module.weight", "1.weight"])
      ['0.weight', '1.weight']
    """
    kept = saved_names(names)
    # Only words that all names have: a module of the user's may be named "module" too.
    wrapped = list(filter(_COUNT_OF_AVERAGES.__ne__, kept))
    shared = os.path.commonprefix(wrapped).split(".")[:-1]  # noqa: RUF071 (of characters)
    head = ".".join([*itertools.takewhile(_HEADS.__contains__, shared), ""])
    return [name.removeprefix(head) for name in kept]


def saved_names(names: Sequence[str]) -> list[str]:
    """Returns the names that the state dict has for parameters of these names."""
    return _without(names, _NEVER_SAVED)


def _without(names: Sequence[str], words: Collection[str]) -> list[str]:
    """Removes these words from dotted names."""
    kept = []
    for name in names:
        kept.append(".".join(itertools.filterfalse(words.__contains__, name.split("."))))
    return kept


def clean_names(names: Sequence[str]) -> dict[str, str]:
    """Maps each name to the same name without the wrappers' words, at any place in the name.

    Raises:
      CheckpointMismatch: Two names become equal, so a tensor would be lost; the error lists all.
    """
    cleaned = dict(zip(names, unwrapped(_without(names, _WORDS)), strict=True))
    first = {}
    ambiguous = []
    for name, clean in cleaned.items():
        other = first.setdefault(clean, name)
        if other != name:
            ambiguous.append(f"{other} and {name}")
    if ambiguous:
        raise CheckpointMismatch(
            "Several names become equal when the prefixes of DDP, FSDP and torch.compile are "
            "removed. Rename or drop one name of each pair before the conversion.",
            ambiguous=ambiguous,
        )
    return cleaned


def names_in_model(names: Sequence[str], model: Collection[str]) -> list[str]:
    """Returns the names that tensors have in a model, which may differ in the wrappers' words.

    If the names are those of a module of the model (the network in a LightningModule), and only one
    module has them all, its name is put before them. Else a name stays if the model has it, or has
    no tensor or several that could be meant.

    Example:
      >>> names_in_model(["_orig_mod.fc.weight"], ["module.fc.weight", "position_ids"])
      ['module.fc.weight']
      >>> names_in_model(["0.weight", "0.bias"], ["net.0.weight", "net.0.bias", "loss.weight"])
      ['net.0.weight', 'net.0.bias']
    """
    alike = {}
    for name in model:
        alike.setdefault(_bare(name), []).append(name)
    renamed = []
    for name in names:
        of_model = alike.get(_bare(name), ())
        if name in model or len(of_model) != 1:
            of_model = [name]
        renamed += of_model
    if not names or not set(model).isdisjoint(renamed):
        return renamed
    owners = []
    for name in model:
        owner = name.removesuffix(names[0])
        if owner != name and owner.endswith(".") and all(owner + one in model for one in names):
            owners.append(owner)
    if len(owners) == 1:
        return [owners[0] + name for name in names]
    return renamed


def in_model(values: Mapping[str, Any], model: Collection[str]) -> dict[str, Any]:
    """Returns the values under the names of `names_in_model`."""
    return dict(zip(names_in_model(list(values), model), values.values(), strict=True))


def _bare(name: str) -> str:
    """Returns a name without wrappers' words, and without each ``module`` that it begins with."""
    (kept,) = _without([name], _WORDS)
    return ".".join(itertools.dropwhile("module".__eq__, kept.split(".")))
