"""Files for the reading tests: good ones written by torch, damaged and hostile ones made from them.

Everything is deterministic. Hostile pickles are assembled opcode by opcode, so that each says
exactly which trick it plays; every payload that could run creates the canary file.
"""

from __future__ import annotations

import gzip
import io
import json
import pickle
import struct
import zipfile

import numpy as np
import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

HOOK = "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook"


def hook_state(rank=2, buckets=1):
    generator = torch.Generator().manual_seed(3)
    state = powerSGD_hook.PowerSGDState(None, rank, start_powerSGD_iter=10)
    for bucket in range(buckets):
        state.error_dict[bucket] = torch.randn(100, generator=generator)
        state.p_memory_dict[bucket] = torch.randn(16, generator=generator)
        state.q_memory_dict[bucket] = torch.randn(8, generator=generator)
    state.iter = 12
    return state


def model():
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Linear(8, 4)
    )


def documented(prefix="module."):
    return {
        "state_dict": {prefix + name: value for name, value in model().state_dict().items()},
        "comm_hook": powerSGD_hook.powerSGD_hook,
        "comm_hook_state": hook_state(),
        "epoch": 3,
    }


def saved(value, **options) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def archive(data_pkl: bytes, entries=(), compression=zipfile.ZIP_STORED, root="archive") -> bytes:
    """A zip as torch lays it out, around any pickle."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file:
        file.writestr(f"{root}/data.pkl", data_pkl)
        file.writestr(f"{root}/byteorder", b"little")
        for name, content in dict(entries).items():
            file.writestr(f"{root}/{name}", content)
        file.writestr(f"{root}/version", b"3\n")
    return buffer.getvalue()


# --- damage ---------------------------------------------------------------------------------


def protected_ranges(raw: bytes) -> list[tuple[int, int]]:
    """Byte ranges of a zip file that a CRC covers."""
    ranges = []
    with zipfile.ZipFile(io.BytesIO(raw)) as file:
        for info in file.infolist():
            name, extra = struct.unpack_from("<HH", raw, info.header_offset + 26)
            start = info.header_offset + 30 + name + extra
            if info.file_size and "serialization_id" not in info.filename:
                ranges.append((start, start + info.file_size))
    return ranges


def flipped(raw: bytes, position: int, bit: int) -> bytes:
    changed = bytearray(raw)
    changed[position] ^= 1 << bit
    return bytes(changed)


def damaged() -> dict[str, bytes]:
    """200 files: 70 cut short, 100 with one bit flipped, 30 of other kinds."""
    random = np.random.RandomState(0)
    zip_file = saved(documented())
    files = {}
    for index in range(70):
        cut = int(random.randint(1, len(zip_file) - 1))
        files[f"zip cut {index} at {cut}"] = zip_file[:cut]
    read = [r for r in protected_ranges(zip_file) if not _unread(zip_file, r)]
    positions = np.concatenate([np.arange(*r) for r in read])
    for index, position in enumerate(random.choice(positions, 100, replace=False)):
        files[f"bit flip {index} at {position}"] = flipped(zip_file, int(position), index % 8)
    files |= foreign(zip_file)
    assert len(files) == 200, len(files)
    return files


def _unread(raw: bytes, span: tuple[int, int]) -> bool:
    # version, .format_version and the like are not needed to read the file.
    return raw[slice(*span)] in (b"3\n", b"1", b"64")


def foreign(zip_file: bytes) -> dict[str, bytes]:
    npz = io.BytesIO()
    np.savez(npz, a=np.zeros(3))
    script = archive(pickle.dumps({}, 2), {"constants.pkl": b"x", "code/a.py": b"import os"})
    other_zip = io.BytesIO()
    with zipfile.ZipFile(other_zip, "w") as file:
        file.writestr("readme.txt", "hello")
    tensor = {"w": torch.zeros(3)}
    files = {
        "empty": b"",
        "one byte": b"\x80",
        "text": b"hello, this is no checkpoint\n",
        "json": json.dumps({"state_dict": {}}).encode(),
        "png": b"\x89PNG\r\n\x1a\n" + bytes(64),
        "gzip of a checkpoint": gzip.compress(zip_file, mtime=0),
        "npz": npz.getvalue(),
        "npy": npz.getvalue()[60:],
        "hdf5": b"\x89HDF\r\n\x1a\n" + bytes(200),
        "safetensors": struct.pack("<Q", 2) + b"{}",
        "tar": bytes(1024),
        "torchscript": script,
        "other zip": other_zip.getvalue(),
        "zip end only": b"PK\x05\x06" + bytes(18),
        "zip start only": b"PK\x03\x04" + bytes(40),
        "plain pickle of a list": pickle.dumps([1, 2], 2),
        "plain pickle of a dict": pickle.dumps({"state_dict": {}}, 4),
        "plain pickle, protocol 0": pickle.dumps({"a": 1}, 0),
        "protocol 99": b"\x80\x63.",
        "number": saved(3),
        "string": saved("state_dict"),
        "list of tensors": saved([torch.zeros(2)]),
        "dict of numbers": saved({"epoch": 3, "loss": 0.5}),
        "hook state that is none": saved({**tensor, "comm_hook_state": 3}),
        "hook state without q": saved(
            {"comm_hook_state": {k: v for k, v in slots().items() if k != "q_memory_dict"}}
        ),
        "hook state with text for iter": saved({"comm_hook_state": {**slots(), "iter": "twelve"}}),
        "rank zero": saved({"comm_hook_state": {**slots(), "matrix_approximation_rank": 0}}),
        "error dict of numbers": saved({"comm_hook_state": {**slots(), "error_dict": {0: 1.5}}}),
        "own format of the future": saved({"format": "torch_bridge.checkpoint", "version": 99}),
        "no storages": archive(pickle_of_tensor(), {}),
    }
    assert len(files) == 30, len(files)
    return files


def slots():
    return hook_state().__getstate__()


# --- hostile pickles --------------------------------------------------------------------------


def glob(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def text(value: str) -> bytes:
    raw = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(raw)) + raw


def integer(value: int) -> bytes:
    if -(2**31) <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    raw = value.to_bytes(16, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def tup(*parts: bytes) -> bytes:
    return b"(" + b"".join(parts) + b"t"


def call(function: bytes, *args: bytes) -> bytes:
    return function + tup(*args) + b"R"


def dictionary(**items: bytes) -> bytes:
    return b"}(" + b"".join(text(key) + value for key, value in items.items()) + b"u"


def whole(body: bytes, protocol: int = 2) -> bytes:
    return b"\x80" + bytes([protocol]) + body + b"."


def storage(key="0", numel=6, kind=("torch", "FloatStorage")) -> bytes:
    return tup(text("storage"), glob(*kind), text(key), text("cpu"), integer(numel)) + b"Q"


EMPTY = call(glob("collections", "OrderedDict"))


def tensor_call(source=None, offset=0, size=(2, 3), stride=(3, 1), hooks=EMPTY) -> bytes:
    ints = lambda values: tup(*map(integer, values))  # noqa: E731
    return call(
        glob("torch._utils", "_rebuild_tensor_v2"),
        source or storage(),
        integer(offset),
        ints(size),
        ints(stride),
        b"\x89",
        hooks,
    )


def pickle_of_tensor(**options) -> bytes:
    return whole(dictionary(state_dict=dictionary(w=tensor_call(**options))))


def hostile(canary: str) -> dict[str, tuple[bytes, str | None]]:
    """At least 50 files: description -> (bytes, the global that must be named or None)."""
    command = f"touch {canary}"
    code = f"open({canary!r}, 'w').close()"
    system = call(glob("os", "system"), text(command))
    calls = {
        "os.system": system,
        "posix.system": call(glob("posix", "system"), text(command)),
        "nt.system": call(glob("nt", "system"), text(command)),
        "os.popen": call(glob("os", "popen"), text(command)),
        "subprocess.Popen": call(glob("subprocess", "Popen"), text(command)),
        "subprocess.check_output": call(glob("subprocess", "check_output"), text(command)),
        "builtins.eval": call(glob("builtins", "eval"), text(code)),
        "builtins.exec": call(glob("builtins", "exec"), text(code)),
        "builtins.compile": call(glob("builtins", "compile"), text(code), text("a"), text("exec")),
        "builtins.__import__": call(glob("builtins", "__import__"), text("antigravity")),
        "builtins.getattr": call(glob("builtins", "getattr"), glob("os", "x"), text("system")),
        "builtins.open": call(glob("builtins", "open"), text(canary), text("w")),
        "builtins.setattr": glob("builtins", "setattr"),
        "builtins.map": call(glob("builtins", "map"), glob("os", "system"), tup(text(command))),
        "importlib.import_module": call(glob("importlib", "import_module"), text("os")),
        "runpy.run_path": call(glob("runpy", "run_path"), text(canary)),
        "shutil.rmtree": call(glob("shutil", "rmtree"), text(canary)),
        "socket.create_connection": call(glob("socket", "create_connection")),
        "pickle.loads": call(glob("pickle", "loads"), b"C\x01."),
        "torch.load": call(glob("torch", "load"), text(canary)),
        "torch.hub.load": call(glob("torch.hub", "load"), text("a/b"), text("c")),
        "numpy.load": call(glob("numpy", "load"), text(canary)),
        "numpy.testing._private.utils.runstring": call(
            glob("numpy.testing._private.utils", "runstring"), text(code), b"}"
        ),
        "operator.attrgetter": call(glob("operator", "attrgetter"), text("system")),
        "functools.partial": call(glob("functools", "partial"), glob("os", "system")),
        "types.FunctionType": call(glob("types", "FunctionType")),
        "copyreg._reconstructor": call(glob("copy_reg", "_reconstructor")),
        "torch.nn.modules.linear.Linear": glob("torch.nn.modules.linear", "Linear") + b")\x81}b",
        "timeit.timeit": call(glob("timeit", "timeit"), text(code)),
        "torch._utils._rebuild_qtensor": call(glob("torch._utils", "_rebuild_qtensor")),
    }
    files: dict[str, tuple[bytes, str | None]] = {
        f"root: {name}": (archive(whole(body)), name) for name, body in calls.items()
    }
    files |= _hidden(system)
    files |= _tricks(system, command)
    files |= _lies()
    files |= _bombs()
    return files


def _hidden(system: bytes) -> dict[str, tuple[bytes, str]]:
    """os.system in every place where a checkpoint has room for a value."""
    state = glob(HOOK, "PowerSGDState") + b")\x81"
    bodies = {
        "in the state_dict": dictionary(state_dict=dictionary(w=system)),
        "as a dictionary key": b"}(" + system + b"K\x01u",
        "in a tensor's hooks": dictionary(state_dict=dictionary(w=tensor_call(hooks=system))),
        "as a tensor's storage": dictionary(state_dict=dictionary(w=tensor_call(source=system))),
        "in a storage's id": tup(text("storage"), system) + b"Q",
        "as a storage's id": system + b"Q",
        "in the hook state": dictionary(comm_hook_state=state + dictionary(iter=system) + b"b"),
        "as rng": dictionary(comm_hook_state=state + dictionary(rng=system) + b"b"),
        "inside rng": call(glob("numpy.random._pickle", "__randomstate_ctor"), system),
        "as rng's state": glob("numpy.random._pickle", "__randomstate_ctor")
        + b")R"
        + system
        + b"b",
        "in an array's dtype": call(glob("numpy", "dtype"), system),
        "as a default factory": call(glob("collections", "defaultdict"), glob("os", "system")),
        "as a tensor's rebuild": call(
            glob("torch._tensor", "_rebuild_from_type_v2"), glob("os", "system"), text("x")
        ),
        "popped again": system + b"0N",
        "in the optimizer": dictionary(optimizer=dictionary(state=system)),
    }
    return {
        f"hidden {where}": (archive(whole(body), {"data/0": bytes(24)}), "os.system")
        for where, body in bodies.items()
    }


def _tricks(system: bytes, command: str) -> dict[str, tuple[bytes, str | None]]:
    def dotted(module: str, name: str) -> bytes:
        short = lambda s: b"\x8c" + bytes([len(s)]) + s.encode()  # noqa: E731
        return short(module) + short(name) + b"\x93"

    hook = glob(HOOK, "powerSGD_hook")
    rebuild = glob("torch._utils", "_rebuild_tensor_v2")
    return {
        "dotted name": (
            archive(whole(dotted("collections", "OrderedDict.__class__") + b")R", 4)),
            "collections.OrderedDict.__class__",
        ),
        "dotted getattr chain": (
            archive(
                whole(dotted("torch", "serialization.os.system") + tup(text(command)) + b"R", 4)
            ),
            "torch.serialization.os.system",
        ),
        "dotted builtins": (
            archive(whole(dotted("builtins", "__import__.__call__"), 4)),
            "builtins.__import__.__call__",
        ),
        "INST opcode": (archive(whole(b"(" + text(command) + b"ios\nsystem\n")), "os.system"),
        "EXT1 opcode": (archive(whole(b"\x82\x01)R")), "extension code"),
        "EXT4 opcode": (archive(whole(b"\x84\x01\x00\x00\x00)R")), "extension code"),
        "OBJ opcode": (
            archive(whole(b"(" + glob("os", "system") + text(command) + b"o")),
            "os.system",
        ),
        "NEWOBJ": (
            archive(whole(glob("os", "system") + tup(text(command)) + b"\x81")),
            "os.system",
        ),
        "calling a hook": (archive(whole(hook + b")R")), f"{HOOK}.powerSGD_hook"),
        "attributes of a function": (
            archive(whole(rebuild + tup(b"}", dictionary(__code__=text("x"))) + b"b")),
            None,
        ),
        "attributes of a class": (
            archive(
                whole(glob("collections", "OrderedDict") + dictionary(update=text("x")) + b"b")
            ),
            None,
        ),
        # What is no zip file is not looked into.
        "before torch 1.6": (pickle.dumps(0x1950A86A20F9469CFC6C, 2) + whole(system), None),
        "plain pickle": (whole(system), None),
        "attributes of a call's result": (
            archive(whole(call(glob("torch", "device"), text("cpu")) + b"}b")),
            None,
        ),
        "a call of a call's result": (archive(whole(EMPTY + b")R")), None),
        "a new object of a call's result": (archive(whole(EMPTY + b")\x81")), None),
        "a call of a tensor": (archive(whole(tensor_call() + b")R"), {"data/0": bytes(24)}), None),
        "attributes of a tensor": (
            archive(
                whole(tensor_call() + dictionary(data=text("x")) + b"b"), {"data/0": bytes(24)}
            ),
            None,
        ),
        "entries of a tensor": (
            archive(whole(tensor_call() + b"K\x00K\x01s"), {"data/0": bytes(24)}),
            None,
        ),
        "entries of a function": (archive(whole(rebuild + b"K\x00K\x01s")), None),
        "attributes of text": (archive(whole(text("a") + dictionary(b=text("c")) + b"b")), None),
        "attributes by slots": (archive(whole(rebuild + b"N}\x86b")), None),
        "a buffer from elsewhere": (archive(whole(b"\x97", 5)), None),
        "a frame of 2**60": (archive(whole(b"\x95" + struct.pack("<Q", 2**60), 4)), None),
        "a persistent id of ours": (archive(whole(b"Pd\n")), None),
        "a persistent id in text": (archive(whole(text("e") + b"Q")), None),
        "arguments in a list": (archive(whole(rebuild + b"]R")), None),
        "wrapped rebuild": (
            archive(
                whole(
                    call(
                        glob("torch._tensor", "_rebuild_from_type_v2"),
                        glob("torch._utils", "_rebuild_parameter"),
                        glob("torch", "Tensor"),
                        tup(system),
                        b"N",
                    )
                )
            ),
            "os.system",
        ),
    }


def _lies() -> dict[str, tuple[bytes, None]]:
    """Tensors whose metadata reach outside their storage, and other false claims."""
    views = {
        "offset past the end": {"offset": 6},
        "huge offset": {"offset": 2**61},
        "negative offset": {"offset": -1},
        "size past the end": {"size": (3, 3)},
        "huge size": {"size": (2**40, 2**40)},
        "stride past the end": {"stride": (100, 1)},
        "negative stride": {"stride": (-3, 1)},
        "sizes without strides": {"stride": (3,)},
        "expanded to a terabyte": {"size": (2**20, 2**20), "stride": (0, 0)},
        "overflowing product": {"size": (2**32, 2**32), "stride": (2**32, 2**32)},
        "100 axes": {"size": (1,) * 100, "stride": (1,) * 100},
    }
    files = {
        f"tensor: {name}": (archive(pickle_of_tensor(**options), {"data/0": bytes(24)}), None)
        for name, options in views.items()
    }
    small = {"data/0": bytes(24)}
    files["storage of another size"] = (
        archive(pickle_of_tensor(source=storage(numel=2**40)), small),
        None,
    )
    files["storage outside the archive"] = (
        archive(pickle_of_tensor(source=storage(key="../../etc/passwd")), small),
        None,
    )
    files["storage with a path"] = (
        archive(pickle_of_tensor(source=storage(key="/etc/passwd")), small),
        None,
    )
    files["storage of no type"] = (
        archive(pickle_of_tensor(source=storage(kind=("torch", "float32"))), small),
        None,
    )
    nested = tup(text("storage"), storage(), text("0"), text("cpu"), integer(6)) + b"Q"
    files["storage made of a storage"] = (archive(pickle_of_tensor(source=nested), small), None)
    return files


def _bombs() -> dict[str, tuple[bytes, None]]:
    """Small files that would take all memory or time."""
    zeros = bytes(300 << 20)
    packed = archive(
        pickle_of_tensor(source=storage(numel=len(zeros) // 4)),
        {"data/0": zeros},
        compression=zipfile.ZIP_DEFLATED,
    )
    deep_key = b"}" + b")" + b"\x85" * 100_000 + b"K\x01s"
    doubling = b")q\x00" + b"h\x00h\x00\x86q\x00" * 60
    array = (
        call(glob("numpy.core.multiarray", "_reconstruct"), glob("numpy", "ndarray"), tup(), b"N")
        + tup(
            integer(1),
            tup(integer(2**40)),
            call(glob("numpy", "dtype"), text("f8")),
            b"\x89",
            b"C\x04abcd",
        )
        + b"b"
    )
    return {
        "zip bomb": (packed, None),
        "deeply nested key": (archive(whole(deep_key)), None),
        "exponential key": (archive(whole(b"}" + doubling + b"K\x01s")), None),
        "deeply nested value": (archive(whole(b"]" + b"\x85" * 200_000)), None),
        "memo index of four billion": (archive(whole(b"N" + b"r\xff\xff\xff\xff")), None),
        "string of four gigabytes": (archive(whole(b"X\xff\xff\xff\xff")), None),
        "bytes of 2**63": (archive(whole(b"\x8e" + struct.pack("<Q", 2**63), 4)), None),
        "bytes by number": (archive(whole(call(glob("builtins", "bytes"), integer(10**12)))), None),
        "array of terabytes": (archive(whole(array)), None),
        "array of objects": (archive(whole(call(glob("numpy", "dtype"), text("O8")))), None),
        "bytearray by number": (
            archive(whole(call(glob("builtins", "bytearray"), integer(10**12)))),
            None,
        ),
    }
