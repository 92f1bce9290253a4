"""Pickles that must be refused: what would run, and what would take hours or gigabytes.

Assembled opcode by opcode, so that each says exactly which trick it plays; every payload that could
run creates the canary file. Each table maps what a file does to its bytes and to what the error
must say: of `UnsafeCheckpoint` the global, else a part of the sentence.
"""

import io
import struct
import zipfile

from tests.helpers import torch_files as files
from tests.helpers.torch_files import (
    archive,
    call,
    dictionary,
    get,
    glob,
    integer,
    put,
    text,
    tup,
    whole,
)

CANARY = "a-hostile-file-was-here"
PACKED = zipfile.ZIP_DEFLATED
POP = b"0"
DEEP = b"]" * 100_000 + b"a" * 99_999
SYSTEM = call(glob("os", "system"), text(f"touch {CANARY}"))
REBUILD = glob("torch._utils", "_rebuild_tensor_v2")
GENERATOR = glob("numpy.random._pickle", "__randomstate_ctor")
PATH = glob("pathlib", "PosixPath")

Table = dict[str, tuple[bytes, str]]


# --- what would run ---------------------------------------------------------------------------

# As module and name, old names of Python 2 and attributes of attributes included.
CALLED = """
posix:system builtins:eval __builtin__:getattr copy_reg:_reconstructor pickle:loads torch:load
operator:attrgetter functools:partial types:FunctionType torch.nn.modules.linear:Linear
torch._utils:_rebuild_qtensor numpy.testing._private.utils:runstring uuid:_get_command_stdout
torch:serialization.os.system builtins:__import__.__call__ collections:OrderedDict.__class__
"""


def unsafe():
    """Calls of what is not on the allow-list, wherever a checkpoint has room for a value."""
    found = {}
    for name in CALLED.split():
        module, _, function = name.partition(":")
        now = {"__builtin__": "builtins", "copy_reg": "copyreg"}.get(module, module)
        make = glob if module != now else files.stack_glob
        found[name] = call(make(module, function), text("a")), f"{now}.{function}"
    memo = text("os") + put(0) + text("system") + put(1) + b"00" + get(0) + get(1) + b"\x93"
    hidden = {
        "in a tensor's hooks": files.tensor_call(hooks=SYSTEM),
        "as a storage's id": SYSTEM + b"Q",
        "as a default factory": call(glob("collections", "defaultdict"), glob("os", "system")),
        "popped again": SYSTEM + b"0N",
        "named by the memo": memo + tup(text("true")) + b"R",
        "INST": b"(" + text("true") + b"ios\nsystem\n",
        "OBJ": b"(" + glob("os", "system") + text("true") + b"o",
        "NEWOBJ": glob("os", "system") + tup(text("true")) + b"\x81",
        "NEWOBJ_EX": glob("os", "system") + tup(text("true")) + b"}\x92",
        "broken behind the call": SYSTEM + b"0\xff\xff",
    }  # fmt: skip
    found |= {f"os.system {where}": (body, "os.system") for where, body in hidden.items()}
    found["a hook that is called"] = (
        glob(files.HOOK, "powerSGD_hook") + b")R",
        f"{files.HOOK}.powerSGD_hook",
    )
    found |= {f"EXT {b[0]}": (b + b")R", "extension") for b in (b"\x82\x01", b"\x84\x01\0\0\0")}
    full = call(glob("torch._utils", "_rebuild_wrapper_subclass"))
    found["a DTensor"] = full, "full_tensor()"
    return {
        name: (archive(whole(body, 4), files.STORAGES), said)
        for name, (body, said) in found.items()
    }


