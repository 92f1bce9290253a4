"""The allow-list: what each global that torch, NumPy and Python write into a checkpoint means here.

Every constructor below takes what the file passes and checks it, because the file chooses the
arguments too: a tensor's sizes, strides and offset must stay inside its storage, and the arrays
of one file together stay below a budget.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from torch_bridge._base.schema import RandomStateRecord
from torch_bridge._read.tensors import DTYPES, STORAGES, Budget, tensor_constructors
from torch_bridge._read.values import Forbidden, Global, Keys, Malformed, Pending, brief

_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"
POWERSGD_STATE = f"{_HOOKS}.powerSGD_hook.PowerSGDState"

_MAX_PATH = 4096
_GENERATOR_BYTES = 4 * 624 + 1000
_NUMPY_DTYPE = re.compile(r"[<>|=]?(?:b1|[iu][1248]|f[248]|c8|c16|\?)")

# Values that a checkpoint may mention; nothing here is ever called.
_NAMED_VALUES = {
    f"{_HOOKS}.{hook}"
    for hook in (
        "powerSGD_hook.powerSGD_hook",
        "powerSGD_hook.batched_powerSGD_hook",
        "default_hooks.allreduce_hook",
        "default_hooks.fp16_compress_hook",
        "default_hooks.bf16_compress_hook",
        "post_localSGD_hook.post_localSGD_hook",
        "quantization_hooks.quantization_pertensor_hook",
        "quantization_hooks.quantization_perchannel_hook",
        "debugging_hooks.noop_hook",
    )
} | {
    "torch.Tensor",
    "torch.nn.parameter.Parameter",
    "torch.strided",
    "torch.contiguous_format",
    "torch.channels_last",
    "numpy.ndarray",
    "numpy.random._mt19937.MT19937",
    "numpy.random.bit_generator.SeedSequence",
    "builtins.int",
    "builtins.float",
    "builtins.bool",
    "builtins.str",
    "builtins.list",
    "builtins.dict",
}


def allow_list(budget: Budget, keys: Keys) -> tuple[frozenset[str], dict[str, Callable[..., Any]]]:
    """The globals that may appear, and the constructors of those that may be called.

    Args:
      budget: What the arrays of this file are charged to.
      keys: What checks and counts its keys.

    Returns:
      All names allowed, and name -> constructor.
    """
    rebuild = tensor_constructors(budget)

    def from_type(function: Any, kind: Any, args: Any, state: Any) -> Any:
        # A tensor with Python attributes: the inner rebuild, without the attributes.
        if not isinstance(function, Global) or not isinstance(args, tuple):
            raise Malformed("a tensor without a function that makes it, or without arguments")
        if function.name not in rebuild:
            raise Forbidden(f"{function.name} (called)")
        return rebuild[function.name](*args)

    constructors = {
        **rebuild,
        "torch._tensor._rebuild_from_type_v2": from_type,
        **_PLAIN,
        **_containers(keys),
        **_numpy_constructors(budget),
    }
    values = {f"torch.{name}" for name in DTYPES} | set(STORAGES) | _NAMED_VALUES
    return frozenset(values | set(constructors)), constructors


# --- plain Python values --------------------------------------------------------------------


def _containers(keys: Keys) -> dict[str, Callable[..., Any]]:
    def mapping(items: Any = ()) -> dict:
        return keys.fill_dict({}, items.items() if isinstance(items, dict) else _plain_list(items))

    def default_dict(factory: Any = None, items: Any = ()) -> dict:
        return mapping(items)

    def plain_set(items: Any = ()) -> set:
        return keys.fill_set(set(), _plain_list(items))

    return {
        "collections.OrderedDict": mapping,
        "collections.Counter": mapping,
        "collections.defaultdict": default_dict,
        "builtins.set": plain_set,
        "builtins.frozenset": lambda items=(): frozenset(plain_set(items)),
    }


def _encode(text: Any, encoding: Any) -> bytes:
    if (
        not isinstance(encoding, str)
        or not isinstance(text, str)
        or encoding not in ("latin1", "latin-1", "utf-8", "ascii")
    ):
        raise Malformed("bytes in an encoding that pickle does not use")
    return text.encode(encoding)


def _bytes(value: Any = b"", encoding: Any = None) -> bytes:
    if encoding is not None:
        return _encode(value, encoding)
    if not isinstance(value, bytes):  # bytes(10**12) would allocate
        raise Malformed("bytes made of something else")
    return value


def _plain_list(values: Any) -> Any:
    """`values`, which must not be an array: a few bytes can be seen as one of any size."""
    if not isinstance(values, tuple | list | set | frozenset):
        raise Malformed(f"a {type(values).__name__} where a list belongs")
    return values


def _device(kind: Any, index: Any = None) -> str:
    name = _text(kind)
    if index is not None and type(index) is not int:
        raise Malformed("a device whose index is no number")
    return f"{name:.32}" if index is None else f"{name:.32}:{int(index)}"


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise Malformed(f"{brief(value)} where text belongs")
    return value


def _complex(real: Any, imag: Any = 0.0) -> complex:
    if not isinstance(real, int | float) or not isinstance(imag, int | float):
        raise Malformed("a complex number made of something else")
    return complex(real, imag)


def _path(*parts: Any) -> str:
    if sum(len(_text(part)) for part in parts) > _MAX_PATH:  # joined paths can be joined again
        raise Malformed(f"a path of more than {_MAX_PATH} characters")
    return "/".join(parts).replace("//", "/")


def _size(values: Any) -> tuple:
    return tuple(_plain_list(values))


def _hook_state(*args: Any) -> Pending:
    return Pending("PowerSGDState", _slots, value={})


def _slots(state: Any) -> dict:
    # A class with __slots__ pickles as (instance dict, slots); with __getstate__, as one dict.
    if isinstance(state, tuple) and len(state) == 2:
        if any(type(name) is not str for part in state for name in part or ()):
            raise Malformed("an object whose attributes have no names")  # uncounted, else
        state = {**(state[0] or {}), **(state[1] or {})}
    if not isinstance(state, dict):
        raise Malformed("a PowerSGDState without its slots")
    return state


def _namespace(*args: Any) -> Pending:
    return Pending("argparse.Namespace", _slots, value={})


_PLAIN: dict[str, Callable[..., Any]] = {
    "_codecs.encode": _encode,
    "builtins.bytes": _bytes,
    "builtins.bytearray": _bytes,
    "builtins.complex": _complex,
    "pathlib.PosixPath": _path,
    "pathlib._local.PosixPath": _path,
    "argparse.Namespace": _namespace,
    "torch.Size": _size,
    "torch.device": _device,
    "torch.serialization._get_layout": _text,
    POWERSGD_STATE: _hook_state,
}


# --- NumPy ----------------------------------------------------------------------------------


def _numpy_constructors(budget: Budget) -> dict[str, Callable[..., Any]]:
    def array_from(raw: Any, dtype: Any, shape: Any, fortran: bool) -> np.ndarray:
        if not isinstance(raw, bytes) or not isinstance(dtype, np.dtype):
            raise Malformed("a NumPy array of Python objects, or one without data")
        budget.claim(len(raw))
        if not isinstance(shape, tuple | list) or len(shape) > 64:
            raise Malformed("a NumPy array whose shape is no tuple of at most 64")
        flat = np.frombuffer(raw, dtype)
        return flat.reshape(shape, order="F" if fortran else "C").copy()

    def unbuilt_array(kind: Any, shape: Any, code: Any) -> Pending:
        def build(state: Any) -> np.ndarray:
            _version, shape, dtype, fortran, raw = _plain_list(state)
            return array_from(raw, dtype, shape, bool(fortran))

        return Pending("numpy.ndarray", build)

    def from_buffer(raw: Any, dtype: Any, shape: Any, order: Any) -> np.ndarray:
        return array_from(raw, dtype, shape, order == "F")

    def scalar(dtype: Any, raw: Any) -> Any:
        return array_from(raw, dtype, (), False)[()]

    def random_state(*_: Any) -> Pending:
        def build(state: Any) -> RandomStateRecord:
            budget.claim(_GENERATOR_BYTES)  # it has words of its own
            return _random_state_record(state)

        return Pending("numpy.random.RandomState", build)

    return {
        "numpy._core.multiarray._reconstruct": unbuilt_array,
        "numpy._core.multiarray.scalar": scalar,
        "numpy._core.numeric._frombuffer": from_buffer,
        "numpy.dtype": _numpy_dtype,
        "numpy.random._pickle.__randomstate_ctor": random_state,
        "numpy.random._pickle.__bit_generator_ctor": _bit_generator,
        "numpy.random.__RandomState_ctor": random_state,
        "numpy.random.bit_generator.__pyx_unpickle_SeedSequence": _bit_generator,
    }


def _numpy_dtype(code: Any, *_: Any) -> Pending:
    if not isinstance(code, str) or not _NUMPY_DTYPE.fullmatch(code):
        raise Malformed(f"the NumPy dtype {brief(code)!r}; numbers and booleans are read")
    dtype = np.dtype(code)

    def build(state: Any) -> np.dtype:
        if not isinstance(state, tuple) or len(state) < 5 or any(x is not None for x in state[2:5]):
            raise Malformed("a structured NumPy dtype")
        order = state[1]
        if not isinstance(order, str) or order not in ("<", ">", "|", "="):
            raise Malformed("a NumPy dtype without a byte order")
        return dtype.newbyteorder(order)

    return Pending("numpy.dtype", build, dtype)


def _bit_generator(*_: Any) -> Pending:
    # Its own state is repeated in the RandomState that wraps it, and its seed was used up.
    return Pending("numpy bit generator", lambda state: None)


def _random_state_record(state: Any) -> RandomStateRecord:
    try:
        if isinstance(state, dict):
            kind, words = state["bit_generator"], state["state"]
            fields = (words["key"], words["pos"], state["has_gauss"], state["gauss"])
        else:
            kind, *fields = _plain_list(state)
        if not isinstance(kind, str) or len(fields) > 4 or kind != "MT19937":
            raise Malformed(f"the generator {brief(kind)!r} where torch has MT19937")
        return RandomStateRecord(*fields)
    except (TypeError, ValueError, LookupError) as error:
        raise Malformed("a numpy RandomState with an unreadable state") from error
