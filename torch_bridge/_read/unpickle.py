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
from collections.abc import Callable, Iterator, Mapping
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
# Every opcode that is carried out, by the bytes of memory that it takes at most, with its places on
# the stack and in a container.
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
    """What is known of one pickle besides its stack.

    Args:
      functions: What a global, and a storage's id, stand for.
      budget: What everything is charged to.
    """

    def __init__(self, functions: Functions, budget: Budget) -> None:
        self._functions = functions
        self._budget = budget
        self._globals: dict[str, Global] = {}
        self._measured: dict[int, tuple[Any, int, int]] = {}

    def run(self, data: bytes) -> Any:
        """Carries out one opcode after the other; returns the value that is left at the end."""
        budget = self._budget
        stack = []
        below = []  # the stacks below each mark
        values = []  # what was above the last mark
        memo = []  # what the file numbered, from 0 on as every pickler does
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
                        raise Malformed("numbers of the memo that do not count up")
                    memo.append(stack[-1])
                case "MARK":
                    below.append(stack)
                    stack = []
                case "POP":
                    if stack:
                        stack.pop()
                    else:  # the mark itself
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
                    self._global(argument)  # so that what is not allowed is named
                    raise Malformed("the opcode INST, which torch does not write")
                case "EXT1" | "EXT2" | "EXT4":
                    # The standard library keeps such objects, so one may come from another file.
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

    def _filled(self, stack: list[Any], kind: type) -> Any:
        """Returns the container at the top of the stack, which is about to be filled."""
        return expect(self._unshown(stack), kind, f"where a {kind.__name__} belongs")

    def _unshown(self, stack: list[Any]) -> Any:
        """Returns the top of the stack, which is in nothing yet, and so never in itself."""
        if id(stack[-1]) in self._measured:
            raise Malformed("a container that holds itself, or is filled after it was shown")
        return stack[-1]

    def _global(self, reference: str) -> Global:
        """Returns the token for ``"module name"``, if that is on the allow-list."""
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
        """Calls what stands for a global."""
        if not isinstance(function, Global) or not isinstance(arguments, tuple):
            raise Malformed("a call of something that is no function")
        if function.name not in self._functions:
            # On the list as a value (a hook, a dtype), but never to be called.
            raise Forbidden(f"{function.name} (called)")
        otherwise = f"arguments that {function.name} cannot have"
        return _called(self._functions[function.name], arguments, otherwise)

    def _storage(self, identity: Any) -> Any:
        """Reads the storage that a persistent id names."""
        match identity:
            case (str(kind), *rest) if kind == STORAGE and isinstance(identity, tuple):
                return self._functions[STORAGE](*rest)
        raise Malformed("a reference to something that is no storage")


def _called(function: Callable[..., Any], arguments: tuple[Any, ...], otherwise: str) -> Any:
    """Calls a function of ours; `otherwise` says what was found where arguments do not fit it."""
    try:
        return function(*arguments)
    except CheckpointMismatch:
        raise
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        raise Malformed(otherwise) from error


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
