"""What a pickle says, found out by a loop over its opcodes, with values of ours that do nothing.

`pickletools.genops` splits a pickle into opcodes and their arguments. What each of them means is
said here, for those that torch's pickler writes and for no others. No function or class of torch,
NumPy or Python that could do anything is ever on the stack: what a file names is a `Global`, and a
call of it goes to what stands for it here.

Two rules bound what a file can cost. Memory is claimed from a budget before it is taken. And what
the memo shows once more is claimed once more, in proportion to its size, so that no operation costs
more than what its operands have been charged with.
"""

from __future__ import annotations

import codecs
import pickletools
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._read.globals import is_value, set_state
from torch_bridge._read.values import Budget, Forbidden, Global, Malformed, expect

STORAGE = "storage"  # what a persistent id of torch's begins with
Functions: TypeAlias = Mapping[str, Callable[..., Any]]
_CONTAINERS = (dict, list, tuple, set, frozenset)
_LATEST = 5  # protocol
# genops decodes the argument of UNICODE before that can be refused. Its codec is imported now, so
# that no file causes an import.
codecs.lookup("raw-unicode-escape")
_DEEPEST = 100  # containers in each other, through which everything else walks
_LONGEST_NAME = 200  # of a global; the longest on the list has 80 characters
# Bytes of memory for a byte of a pickle: of it itself, and of text, which can take 4 a character.
_COPIES = 4
# Bytes of memory: of a global that was not named before, of what is remembered of a container, and
# for each value that a file shows once more (64 characters count as one), as a walk meets it again.
_NAME, _CONTAINER, _AGAIN = 512, 224, 64
# Bytes of memory that an opcode takes at most, with its places on the stack and in a container.
_SMALL, _NUMBER, _MEDIUM, _LARGE = 32, 64, 96, 208
# Opcodes that push their argument.
_PUSHED = {
    "BININT1": _SMALL,
    "BININT2": _NUMBER,
    "BININT": _NUMBER,
    "LONG1": _NUMBER,
    "LONG4": _NUMBER,
    "BINFLOAT": _NUMBER,
    "SHORT_BINSTRING": _MEDIUM,
    "BINSTRING": _MEDIUM,
    "SHORT_BINUNICODE": _MEDIUM,
    "BINUNICODE": _MEDIUM,
    "BINUNICODE8": _MEDIUM,
    "SHORT_BINBYTES": _MEDIUM,
    "BINBYTES": _MEDIUM,
    "BINBYTES8": _MEDIUM,
}
# Opcodes that push a value of their own.
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_EMPTY: dict[str, Callable[[], Any]] = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_SET": set}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Unpickler:
    """The stack and the memo of one pickle.

    Args:
      functions: What a global, and a storage's id, stand for.
      budget: What everything is charged to.
    """

    def __init__(self, functions: Functions, budget: Budget) -> None:
        self._functions = functions
        self._budget = budget
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []  # the stacks below each mark
        self._memo: list[Any] = []  # what the file numbered, from 0 on as every pickler does
        self._globals: dict[str, Global] = {}
        self._measured: dict[int, tuple[Any, int, int]] = {}

    def run(self, data: bytes) -> Any:
        """Carries out one opcode after the other; returns the value that is left at the end."""
        claim = self._budget.claim
        for opcode, argument, _ in pickletools.genops(data):
            name = opcode.name
            if name in _PUSHED:
                claim(_PUSHED[name])
                self._stack.append(argument)
            elif name in _CONSTANTS:
                claim(_SMALL)
                self._stack.append(_CONSTANTS[name])
            elif name in _EMPTY:
                claim(_LARGE)
                self._stack.append(_EMPTY[name]())
            elif name in _TUPLES:
                claim(_MEDIUM)
                self._stack.append(self._popped(_TUPLES[name]))
            elif name in _ACTIONS:
                claim(_LARGE if name in _COSTLY else _SMALL)
                _ACTIONS[name](self, argument)
            elif name != "STOP":
                raise Malformed(f"the opcode {name}, which torch does not write")
        value = self._stack.pop()
        self._measure(value)
        return value

    # --- the stack and the memo ---

    def mark(self, _: None) -> None:
        self._below.append(self._stack)
        self._stack = []

    def _since_mark(self) -> list[Any]:
        values = self._stack
        self._stack = self._below.pop()
        return values

    def _popped(self, count: int) -> tuple[Any, ...]:
        values = tuple(self._stack[-count:])
        if len(values) < count:
            raise IndexError("too few values on the stack")
        del self._stack[-count:]
        return values

    def pop(self, _: None) -> None:
        if self._stack:
            self._stack.pop()
        else:  # the mark itself
            self._since_mark()

    def pop_mark(self, _: None) -> None:
        self._since_mark()

    def memoize(self, _: None) -> None:
        self._memo.append(self._stack[-1])

    def put(self, index: int) -> None:
        if index == len(self._memo):
            self.memoize(None)
        self._memo[index] = self._stack[-1]

    def get(self, index: int) -> None:
        value = self._memo[index]
        size, _ = self._measure(value)
        if size > 1 or isinstance(value, _CONTAINERS):
            self._budget.claim(_AGAIN * size)
        self._stack.append(value)

    def _measure(self, value: Any, level: int = 0) -> tuple[int, int]:
        """Counts what a walk meets, in values, and the containers in each other.

        Text, bytes and numbers count as the more, the longer they are. From now on `value` and what
        is in it are not filled any more, so nothing holds itself.

        Raises:
          Malformed: There are too many containers in each other.
        """
        if isinstance(value, str | bytes):
            return 1 + len(value) // _AGAIN, 0
        if isinstance(value, int):
            return 1 + value.bit_length() // (8 * _AGAIN), 0
        if not isinstance(value, _CONTAINERS):
            return 1, 0
        _, size, depth = self._measured.get(id(value), (None, 0, 1))
        if level + depth > _DEEPEST:
            raise Malformed(f"more than {_DEEPEST} containers in each other")
        if size:
            return size, depth
        self._budget.claim(_CONTAINER)
        parts = list(value)
        if isinstance(value, dict):
            parts.extend(value.values())
        size = 1
        for part in parts:
            inner_size, inner_depth = self._measure(part, level + 1)
            size += inner_size
            depth = max(depth, inner_depth + 1)
        self._measured[id(value)] = (value, size, depth)  # which keeps it, and so its id
        return size, depth

    # --- containers ---

    def make_tuple(self, _: None) -> None:
        values = self._since_mark()
        self._stack.append(tuple(values))

    def make_frozenset(self, _: None) -> None:
        members = self._budget.fill_set(set(), self._since_mark())
        self._stack.append(frozenset(members))

    def append(self, _: None) -> None:
        value = self._stack.pop()
        self._filled(list).append(value)

    def extend(self, _: None) -> None:
        values = self._since_mark()
        self._filled(list).extend(values)

    def add(self, _: None) -> None:
        members = self._since_mark()
        self._budget.fill_set(self._filled(set), members)

    def set_item(self, _: None) -> None:
        item = self._popped(2)
        self._budget.fill_dictionary(self._filled(dict), [item])

    def set_items(self, _: None) -> None:
        values = self._since_mark()
        items = zip(values[::2], values[1::2], strict=True)
        self._budget.fill_dictionary(self._filled(dict), items)

    def _filled(self, kind: type) -> Any:
        """Returns the container at the top of the stack, which is about to be filled."""
        return expect(self._unshown(), kind, f"where a {kind.__name__} belongs")

    def _unshown(self) -> Any:
        """Returns the top of the stack, which is in nothing yet, and so never in itself."""
        if id(self._stack[-1]) in self._measured:
            raise Malformed("a container that holds itself, or is filled after it was shown")
        return self._stack[-1]

    # --- globals, calls and storages ---

    def name(self, text: str) -> None:
        """Pushes a global by ``"module name"``."""
        module, _, name = text.partition(" ")
        self._name(module, name)

    def name_on_stack(self, _: None) -> None:
        name = expect(self._stack.pop(), str, "as a name")
        module = expect(self._stack.pop(), str, "as a module")
        self._name(module, name)

    def _name(self, module: str, name: str) -> None:
        if len(module) + len(name) > _LONGEST_NAME:
            raise Malformed(f"a global whose name has {len(module) + len(name)} characters")
        full = _canonical(module, name)
        if full not in self._globals:
            if not (full in self._functions or is_value(full)):
                raise Forbidden(full)
            self._budget.claim(_NAME)
            self._globals[full] = Global(full)
        self._stack.append(self._globals[full])

    def instance(self, text: str) -> None:
        self.name(text)  # so that what is not allowed is named
        raise Malformed("the opcode INST, which torch does not write")

    def call(self, _: None) -> None:
        function, arguments = self._popped(2)
        if not isinstance(function, Global) or not isinstance(arguments, tuple):
            raise Malformed("a call of something that is no function")
        if function.name not in self._functions:
            # On the list as a value (a hook, a dtype), but never to be called.
            raise Forbidden(f"{function.name} (called)")
        otherwise = f"arguments that {function.name} cannot have"
        self._stack.append(_called(self._functions[function.name], arguments, otherwise))

    def build(self, _: None) -> None:
        state = self._stack.pop()
        arguments = (self._unshown(), state, self._budget)
        _called(set_state, arguments, "attributes that an object cannot have")

    def storage(self, _: None) -> None:
        identity = self._stack.pop()
        is_tuple = isinstance(identity, tuple) and bool(identity)
        if not is_tuple or not isinstance(identity[0], str) or identity[0] != STORAGE:
            raise Malformed("a reference to something that is no storage")
        self._stack.append(self._functions[STORAGE](*identity[1:]))

    def extension(self, _: int) -> None:
        # The standard library keeps such objects, so that one may come from another file.
        raise Forbidden("a copyreg extension code")

    def make_bytes(self, raw: bytearray) -> None:
        self._stack.append(bytes(raw))

    def protocol(self, number: int) -> None:
        if number > _LATEST:
            raise Malformed(f"a pickle of protocol {number}, which is later than {_LATEST}")

    def skip(self, _: int) -> None:
        """Does nothing: a frame only says how much to read at once."""


