"""Reads a pickle with a loop over its opcodes; nothing that the file names is ever executed.

`pickletools.genops` splits a pickle into opcodes and their arguments. This file implements the
opcodes that torch's pickler writes, and refuses all others. The stack never holds a function or a
class of torch, NumPy or Python. A name in the file becomes a `Global`, and a call of that name runs
our replacement.

Two rules limit the time and the memory that a file can take. Memory is claimed from a budget before
it is allocated. A value that the memo returns again is charged again, in proportion to its size. So
no operation costs more than was charged for its operands.
"""

from __future__ import annotations

import codecs
import pickletools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np

from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._read.globals import is_value, set_state
from torch_bridge._read.values import Budget, Forbidden, Global, Malformed, expect

STORAGE = "storage"  # the first entry of a persistent id that torch writes
Functions: TypeAlias = Mapping[str, Callable[..., Any]]
_CONTAINERS = (dict, list, tuple, set, frozenset)
_LATEST = 5  # the newest pickle protocol that is read
# genops decodes the argument of UNICODE before this file can refuse that opcode. The codec is
# imported now, so that no checkpoint can cause an import.
codecs.lookup("raw-unicode-escape")
_DEEPEST = 100  # levels of containers; other functions recurse through all of them
_LONGEST_NAME = 200  # characters of a global's name; the longest on the allow-list has 80
# Memory for each byte of a pickle: its copy, and text, which can take 4 bytes for a character.
_COPIES = 4
# Bytes of memory: for the first use of a global, for the record of a container, and for each value
# that a file uses again (64 characters count as one value), since a walk visits that value again.
_NAME = 512
_CONTAINER = 224
_AGAIN = 64
# Every supported opcode, by the most bytes of memory that it takes, with its entries on the stack
# and in a container.
_OPCODES = {
    32: "NONE NEWTRUE NEWFALSE EMPTY_TUPLE BININT1 PROTO FRAME STOP POP POP_MARK MEMOIZE BINPUT "
    "LONG_BINPUT BINGET LONG_BINGET APPEND APPENDS ADDITEMS SETITEM SETITEMS GLOBAL STACK_GLOBAL "
    "INST BUILD EXT1 EXT2 EXT4",
    64: "BININT2 BININT LONG1 LONG4 BINFLOAT",
    96: "SHORT_BINSTRING BINSTRING SHORT_BINUNICODE BINUNICODE BINUNICODE8 SHORT_BINBYTES BINBYTES "
    "BINBYTES8 TUPLE1 TUPLE2 TUPLE3",
    208: "EMPTY_LIST EMPTY_DICT EMPTY_SET MARK TUPLE FROZENSET BYTEARRAY8 REDUCE NEWOBJ BINPERSID",
}
_COSTS: dict[str, int] = {}
for _cost, _names in _OPCODES.items():
    _COSTS.update(dict.fromkeys(_names.split(), _cost))
_TO_MARK = frozenset({"TUPLE", "FROZENSET", "APPENDS", "ADDITEMS", "SETITEMS", "POP_MARK"})


