"""Pickles that must be refused: those that run code, and those that take hours or gigabytes.

Each pickle is assembled opcode by opcode, so that its trick is visible. Code that ran would create
the canary file. Each table maps the name of a trick to the file's bytes and to a part of the error
message, which for `UnsafeCheckpoint` is the name of the global.
"""

import io
import itertools
import struct
import zipfile

from tests.helpers import torch_files as files
from tests.helpers.torch_files import archive, assemble, sized, text, whole

CANARY = "a-hostile-file-was-here"
PACKED = zipfile.ZIP_DEFLATED
SYSTEM = assemble(f"os:system 'touch {CANARY}' TUPLE1 REDUCE")
DEEP = assemble("(EMPTY_LIST) * 40000 (APPEND) * 39999")


# --- pickles that run code --------------------------------------------------------------------

# Functions as module:name, with names of Python 2 and attributes of attributes.
CALLED = """
posix:system builtins:eval __builtin__:getattr copy_reg:_reconstructor pickle:loads torch:load
operator:attrgetter functools:partial types:FunctionType torch.nn.modules.linear:Linear
torch._utils:_rebuild_qtensor numpy.testing._private.utils:runstring uuid:_get_command_stdout
torch:serialization.os.system builtins:__import__.__call__ collections:OrderedDict.__class__
"""
RENAMED = {"__builtin__": "builtins", "copy_reg": "copyreg"}
OF_SYSTEM = {
    "as a storage's id": "system BINPERSID",
    "as a default factory": "collections:defaultdict os:system TUPLE1 REDUCE",
    "popped again": "system POP NONE",
    "named by the memo": "'os' MEMOIZE 'system' MEMOIZE POP POP GET0 GET1 STACK_GLOBAL NONE TUPLE1"
    " REDUCE",
    "INST": "MARK 'true' inst",
    "OBJ": "MARK os:system 'true' OBJ",
    "NEWOBJ": "os:system 'true' TUPLE1 NEWOBJ",
    "NEWOBJ_EX": "os:system 'true' TUPLE1 EMPTY_DICT NEWOBJ_EX",
    "broken behind the call": "system POP 0xffff",
}
CALLS = {
    "a hook": (f"{files.HOOK}:powerSGD_hook EMPTY_TUPLE REDUCE", f"{files.HOOK}.powerSGD_hook"),
    "EXT1": ("EXT1 0x01 EMPTY_TUPLE REDUCE", "extension"),
    "EXT4": ("EXT4 0x01000000 EMPTY_TUPLE REDUCE", "extension"),
    "a DTensor": ("torch._utils:_rebuild_wrapper_subclass EMPTY_TUPLE REDUCE", "full_tensor()"),
}


def unsafe():
    """Makes files that call a forbidden function, at every place of a value in a checkpoint."""
    found = {"os.system in a tensor's hooks": (files.tensor_call(hooks=SYSTEM), "os.system")}
    for name in CALLED.split():
        module, _, function = name.partition(":")
        make = files.glob if module in RENAMED else files.stack_glob
        body = assemble("function 'a' TUPLE1 REDUCE", function=make(module, function))
        found[name] = body, f"{RENAMED.get(module, module)}.{function}"
    for where, program in OF_SYSTEM.items():
        body = assemble(program, system=SYSTEM, inst=b"ios\nsystem\n")
        found[f"os.system {where}"] = body, "os.system"
    for name, (program, said) in CALLS.items():
        found[name] = assemble(program), said
    return {
        name: (archive(whole(body, 4), files.STORAGES), said)
        for name, (body, said) in found.items()
    }