def tricks():
    """Lists what an unpickler could be made to do with harmless objects."""
    tensor = files.tensor_call()
    plain = glob("collections", "OrderedDict")
    bodies = {
        "attributes of a function": REBUILD + tup(b"}", dictionary(__code__=text("x"))) + b"b",
        "attributes of a class": plain + dictionary(update=text("x")) + b"b",
        "attributes of a call's result": call(glob("torch", "device"), text("cpu")) + b"}b",
        "attributes of a tensor": tensor + dictionary(data=text("x")) + b"b",
        "attributes of text": text("a") + dictionary(b=text("c")) + b"b",
        "attributes by slots": REBUILD + b"N}\x86b",
        "attributes without names": call(glob("argparse", "Namespace"))
        + b"}" + integer(7) + b"Ns}\x86b",
        "a call of a call's result": files.EMPTY + b")R",
        "a new object of a call's result": files.EMPTY + b")\x81",
        "a call of a tensor": tensor + b")R",
        "entries of a tensor": tensor + b"K\x00K\x01s",
        "entries of a function": REBUILD + b"K\x00K\x01s",
        "a member of a dictionary": b"}(K\x01\x90",
        "arguments in a list": REBUILD + b"]R",
        "a buffer from elsewhere": b"\x97",
        "a frame of 2**60": b"\x95" + struct.pack("<Q", 2**60),
        "a persistent id of text": b"Pd\n",
        "a persistent id on the stack": text("e") + b"Q",
        "a storage of no type": files.tensor_call(
            source=files.storage(kind=("torch", "float32"))
        ),
        "a storage made of a storage": files.tensor_call(
            source=tup(text("storage"), files.storage(), text("0"), text("cpu"), integer(6)) + b"Q"
        ),
        "a number for a storage": files.tensor_call(source=b"K\x07"),
        "an array in a persistent id": tup(
            tensor, glob("torch", "FloatStorage"), text("0"), text("cpu"), b"K\x06"
        ) + b"Q",
        "an array as an encoding": call(glob("_codecs", "encode"), text("a"), tensor),
        "an array as a device's number": call(glob("torch", "device"), text("cuda"), tensor),
        "a memo index of four billion": b"N" + b"r\xff\xff\xff\xff",
        "text of four gigabytes": b"X\xff\xff\xff\xff",
        "bytes of 2**63": b"\x8e" + struct.pack("<Q", 2**63),
        "a bytearray of 2**60": b"\x96" + struct.pack("<Q", 2**60),
        "a memo that is not there": get(7),
        "a list that holds itself": b"]" + put(0) + get(0) + b"a",
        "a list that is filled after it was shown": b"]" + put(0) + b"]" + get(0) + b"aK\x01"
        + get(0) + b"K\x01a",
        "150 lists in each other": b"]" * 150 + b"a" * 149,
        "an array of objects": call(glob("numpy", "dtype"), text("O8")),
    }  # fmt: skip
    views = {
        "an offset past the end": {"offset": 6},
        "a huge offset": {"offset": 2**61},
        "a negative offset": {"offset": -1},
        "a size past the end": {"size": (3, 3)},
        "a huge size": {"size": (2**40, 2**40)},
        "strides past the end": {"stride": (100, 1)},
        "a negative stride": {"stride": (-3, 1)},
        "sizes without strides": {"stride": (3,)},
        "a terabyte by strides of 0": {"size": (2**20, 2**20), "stride": (0, 0)},
        "an overflowing product": {"size": (2**32, 2**32), "stride": (2**32, 2**32)},
        "100 axes": {"size": (1,) * 100, "stride": (1,) * 100},
        "a storage of another size": {"source": files.storage(numel=2**40)},
        "a storage outside the archive": {"source": files.storage(key="../../etc/passwd")},
        "a storage with a path": {"source": files.storage(key="/etc/passwd")},
    }
    bodies |= {name: files.tensor_call(**options) for name, options in views.items()}
    return {name: (files.beside(body), "xpected") for name, body in bodies.items()}


# --- what would take hours or gigabytes -------------------------------------------------------


def _kept(*values):
    """Values in the memo, from 0 on, and none on the stack."""
    return b"".join(value + put(index) + POP for index, value in enumerate(values))


def _doubling(start, times=60):
    """Makes a pair of a pair of ... of one value."""
    return _kept(start, *(get(k) * 2 + b"\x86" for k in range(times))) + get(times)