class _Unpickler:
    """The reader of one pickle.

    Args:
      functions: The replacement for each global that a file may call, by name. The entry `STORAGE`
        reads a storage.
      budget: The limit that every operation is charged to.
    """

    def __init__(self, functions: Functions, budget: Budget) -> None:
        self._functions = functions
        self._budget = budget
        self._globals: dict[str, Global] = {}
        self._measured: dict[int, tuple[Any, int, int]] = {}

    def run(self, data: bytes) -> Any:
        """Carries out the opcodes in order; returns the value that is on the stack at the end."""
        budget = self._budget
        stack = []
        below = []  # the stacks below each mark
        values = []  # the entries above the last mark
        memo = []  # the values that the file numbered; every pickler counts from 0
        opcodes: Iterator[Any] = pickletools.genops(data)
        for opcode, argument, _ in opcodes:
            name = opcode.name
            if name not in _COSTS:
                raise Malformed(f"the opcode {name}, which torch does not write")
            budget.claim(_COSTS[name])
            if name in _TO_MARK:
                values = stack
                stack = below.pop()
            match name:
                case "BINGET" | "LONG_BINGET":
                    value = memo[argument]
                    size, _ = self._measure(value)
                    if size > 1 or isinstance(value, _CONTAINERS):
                        budget.claim(_AGAIN * size)
                    stack.append(value)
                case "BINPUT" | "LONG_BINPUT" if argument < len(memo):
                    memo[argument] = stack[-1]
                case "BINPUT" | "LONG_BINPUT" | "MEMOIZE":
                    if argument not in (None, len(memo)):
                        raise Malformed("memo numbers that are not in ascending order")
                    memo.append(stack[-1])
                case "MARK":
                    below.append(stack)
                    stack = []
                case "POP":
                    if stack:
                        stack.pop()
                    else:  # the opcode removes the mark
                        stack = below.pop()
                case "NEWTRUE" | "NEWFALSE":
                    stack.append(name == "NEWTRUE")
                case "BYTEARRAY8":
                    stack.append(bytes(argument))
                case "EMPTY_TUPLE":
                    stack.append(())
                case "EMPTY_LIST":
                    stack.append([])
                case "EMPTY_DICT":
                    stack.append({})
                case "EMPTY_SET":
                    stack.append(set())
                case "TUPLE1" | "TUPLE2" | "TUPLE3":
                    parts = [stack.pop() for _ in range(int(name[-1]))]
                    stack.append(tuple(reversed(parts)))
                case "TUPLE":
                    stack.append(tuple(values))
                case "FROZENSET":
                    stack.append(frozenset(budget.fill_set(set(), values)))
                case "APPEND":
                    value = stack.pop()
                    self._filled(stack, list).append(value)
                case "APPENDS":
                    self._filled(stack, list).extend(values)
                case "ADDITEMS":
                    budget.fill_set(self._filled(stack, set), values)
                case "SETITEM":
                    value = stack.pop()
                    item = (stack.pop(), value)
                    budget.fill_dictionary(self._filled(stack, dict), [item])
                case "SETITEMS":
                    items = zip(values[::2], values[1::2], strict=True)
                    budget.fill_dictionary(self._filled(stack, dict), items)
                case "GLOBAL":
                    stack.append(self._global(argument))
                case "STACK_GLOBAL":
                    attribute = expect(stack.pop(), str, "as a name")
                    module = expect(stack.pop(), str, "as a module")
                    stack.append(self._global(f"{module} {attribute}"))
                case "REDUCE" | "NEWOBJ":
                    arguments = stack.pop()
                    stack.append(self._call(stack.pop(), arguments))
                case "BUILD":
                    state = stack.pop()
                    arguments = (self._unshown(stack), state, budget)
                    _called(set_state, arguments, "attributes that an object cannot have")
                case "BINPERSID":
                    stack.append(self._storage(stack.pop()))
                case "INST":
                    self._global(argument)  # raises Forbidden with the name, if it is not allowed
                    raise Malformed("the opcode INST, which torch does not write")
                case "EXT1" | "EXT2" | "EXT4":
                    # The standard library caches such objects, so another file may have set one.
                    raise Forbidden("a copyreg extension code")
                case "PROTO":
                    if argument > _LATEST:
                        raise Malformed(f"a pickle of protocol {argument}, later than {_LATEST}")
                case "POP_MARK" | "FRAME" | "STOP":  # a frame only says how much to read at once
                    pass
                case _:
                    stack.append(argument)
        value = stack.pop()
        self._measure(value)
        return value

    def _measure(self, value: Any, level: int = 0) -> tuple[int, int]:
        """Returns the number of values in `value`, and the number of levels of its containers.

        Long text, bytes and numbers count as several values. From now on `_unshown` refuses to fill
        `value` or a container in it, so that no container can hold itself.

        Raises:
          Malformed: The containers have too many levels.
        """
        if isinstance(value, str | bytes):
            return 1 + len(value) // _AGAIN, 0
        if isinstance(value, int):
            return 1 + value.bit_length() // (8 * _AGAIN), 0
        if not isinstance(value, _CONTAINERS):
            return 1, 0
        _, size, depth = self._measured.get(id(value), (None, 0, 1))
        if level + depth > _DEEPEST:
            raise Malformed(f"containers nested more than {_DEEPEST} deep")
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
        self._measured[id(value)] = (value, size, depth)  # a reference to value keeps its id valid
        return size, depth

    def _filled(self, stack: list[Any], kind: type) -> Any:
        """Returns the container at the top of the stack, for the caller to fill."""
        return expect(self._unshown(stack), kind, f"where a {kind.__name__} belongs")

    def _unshown(self, stack: list[Any]) -> Any:
        """Returns the top of the stack; refuses it if another container may hold it already."""
        if id(stack[-1]) in self._measured:
            raise Malformed("a container that holds itself, or that is filled after its first use")
        return stack[-1]

    def _global(self, reference: str) -> Global:
        """Returns the `Global` for ``"module name"``, if the allow-list has that name."""
        if len(reference) > _LONGEST_NAME:
            raise Malformed(f"a global whose name has {len(reference)} characters")
        module, _, name = reference.partition(" ")
        full = _canonical(module, name)
        if full not in self._globals:
            if not (full in self._functions or is_value(full)):
                raise Forbidden(full)
            self._budget.claim(_NAME)
            self._globals[full] = Global(full)
        return self._globals[full]

    def _call(self, function: Any, arguments: Any) -> Any:
        """Calls the replacement for a global."""
        if not isinstance(function, Global) or not isinstance(arguments, tuple):
            raise Malformed("a call of something that is not a function")
        if function.name not in self._functions:
            # The name is allowed as a value (a hook, a dtype), but not as a function to call.
            raise Forbidden(f"{function.name} (called)")
        otherwise = f"arguments that {function.name} cannot have"
        return _called(self._functions[function.name], arguments, otherwise)

    def _storage(self, identity: Any) -> Any:
        """Returns the storage that a persistent id names."""
        match identity:
            case (str(kind), *rest) if kind == STORAGE and isinstance(identity, tuple):
                return self._functions[STORAGE](*rest)
        raise Malformed("a reference to something that is not a storage")


