"""Pickles of opcodes in an order that torch never writes, for the fuzzer."""

import pickle
import pickletools
import random
import struct

from tests.helpers import torch_files as files
from tests.helpers.torch_files import OPCODES, assemble, sized

Dice = random.Random
GLOBALS = [
    *("torch._utils:_rebuild_tensor_v2", "collections:OrderedDict", "torch:Size", "torch:device"),
    *("torch:float32", "torch:FloatStorage", "builtins:set", "builtins:bytearray", "numpy:dtype"),
    *("numpy._core.multiarray:_reconstruct", "numpy._core.multiarray:scalar", "os:system"),
    *("numpy.random._pickle:__randomstate_ctor", "argparse:Namespace", "collections:defaultdict"),
    *("_codecs:encode", "pathlib:PosixPath", f"{files.HOOK}:powerSGD_hook", "builtins:bytes"),
    *(f"{files.HOOK}:PowerSGDState", "torch._tensor:_rebuild_from_type_v2", "builtins:eval"),
]
FORBIDDEN = ("os:system", "builtins:eval")
TEXTS = ["__class__", "__setstate__", "storage", "0", "", "w", "a" * 300, "\ud800", "latin1"]
NUMBERS = [0, -1, 1, 3, 255, 2**31, 2**40, 2**62]
COUNTS = [0, 1, 7, 255, 300, 65_536, 2**31 - 1, 2**32 - 1, 2**40, 2**63, 2**64 - 1]
NOT_LAST = [opcode for opcode in pickletools.opcodes if opcode.name != "STOP"]
PLAIN = ["NONE", "NEWTRUE", "EMPTY_TUPLE", "EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET"]
CALLS = ["EMPTY_TUPLE REDUCE", "EMPTY_TUPLE NEWOBJ"]


def named(dice):
    """Names a global, most often one that is allowed."""
    name = dice.choice(GLOBALS)
    while name in FORBIDDEN and dice.random() < 0.7:
        name = dice.choice(GLOBALS)
    return files.glob(*name.split(":"))


def any_value(dice, depth=0):
    """Makes a function, an instance, a tensor, a storage or something plain, of few opcodes."""
    kind = dice.randrange(6 if depth > 3 else 10)
    if kind == 0:
        return OPCODES[dice.choice(PLAIN)]
    if kind == 1:
        return files.integer(dice.choice(NUMBERS))
    if kind == 2:
        return files.text(dice.choice(TEXTS))
    if kind == 3:
        return named(dice)
    if kind == 4:
        size = (dice.choice([0, 2, 2, 2**20]),)
        stride = (dice.choice([0, 1]),)
        return files.tensor_call(size=size, stride=stride)
    if kind == 5:
        return files.storage(str(dice.randrange(2)), dice.choice([0, 6, 6, 1024, 2**40]))
    parts = [any_value(dice, depth + 1) for _ in range(dice.randrange(4))]
    if kind == 6:
        return files.call(named(dice), *parts)
    if kind == 7:
        return any_value(dice, depth + 1) + assemble(dice.choice(CALLS))
    if kind == 8:
        return files.tup(*parts)
    return state(dice, depth + 1)


def state(dice, depth):
    """Makes a dictionary of one entry."""
    key = files.text(dice.choice(TEXTS))
    return assemble("EMPTY_DICT key value SETITEM", key=key, value=any_value(dice, depth))


ENDINGS = [  # what calls or fills whatever there is: functions, instances and values
    *("pair SETITEM", "MARK pair SETITEMS", "value APPEND", "MARK pair APPENDS"),
    *("MARK pair ADDITEMS", "value BUILD", "state BUILD", "NONE state TUPLE2 BUILD"),
    *("MARK pair TUPLE REDUCE", "MARK pair TUPLE NEWOBJ", "MARK pair TUPLE EMPTY_DICT NEWOBJ_EX"),
    *("BINPERSID", "state state TUPLE2 BUILD", "MARK name pair OBJ"),
]


def calls(dice):
    """Calls and fills whatever there is: functions, instances and values."""
    body = any_value(dice)
    for _ in range(dice.randrange(1, 5)):
        parts = {
            "pair": any_value(dice, 2) + any_value(dice, 2),
            "state": state(dice, 3),
            "value": any_value(dice),
            "name": named(dice),
        }
        body += assemble(dice.choice(ENDINGS), **parts)
    return body


TWO_OF_TWO = "GET0 GET0 TUPLE2 BINPUT 0x00"
MEMO = [
    *("BINPUT short", "MEMOIZE", "BINGET short APPEND", "LONG_BINPUT long"),
    *("LONG_BINGET long APPEND", "TUPLE1 MEMOIZE", TWO_OF_TWO, "EMPTY_DICT BINPUT 0x01 GET0 GET1"),
]


