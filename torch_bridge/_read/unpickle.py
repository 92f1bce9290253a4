"""The unpickler of the standard library over values of ours that do nothing.

No function or class of torch, NumPy or Python that could do anything is ever on the stack: what a
file names is a `Global`, and a call of it goes to what stands for it here. What the unpickler would
do by itself is kept from it: hashing keys that were chosen to have one hash, a memo index of 2**31,
setting attributes, filling whatever has a method ``append``.

It is the unpickler in Python, ``pickle._Unpickler``: only there can opcodes be left out.
"""

from __future__ import annotations

import io
import itertools
import pickle
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeAlias

import numpy as np

from torch_bridge._read.globals import is_value, set_state
from torch_bridge._read.keys import Keys
from torch_bridge._read.values import Budget, Forbidden, Global, Malformed, expect

STORAGE = "storage"  # what a persistent id of torch's begins with
Functions: TypeAlias = Mapping[str, Callable[..., Any]]
_CONTAINERS = (dict, list, tuple, set, frozenset)
_DEEPEST = 100
# Of memory for a byte of a pickle: of it itself, and of text, which can take 4 bytes a character.
_COPIES = 4
# Bytes of memory: of a global that was not named before, of what is remembered of a container, and
# for each value in one that a file shows once more, as every walk meets it again.
_NAME, _CONTAINER, _AGAIN = 512, 224, 64
# Bytes of memory that an opcode takes at most, with its places on the stack and in a container;
# what is not here only takes away from the stack.
_CHARGES = {
    **dict.fromkeys(b"qr\x94", 16),
    **dict.fromkeys(b"\x80\x95N\x88\x89)hjc\x93iK", 32),
    **dict.fromkeys(b"JMG\x8a\x8bt", 64),
    **dict.fromkeys(b"\x85\x86\x87XU\x8cT\x8dCB\x8e\x96", 96),
    **dict.fromkeys(b"](", 128),
    **dict.fromkeys(b"}\x8f\x91R\x81Q", 208),
}
_LOADS: dict[int, Callable[[Any], None]] = dict(pickle._Unpickler.dispatch)


class _Memo(list):
    """What the file numbered, from 0 on, as every pickler does."""

    def __setitem__(self, index: Any, value: Any) -> None:
        if index == len(self):
            self.append(value)
        else:
            super().__setitem__(index, value)


class _Unpickler(pickle._Unpickler):
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]
    read: Callable[[int], bytes]
    stack: list[Any]

    def __init__(self, data: bytes, functions: Functions, keys: Keys, budget: Budget) -> None:
        super().__init__(io.BytesIO(data), encoding="latin-1")
        self.memo: Any = _Memo()
        self._functions, self._keys, self._budget = functions, keys, budget
        self._named: dict[str, Global] = {}
        self._measured: dict[int, tuple[Any, int, int]] = {}

    def find_class(self, module: str, name: str) -> Global:
        full = _canonical(module, name)
        if full not in self._named:
            if full not in self._functions and not is_value(full):
                raise Forbidden(full)
            self._budget.claim(_NAME)
            self._named[full] = Global(full)
        return self._named[full]

    def persistent_load(self, pid: Any) -> Any:
        if isinstance(pid, tuple) and pid and isinstance(pid[0], str) and pid[0] == STORAGE:
            return self._functions[STORAGE](*pid[1:])
        raise Malformed("a reference to something that is no storage")

    def measured(self, value: Any, level: int = 0) -> tuple[int, int]:
        """The values that a walk through `value` meets, and the containers in each other.

        From now on `value` and what is in it are not filled any more.

        Raises:
          Malformed: There are too many containers in each other.
        """
        if not isinstance(value, _CONTAINERS):
            return 1, 0
        _, size, depth = self._measured.get(id(value), (None, 0, 1))
        if level + depth > _DEEPEST:
            raise Malformed(f"more than {_DEEPEST} containers in each other")
        if not size:
            self._budget.claim(_CONTAINER)
            size = 1
            for part in itertools.chain(value, value.values() if isinstance(value, dict) else ()):
                inner_size, inner_depth = self.measured(part, level + 1)
                size, depth = size + inner_size, max(depth, inner_depth + 1)
            self._measured[id(value)] = value, size, depth  # which keeps it, and so its id
        return size, depth

    def _again(self, index: int) -> None:
        value = self.memo[index]
        if isinstance(value, _CONTAINERS):
            self._budget.claim(_AGAIN * self.measured(value)[0])
        self.append(value)

    def _fill(self, kind: type, added: list[Any]) -> None:
        """Add to the container at the top of the stack."""
        into = expect(self._unshown(), kind, f"where a {kind.__name__} belongs")
        if kind is list:
            into += added
        elif kind is set:
            self._keys.members(added, into)
        else:
            parts = iter(added)
            self._keys.mapping(zip(parts, parts, strict=True), into)

    def _frozen_set(self) -> None:
        members = self._keys.members(self.pop_mark())  # which changes what `append` is
        self.append(frozenset(members))

    def _unshown(self) -> Any:
        """The top of the stack, which is not in anything yet, and so never in itself."""
        if id(self.stack[-1]) in self._measured:
            raise Malformed("a container that holds itself, or is filled after it was shown")
        return self.stack[-1]

    def _reduce(self) -> None:
        args, function = self.stack.pop(), self.stack[-1]
        if not isinstance(function, Global) or not isinstance(args, tuple):
            raise Malformed("a call of something that is no function")
        if function.name not in self._functions:
            # On the list as a value (a hook, a dtype), but never to be called.
            raise Forbidden(f"{function.name} (called)")
        otherwise = f"arguments that {function.name} cannot have"
        self.stack[-1] = _called(self._functions[function.name], args, otherwise)

    def _build(self) -> None:
        state, value = self.stack.pop(), self._unshown()
        _called(set_state, (value, state, self._budget), "attributes that an object cannot have")

    def _extension(self) -> NoReturn:
        # The standard library keeps such objects, so that one may come from another file.
        raise Forbidden("a copyreg extension code")


