"""A pickle machine that cannot run anything: it has no import, no getattr and no call.

``pickle.Unpickler`` with a filtered ``find_class`` still hands real functions and classes to the
file: BUILD may set attributes on them, a memo index of 2**31 allocates gigabytes, and a nested
tuple as a dictionary key recurses through C. Here a global is an inert `Global` token, and the
only thing that REDUCE, NEWOBJ and BUILD do is look that token up in a table of constructors of
ours (``globals.py``), each of which checks its arguments. Opcodes that torch never writes are
refused.

References: Python's ``pickletools`` for the opcodes, ``torch/_weights_only_unpickler.py`` for the
idea of a reduced machine.
"""

from __future__ import annotations

import pickle
import re
import struct
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from torch_bridge._read.values import Forbidden, Global, Keys, Malformed, Pending, settle

# Bytes charged: for an entry of the memo or of a set, of a list, of a dictionary, for a number, for
# an entry of the stack and of the lists that are made of it.
_MEMO_BYTES, _SLOT_BYTES, _ITEM_BYTES, _NUMBER_BYTES, _STACK_BYTES = 96, 16, 160, 40, 32
_TEXT_BYTES = 4  # at most, for a character
_BETWEEN = 1 << 14  # opcodes from one look at the stack to the next
_NAME = re.compile(r"\S+")


# Globals that copy what they are given.
_CONTAINERS = (tuple, list, set, frozenset, dict)
_COPIES = frozenset(
    {
        "collections.OrderedDict",
        "collections.Counter",
        "collections.defaultdict",
        "builtins.set",
        "builtins.frozenset",
        "torch.Size",
        "_codecs.encode",
    }
)
Constructors = Mapping[str, Callable[..., Any]]
_MARK = object()