_V3 = "torch._utils:_rebuild_tensor_v3 MARK storage 0 1 TUPLE1 1 TUPLE1 NEWFALSE NONE"
# Of harmless objects. What is said -> the name of a trick -> what does it.
TRICKS = {
    "attributes of an object that cannot have any": {
        "attributes of a function": "rebuild EMPTY_TUPLE EMPTY_DICT '__code__' 'x' SETITEM"
        " TUPLE2 BUILD",
        "attributes of a class": "collections:OrderedDict EMPTY_DICT 'update' 'x' SETITEM BUILD",
        "attributes of a call's result": "torch:device 'cpu' TUPLE1 REDUCE EMPTY_DICT BUILD",
        "attributes of a tensor": "tensor EMPTY_DICT 'data' 'x' SETITEM BUILD",
        "attributes of text": "'a' EMPTY_DICT 'b' 'c' SETITEM BUILD",
        "attributes by slots": "rebuild NONE EMPTY_DICT TUPLE2 BUILD",
    },
    "an object whose attributes have no names": {
        "attributes without names": "argparse:Namespace EMPTY_TUPLE REDUCE NONE EMPTY_DICT 7"
        " NONE SETITEM TUPLE2 BUILD",
    },
    "a call of something that is not a function": {
        "a call of a call's result": "collections:OrderedDict EMPTY_TUPLE REDUCE EMPTY_TUPLE"
        " REDUCE",
        "a new object of a call's result": "collections:OrderedDict EMPTY_TUPLE REDUCE"
        " EMPTY_TUPLE NEWOBJ",
        "a call of a tensor": "tensor EMPTY_TUPLE REDUCE",
        "arguments in a list": "rebuild EMPTY_LIST REDUCE",
    },
    "where a dict belongs": {
        "entries of a tensor": "tensor 0 1 SETITEM",
        "entries of a function": "rebuild 0 1 SETITEM",
    },
    "a dict where a set belongs": {
        "a member of a dictionary": "EMPTY_DICT MARK 1 ADDITEMS",
    },
    "which torch does not write": {
        "a buffer from elsewhere": "NEXT_BUFFER",
        "a persistent id of text": "PERSID 0x640a",
    },
    "a damaged pickle": {
        "a frame of 2**60": "FRAME 0x0000000000000010",
        "text of four gigabytes": "BINUNICODE 0xffffffff",
        "bytes of 2**63": "BINBYTES8 0x0000000000000080",
        "a bytearray of 2**60": "BYTEARRAY8 0x0000000000000010",
        "a memo that is not there": "GET7",
    },
    "a reference to something that is not a storage": {
        "a persistent id on the stack": "'e' BINPERSID",
        "an array in a persistent id": "MARK tensor torch:FloatStorage '0' 'cpu' 6 TUPLE BINPERSID",
    },
    "a storage of an unknown type": {
        "a storage made of a storage": "MARK 'storage' storage '0' 'cpu' 6 TUPLE BINPERSID",
    },
    "a ndarray where text belongs": {
        "an array as an encoding": "_codecs:encode 'a' tensor TUPLE2 REDUCE",
    },
    "a device whose index is not a number": {
        "an array as a device's number": "torch:device 'cuda' tensor TUPLE2 REDUCE",
    },
    "memo numbers that are not in ascending order": {
        "a memo index of four billion": "NONE LONG_BINPUT 0xffffffff",
    },
    "a container that holds itself, or that is filled after its first use": {
        "a list that holds itself": "EMPTY_LIST MEMOIZE GET0 APPEND",
        "a list that is filled after it was shown": "EMPTY_LIST MEMOIZE EMPTY_LIST GET0 APPEND"
        " 1 GET0 1 APPEND",
    },
    "containers nested more than 100 deep": {
        "150 lists in each other": "(EMPTY_LIST) * 150 (APPEND) * 149",
        "60 lists in 60 others": "(EMPTY_LIST) * 60 (APPEND) * 59 KEEP (EMPTY_LIST) * 60 GET0"
        " (APPEND) * 60",
    },
    "the NumPy dtype 'O8'": {
        "an array of objects": "numpy:dtype 'O8' TUPLE1 REDUCE",
    },
    "the generator 'PCG64' where torch has MT19937": {
        "a generator of another kind": "generator EMPTY_TUPLE REDUCE MARK 'PCG64' 1 1 1 1 TUPLE"
        " BUILD",
    },
    "where a dtype that NumPy has belongs": {
        "a quantized dtype": f"{_V3} torch:quint8 TUPLE REDUCE",
        "text as a dtype": f"{_V3} 'float32' TUPLE REDUCE",
    },
}
VIEWS = {
    "a tensor that reaches outside its storage": {
        "an offset past the end": {"offset": 6},
        "one number past the end": {"offset": 1},
        "a huge offset": {"offset": 2**61},
        "a size past the end": {"size": (3, 3)},
        "a huge size": {"size": (2**40, 2**40)},
        "strides past the end": {"stride": (100, 1)},
        "an overflowing product": {"size": (2**32, 2**32), "stride": (2**32, 2**32)},
    },
    "a tensor whose offset, sizes or strides are not counts": {
        "a negative offset": {"offset": -1},
        "a negative stride": {"stride": (-3, 1)},
        "sizes without strides": {"stride": (3,)},
    },
    "contents that unpack to more than": {
        "a terabyte by strides of 0": {"size": (2**20, 2**20), "stride": (0, 0)},
    },
    "a tensor whose sizes and strides are not tuples of at most 64 numbers": {
        "100 axes": {"size": (1,) * 100, "stride": (1,) * 100},
    },
    "a int as a storage": {
        "a number for a storage": {"source": assemble("7")},
    },
    "a storage of an unknown type": {
        "a storage of no type": {"source": files.storage(kind=("torch", "float32"))},
    },
    "one storage that has two sizes or types": {
        "a storage of another size": {"source": files.storage(numel=2**40)},
    },
    "an archive without its entry": {
        "a storage outside the archive": {"source": files.storage(key="../../etc/passwd")},
        "a storage with a path": {"source": files.storage(key="/etc/passwd")},
    },
}