def _called(function: Callable[..., Any], arguments: tuple[Any, ...], otherwise: str) -> Any:
    """Calls a function of ours; `otherwise` says what was found where arguments do not fit it."""
    try:
        return function(*arguments)
    except CheckpointMismatch:
        raise
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        raise Malformed(otherwise) from error


# Opcodes that do something else than to push.
_ACTIONS: dict[str, Callable[[_Unpickler, Any], None]] = {
    "PROTO": _Unpickler.protocol,
    "FRAME": _Unpickler.skip,
    "BYTEARRAY8": _Unpickler.make_bytes,
    "TUPLE": _Unpickler.make_tuple,
    "FROZENSET": _Unpickler.make_frozenset,
    "APPEND": _Unpickler.append,
    "APPENDS": _Unpickler.extend,
    "ADDITEMS": _Unpickler.add,
    "SETITEM": _Unpickler.set_item,
    "SETITEMS": _Unpickler.set_items,
    "MARK": _Unpickler.mark,
    "POP": _Unpickler.pop,
    "POP_MARK": _Unpickler.pop_mark,
    "MEMOIZE": _Unpickler.memoize,
    "BINPUT": _Unpickler.put,
    "LONG_BINPUT": _Unpickler.put,
    "BINGET": _Unpickler.get,
    "LONG_BINGET": _Unpickler.get,
    "GLOBAL": _Unpickler.name,
    "STACK_GLOBAL": _Unpickler.name_on_stack,
    "INST": _Unpickler.instance,
    "REDUCE": _Unpickler.call,
    "NEWOBJ": _Unpickler.call,
    "BUILD": _Unpickler.build,
    "BINPERSID": _Unpickler.storage,
    "EXT1": _Unpickler.extension,
    "EXT2": _Unpickler.extension,
    "EXT4": _Unpickler.extension,
}
_COSTLY = frozenset({"MARK", "TUPLE", "FROZENSET", "BYTEARRAY8", "REDUCE", "NEWOBJ", "BINPERSID"})


def unpickle(data: np.ndarray, functions: Functions, budget: Budget) -> Any:
    """Reads a pickle into plain values; `functions` are what a global, and a storage, stand for.

    Raises:
      Malformed: It is damaged, is none that torch writes, or takes more than the budget.
      Forbidden: It asks for a global that is not allowed; the first one is named.
    """
    budget.claim(_COPIES * data.size)
    try:
        return _Unpickler(functions, budget).run(data.tobytes())
    except (CheckpointMismatch, Forbidden, MemoryError):
        raise
    except Exception as error:  # whatever the standard library says of a damaged pickle
        raise Malformed(f"a damaged pickle ({error!s:.100})") from error


def _canonical(module: str, name: str) -> str:
    """Spells ``module.name`` as Python 3 and today's NumPy do."""
    module = {"__builtin__": "builtins", "copy_reg": "copyreg"}.get(module, module)
    if module == "numpy.core" or module.startswith("numpy.core."):
        module = "numpy._core" + module[len("numpy.core") :]
    return f"{module}.{name}"