class Machine:
    """Reads one pickle from `data`.

    Args:
      data: The bytes; nothing past the pickle's STOP is looked at.
      allowed: Names of the globals that may appear.
      reduce: Global name -> constructor for REDUCE and NEWOBJ; a name in `allowed` alone may
        appear as a value only.
      persistent_load: Persistent id -> value.
      charge: Called with the bytes that a value takes, before it is made; raises when it is too
        much.
      keys: What checks and counts the keys of the whole file.
      max_opcodes: How many opcodes may run.
      pos: Where the pickle starts.

    Attributes:
      pos: After `load`, the first byte past the pickle.
    """

    def __init__(
        self,
        data: bytes | bytearray,
        *,
        allowed: frozenset[str],
        reduce: Constructors,
        persistent_load: Callable[[Any], Any],
        charge: Callable[[int], None],
        keys: Keys,
        max_opcodes: int,
        pos: int = 0,
    ) -> None:
        self.data = data
        self.pos = pos
        self._allowed = allowed
        self._reduce = reduce
        self._persistent_load = persistent_load
        self._charge = charge
        self._keys = keys
        self._opcodes_left = max_opcodes
        self._stack: list[Any] = []
        self._charged = 0  # entries of the stack
        self._memo: dict[int, Any] = {}
        self._tokens: dict[str, Global] = {}  # one per name, as they are not charged

    def load(self) -> Any:
        """Run to STOP and return the value.

        Raises:
          Malformed: The stream is cut short or is not one that torch writes.
          Forbidden: It asks for a global that is not allowed.
        """
        data, stop = self.data, len(self.data)
        while self._opcodes_left > 0:
            self._opcodes_left -= 1
            if not self._opcodes_left % _BETWEEN:
                self._charge_stack()
            if self.pos >= stop:
                raise Malformed("the pickle ends in the middle of an object")
            opcode = data[self.pos]
            self.pos += 1
            if opcode == _STOP:
                return self._pop()
            handler = _BY_BYTE[opcode]
            if handler is None:
                raise Malformed(
                    f"pickle opcode {bytes([opcode])!r}, which torch.save does not write"
                )
            handler(self)
        raise Malformed("more pickle opcodes than a file of this size has")

    # --- bytes ------------------------------------------------------------------------------

    def _take(self, count: int) -> bytes:
        end = self.pos + count
        if count < 0 or end > len(self.data):
            raise Malformed("the pickle ends in the middle of an object")
        chunk = bytes(self.data[self.pos : end])
        self.pos = end
        return chunk

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _line(self) -> str:
        end = self.data.find(b"\n", self.pos, self.pos + 1024)
        if end < 0:
            raise Malformed("a global's name has no end")
        return _text(self._take(end + 1 - self.pos)[:-1])

    # --- the stack --------------------------------------------------------------------------

    def _charge_stack(self) -> None:
        more = len(self._stack) - self._charged
        if more > 0:
            self._charge(more * _STACK_BYTES)
            self._charged += more

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _push_number(self, value: Any) -> None:
        self._charge(_NUMBER_BYTES)
        self._stack.append(value)

    def _pop(self) -> Any:
        if not self._stack or self._stack[-1] is _MARK:
            raise Malformed("the pickle takes a value that is not there")
        return settle(self._stack.pop())

    def _pop_to_mark(self) -> list[Any]:
        values = []
        while self._stack:
            value = self._stack.pop()
            if value is _MARK:
                return values[::-1]
            values.append(settle(value))
        raise Malformed("the pickle closes a group that it never opened")

    def _top(self, kind: type) -> Any:
        if not self._stack or not isinstance(self._stack[-1], kind):
            raise Malformed(f"the pickle fills a {kind.__name__} where there is none")
        return self._stack[-1]

    def _memoize(self, key: int) -> None:
        if not self._stack or self._stack[-1] is _MARK:
            raise Malformed("the pickle stores a value that is not there")
        value = self._stack[-1]
        self._charge(_MEMO_BYTES)
        self._memo[key] = value
        if isinstance(value, Pending):
            value.memo_keys.append(key)

    def _recall(self, key: int) -> None:
        if key not in self._memo:
            raise Malformed(f"the pickle recalls entry {key}, which it never stored")
        self._push(self._memo[key])

    # --- globals and objects ----------------------------------------------------------------

    def _global(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise Malformed("a global's name is not text")
        full = canonical(module, name)
        if full not in self._allowed:
            raise _refusal(full)
        self._push(self._tokens.setdefault(full, Global(full)))

    def _construct(self, target: Any, args: Any) -> None:
        if not isinstance(target, Global) or not isinstance(args, tuple):
            raise Malformed(f"the pickle calls a {type(target).__name__}")
        constructor = self._reduce.get(target.name)
        if constructor is None:
            # On the list as a value (a hook, a dtype), but never to be called.
            raise Forbidden(f"{target.name} (called)")
        if target.name in _COPIES:  # before it is made, as everything
            self._charge(sum(len(a) * _ITEM_BYTES for a in args if isinstance(a, _CONTAINERS)))
            self._charge(sum(len(a) * _TEXT_BYTES for a in args if isinstance(a, str)))
        self._push_charged(_checked(target.name, constructor, *args))

    def _push_charged(self, value: Any) -> None:
        # Else a few bytes of a file could copy a large value again and again. Arrays have been
        # charged by whoever made them.
        if not isinstance(value, np.ndarray):
            self._charge(sys.getsizeof(value))
        self._push(value)

    def _build(self) -> None:
        state = self._pop()
        if not self._stack:
            raise Malformed("the pickle fills an object that is not there")
        target = self._stack[-1]
        if isinstance(target, Pending):
            value = _checked(target.what, target.build, state)
            # The file memoised the object before it was complete: later references must see
            # the value. Nothing else can hold the unfinished object.
            for key in target.memo_keys:
                self._memo[key] = value
            target.memo_keys.clear()  # a file can build one object many times
            self._stack.pop()
            self._push_charged(value)
        elif not isinstance(target, dict):  # a dict subclass's own attributes are not needed
            raise Malformed(f"the pickle sets attributes of a {type(target).__name__}")

    # --- one method per opcode that needs more than a line -----------------------------------

    def _setitems(self, pairs: list[Any]) -> None:
        if len(pairs) % 2:
            raise Malformed("a dictionary key has no value")
        target = self._top(dict)
        self._charge(len(pairs) // 2 * _ITEM_BYTES)
        self._keys.fill_dict(target, zip(pairs[::2], pairs[1::2], strict=True))

    def _setitem(self) -> None:
        value = self._pop()
        self._setitems([self._pop(), value])

    def _append(self) -> None:
        value = self._pop()
        self._charge(_SLOT_BYTES)
        self._top(list).append(value)

    def _appends(self) -> None:
        values = self._pop_to_mark()
        self._charge(len(values) * _SLOT_BYTES)
        self._top(list).extend(values)

    def _additems(self) -> None:
        values = self._pop_to_mark()
        self._charge(len(values) * _MEMO_BYTES)
        self._keys.fill_set(self._top(set), values)

    def _frozenset(self) -> None:
        values = self._pop_to_mark()
        self._charge(len(values) * _MEMO_BYTES)
        self._push_charged(frozenset(self._keys.fill_set(set(), values)))

    def _op_reduce(self) -> None:
        args = self._pop()
        self._construct(self._pop(), args)

    def _inst(self) -> None:
        # A class and its arguments in one, of protocol 0: torch never writes it.
        module, name = self._line(), self._line()
        raise _refusal(canonical(module, name))

    def _extension(self, form: str) -> None:
        raise Forbidden(f"copyreg extension code {self._number(form)}")

    def _stack_global(self) -> None:
        name = self._pop()
        self._global(self._pop(), name)

    def _tuple(self, count: int) -> None:
        values = [self._pop() for _ in range(count)]
        self._push_charged(tuple(values[::-1]))

    def _dup(self) -> None:
        if not self._stack or self._stack[-1] is _MARK:
            raise Malformed("the pickle copies a value that is not there")
        self._push(self._stack[-1])

    def _string(self, form: str) -> None:
        raw = self._take_charged(form)
        if not raw.isascii():  # one character can make all of them wider
            self._charge((_TEXT_BYTES - 1) * len(raw))
        self._push_charged(_text(raw))

    def _py2_string(self, form: str) -> None:
        self._push_charged(self._take_charged(form).decode("latin-1"))

    def _bytes(self, form: str) -> None:
        self._push_charged(self._take_charged(form))

    def _long(self, form: str) -> None:
        self._push_charged(int.from_bytes(self._take_charged(form), "little", signed=True))

    def _take_charged(self, form: str) -> bytes:
        count = self._number(form)
        self._charge(count if 0 <= count <= len(self.data) else 0)  # more is not there
        return self._take(count)

    def _proto(self) -> None:
        if self._number("B") > pickle.HIGHEST_PROTOCOL:
            raise Malformed("a pickle protocol newer than this Python's")


def _checked(name: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call a constructor of ours; arguments it cannot use are the file's fault."""
    try:
        return function(*args)
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        raise Malformed(f"arguments that {name} cannot have") from error


def _refusal(name: str) -> Malformed | Forbidden:
    """The error for a global that is not allowed; nothing has a name with spaces but text."""
    if _NAME.fullmatch(name):
        return Forbidden(name)
    return Malformed("a file that torch.save did not write")


def canonical(module: str, name: str) -> str:
    """``module.name`` as Python 3 and today's NumPy spell it."""
    module = {"__builtin__": "builtins", "copy_reg": "copyreg"}.get(module, module)
    if module == "numpy.core" or module.startswith("numpy.core."):
        module = "numpy._core" + module[len("numpy.core") :]
    return f"{module}.{name}"


def _text(raw: bytes) -> str:
    try:
        return raw.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise Malformed("text that is not UTF-8") from error


_HANDLERS: dict[bytes, Callable[[Machine], object]] = {
    pickle.PROTO: Machine._proto,
    pickle.FRAME: lambda m: m._number("<Q"),
    pickle.MARK: lambda m: m._push(_MARK),
    pickle.POP: lambda m: m._pop(),
    pickle.POP_MARK: lambda m: m._pop_to_mark(),
    pickle.DUP: Machine._dup,
    pickle.NONE: lambda m: m._push(None),
    pickle.NEWTRUE: lambda m: m._push(True),
    pickle.NEWFALSE: lambda m: m._push(False),
    pickle.BININT: lambda m: m._push_number(m._number("<i")),
    pickle.BININT1: lambda m: m._push(m._number("B")),  # Python has one of each
    pickle.BININT2: lambda m: m._push_number(m._number("<H")),
    pickle.LONG1: lambda m: m._long("B"),
    pickle.LONG4: lambda m: m._long("<i"),
    pickle.BINFLOAT: lambda m: m._push_number(m._number(">d")),
    pickle.BINUNICODE: lambda m: m._string("<I"),
    pickle.SHORT_BINUNICODE: lambda m: m._string("B"),
    pickle.BINUNICODE8: lambda m: m._string("<Q"),
    pickle.BINSTRING: lambda m: m._py2_string("<i"),
    pickle.SHORT_BINSTRING: lambda m: m._py2_string("B"),
    pickle.BINBYTES: lambda m: m._bytes("<I"),
    pickle.SHORT_BINBYTES: lambda m: m._bytes("B"),
    pickle.BINBYTES8: lambda m: m._bytes("<Q"),
    pickle.BYTEARRAY8: lambda m: m._bytes("<Q"),
    pickle.EMPTY_TUPLE: lambda m: m._push(()),
    pickle.TUPLE1: lambda m: m._tuple(1),
    pickle.TUPLE2: lambda m: m._tuple(2),
    pickle.TUPLE3: lambda m: m._tuple(3),
    pickle.TUPLE: lambda m: m._push_charged(tuple(m._pop_to_mark())),
    pickle.EMPTY_LIST: lambda m: m._push_charged([]),
    pickle.LIST: lambda m: m._push_charged(m._pop_to_mark()),
    pickle.EMPTY_DICT: lambda m: m._push_charged({}),
    pickle.EMPTY_SET: lambda m: m._push_charged(set()),
    pickle.FROZENSET: Machine._frozenset,
    pickle.SETITEM: Machine._setitem,
    pickle.SETITEMS: lambda m: m._setitems(m._pop_to_mark()),
    pickle.APPEND: Machine._append,
    pickle.APPENDS: Machine._appends,
    pickle.ADDITEMS: Machine._additems,
    pickle.BINPUT: lambda m: m._memoize(m._number("B")),
    pickle.LONG_BINPUT: lambda m: m._memoize(m._number("<I")),
    pickle.MEMOIZE: lambda m: m._memoize(len(m._memo)),
    pickle.BINGET: lambda m: m._recall(m._number("B")),
    pickle.LONG_BINGET: lambda m: m._recall(m._number("<I")),
    pickle.GLOBAL: lambda m: m._global(m._line(), m._line()),
    pickle.STACK_GLOBAL: Machine._stack_global,
    pickle.INST: Machine._inst,
    pickle.EXT1: lambda m: m._extension("B"),
    pickle.EXT2: lambda m: m._extension("<H"),
    pickle.EXT4: lambda m: m._extension("<i"),
    pickle.REDUCE: Machine._op_reduce,
    pickle.NEWOBJ: Machine._op_reduce,
    pickle.BUILD: Machine._build,
    pickle.BINPERSID: lambda m: m._push(m._persistent_load(m._pop())),
}
_STOP = pickle.STOP[0]
_BY_BYTE = [_HANDLERS.get(bytes([code])) for code in range(256)]
