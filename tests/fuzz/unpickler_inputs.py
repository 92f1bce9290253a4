"""Pickles of opcodes in an order that torch never writes, for the fuzzer."""

import pickle
import pickletools
import random
import struct

from tests.helpers import torch_files as files

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
PLAIN = [b"N", b"\x88", b")", b"]", b"}", b"\x8f", b"C\x03abc", b"(lK\x01a", b"G\x7f" + bytes(7)]
OPCODES = [opcode for opcode in pickletools.opcodes if opcode.code != "."]


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
        return dice.choice(PLAIN)
    if kind == 1:
        return files.integer(dice.choice(NUMBERS))
    if kind == 2:
        return files.text(dice.choice(TEXTS))
    if kind == 3:
        return named(dice)
    if kind == 4:
        size, stride = (dice.choice([0, 2, 2, 2**20]),), (dice.choice([0, 1]),)
        return files.tensor_call(size=size, stride=stride)
    if kind == 5:
        return files.storage(str(dice.randrange(2)), dice.choice([0, 6, 6, 1024, 2**40]))
    parts = [any_value(dice, depth + 1) for _ in range(dice.randrange(4))]
    if kind == 6:
        return files.call(named(dice), *parts)
    if kind == 7:
        return any_value(dice, depth + 1) + b")" + dice.choice([b"R", b"\x81"])
    if kind == 8:
        return files.tup(*parts)
    return b"}" + files.text(dice.choice(TEXTS)) + any_value(dice, depth + 1) + b"s"


def calls(dice):
    """Calls and fills whatever there is: functions, instances and values."""
    body = any_value(dice)
    for _ in range(dice.randrange(1, 5)):
        pair = any_value(dice, 2) + any_value(dice, 2)
        arguments = files.tup(pair)
        state = b"}" + files.text(dice.choice(TEXTS)) + any_value(dice, 3) + b"s"
        endings = [
            *(pair + b"s", b"(" + pair + b"u", any_value(dice) + b"a", b"(" + pair + b"e"),
            *(b"(" + pair + b"\x90", any_value(dice) + b"b", state + b"b", b"N" + state + b"\x86b"),
            *(arguments + b"R", arguments + b"\x81", arguments + b"}\x92", b"Q"),
            *(state + state + b"\x86b", b"(" + named(dice) + pair + b"o"),
        ]
        body += dice.choice(endings)
    return body


def memo(dice):
    """Asks for entries of the memo that are far away, missing, overwritten, or hold each other."""
    if dice.random() < 0.3:  # two of two of two of ...
        return b")q\x00" + b"h\x00h\x00\x86q\x00" * dice.choice([5, 12, 40])
    body = b"]"
    for _ in range(dice.randrange(1, 60)):
        index = dice.choice([0, 1, 2, 3, 200, 5_000, 10**6, 2**31 - 1, 2**32 - 1])
        short, long = bytes([index & 255]), struct.pack("<I", index)
        endings = [
            *(b"q" + short, b"\x94", b"h" + short + b"a", b"r" + long, b"j" + long + b"a"),
            *(b"\x85\x94", b"h\x00h\x00\x86q\x00", b"}q\x01h\x00h\x01sa"),
        ]
        body += dice.choice(endings)
    return body


NESTED = [  # what is before, and what behind
    (b"]", b"a"), (b"(", b"t"), (b"", b"\x85"), (b"}K\x00", b"s"), (b"", b"N\x86"), (b"}", b"Ns"),
    (files.glob("torch", "Size"), b"\x85R"), (b"\x8f(", b"\x90"),
    (files.glob("argparse", "Namespace") + b")R", b"b"),
]  # fmt: skip


def deep(dice):
    """Puts containers, arguments, states and keys into each other."""
    depth = 100_000 if dice.random() < 0.03 else dice.choice([5, 40, 90, 100, 101, 2_000])
    start, end = dice.choice(NESTED)
    return start * depth + b"N" + end * depth


# Opcodes with a length, and its bytes.
WITH_LENGTH = {
    b"\x8a": 1, b"\x8b": 4, b"X": 4, b"\x8d": 8, b"\x8c": 1, b"T": 4, b"U": 1, b"B": 4, b"C": 1,
    b"\x8e": 8, b"\x96": 8, b"\x95": 8,
}  # fmt: skip


def huge(dice):
    """Makes integers, text and bytes that are large, or say that they are."""
    size = dice.choice([0, 1, 255, 256, 5_000, 400_000])
    raw = dice.choice([b"\x7f", b"a", b"\xff", "\u00e9".encode(), "\U0001f600".encode()]) * size
    said = len(raw) if dice.random() < 0.6 else dice.choice(COUNTS)
    code, width = dice.choice(list(WITH_LENGTH.items()))
    made = code + (said % 256**width).to_bytes(width, "little") + raw
    return dice.choice([made, b"}" + made + b"Ns", made + b"q\x00" + b"h\x00\x86" * 50])