def _endless():
    """Puts a value of endless ``repr`` where a message could show it."""
    found = {}
    for kind, value in (("deep", DEEP), ("doubling", _doubling(b")"))):
        arguments = value, b"N", b"N", b"N"
        found |= {
            f"{kind} device": call(glob("torch", "device"), value),
            f"{kind} function": call(glob("torch._tensor", "_rebuild_from_type_v2"), *arguments),
            f"{kind} generator": GENERATOR + b")R" + tup(value, b"K\x01", b"K\x01" * 3) + b"b",
            f"{kind} key": b"}" + value + b"K\x01s",
            f"{kind} optimizer": dictionary(state=value),
        }
    return found


def _keys():
    """Keys that have one hash, are huge, or are nested, in every container."""
    ones = [integer(1 + k * (2**61 - 1)) for k in range(8)]
    tuples = (b"(" + b"".join(ones[(i >> (3 * d)) & 7] for d in range(8)) + b"tN"
              for i in range(5_000))  # fmt: skip
    numbers = [integer(2 * k + 1) for k in range(1 << 14)] + [integer(-5)]
    listed = b"(" + b"".join(numbers) + b"t"
    pairs = b"(" + b"".join(number + b"N\x86" for number in numbers) + b"t"
    huge = _kept(b"\x8b" + struct.pack("<i", 400_000) + b"\x7f" * 400_000)
    wide = _kept(b"(" + b"K\x01" * 64 + b"t", b"(" + get(0) * 64 + b"t")
    return {
        "tuples of one hash": b"}(" + b"".join(tuples) + b"u",
        "number keys": b"}(" + b"N".join(numbers) + b"Nu",
        "numbers in a set": call(glob("builtins", "set"), listed),
        "numbers that ADDITEMS adds": b"\x8f" + listed[:-1] + b"\x90",
        "number keys of a mapping": call(glob("collections", "OrderedDict"), pairs),
        "one huge integer as a key": huge + b"}" + (get(0) + b"Ns") * 50_000,
        "tuples of tuples as keys": wide + b"}(" + (get(1) + b"N") * 50_000 + b"u",
    }


def _copied():
    """Small calls that copy one large value again and again, or each make something large."""
    expanded = files.tensor_call(
        size=(25 << 20,), stride=(0,), source=files.storage("1", 24, ("torch", "ByteStorage"))
    )
    table = b"}(" + b"".join(integer(i) + b"N" for i in range(20_000)) + b"u"
    joined = (get(0) + get(k) * 2 + b"\x86R" for k in range(1, 40))
    array = call(
        glob("numpy.core.multiarray", "_reconstruct"), glob("numpy", "ndarray"), tup(), b"N"
    )
    huge = tup(integer(1), tup(integer(2**40)), call(glob("numpy", "dtype"), text("f8")), b"\x89",
               b"C\x04abcd")  # fmt: skip
    return {
        "a size made of an expanded array": call(glob("torch", "Size"), expanded),
        "a mapping of an expanded array": call(glob("collections", "OrderedDict"), expanded),
        "sizes made of an expanded array": call(
            REBUILD, files.storage(), b"K\x00", expanded, expanded, b"\x89", files.EMPTY
        ),
        "a generator of an expanded array": GENERATOR + b")R" + expanded + b"b",
        "paths that double": _kept(PATH, text("a" * 100), *joined) + get(40),
        "text encoded 8000 times": _kept(
            glob("_codecs", "encode"), text("a" * 500_000), text("latin1")
        ) + b"](" + (get(0) + get(1) + get(2) + b"\x86R") * 8000 + b"e",
        "dictionaries copied": _kept(glob("collections", "OrderedDict"), table)
        + b"](" + (get(0) + get(1) + b"\x85R") * 8000 + b"e",
        "an array of terabytes": array + huge + b"b",
        "tuples in each other": b"]" + b"\x85" * 200_000,
        "bytes by number": call(glob("builtins", "bytes"), integer(10**12)),
        "a bytearray by number": call(glob("builtins", "bytearray"), integer(10**12)),
    }  # fmt: skip


