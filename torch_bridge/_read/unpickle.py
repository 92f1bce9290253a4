"""``pickle.Unpickler`` over objects of ours that do nothing: what a file says, as a tree.

No object of torch, NumPy or Python that could do anything is ever on the unpickler's stack. Calls
and dictionaries are written down as `Made`, which `torch_bridge._read.evaluate` turns into values,
and nothing in the tree has attributes that BUILD could set.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any, NoReturn

from torch_bridge._read.opcodes import DICT, END, SET, harmless
from torch_bridge._read.values import Forbidden, Malformed

STORAGE = "storage"
Allowed = Callable[[str], bool]


class Made:
    """A call that the file asks for, a dictionary, a set or a storage: written down, not made.

    `name` is the global, or `DICT`, `SET`, `STORAGE`; `items` are keys and values in turn, or what
    was added to a set; `state` is what BUILD gave it, `...` without one.
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
        self.items.append(value)

    def __setstate__(self, state: Any) -> None:
        self.state = state


class Named:
    """A global on the allow-list. Calling it writes the call down."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *args: Any) -> Made:
        return Made(self.name, args)

    def __setstate__(self, state: Any) -> NoReturn:
        raise Malformed(f"the pickle sets attributes of {self.name}")


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, is_allowed: Allowed, problem: Exception) -> None:
        # A buffered reader has peek(), without which the unpickler reads byte by byte.
        super().__init__(io.BufferedReader(stream), encoding="latin-1")
        self._is_allowed = is_allowed
        self._named: dict[str, Named] = {}  # made anew for each file
        self._problem = problem

    def find_class(self, module: str, name: str, /) -> Named:
        full = _canonical(module, name)
        if full not in self._named:
            if not self._is_allowed(full):
                raise Forbidden(full)
            self._named[full] = Named(full)
        return self._named[full]

    def persistent_load(self, pid: Any, /) -> Made:
        if isinstance(pid, tuple) and pid and isinstance(pid[0], str) and pid[0] == STORAGE:
            return Made(STORAGE, pid[1:])
        if isinstance(pid, str) and pid in (DICT, SET):
            return Made(pid)
        if isinstance(pid, str) and pid == END:
            raise self._problem
        raise Malformed("a reference to something that is no storage")


def unpickle(data: bytes, is_allowed: Allowed, claim: Callable[[int], None]) -> Any:
    """What a pickle says, of `Made`, `Named`, lists, tuples, numbers, text, bytes and None.

    Raises:
      Malformed: It is damaged, is none that torch writes, or takes more bytes than can be claimed.
      Forbidden: It asks for a global that is not allowed; the first one is named.
    """
    stream, problem = harmless(data, claim)
    unpickler = _Unpickler(stream, is_allowed, problem)
    try:
        return unpickler.load()
    except (Malformed, Forbidden):
        raise
    except Exception as error:  # whatever the standard library says of a damaged pickle
        raise Malformed(f"a damaged pickle ({error!s:.100})") from error


def _canonical(module: str, name: str) -> str:
    """``module.name`` as Python 3 and today's NumPy spell it."""
    module = {"__builtin__": "builtins", "copy_reg": "copyreg"}.get(module, module)
    if module == "numpy.core" or module.startswith("numpy.core."):
        module = "numpy._core" + module[len("numpy.core") :]
    return f"{module}.{name}"
