"""The allow-list: our replacement for each global that torch, NumPy and Python write into a file.

`unpickle` calls these functions where a pickle calls a global, so this file alone decides what a
file can cause. Every function checks its arguments, because the file chooses the arguments too.
What is not listed is refused by name, with advice for the kinds that torch itself would read.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from torch_bridge._base.schema import random_state
from torch_bridge._read.tensors import STORAGES, tensor_constructors
from torch_bridge._read.values import Budget, Forbidden, Global, Malformed, brief, expect

_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"
_GENERATOR_BYTES = 4 * 624 + 4000
_NUMPY_DTYPE = re.compile(r"[<|=]?(?:b1|[iu][1248]|f[248]|c8|c16|\?)")
# Globals that a checkpoint may mention as values; the reader never calls them.
_VALUES = frozenset(STORAGES) | {
    "torch.Tensor", "torch.nn.parameter.Parameter", "torch.strided", "torch.contiguous_format",
    "torch.channels_last", "numpy.ndarray", "numpy.random._mt19937.MT19937",
    "numpy.random.bit_generator.SeedSequence", "builtins.int", "builtins.float", "builtins.bool",
    "builtins.str", "builtins.list", "builtins.dict",
    "builtins.long",  # the name of int in pickle protocol 2, which torch writes
}  # fmt: skip
# The same for torch's dtypes and hooks.
_KINDS_OF_VALUES = re.compile(
    r"torch\.(?:q?u?int|b?float|b?complex|bits|bool|per_tensor|per_channel)\w*"
    rf"|{re.escape(_HOOKS)}\.\w+\.\w+_hook"
)
# Globals that ``torch.load(weights_only=True)`` reads and this reader does not: the advice for the
# user, by the beginning of the name.
_FULL = (
    "A DTensor is a part of a tensor; save its full_tensor(), or the state dict that "
    "torch.distributed.checkpoint.state_dict gives with StateDictOptions(full_state_dict=True)"
)
_WAYS_OUT = {
    "torch.distributed.tensor": _FULL,
    "torch.distributed._tensor": _FULL,
    "torch.distributed.device_mesh": _FULL,
    "torch._utils._rebuild_wrapper_subclass": _FULL,
    "torch._utils._rebuild_meta": "A tensor on the meta device has no values; leave it out",
    "torch._utils._rebuild_sparse": "Save sparse tensors as to_dense()",
    "torch._utils._rebuild_qtensor": "Save quantized tensors as dequantize()",
    "torch._utils._rebuild_nested": "Save nested tensors as their unbind()",
    "torch.nn.parameter.Uninitialized": "A lazy parameter has no values; run the model once first",
}
_OTHERWISE = (
    "Save tensors, numbers, strings and containers of them (of a module its state_dict()), and "
    "read that file"
)


def is_value(name: str) -> bool:
    """Returns whether a checkpoint may mention this global as a value, though never call it."""
    return name in _VALUES or _KINDS_OF_VALUES.fullmatch(name) is not None


def way_out(name: str) -> str:
    """Returns advice for a file that asks for this global, which is not on the allow-list."""
    for start, advice in _WAYS_OUT.items():
        if name.startswith(start):
            return advice
    return _OTHERWISE


class Attributes(dict):
    """The attributes of an object, by name. The reader takes nothing else from the object."""

    __slots__ = ()


def functions_of(budget: Budget) -> dict[str, Callable[..., Any]]:
    """Makes a replacement for each global that a file may call, by the global's name.

    A replacement charges its copies to `budget`. An object whose state follows in the file (an
    array, a generator, `Attributes`) stays empty until `set_state`.
    """
    rebuild = tensor_constructors(budget)

    def from_type(function: Any, kind: Any, args: Any, state: Any) -> Any:
        # A tensor with Python attributes: call the inner rebuild function, drop the attributes.
        if expect(function, Global, "where a function belongs").name not in rebuild:
            raise Forbidden(f"{function.name} (called)")
        return rebuild[function.name](*expect(args, tuple, "as arguments"))

    def mapping(items: Any = ()) -> dict:
        items = items.items() if isinstance(items, dict) else _listed(items)
        return budget.fill_dictionary({}, items)

    def members(items: Any = ()) -> set:
        return budget.fill_set(set(), _listed(items))

    def size(items: Any = ()) -> tuple:
        budget.claim(8 * len(_listed(items)))
        return tuple(items)

    def encode(text: Any, encoding: Any) -> bytes:
        if _text(encoding) not in ("latin1", "latin-1", "utf-8", "ascii"):
            raise Malformed("bytes in an encoding that pickle does not use")
        budget.claim(4 * len(_text(text)))
        return text.encode(encoding)

    def path(*parts: Any) -> str:
        budget.claim(4 * sum(map(len, map(_text, parts))))  # a file can join paths again
        return "/".join(parts).replace("//", "/")

    def to_bytes(value: Any = b"", encoding: Any = None) -> bytes:
        # Refuses a number, because bytes(10**12) would allocate that many bytes.
        if encoding is None:
            return expect(value, bytes, "where bytes belong")
        return encode(value, encoding)

    def generator(*_: Any) -> np.random.RandomState:
        budget.claim(_GENERATOR_BYTES)  # every generator has its 624 words
        return np.random.RandomState(0)  # without a seed it would also hold a SeedSequence

    array = functools.partial(_array, budget)
    return rebuild | {
        "torch._tensor._rebuild_from_type_v2": from_type,
        "torch.Size": size,
        "torch.device": _device,
        "torch.serialization._get_layout": _text,
        "torch.torch_version.TorchVersion": _text,
        "collections.OrderedDict": mapping,
        "collections.Counter": mapping,
        "collections.defaultdict": lambda factory=None, items=(): mapping(items),
        "builtins.set": members,
        "builtins.frozenset": lambda items=(): frozenset(members(items)),
        "builtins.bytes": to_bytes,
        "builtins.bytearray": to_bytes,
        "builtins.complex": _complex,
        "_codecs.encode": encode,
        "pathlib.PosixPath": path,
        "pathlib._local.PosixPath": path,
        "argparse.Namespace": lambda *_: Attributes(),
        f"{_HOOKS}.powerSGD_hook.PowerSGDState": lambda *_: Attributes(),
        f"{_HOOKS}.post_localSGD_hook.PostLocalSGDState": lambda *_: Attributes(),
        "numpy.dtype": _numpy_dtype,
        "numpy._core.multiarray._reconstruct": lambda *_: np.empty(0),
        "numpy._core.multiarray.scalar": lambda dtype, raw: array(raw, dtype, ())[()],
        "numpy._core.numeric._frombuffer": array,
        "numpy.random._pickle.__randomstate_ctor": generator,
        "numpy.random.__RandomState_ctor": generator,
        # Ignored, because the RandomState around them repeats their states.
        "numpy.random._pickle.__bit_generator_ctor": lambda *_: {},
        "numpy.random.bit_generator.__pyx_unpickle_SeedSequence": lambda *_: {},
    }


def set_state(value: Any, state: Any, budget: Budget) -> None:
    """Carries out pickle's BUILD opcode: sets the state of `value` in place.

    `value` is an object that a function of `functions_of` made. The attributes of a dictionary
    (``_metadata`` of a state_dict) are ignored.
    """
    if isinstance(value, Attributes):
        # A class with __slots__ pickles as (instance dict, slots), one with __getstate__ as a dict.
        parts = state[::-1] if isinstance(state, tuple) and len(state) == 2 else (state,)
        for part in filter(None, parts):
            if not all(isinstance(name, str) for name in expect(part, dict, "as attributes")):
                raise Malformed("an object whose attributes have no names")
            value.update(part)
    elif isinstance(value, np.ndarray) and not value.size:
        _version, shape, dtype, fortran, raw = _listed(state)
        made = _array(budget, raw, dtype, shape, "F" if fortran is True else "C")
        budget.claim(made.nbytes)
        state_of_made: Any = made.__reduce__()[2]
        value.__setstate__(state_of_made)
    elif isinstance(value, np.random.RandomState):
        if isinstance(state, dict):
            words = state["state"]
            state = (state["bit_generator"], words["key"], words["pos"], state["has_gauss"],
                     state["gauss"])  # fmt: skip
        kind, *fields = _listed(state)
        if _text(kind) != "MT19937" or len(fields) != 4:
            raise Malformed(f"the generator {brief(kind)!r} where torch has MT19937")
        value.set_state(random_state(*fields).get_state())
    elif isinstance(value, np.dtype):
        if any(part is not None for part in expect(state, tuple, "as a NumPy dtype")[2:5]):
            raise Malformed("a structured NumPy dtype")
        if _text(state[1]) == ">":
            raise Malformed("a big-endian NumPy array; save array.astype(float), for example")
    elif not isinstance(value, dict):
        raise Malformed("attributes of an object that cannot have any")


def _array(budget: Budget, raw: Any, dtype: Any, shape: Any, order: Any = "C") -> np.ndarray:
    expect(raw, bytes, "as the data of a NumPy array, which may not be of Python objects")
    expect(dtype, np.dtype, "as a NumPy dtype")
    budget.claim(len(raw) + 64)
    if not isinstance(shape, tuple | list) or len(shape) > 64:
        raise Malformed("a NumPy array whose shape is not a tuple of at most 64 numbers")
    return np.frombuffer(raw, dtype).reshape(shape, order=order).copy()


def _listed(values: Any) -> Any:
    """Returns `values` if it is a list or similar; refuses an array, which can have any size."""
    return expect(values, (tuple, list, set, frozenset), "where a list belongs")


def _text(value: Any) -> str:
    return expect(value, str, "where text belongs")


def _device(kind: Any, index: Any = None) -> str:
    if index is not None and type(index) is not int:
        raise Malformed("a device whose index is not a number")
    return f"{_text(kind):.32}" if index is None else f"{_text(kind):.32}:{brief(index)}"


def _complex(real: Any, imag: Any = 0.0) -> complex:
    for part in (real, imag):
        expect(part, (int, float), "in a complex number")
    return complex(real, imag)


def _numpy_dtype(code: Any, *_: Any) -> np.dtype:
    if not isinstance(code, str) or not _NUMPY_DTYPE.fullmatch(code):
        raise Malformed(f"the NumPy dtype {brief(code)!r}; numbers and booleans are read")
    return np.dtype(code)