def _long():
    """Long values that cost nothing to show again: names, keys, text to be joined or encoded."""
    letters = "a" * (1 << 20)
    name = _kept(text("torch"), text("int" + letters))
    again = (get(0) + get(1) + b"\x93" + POP) * 3_000
    # Equal, and not one object, so that each look-up compares them.
    equal = _kept(text(letters), text(letters))
    megabyte = b"B" + struct.pack("<I", 1 << 20) + bytes(1 << 20)
    raw = _kept(megabyte, megabyte)
    tuples = _kept(tup(text(letters)), tup(text(letters)))
    numbers = _kept(b"\x8b" + struct.pack("<i", 1 << 20) + b"\x7f" * (1 << 20))
    filled = b"}" + get(0) + b"Ns" + (get(1) + b"Ns") * 50_000
    return {
        "a long name": name + again + b"N",
        "a long module": _kept(text(letters), text("x")) + (get(0) + get(1) + b"\x93") + b"N",
        "equal long keys": equal + filled,
        "equal bytes as keys": raw + filled,
        "tuples of equal text as keys": tuples + filled,
        "equal long members": equal + b"\x8f(" + get(0) + get(1) * 50_000 + b"\x90",
        "a long number again": numbers + b"](" + get(0) * 50_000 + b"e",
        "long text as a storage's name": _kept(text(letters), text(letters)) + b"]("
        + (get(0) + POP + get(1)) * 50_000 + b"e",
    }  # fmt: skip


def amplified():
    """Files that a naive reader would take hours or gigabytes for, within one entry."""
    bodies = _endless() | _keys() | _copied() | _long()
    return {name: (files.beside(body), "xpected") for name, body in bodies.items()}


def packed():
    """Small archives whose contents would unpack to far more: refused by `max_bytes`."""
    words = b"B" + struct.pack("<I", 2496) + bytes(2496)
    dtype = call(glob("numpy", "dtype"), text("u4"))
    key = call(glob("numpy._core.numeric", "_frombuffer"), words, dtype, tup(integer(624)),
               text("C"))  # fmt: skip
    state = tup(text("MT19937"), key, b"K\x01", b"K\x00", b"G" + bytes(8))
    axes = tup(b"K\x00", *[b"K\x01"] * 63)
    tensor = tup(files.storage("0", 6), b"K\x00", axes, axes, b"\x89", b"N")
    layout = f'{{"format":"torch_bridge.BucketLayout","version":1,"buckets":[[{"[0]," * 2**17}0]]}}'
    bodies = {
        "nothing": b"N" * 250_000,
        "nothing, popped": b"N0" * 250_000,
        "wide strings": b"X\x04\x00\x00\x00\xf0\x9f\x98\x80" * 50_000,
        "tuples": (b"K\x01" * 3 + b"\x87") * 50_000,
        "marks": b"(" * 250_000,
        "sets": b"\x8f" * 250_000,
        "dictionaries": b"}\x94" * 150_000,
        "generators": _kept(GENERATOR, state) + b"](" + (get(0) + b")R" + get(1) + b"b") * 4_000
        + b"e",
        "empty tensors": _kept(REBUILD, tensor) + b"](" + (get(0) + get(1) + b"R") * 6_000 + b"e",
        "a layout": dictionary(state_dict=b"}", layout=text(layout)),
    }  # fmt: skip
    found = {name: archive(whole(body), files.STORAGES, PACKED) for name, body in bodies.items()}
    zeros = {"data/0": bytes(100 << 20)}
    source = files.storage(numel=25 << 20)
    found["zeros"] = archive(files.pickle_of_tensor(source=source), zeros, PACKED)
    found["a directory of many entries"] = _directory()
    return {name: (raw, "max_bytes") for name, raw in found.items()}


def _directory(count=200_000):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("archive/data.pkl", whole(b"}"))
    raw = buffer.getvalue()
    start, end = raw.index(b"PK\x01\x02"), raw.index(b"PK\x05\x06")
    sizes = (0, 0, 65535, 65535, (end - start) * count, start, 0)
    tail = struct.pack("<4s4HLLH", b"PK\x05\x06", *sizes)
    return raw[:start] + raw[start:end] * count + tail
