"""Pickles that use what the unpickler of the standard library can do by itself, for the fuzzer."""

import pickle
import pickletools
import random
import struct

from tests.helpers import torch_files as files

Dice = random.Random
GLOBALS = [
    ("torch._utils", "_rebuild_tensor_v2"), ("collections", "OrderedDict"), ("torch", "Size"),
    ("torch", "device"), ("torch", "float32"), ("torch", "FloatStorage"), ("builtins", "set"),
    ("builtins", "bytearray"), ("numpy", "dtype"), ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "scalar"), ("numpy.random._pickle", "__randomstate_ctor"),
    ("argparse", "Namespace"), ("collections", "defaultdict"), ("_codecs", "encode"),
    ("pathlib", "PosixPath"), (files.HOOK, "powerSGD_hook"), (files.HOOK, "PowerSGDState"),
    ("torch._tensor", "_rebuild_from_type_v2"), ("os", "system"), ("builtins", "eval"),
]  # fmt: skip
NAMES = ["__class__", "__dict__", "__setstate__", "__call__", "__code__", "args", "name", "x"]
TEXTS = [*NAMES, "storage", "0", "", "w", "module.w", "a" * 300, "\ud800", "cpu", "latin1"]
COUNTS = [0, 1, 7, 255, 300, 65_536, 2**31 - 1, 2**32 - 1, 2**40, 2**63, 2**64 - 1]


def named(dice):
    """A global, most often one that is allowed."""
    return files.glob(*dice.choice(GLOBALS[:-2] if dice.random() < 0.95 else GLOBALS))


def any_value(dice, depth=0):
    """A function, an instance, a tensor, a storage or something plain, made of few opcodes."""
    numbers = [0, -1, 1, 3, 2**31, 2**40, 2**62, -(2**62)]
    makers = [
        lambda: dice.choice([b"N", b"\x88", b")", b"]", b"}", b"\x8f", b"C\x03abc", b"(lK\x01a"]),
        lambda: files.integer(dice.choice(numbers)),
        lambda: b"G" + struct.pack(">d", dice.choice([0.0, 1e300, float("nan")])),
        lambda: files.text(dice.choice(TEXTS)),
        lambda: named(dice),
        lambda: files.tensor_call(
            size=(dice.choice([0, 2, 2, 2**20]),), stride=(dice.choice([0, 1]),)
        ),
        lambda: files.storage(str(dice.randrange(2)), dice.choice([0, 6, 6, 1024, 2**40])),
    ]
    if depth < 4:
        inner = lambda: any_value(dice, depth + 1)  # noqa: E731
        makers += [
            lambda: files.call(named(dice), *[inner() for _ in range(dice.randrange(4))]),
            lambda: inner() + b")" + dice.choice([b"R", b"\x81"]),
            lambda: files.tup(*[inner() for _ in range(dice.randrange(4))]),
            lambda: b"}" + files.text(dice.choice(NAMES)) + inner() + b"s",
        ]
    return dice.choice(makers)()


def _state(dice):
    attributes = b"}(" + b"".join(
        files.text(dice.choice(NAMES)) + any_value(dice, 3) for _ in range(dice.randrange(4))
    )
    mapping = attributes + b"u"
    return dice.choice([mapping, b"N" + mapping + b"\x86", mapping + mapping + b"\x86", b"N"])


def build(dice):
    """BUILD, SETITEM, APPEND and ADDITEMS on whatever there is, functions included."""
    target = any_value(dice)
    for _ in range(dice.randrange(1, 5)):
        pair = any_value(dice, 2) + any_value(dice, 2)
        target += dice.choice(
            [_state(dice) + b"b", pair + b"s", b"(" + pair + b"u", any_value(dice) + b"a",
             b"(" + pair + b"e", b"(" + pair + b"\x90", any_value(dice) + b"b"]
        )  # fmt: skip
    return target