def tricks():
    """Makes files that misuse harmless objects of the allow-list."""
    found = {}
    for said, programs in TRICKS.items():
        for name, program in programs.items():
            found[name] = files.beside(assemble(program)), said
    for said, views in VIEWS.items():
        for name, options in views.items():
            found[name] = files.beside(files.tensor_call(**options)), said
    return found


# --- pickles that take hours or gigabytes -----------------------------------------------------

# Each file has two values: a deeply nested one, and a pair of a pair of ... of one value.
ENDLESS = {  # a value whose ``repr`` never ends, at a place that a message could show
    "device": "torch:device value TUPLE1 REDUCE",
    "function": "torch._tensor:_rebuild_from_type_v2 MARK value NONE NONE NONE TUPLE REDUCE",
    "generator": "generator EMPTY_TUPLE REDUCE MARK value 1 1 1 1 TUPLE BUILD",
    "key": "EMPTY_DICT value 1 SETITEM",
    "optimizer": "EMPTY_DICT 'state' value SETITEM",
}
DOUBLING = "EMPTY_TUPLE BINPUT 0x00 (GET0 GET0 TUPLE2 BINPUT 0x00) * 60"


def _keys():
    """Makes keys with equal hashes, huge keys, and nested keys, in every kind of container."""
    of_one_hash = [str(1 + k * (2**61 - 1)) for k in range(8)]
    tuples = ["EMPTY_DICT MARK"]
    for key in itertools.islice(itertools.product(of_one_hash, repeat=8), 5_000):
        tuples.append(f"MARK {' '.join(key)} TUPLE NONE")
    odd = [str(2 * k + 1) for k in range(1 << 14)] + ["-5"]
    numbers = " ".join(odd)
    pairs = " NONE TUPLE2 ".join(odd)
    return {
        "tuples of one hash": f"{' '.join(tuples)} SETITEMS",
        "number keys": f"EMPTY_DICT MARK {' NONE '.join(odd)} NONE SETITEMS",
        "numbers in a set": f"builtins:set MARK MARK {numbers} TUPLE TUPLE REDUCE",
        "numbers that ADDITEMS adds": f"EMPTY_SET MARK {numbers} ADDITEMS",
        "number keys of a mapping": "collections:OrderedDict MARK MARK"
        f" {pairs} NONE TUPLE2 TUPLE TUPLE REDUCE",
        "one huge integer as a key": "huge KEEP EMPTY_DICT MARK (GET0 NONE) * 50000 SETITEMS",
        "tuples of tuples as keys": "MARK (1) * 64 TUPLE KEEP MARK (GET0) * 64 TUPLE KEEP"
        " EMPTY_DICT MARK (GET1 NONE) * 50000 SETITEMS",
    }


# Small calls that copy one large value many times, or that each make a large value.
COPIED = {
    "a size made of an expanded array": "torch:Size expanded TUPLE1 REDUCE",
    "a mapping of an expanded array": "collections:OrderedDict expanded TUPLE1 REDUCE",
    "sizes made of an expanded array": "rebuild MARK storage 0 expanded expanded NEWFALSE NONE"
    " TUPLE REDUCE",
    "a generator of an expanded array": "generator EMPTY_TUPLE REDUCE expanded BUILD",
    "paths that double": "pathlib:PosixPath path TUPLE1 REDUCE BINPUT 0x00"
    " (POP pathlib:PosixPath GET0 GET0 TUPLE2 REDUCE BINPUT 0x00) * 40",
    "text encoded 8000 times": "_codecs:encode KEEP letters KEEP 'latin1' KEEP EMPTY_LIST"
    " MARK (GET0 GET1 GET2 TUPLE2 REDUCE) * 8000 APPENDS",
    "dictionaries copied": "collections:OrderedDict KEEP EMPTY_DICT MARK table NONE"
    " SETITEMS KEEP EMPTY_LIST MARK (GET0 GET1 TUPLE1 REDUCE) * 8000 APPENDS",
    "an array of terabytes": "numpy.core.multiarray:_reconstruct numpy:ndarray EMPTY_TUPLE NONE"
    " TUPLE3 REDUCE MARK 1 1099511627776 TUPLE1 numpy:dtype 'f8' TUPLE1 REDUCE NEWFALSE abcd"
    " TUPLE BUILD",
    "tuples in each other": "EMPTY_LIST (TUPLE1) * 60000",
    "bytes by number": "builtins:bytes 1000000000000 TUPLE1 REDUCE",
    "a bytearray by number": "builtins:bytearray 1000000000000 TUPLE1 REDUCE",
}

