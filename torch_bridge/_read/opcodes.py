"""A pickle, opcode by opcode, before ``pickle.Unpickler`` sees it: charged, and made harmless.

The unpickler of the standard library asks us for every global, but what it does by itself can take
all memory or the process: a memo index of 2**31 allocates gigabytes, a dictionary hashes keys that
were chosen to have one hash or whose nesting overflows the C stack, an extension code may stand for
an object that it has kept from another file. So dictionaries and sets become objects of ours that
only collect, and an opcode that torch does not write ends the pickle.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Callable

from torch_bridge._read.values import Forbidden, Malformed

# What a persistent id of text means, since torch's own are tuples.
DICT, SET, END = "d", "s", "e"

_READ = (
    b"\x80\x95.(012N\x88\x89JKMG\x8a\x8b"  # protocol, frame, end; mark, stack; None, numbers
    b"XU\x8cT\x8dCB\x8e\x96)t\x85\x86\x87"  # text, bytes, tuples
    b"]l}\x8fsuea\x90qrhj\x94c\x93\x81RbQ"  # lists, dictionaries, sets, memo; globals and calls
)
_TEXT, _BYTES = b"XU\x8cT\x8d", b"CB\x8e\x96"
# Bytes of memory that an opcode takes at most, beside its place on the stack and in a container.
_SLOT = 16
_CHARGES = {
    **dict.fromkeys(b"}\x8fR\x81Q", 192),
    **dict.fromkeys(b"]l", 112),
    **dict.fromkeys(b"t\x85\x86\x87", 96),
    **dict.fromkeys(_TEXT + _BYTES, 64),
    **dict.fromkeys(b"JMG\x8a\x8b", 48),
}
_REPLACED = {
    pickle.EMPTY_DICT: f"P{DICT}\n".encode(),
    pickle.EMPTY_SET: f"P{SET}\n".encode(),
    pickle.NEWOBJ: pickle.REDUCE,  # which makes no instance of a class
    pickle.BYTEARRAY8: pickle.BINBYTES8,
    pickle.FRAME: b"",  # the replacements make its length wrong
}
_LENGTHS = {-2: 1, -3: 4, -4: 4, -5: 8}  # pickletools' TAKEN_FROM_ARGUMENT
_PUTS = (pickle.BINPUT[0], pickle.LONG_BINPUT[0])
_FRAME, _INST, _STOP = pickle.FRAME[0], pickle.INST[0], pickle.STOP[0]


def _table() -> list[tuple[int, bool, int, bytes | None] | None]:
    """Per opcode the length of its argument, if that is a count, its charge, its replacement."""
    table: list[tuple[int, bool, int, bytes | None] | None] = [None] * 256
    for opcode in pickletools.opcodes:
        code = opcode.code.encode("latin-1")
        if code in _READ:
            size = opcode.arg.n if opcode.arg else 0  # -1: lines
            charge = _SLOT + _CHARGES.get(code[0], 0)
            entry = _LENGTHS.get(size, size), size in _LENGTHS, charge, _REPLACED.get(code)
            table[code[0]] = entry
    return table


_TABLE = _table()


def harmless(data: bytes, claim: Callable[[int], None]) -> tuple[io.BytesIO, Exception]:
    """The pickle that ``pickle.Unpickler`` may read in the place of `data`.

    Args:
      data: A pickle; nothing behind its STOP is looked at.
      claim: Charged with what the unpickler will allocate, at most, in bytes.

    Returns:
      That pickle, and what is wrong with `data` where it has no STOP: the unpickler then asks for
      the persistent id `END`, after everything before it has been read.
    """
    view, stream, copied, position, memo, charged = memoryview(data), io.BytesIO(), 0, 0, 0, 0
    problem: Exception = Malformed("the pickle ends in the middle of an object")
    while position < len(data):
        code = data[position]
        entry = _TABLE[code]
        if entry is None:
            problem = _refusal(data[position : position + 1024])
            break
        size, is_count, charge, replacement = entry
        end = position + 1 + size
        if size < 0:
            end = data.find(b"\n", data.find(b"\n", position) + 1) + 1
            if end <= position:
                break
        elif is_count:
            length = int.from_bytes(data[position + 1 : end], "little")
            if code in _TEXT and not data[end : end + length].isascii():
                charge += 3 * length
            end += length
            charge += length
        elif code in _PUTS:
            index = int.from_bytes(data[position + 1 : end], "little")
            if index >= memo:  # which is an array
                charge += _SLOT * (index + 1 - memo)
                memo = index + 1
        if end > len(data):
            break
        charged += charge
        if charged > 1 << 16:
            claim(charged)
            charged = 0
        if replacement is not None:
            stream.write(view[copied:position])
            stream.write(replacement)
            copied = end if code == _FRAME else position + 1
        position = end
        if code == _STOP:
            break
    claim(charged)
    stream.write(view[copied:position])
    stream.write(f"P{END}\n".encode())
    stream.seek(0)
    return stream, problem


def _refusal(rest: bytes) -> Exception:
    """The error for an opcode that is not read; `rest` begins with it."""
    if rest[0] == _INST and rest.count(b"\n") > 1:  # a global and a call in one
        module, name = rest[1:].decode("latin-1").split("\n")[:2]
        return Forbidden(f"{module}.{name}")
    if size := {pickle.EXT1: 1, pickle.EXT2: 2, pickle.EXT4: 4}.get(rest[:1]):
        return Forbidden(f"copyreg extension code {int.from_bytes(rest[1 : 1 + size], 'little')}")
    return Malformed(f"pickle opcode {rest[:1]!r}, which torch.save does not write")