def memo(dice):
    """Asks for entries of the memo that are far away, missing, overwritten, or hold each other."""
    if dice.random() < 0.3:
        return assemble(f"EMPTY_TUPLE BINPUT 0x00 ({TWO_OF_TWO}) * {dice.choice([5, 12, 40])}")
    body = assemble("EMPTY_LIST")
    for _ in range(dice.randrange(1, 60)):
        index = dice.choice([0, 1, 2, 3, 200, 5_000, 10**6, 2**31 - 1, 2**32 - 1])
        parts = {"short": bytes([index & 255]), "long": struct.pack("<I", index)}
        body += assemble(dice.choice(MEMO), **parts)
    return body


NESTED = [  # containers, arguments, states and keys in each other
    *("(EMPTY_LIST) * {0} NONE (APPEND) * {0}", "(MARK) * {0} NONE (TUPLE) * {0}"),
    *("NONE (TUPLE1) * {0}", "(EMPTY_DICT 0) * {0} NONE (SETITEM) * {0}"),
    *("NONE (NONE TUPLE2) * {0}", "(EMPTY_DICT) * {0} NONE (NONE SETITEM) * {0}"),
    *("(torch:Size) * {0} NONE (TUPLE1 REDUCE) * {0}", "(EMPTY_SET MARK) * {0} (ADDITEMS) * {0}"),
    "(argparse:Namespace EMPTY_TUPLE REDUCE) * {0} NONE (BUILD) * {0}",
]


def deep(dice):
    depth = 100_000 if dice.random() < 0.03 else dice.choice([5, 40, 90, 100, 101, 2_000])
    return assemble(dice.choice(NESTED).format(depth))


# Bytes of the length that stands behind an opcode.
WITH_LENGTH = {
    **dict.fromkeys(("LONG1", "SHORT_BINUNICODE", "SHORT_BINSTRING", "SHORT_BINBYTES"), 1),
    **dict.fromkeys(("LONG4", "BINUNICODE", "BINSTRING", "BINBYTES"), 4),
    **dict.fromkeys(("BINUNICODE8", "BINBYTES8", "BYTEARRAY8", "FRAME"), 8),
}
HUGE = ["made", "EMPTY_DICT made NONE SETITEM", "made BINPUT 0x00 (GET0 TUPLE2) * 50"]


def huge(dice):
    """Makes integers, text and bytes that are large, or say that they are."""
    size = dice.choice([0, 1, 255, 256, 5_000, 400_000])
    raw = dice.choice([b"\x7f", b"a", b"\xff", "\u00e9".encode(), "\U0001f600".encode()]) * size
    said = len(raw) if dice.random() < 0.6 else dice.choice(COUNTS)
    name, width = dice.choice(list(WITH_LENGTH.items()))
    made = OPCODES[name] + (said % 256**width).to_bytes(width, "little") + raw
    return assemble(dice.choice(HUGE), made=made)


def any_opcodes(dice):
    """Puts any opcode behind any other, with arguments that can be read."""
    body = b""
    for _ in range(dice.randrange(1, 40)):
        opcode = dice.choice(NOT_LAST)
        size = opcode.arg.n if opcode.arg else 0
        argument = bytes(dice.randrange(4) for _ in range(max(size, 0)))
        if size == pickletools.UP_TO_NEWLINE:
            argument = dice.choice([b"0\n", b"torch\nSize\n", b"1\n", b"9" * 5_000 + b"\n"])
        elif size < 0:
            argument = b"\x03" + bytes(WITH_LENGTH[opcode.name] - 1) + b"abc"
        body += dice.choice([b"", any_value(dice, 3)]) + OPCODES[opcode.name] + argument
    return body


# Keys of one hash, equal ones, and text that is equal once it is escaped, unescaped or unwrapped.
HASHES = [
    lambda k: 7 + k % 8 * (2**61 - 1),
    lambda k: k << 40,
    lambda k: tuple(-1 - (k >> place & 1) for place in range(8)),
    lambda k: (1, 1.0, True, -1, -2, -1.0)[k % 6],
    lambda k: ("w", "\\x77", "_orig_mod.w", "module.w", "w\0", "w\u200b")[k % 6],
    lambda k: (1, "1", "\ud800", "\\ud800", "\x1b", "\\x1b", b"1")[k % 7],
]


def written(value):
    """Writes a key without the memo, which would make equal keys one."""
    if isinstance(value, tuple):
        return files.tup(*map(written, value))
    return files.text(value) if isinstance(value, str) else pickle.dumps(value, 4)[2:-1]


FILLED = [
    *("EMPTY_DICT MARK entries SETITEMS", "EMPTY_DICT set", "EMPTY_SET MARK keys ADDITEMS"),
    *("MARK keys FROZENSET", "builtins:set MARK MARK keys TUPLE TUPLE REDUCE"),
    "collections:OrderedDict EMPTY_DICT MARK entries SETITEMS TUPLE1 REDUCE",
    "EMPTY_DICT 'state' EMPTY_DICT MARK entries SETITEMS SETITEM",
]