def _called(function: Callable[..., Any], arguments: tuple[Any, ...], otherwise: str) -> Any:
    """Calls one of our functions; raises Malformed(`otherwise`) if the arguments do not fit."""
    try:
        return function(*arguments)
    except CheckpointMismatch:
        raise
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        raise Malformed(otherwise) from error


def unpickle(data: np.ndarray, functions: Functions, budget: Budget) -> Any:
    """Reads a pickle into plain values.

    Args:
      data: The pickle, uint8.
      functions: The replacements for globals, as `functions_of` makes them, with `STORAGE`.
      budget: The limit that every operation is charged to.

    Raises:
      Malformed: The pickle is damaged, torch does not write such pickles, or it takes more than
        the budget.
      Forbidden: The pickle asks for a global that is not allowed; the message names the first one.
    """
    budget.claim(_COPIES * data.size)
    try:
        return _Unpickler(functions, budget).run(data.tobytes())
    except (CheckpointMismatch, Forbidden, MemoryError):
        raise
    except Exception as error:  # genops raises errors of many classes for a damaged pickle
        raise Malformed(f"a damaged pickle ({error!s:.100})") from error


def _canonical(module: str, name: str) -> str:
    """Returns ``module.name`` in the spelling of Python 3 and of NumPy 2."""
    module = {"__builtin__": "builtins", "copy_reg": "copyreg"}.get(module, module)
    if module == "numpy.core" or module.startswith("numpy.core."):
        module = "numpy._core" + module[len("numpy.core") :]
    return f"{module}.{name}"
