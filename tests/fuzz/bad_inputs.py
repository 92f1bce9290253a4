"""21 kinds of bad input and 45 files that scanners of pickles have let through, each by name."""

from __future__ import annotations

import io
import struct
import zipfile

import torch_files as files

# Callables that picklescan, modelscan or fickling did not know before somebody told them.
UNLISTED = [
    ("asyncio.unix_events", "_UnixSubprocessTransport._start"),
    ("bdb", "Bdb.run"),
    ("cProfile", "run"),
    ("cProfile", "runctx"),
    ("code", "InteractiveInterpreter.runcode"),
    ("ctypes", "CDLL"),
    ("distutils.file_util", "write_file"),
    ("doctest", "debug_script"),
    ("ensurepip", "_run_pip"),
    ("idlelib.autocomplete", "AutoComplete.get_entity"),
    ("idlelib.calltip", "get_entity"),
    ("idlelib.debugobj", "ObjectTreeItem.SetText"),
    ("idlelib.pyshell", "ModifiedInterpreter.runcommand"),
    ("idlelib.run", "Executive.runcode"),
    ("lib2to3.pgen2.grammar", "Grammar.loads"),
    ("logging.config", "_install_loggers"),
    ("marshal", "loads"),
    ("multiprocessing.util", "spawnv_passfds"),
    ("numpy.f2py.crackfortran", "getlincoef"),
    ("numpy.testing._private.utils", "runstring"),
    ("operator", "methodcaller"),
    ("pdb", "run"),
    ("pip", "main"),
    ("profile", "Profile.run"),
    ("pty", "spawn"),
    ("pydoc", "pipepager"),
    ("timeit", "timeit"),
    ("torch.jit.unsupported_tensor_ops", "execWrapper"),
    ("torch.utils._config_module", "ConfigModule.load_config"),
    ("torch.utils.bottleneck.__main__", "run_cprofile"),
    ("torch.utils.collect_env", "run"),
    ("torch.utils.data.datapipes.utils.decoder", "basichandlers"),
    ("trace", "Trace.run"),
    ("types", "FunctionType"),
    ("uuid", "_get_command_stdout"),
    ("webbrowser", "open"),
]
SYSTEM = files.call(files.glob("os", "system"), files.text("true"))


def bypasses() -> dict[str, bytes]:
    """What each does -> the file."""
    found = {}
    for module, name in UNLISTED:
        by_stack = files.text(module) + files.text(name) + b"\x93"
        body = files.call(by_stack, files.text("true"))
        found[f"calls {module}.{name}"] = files.archive(files.whole(body, 4))
    memo = files.text("os") + b"q\x00" + files.text("system") + b"q\x01" + b"00h\x00h\x01\x93"
    hidden = files.archive(files.whole(SYSTEM))
    bodies = {
        "its name taken from the memo": files.whole(memo + files.tup(files.text("true")) + b"R", 4),
        "INST in place of a call": files.whole(b"(" + files.text("true") + b"ios\nsystem\n"),
        "OBJ in place of a call": files.whole(
            b"(" + files.glob("os", "system") + files.text("true") + b"o"
        ),
        "NEWOBJ_EX in place of a call": files.whole(
            files.glob("os", "system") + files.tup(files.text("true")) + b"}\x92", 4
        ),
        "an extension's number for a name": files.whole(b"\x82\x01)R"),
        "broken behind the call": b"\x80\x02" + SYSTEM + b"0\xff\xff",
    }
    found |= {name: files.archive(body) for name, body in bodies.items()}
    found["no archive, and the name of one"] = files.whole(SYSTEM)
    start = hidden.index(b"PK\x01\x02")
    found["marked as encrypted"] = _with(hidden, start + 8, b"\x01\x00")
    found["another name in the local header"] = hidden.replace(b"data.pkl", b"data.txt", 1)
    return found


def bad_inputs() -> dict[str, bytes]:
    """What is wrong -> the file."""
    good, small = files.saved(files.documented()), {"data/0": bytes(24)}
    model = {"state_dict": files.model().state_dict()}
    old, first = files.saved(model, _use_new_zipfile_serialization=False), files.saved(model)
    tensors = {
        "an offset behind the storage": {"offset": 6},
        "strides behind the storage": {"stride": (100, 1)},
        "a negative stride": {"stride": (-3, 1)},
        "a size of 2**80": {"size": (2**40, 2**40)},
        "a tensor of a terabyte in 24 bytes": {"size": (2**20, 2**18), "stride": (0, 0)},
        "a storage that is smaller than it says": {"source": files.storage(numel=2**20)},
        "a storage that is not there": {"source": files.storage(key="7")},
        "a number for a storage": {"source": b"K\x07"},
    }
    expanded = files.tensor_call(
        size=(50 << 20,), stride=(0,), source=files.storage("0", 24, ("torch", "ByteStorage"))
    )
    colliding = b"}(" + b"".join(_long((2**61 - 1) * k) + b"N" for k in range(1, 20_000)) + b"u"
    deep = b"}" + b")" + b"\x85" * 300_000 + b"K\x01s"
    values = {
        "a size made of an expanded tensor": files.call(files.glob("torch", "Size"), expanded),
        "a bytearray of 2**40": files.call(
            files.glob("builtins", "bytearray"), files.integer(2**40)
        ),
        "keys of one hash": colliding,
        "a key of 300 000 tuples in each other": deep,
        "a text of 4 GB": b"X\xff\xff\xff\xff",
    }
    found = {
        "an empty file": b"",
        "text": b"hello, this is no checkpoint\n",
        "an archive that is cut": good[: len(good) // 2],
        "a legacy file that is cut": old[:-100],
        "a bit of a tensor that has flipped": _flipped(first),
    }
    found |= {n: files.archive(files.pickle_of_tensor(**o), small) for n, o in tensors.items()}
    found |= {n: files.archive(files.whole(body), small) for n, body in values.items()}
    packed = zipfile.ZIP_DEFLATED
    found["100 MB of zeros, packed"] = files.archive(
        files.pickle_of_tensor(source=files.storage(numel=25 << 20)), {"data/0": bytes(100 << 20)},
        packed,
    )  # fmt: skip
    found["20 million opcodes, packed"] = files.archive(files.whole(b"N0" * 10_000_000), (), packed)
    found["text for the state of a hook"] = files.saved({**model, "comm_hook_state": "text"})
    return found


def _with(raw: bytes, at: int, new: bytes) -> bytes:
    return raw[:at] + new + raw[at + len(new) :]


def _long(value: int) -> bytes:
    raw = value.to_bytes(10, "little", signed=True)
    return b"\x8a" + struct.pack("B", len(raw)) + raw


def _flipped(raw: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        info = next(i for i in archive.infolist() if i.filename.endswith("data/0"))
    name, extra = struct.unpack_from("<HH", raw, info.header_offset + 26)
    return files.flipped(raw, info.header_offset + 30 + name + extra + 2, 6)