def calls(dice):
    """REDUCE, NEWOBJ, NEWOBJ_EX, OBJ and INST of functions, instances and values."""
    args = files.tup(any_value(dice), any_value(dice))
    function, value = named(dice), any_value(dice)
    return dice.choice(
        [value + args + b"R", value + args + b"\x81", value + args + b"}\x92", value + b"Q",
         b"(" + function + value + b"o", b"(" + value + b"i" + function[1:],
         function + value + b"R", function + args + b"R" + args + b"R",
         function + args + b"R" + _state(dice) + b"b" + args + b"\x81"]
    )  # fmt: skip


def memo(dice):
    """Entries of the memo that are far away, missing, overwritten, or hold each other."""
    body = b"]"
    for _ in range(dice.randrange(1, 60)):
        index = dice.choice([0, 1, 2, 3, 200, 5_000, 10**6, 2**31 - 1, 2**32 - 1])
        short = bytes([index & 255])
        long = struct.pack("<I", index)
        body += dice.choice(
            [b"q" + short, b"q" + short, b"\x94", b"h" + short + b"a", b"r" + long, b"2\x86",
             b"j" + long + b"a", b"\x85\x94", b"h\x00h\x00\x86q\x00", b"}q\x01h\x00h\x01sa"]
        )  # fmt: skip
    if dice.random() < 0.3:  # two of two of two of ...
        body = b")q\x00" + b"h\x00h\x00\x86q\x00" * dice.choice([5, 12, 40])
    return body


def deep(dice):
    """Containers, arguments, states and keys in each other."""
    depth = 100_000 if dice.random() < 0.03 else dice.choice([5, 40, 90, 100, 101, 2_000])
    start, end = dice.choice(
        [(b"]", b"a"), (b"(", b"t"), (b"", b"\x85"), (b"}K\x00", b"s"), (b"", b"N\x86"),
         (files.glob("torch", "Size"), b"\x85R"), (b"}", b"Ns"), (b"\x8f(", b"\x90"),
         (files.glob("argparse", "Namespace") + b")R", b"b")]
    )  # fmt: skip
    return start * depth + b"N" + end * depth


def huge(dice):
    """Integers, text and bytes that are large, or say that they are."""
    size = dice.choice([0, 1, 255, 256, 5_000, 400_000])
    raw = dice.choice([b"\x7f", b"a", b"\xff", "\u00e9".encode(), "\U0001f600".encode()]) * size
    said = len(raw) if dice.random() < 0.6 else dice.choice(COUNTS)
    code, width = dice.choice(
        [(b"\x8a", 1), (b"\x8b", 4), (b"X", 4), (b"\x8d", 8), (b"\x8c", 1), (b"T", 4), (b"U", 1),
         (b"B", 4), (b"C", 1), (b"\x8e", 8), (b"\x96", 8)]
    )  # fmt: skip
    made = code + (said % 256**width).to_bytes(width, "little") + raw
    return dice.choice([made, b"}" + made + b"Ns", made + b"q\x00" + b"h\x00\x86" * 50])


def odd(dice):
    """Extension codes, frames, buffers, persistent ids, and opcodes of protocol 0."""
    number = struct.pack("<Q", dice.choice(COUNTS) % 2**64)
    found = [
        b"\x82\x01", b"\x83\x01\x00", b"\x84" + number[:4], b"\x95" + number, b"\x97", b"]\x98",
        b"\x96" + number + b"abc", b"Pd\n", b"Pe\n", b"P\n", files.text("e") + b"Q",
        files.text("d") + b"Q", b"I01\n", b"I" + b"9" * 5_000 + b"\n",
        b"L" + b"9" * 5_000 + b"L\n",
        b"F1e999\n", b"S'a'\n", b"Vabc\\ud800\n", b"g0\n", b"p4000000000\n", b"(d", b"(l",
        b"}p0\ng0\n", b"\x80\x05\x95" + number, b"\x80\x09", b"\x91", b"(N\x91", b"1", b"0", b"2",
    ]  # fmt: skip
    count = dice.randrange(1, 5)
    return b"".join(dice.choice([dice.choice(found), any_value(dice)]) for _ in range(count))


