"""The unpickler of the standard library over objects of ours that do nothing.

What a file says becomes a tree of `Call`, `Global`, lists, tuples, numbers, text, bytes and None,
which `torch_bridge._read.evaluate` turns into values. No object of torch, NumPy or Python that
could do anything is ever on the stack, and what the unpickler would do by itself is kept from it:
hashing keys that were chosen to have one hash, a memo index of 2**31, setting attributes.

It is the unpickler in Python, ``pickle._Unpickler``: only there can opcodes be left out.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from torch_bridge._read.values import Budget, Forbidden, Global, Malformed

STORAGE = "storage"  # what a persistent id of torch's begins with
_DICT, _SET = "collections.OrderedDict", "builtins.set"
# Of memory for a byte of a pickle: of it itself, and of text, which can take 4 bytes a character.
_COPIES, _NAME = 4, 512  # and for a global that was not named before
# Bytes of memory that an opcode takes at most, with its places on the stack and in a container;
# what is not here only takes away from the stack.
_CHARGES = {
    **dict.fromkeys(b"qr\x94", 16),
    **dict.fromkeys(b"\x80\x95N\x88\x89)2hjc\x93ioK", 32),
    **dict.fromkeys(b"JMG\x8a\x8bt", 64),
    **dict.fromkeys(b"\x85\x86\x87XU\x8cT\x8dCB\x8e\x96", 96),
    **dict.fromkeys(b"](", 128),
    **dict.fromkeys(b"}\x8fR\x81Q", 208),
}
_LOADS: dict[int, Callable[[Any], None]] = dict(pickle._Unpickler.dispatch)


class Call:
    """A call that the file asks for, a dictionary, a set or a storage: written down, not made.

    `name` is the global, or `STORAGE`; `items` are keys and values in turn; `state` is what BUILD
    gave it, `...` without one.
    """

    __slots__ = ("args", "items", "name", "state")

    def __init__(self, name: str, args: tuple[Any, ...] = ()) -> None:
        self.name, self.args = name, args
        self.items: list[Any] = []
        self.state: Any = ...

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items += (key, value)

    def add(self, value: Any) -> None:
        """What ADDITEMS does to a set."""
        if self.name != _SET:
            raise Malformed(f"{self.name} where a set belongs")
        self.args[0].append(value)


class _Memo(list):
    """What the file numbered, from 0 on, as every pickler does."""

    def __setitem__(self, index: Any, value: Any) -> None:
        if index == len(self):
            self.append(value)
        else:
            super().__setitem__(index, value)


class _Unpickler(pickle._Unpickler):
    append: Callable[[Any], None]
    read: Callable[[int], bytes]
    stack: list[Any]

    def __init__(
        self, data: bytes, is_allowed: Callable[[str], bool], claim: Callable[[int], None]
    ) -> None:
        super().__init__(io.BytesIO(data), encoding="latin-1")
        self.memo: Any = _Memo()
        self._is_allowed, self.claim = is_allowed, claim
        self._named: dict[str, Global] = {}

    def find_class(self, module: str, name: str) -> Global:
        full = _canonical(module, name)
        if full not in self._named:
            if not self._is_allowed(full):
                raise Forbidden(full)
            self.claim(_NAME)
            self._named[full] = Global(full)
        return self._named[full]

    def persistent_load(self, pid: Any) -> Call:
        if isinstance(pid, tuple) and pid[:1] == (STORAGE,):
            return Call(STORAGE, pid[1:])
        raise Malformed("a reference to something that is no storage")

    def _reduce(self) -> None:
        args = self.stack.pop()
        function = self.stack[-1]
        if not isinstance(function, Global) or not isinstance(args, tuple):
            raise Malformed("a call of something that is no function")
        self.stack[-1] = Call(function.name, args)

    def _build(self) -> None:
        state = self.stack.pop()
        if not isinstance(self.stack[-1], Call):
            raise Malformed("attributes of something that has none")
        self.stack[-1].state = state

    def _extension(self) -> NoReturn:
        # The standard library keeps such objects, so that one may come from another file.
        raise Forbidden("a copyreg extension code")


_OWN: dict[int, Callable[[Any], None]] = {
    pickle.REDUCE[0]: _Unpickler._reduce,
    pickle.NEWOBJ[0]: _Unpickler._reduce,
    pickle.BUILD[0]: _Unpickler._build,
    pickle.EMPTY_DICT[0]: lambda self: self.append(Call(_DICT)),
    pickle.EMPTY_SET[0]: lambda self: self.append(Call(_SET, ([],))),
    pickle.BYTEARRAY8[0]: _LOADS[pickle.BINBYTES8[0]],
    pickle.FRAME[0]: lambda self: self.read(8),
    **dict.fromkeys(b"\x82\x83\x84", _Unpickler._extension),
}


def _charged(code: int) -> Callable[[Any], None]:
    load, nbytes = _OWN.get(code) or _LOADS[code], _CHARGES.get(code, 0)

    def charged(unpickler: Any) -> None:
        unpickler.claim(nbytes)
        load(unpickler)

    return charged


# What torch writes, and the older ways to name a global, so that it is named in the error.
_Unpickler.dispatch = {code: _charged(code) for code in (*_CHARGES, *_OWN, *b".01aseu\x90")}


def unpickle(data: np.ndarray, is_allowed: Callable[[str], bool], budget: Budget) -> Any:
    """What a pickle says, as a tree; `data` is uint8.

    Raises:
      Malformed: It is damaged, is none that torch writes, or takes more than the budget.
      Forbidden: It asks for a global that is not allowed; the first one is named.
    """
    budget.claim(_COPIES * data.size)
    try:
        return _Unpickler(data.tobytes(), is_allowed, budget.claim).load()
    except (Malformed, Forbidden, MemoryError):
        raise
    except Exception as error:  # whatever the standard library says of a damaged pickle
        raise Malformed(f"a damaged pickle ({error!s:.100})") from error


def _canonical(module: str, name: str) -> str:
    """``module.name`` as Python 3 and today's NumPy spell it."""
    module = {"__builtin__": "builtins", "copy_reg": "copyreg"}.get(module, module)
    if module == "numpy.core" or module.startswith("numpy.core."):
        module = "numpy._core" + module[len("numpy.core") :]
    return f"{module}.{name}"