def any_opcodes(dice):
    """Puts any opcode behind any other, with arguments that can be read."""
    body = b""
    for _ in range(dice.randrange(1, 40)):
        opcode = dice.choice(OPCODES)
        size = opcode.arg.n if opcode.arg else 0
        code = opcode.code.encode("latin-1")
        argument = bytes(dice.randrange(4) for _ in range(max(size, 0)))
        if size == pickletools.UP_TO_NEWLINE:
            argument = dice.choice([b"0\n", b"torch\nSize\n", b"1\n", b"9" * 5_000 + b"\n"])
        elif size < 0:
            argument = b"\x03" + bytes(WITH_LENGTH[code] - 1) + b"abc"
        body += dice.choice([b"", any_value(dice, 3)]) + code + argument
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


def _key(value):
    """Writes a key without the memo, which would make equal keys one."""
    if isinstance(value, tuple):
        return files.tup(*map(_key, value))
    return files.text(value) if isinstance(value, str) else pickle.dumps(value, 4)[2:-1]


def filled(dice, keys):
    """Fills a dictionary or a set with these keys, in one of the ways that there are."""
    value = dice.choice([b"N", b"K\x01", files.text("w")])
    mapping = b"}(" + b"".join(key + value for key in keys) + b"u"
    listed = b"(" + b"".join(keys)
    choices = [
        mapping,
        b"}" + b"".join(key + value + b"s" for key in keys),
        b"\x8f" + listed + b"\x90",
        listed + b"\x91",
        files.call(files.glob("builtins", "set"), listed + b"t"),
        files.call(files.glob("collections", "OrderedDict"), mapping),
        files.dictionary(state=mapping),
    ]
    return dice.choice(choices)


def colliding_keys(dice):
    """Fills dictionaries and sets with keys that meet each other."""
    count = dice.choice([2, 7, 40, 300, 5_000, 17_000])
    makers = dice.sample(HASHES, dice.choice([1, 1, 2]))
    keys = [_key(dice.choice(makers)(k)) for k in range(count)]
    return filled(dice, keys[: 300_000 // len(keys[0])])


def equal_keys(dice):
    """Looks one of few long keys up again and again."""
    size = dice.choice([40, 3_000, 300_000])
    kept = b""
    different = dice.choice([1, 2, 9])
    for index in range(different):
        key = files.text("k" * size + str(index))
        kept += (key + b"\x940") * 2
    order = [files.get(dice.randrange(2 * different)) for _ in range(dice.choice([2, 100, 20_000]))]
    return kept + filled(dice, order)


def long_values(dice):
    """Shows long text, bytes, numbers and tuples of them again wherever a value can stand."""
    size = dice.choice([300, 5_000, 100_000, 1 << 20])
    letter = dice.choice([b"a", "\u00e9".encode(), "\U0001f600".encode()])
    raw = letter * (size // len(letter))
    said = struct.pack("<I", len(raw))
    long_text = b"X" + said + raw
    value = dice.choice([long_text, b"B" + said + raw, b"\x8b" + said + raw, files.tup(long_text)])
    module = files.text(dice.choice(["torch", "os", "torch._utils", "collections"]))
    kept = b"".join(part + b"\x940" for part in (value, value, module, named(dice)))
    times = dice.choice([1, 30, 3_000, 30_000])
    first, second, module, function = map(files.get, range(4))
    storage = files.tup(files.text("storage"), files.glob("torch", "FloatStorage"), first, second)
    uses = [
        b"]" + (first + b"a") * times,
        b"](" + second * times + b"e",
        b"}" + (first + second + b"s" + second + b"Ns") * times,
        b"\x8f(" + (first + second) * times + b"\x90",
        (module + first + b"\x930") * times + b"N",
        (first + module + b"\x930") * times + b"N",
        b"](" + (function + first + b"\x85R") * times + b"e",
        b"](" + (function + first + files.text("latin1") + b"\x86R") * times + b"e",
        (storage + b"Q0") * times + b"N",
    ]
    return kept + dice.choice(uses)


def many_names(dice):
    """Gives one tensor, or one storage, very many names."""
    count = dice.choice([10, 1_000, 30_000])
    prefix = dice.choice(["w", "layer.", "module.", "module._orig_mod.", "a.b.c."])
    width = dice.choice([0, 0, 200]) if count < 30_000 else 0
    names = [files.text(f"{prefix}{'x' * width}{index}") for index in range(count)]
    tensor = files.tensor_call()
    if dice.random() < 0.5:
        items = b"".join(name + files.get(0) for name in names)
        return tensor + b"\x940}(" + items + b"u"
    return b"}(" + b"".join(name + tensor for name in names[:1_000]) + b"u"


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