def filled(dice, keys):
    """Fills a dictionary or a set with these keys, in one of the ways that there are."""
    value = dice.choice([assemble("NONE"), assemble("1"), files.text("w")])
    entries = value.join(keys) + value
    set_each = (value + OPCODES["SETITEM"]).join(keys) + value + OPCODES["SETITEM"]
    parts = {"keys": b"".join(keys), "entries": entries, "set": set_each}
    return assemble(dice.choice(FILLED), **parts)


def colliding_keys(dice):
    """Fills dictionaries and sets with keys that meet each other."""
    count = dice.choice([2, 7, 40, 300, 5_000, 17_000])
    makers = dice.sample(HASHES, dice.choice([1, 1, 2]))
    keys = [written(dice.choice(makers)(k)) for k in range(count)]
    return filled(dice, keys[: 300_000 // len(keys[0])])


def equal_keys(dice):
    """Looks one of few long keys up again and again."""
    size = dice.choice([40, 3_000, 300_000])
    kept = b""
    different = dice.choice([1, 2, 9])
    for index in range(different):
        kept += assemble("key KEEP key KEEP", key=files.text("k" * size + str(index)))
    order = [files.get(dice.randrange(2 * different)) for _ in range(dice.choice([2, 100, 20_000]))]
    return kept + filled(dice, order)


# Long text, bytes, numbers and tuples of them: the first two of the memo. Behind them are the name
# of a module and a function.
LONG = "value KEEP value KEEP module KEEP function KEEP "
USES = [
    *("EMPTY_LIST (GET0 APPEND) * {}", "EMPTY_LIST MARK (GET1) * {} APPENDS"),
    "EMPTY_DICT (GET0 GET1 SETITEM GET1 NONE SETITEM) * {}",
    "EMPTY_SET MARK (GET0 GET1) * {} ADDITEMS",
    *("(GET2 GET0 STACK_GLOBAL POP) * {} NONE", "(GET0 GET2 STACK_GLOBAL POP) * {} NONE"),
    "EMPTY_LIST MARK (GET3 GET0 TUPLE1 REDUCE) * {} APPENDS",
    "EMPTY_LIST MARK (GET3 GET0 'latin1' TUPLE2 REDUCE) * {} APPENDS",
    "(MARK 'storage' torch:FloatStorage GET0 GET1 TUPLE BINPERSID POP) * {} NONE",
]


def long_values(dice):
    """Shows long values again wherever a value can stand."""
    size = dice.choice([300, 5_000, 100_000, 1 << 20])
    letter = dice.choice([b"a", "\u00e9".encode(), "\U0001f600".encode()])
    raw = letter * (size // len(letter))
    value = sized(dice.choice(["BINUNICODE", "BINBYTES", "LONG4"]), raw)
    module = files.text(dice.choice(["torch", "os", "torch._utils", "collections"]))
    program = LONG + dice.choice(USES).format(dice.choice([1, 30, 3_000, 30_000]))
    if dice.random() < 0.25:
        value = files.tup(value)
    return assemble(program, value=value, module=module, function=named(dice))


def many_names(dice):
    """Gives one tensor, or one storage, very many names."""
    count = dice.choice([10, 1_000, 30_000])
    prefix = dice.choice(["w", "layer.", "module.", "module._orig_mod.", "a.b.c."])
    width = dice.choice([0, 0, 200]) if count < 30_000 else 0
    names = [files.text(f"{prefix}{'x' * width}{index}") for index in range(count)]
    tensor = files.tensor_call()
    if dice.random() < 0.5:
        again = files.get(0)
        return assemble("tensor KEEP EMPTY_DICT MARK ") + again.join(names) + again + b"u"
    return assemble("EMPTY_DICT MARK") + tensor.join(names[:1_000]) + tensor + b"u"


BODIES = {
    "calls": calls,
    "memo": memo,
    "nesting": deep,
    "huge values": huge,
    "long values": long_values,
    "equal long keys": equal_keys,
    "colliding keys": colliding_keys,
    "many names": many_names,
    "any opcodes": any_opcodes,
}


def unpickler_input(dice, kind):
    """Makes one file whose pickle has such a body in one entry, or as a whole."""
    body = BODIES[kind](dice)
    name = dice.choice(["state_dict", "extra", "optimizer", "comm_hook_state", "comm_hook", ""])
    how = dice.randrange(pickle.HIGHEST_PROTOCOL + 1), dice.choice(files.METHODS)
    if name:
        return files.beside(body, name, *how)
    return files.archive(files.whole(body, how[0]), files.STORAGES, how[1])