# Keys of one hash, equal ones, and text that is equal once it is escaped, unescaped or unwrapped.
HASHES = [
    lambda k: 7 + k % 8 * (2**61 - 1),
    lambda k: k << 40,
    lambda k: tuple(-1 - (k >> place & 1) for place in range(8)),
    lambda k: (k, -1 - k % 2),
    lambda k: (1, 1.0, True, -1, -2, -1.0)[k % 6],
    lambda k: ("w", "\\x77", "\\u0077", "_orig_mod.w", "module.w", "w\0", "w\u200b")[k % 7],
    lambda k: (1, "1", "\ud800", "\\ud800", "\x1b", "\\x1b", b"1")[k % 7],
]


def _key(value):
    """Without the memo, which would make equal keys one."""
    if isinstance(value, tuple):
        return b"(" + b"".join(map(_key, value)) + b"t"
    return files.text(value) if isinstance(value, str) else pickle.dumps(value, 4)[2:-1]


def colliding_keys(dice):
    """Dictionaries and sets whose keys meet each other, in place of one entry."""
    count = dice.choice([2, 2, 7, 7, 40, 300, 300, 5_000, 5_000, 17_000])
    makers = dice.sample(HASHES, dice.choice([1, 1, 2]))
    keys = [_key(dice.choice(makers)(k)) for k in range(count)]
    keys = keys[: 300_000 // len(keys[0])]
    value = dice.choice([b"N", files.tensor_call(), files.text("w")]) if count < 1_000 else b"N"
    mapping = b"}(" + b"".join(key + value for key in keys) + b"u"
    listed = b"(" + b"".join(keys)
    choices = [
        ("state_dict", mapping),
        ("extra", mapping),
        ("optimizer", files.dictionary(state=mapping)),
        ("extra", files.call(files.glob("builtins", "set"), listed + b"t")),
        ("extra", files.call(files.glob("collections", "OrderedDict"), mapping)),
        ("extra", b"\x8f" + listed + b"\x90"),
    ]
    name, body = dice.choice(choices)
    return files.beside(body, name)


def long_values(dice):
    """Long text, bytes, numbers and tuples of them, shown again wherever a value can stand."""
    size = dice.choice([300, 5_000, 100_000, 1 << 20])
    letter = dice.choice([b"a", "\u00e9".encode(), "\U0001f600".encode()])
    raw = letter * (size // len(letter))
    long_text = b"X" + struct.pack("<I", len(raw)) + raw
    value = dice.choice(
        [long_text, b"B" + struct.pack("<I", len(raw)) + raw,
         b"\x8b" + struct.pack("<i", len(raw)) + raw, b"(" + long_text * 2 + b"t"]
    )  # fmt: skip
    # Two that are equal and not one object, the second of which may be a little longer.
    kept = value + b"\x940" + dice.choice([value, value, b"(" + value + b"K\x01t"]) + b"\x940"
    kept += files.text(dice.choice(["torch", "os", "torch._utils", "collections"])) + b"\x940"
    kept += dice.choice(GLOBAL_BODIES)(dice) + b"\x940"
    times = dice.choice([1, 30, 3_000, 30_000])
    first, second, module, function = (files.get(index) for index in range(4))
    uses = [
        b"]" + (first + b"a") * times,
        b"](" + second * times + b"e",
        b"}" + (first + second + b"s" + second + b"Ns") * times,
        b"}(" + (first + b"N" + second + b"N") * times + b"u",
        b"\x8f(" + (first + second) * times + b"\x90",
        (module + first + b"\x930") * times + b"N",
        (first + module + b"\x930") * times + b"N",
        b"](" + (function + first + b"\x85R") * times + b"e",
        b"](" + (function + first + second + b"\x86R") * times + b"e",
        b"](" + (function + first + files.text("latin1") + b"\x86R") * times + b"e",
        (files.tup(files.text("storage"), files.glob("torch", "FloatStorage"), first, second,
                   b"K\x06") + b"Q0") * times + b"N",
    ]  # fmt: skip
    return kept + dice.choice(uses)


GLOBAL_BODIES = [
    named,
    lambda _: files.glob("_codecs", "encode"),
    lambda _: files.glob("pathlib", "PosixPath"),
    lambda _: files.glob("torch", "device"),
    lambda _: files.glob("builtins", "bytes"),
    lambda _: files.glob("torch.torch_version", "TorchVersion"),
    lambda _: files.glob("numpy", "dtype"),
]


OPCODES = [opcode for opcode in pickletools.opcodes if opcode.code not in "."]


def equal_keys(dice):
    """Dictionaries and sets that look up one of few long keys again and again."""
    size = dice.choice([40, 3_000, 300_000])
    different = [files.text("k" * size + str(index)) for index in range(dice.choice([1, 2, 9]))]
    alike = [key + b"\x940" + key + b"\x940" for key in different]
    if dice.random() < 0.3:
        alike = [files.tup(key) + b"\x940" + files.tup(key) + b"\x940" for key in different]
    kept = b"".join(alike)
    count = 2 * len(different)
    times = dice.choice([2, 100, 20_000])
    order = [files.get(dice.randrange(count)) for _ in range(times)]
    value = dice.choice([b"N", b"K\x01", files.get(0)])
    mapping = b"}(" + b"".join(key + value for key in order) + b"u"
    one_by_one = b"}" + b"".join(key + value + b"s" for key in order)
    members = b"\x8f(" + b"".join(order) + b"\x90"
    frozen = b"(" + b"".join(order) + b"\x91"
    ordered = files.call(files.glob("collections", "OrderedDict"), mapping)
    return kept + dice.choice([mapping, one_by_one, members, frozen, ordered])


def many_names(dice):
    """One tensor, or one storage, under very many names."""
    count = dice.choice([10, 1_000, 30_000])
    width = dice.choice([0, 0, 200]) if count < 30_000 else 0
    prefix = dice.choice(["w", "layer.", "module.", "module._orig_mod.", "a.b.c."]) + "x" * width
    names = [files.text(f"{prefix}{index}") for index in range(count)]
    tensor = files.tensor_call()
    if dice.random() < 0.5:
        kept = tensor + b"\x940"
        return kept + b"}(" + b"".join(name + files.get(0) for name in names) + b"u"
    names = names[:1_000]
    return b"}(" + b"".join(name + tensor for name in names) + b"u"


def any_opcodes(dice):
    """Any opcode behind any other, with arguments that can be read."""
    body = b""
    for _ in range(dice.randrange(1, 40)):
        opcode = dice.choice(OPCODES)
        size = opcode.arg.n if opcode.arg else 0
        argument = bytes(dice.randrange(4) for _ in range(max(size, 0)))
        if size == pickletools.UP_TO_NEWLINE:
            argument = dice.choice([b"0\n", b"torch\nSize\n", b"1\n"])
        elif size < 0:
            width = {-2: 1, -3: 4, -4: 4, -5: 8}[size]
            argument = b"\x03" + bytes(width - 1) + b"abc"
        body += dice.choice([b"", any_value(dice, 3)]) + opcode.code.encode("latin-1") + argument
    return body


BODIES = {
    "BUILD": build,
    "calls": calls,
    "memo": memo,
    "nesting": deep,
    "huge values": huge,
    "long values": long_values,
    "equal long keys": equal_keys,
    "many names": many_names,
    "odd opcodes": odd,
    "any opcodes": any_opcodes,
}


def unpickler_input(dice, kind):
    """One file whose pickle has such a body in one entry, or as a whole."""
    body = BODIES[kind](dice)
    name = dice.choice(["state_dict", "extra", "optimizer", "comm_hook_state", "comm_hook", ""])
    how = dice.randrange(pickle.HIGHEST_PROTOCOL + 1), dice.choice(files.METHODS)
    if name:
        return files.beside(body, name, *how)
    return files.archive(files.whole(body, how[0]), files.STORAGES, how[1])