# Long values that a pickle can repeat in few bytes: names, keys, text to join or to encode. Equal
# values are different objects, so each look-up must compare them.
FILLED = "EMPTY_DICT GET0 NONE SETITEM (GET1 NONE SETITEM) * 50000"
LONG = {
    "a long name": "'torch' KEEP letters KEEP (GET0 GET1 STACK_GLOBAL POP) * 3000 NONE",
    "a long module": "letters KEEP 'x' KEEP GET0 GET1 STACK_GLOBAL NONE",
    "equal long keys": "letters KEEP letters KEEP filled",
    "equal bytes as keys": "megabyte KEEP megabyte KEEP filled",
    "tuples of equal text as keys": "letters TUPLE1 KEEP letters TUPLE1 KEEP filled",
    "equal long members": "letters KEEP letters KEEP EMPTY_SET MARK GET0 (GET1) * 50000 ADDITEMS",
    "a long number again": "long KEEP EMPTY_LIST MARK (GET0) * 50000 APPENDS",
    "long text as a storage's name": "letters KEEP letters KEEP EMPTY_LIST MARK"
    " (GET0 POP GET1) * 50000 APPENDS",
}


def amplified():
    """Makes files whose pickle a naive reader would read for hours or into gigabytes."""
    bytes_of_one = files.storage("1", 24, ("torch", "ByteStorage"))
    parts = {
        "expanded": files.tensor_call(size=(25 << 20,), stride=(0,), source=bytes_of_one),
        "path": text("a" * 100),
        "abcd": b"C\x04abcd",
        "huge": sized("LONG4", b"\x7f" * 400_000),
        "long": sized("LONG4", b"\x7f" * (1 << 20)),
        "filled": assemble(FILLED),
        "table": assemble(" NONE ".join(map(str, range(20_000)))),
        "letters": text("a" * (1 << 20)),
        "megabyte": sized("BINBYTES", bytes(1 << 20)),
    }
    bodies = {}
    for kind, value in (("deep", DEEP), ("doubling", assemble(DOUBLING))):
        for name, program in ENDLESS.items():
            bodies[f"{kind} {name}"] = assemble(program, value=value)
    for name, program in (_keys() | COPIED | LONG).items():
        bodies[name] = assemble(program, **parts)
    return {name: (files.beside(body), "xpected") for name, body in bodies.items()}


LAYOUT = f'{{"format":"torch_bridge.BucketLayout","version":1,"buckets":[[{"[0]," * 2**17}0]]}}'
UNPACKED = {
    "nothing": "(NONE) * 250000",
    "nothing, popped": "(NONE POP) * 250000",
    "wide strings": "(wide) * 50000",
    "tuples": "(1 1 1 TUPLE3) * 50000",
    "marks": "(MARK) * 250000",
    "sets": "(EMPTY_SET) * 250000",
    "dictionaries": "(EMPTY_DICT MEMOIZE) * 150000",
    "generators": "generator KEEP MARK 'MT19937' numpy._core.numeric:_frombuffer MARK words"
    " numpy:dtype 'u4' TUPLE1 REDUCE 624 TUPLE1 'C' TUPLE REDUCE 1 0 zero TUPLE KEEP EMPTY_LIST"
    " MARK (GET0 EMPTY_TUPLE REDUCE GET1 BUILD) * 4000 APPENDS",
    "empty tensors": "rebuild KEEP MARK storage 0 MARK 0 (1) * 63 TUPLE MARK 0 (1) * 63"
    " TUPLE NEWFALSE NONE TUPLE KEEP EMPTY_LIST MARK (GET0 GET1 REDUCE) * 6000 APPENDS",
    "a layout": "EMPTY_DICT 'state_dict' EMPTY_DICT SETITEM 'layout' layout SETITEM",
}


def packed():
    """Makes small archives that unpack to far more bytes than `max_bytes` allows."""
    parts = {
        "wide": text("\U0001f600"),
        "words": sized("BINBYTES", bytes(2496)),
        "zero": b"G" + bytes(8),
        "layout": text(LAYOUT),
    }
    found = {"a directory of many entries": _directory()}
    for name, program in UNPACKED.items():
        found[name] = archive(whole(assemble(program, **parts)), files.STORAGES, PACKED)
    document = files.pickle_of_tensor(source=files.storage(numel=25 << 20))
    found["zeros"] = archive(document, {"data/0": bytes(100 << 20)}, PACKED)
    return {name: (raw, "max_bytes") for name, raw in found.items()}


def _directory(count=200_000):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("archive/data.pkl", whole(b"}"))
    raw = buffer.getvalue()
    start = raw.index(b"PK\x01\x02")
    end = raw.index(b"PK\x05\x06")
    sizes = (0, 0, 65535, 65535, (end - start) * count, start, 0)
    tail = struct.pack("<4s4HLLH", b"PK\x05\x06", *sizes)
    return raw[:start] + raw[start:end] * count + tail