def _called(function: Callable[..., Any], args: tuple[Any, ...], otherwise: str) -> Any:
    """What a function of ours gives; `otherwise` says what was found where they do not fit it."""
    try:
        return function(*args)
    except Malformed:
        raise
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        raise Malformed(otherwise) from error


_OWN: dict[int, Callable[[Any], None]] = {
    pickle.REDUCE[0]: _Unpickler._reduce,
    pickle.NEWOBJ[0]: _Unpickler._reduce,
    pickle.BUILD[0]: _Unpickler._build,
    pickle.APPEND[0]: lambda self: self._fill(list, [self.stack.pop()]),
    pickle.APPENDS[0]: lambda self: self._fill(list, self.pop_mark()),
    pickle.ADDITEMS[0]: lambda self: self._fill(set, self.pop_mark()),
    pickle.FROZENSET[0]: _Unpickler._frozen_set,
    pickle.SETITEM[0]: lambda self: self._fill(dict, [self.stack.pop(-2), self.stack.pop()]),
    pickle.SETITEMS[0]: lambda self: self._fill(dict, self.pop_mark()),
    pickle.BINGET[0]: lambda self: self._again(self.read(1)[0]),
    pickle.LONG_BINGET[0]: lambda self: self._again(int.from_bytes(self.read(4), "little")),
    pickle.BYTEARRAY8[0]: _LOADS[pickle.BINBYTES8[0]],
    pickle.FRAME[0]: lambda self: self.read(8),
    **dict.fromkeys(b"\x82\x83\x84", _Unpickler._extension),
}


def _charged(code: int) -> Callable[[Any], None]:
    load, nbytes = _OWN.get(code) or _LOADS[code], _CHARGES.get(code, 0)

    def charged(unpickler: Any) -> None:
        unpickler._budget.claim(nbytes)
        load(unpickler)

    return charged


# What torch writes, and INST, so that the global that it names is named in the error.
_Unpickler.dispatch = {code: _charged(code) for code in (*_CHARGES, *_OWN, *b".01")}


def unpickle(data: np.ndarray, functions: Functions, keys: Keys, budget: Budget) -> Any:
    """What a pickle says; `functions` are what a global, and a storage's id, stand for.

    Raises:
      Malformed: It is damaged, is none that torch writes, or takes more than the budget.
      Forbidden: It asks for a global that is not allowed; the first one is named.
    """
    budget.claim(_COPIES * data.size)
    unpickler = _Unpickler(data.tobytes(), functions, keys, budget)
    try:
        value = unpickler.load()
    except (Malformed, Forbidden, MemoryError):
        raise
    except Exception as error:  # whatever the standard library says of a damaged pickle
        raise Malformed(f"a damaged pickle ({error!s:.100})") from error
    unpickler.measured(value)
    return value


def _canonical(module: str, name: str) -> str:
    """``module.name`` as Python 3 and today's NumPy spell it."""
    module = {"__builtin__": "builtins", "copy_reg": "copyreg"}.get(module, module)
    if module == "numpy.core" or module.startswith("numpy.core."):
        module = "numpy._core" + module[len("numpy.core") :]
    return f"{module}.{name}"
