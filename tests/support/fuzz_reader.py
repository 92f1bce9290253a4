"""A structure-aware fuzzer of `torch_bridge.load`, by a dozen classes of damage.

    python tests/support/fuzz_reader.py --inputs 50000

Every input is a file that torch could nearly have written: pickles are changed opcode by opcode,
archives keep their checksums. Counts what was executed (Python's audit hooks see it), errors that
are not the reader's own, and the slowest input; with `--memory` also the largest.
"""

from __future__ import annotations

import argparse
import io
import json
import pathlib
import pickle
import pickletools
import random
import struct
import sys
import tempfile
import time
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch_files as files

import torch_bridge

NAMED = (torch_bridge.CheckpointMismatch, torch_bridge.UnsafeCheckpoint)
# What a file must never cause; `compile` and `exec` are also what imports do, so those are apart.
FORBIDDEN = (
    "os.system",
    "os.exec",
    "os.fork",
    "os.posix_spawn",
    "subprocess.Popen",
    "shutil.rmtree",
)
SECONDS, OVERHEAD = 5.0, 64 << 20
GLOBALS = [
    ("os", "system"),
    ("builtins", "eval"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("collections", "OrderedDict"),
    ("torch", "FloatStorage"),
    ("torch", "Size"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "scalar"),
    ("numpy", "dtype"),
    ("numpy.random._pickle", "__randomstate_ctor"),
    ("builtins", "set"),
    ("_codecs", "encode"),
    ("torch", "device"),
    ("pathlib", "PosixPath"),
]


class Result(NamedTuple):
    """What a run found.

    Attributes:
      inputs: Files read.
      read: Those that were read without an error.
      executed: Audit events that a file must never cause.
      unnamed: Errors that are not the reader's own, each a line.
      slowest: Seconds of the slowest input, and its class.
      largest: Bytes above three times the file of the largest input, and its class.
    """

    inputs: int
    read: int
    executed: list[str]
    unnamed: list[str]
    slowest: tuple[float, str]
    largest: tuple[int, str]


def seeds() -> list[bytes]:
    """The pickles of good files."""
    parts = []
    own = {
        "format": "torch_bridge.checkpoint", "version": 1, "world_size": 2,
        "state_dict": {"w": torch.ones(3)}, "optimizer": None, "powersgd": None, "errors": [{}],
        "layout": None, "extra": {"epoch": 3},
    }  # fmt: skip
    optimizer = torch.optim.Adam([torch.ones(3, requires_grad=True)]).state_dict()
    for value in (files.documented(), {"state_dict": files.model().state_dict()}, own,
                  {"comm_hook_state": files.hook_state(), "optimizer": optimizer}):  # fmt: skip
        with zipfile.ZipFile(io.BytesIO(files.saved(value))) as archive:
            name = next(n for n in archive.namelist() if n.endswith("/data.pkl"))
            parts.append(archive.read(name))
    return parts


STORAGES = {f"data/{index}": bytes(4 * 1024) for index in range(40)}


def opcodes(pickled: bytes) -> list[bytes]:
    """A pickle as its opcodes, arguments included."""
    starts = [position for _, _, position in pickletools.genops(pickled)]
    return [pickled[a:b] for a, b in zip(starts, [*starts[1:], len(pickled)], strict=True)]


def _atom(dice: random.Random) -> bytes:
    """A value, made of few opcodes."""
    texts = ["storage", "0", "", "w", "module.w", "a" * 300, "format", "\ud800", "cpu", "latin1"]
    return dice.choice(
        [
            lambda: b"N",
            lambda: b"\x88",
            lambda: b")",
            lambda: b"]",
            lambda: b"}",
            lambda: b"\x8f",
            lambda: files.integer(dice.choice([0, -1, 1, 7, 2**31, 2**40, 2**62, -(2**62)])),
            lambda: b"G" + struct.pack(">d", dice.choice([0.0, 1e300, float("nan")])),
            lambda: _text(dice.choice(texts)),
            lambda: files.glob(*dice.choice(GLOBALS)),
            lambda: files.storage(str(dice.randrange(3)), dice.choice([0, 6, 1024, 2**40])),
            lambda: files.tensor_call(
                size=(dice.choice([0, 2, 2**20]),), stride=(dice.choice([0, 1]),)
            ),
            lambda: files.tup(*[_atom(dice) for _ in range(dice.randrange(4))]),
            lambda: b"C" + bytes([3]) + b"abc",
        ]
    )()


def _text(value: str) -> bytes:
    raw = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(raw)) + raw


def _grammar(dice: random.Random) -> bytes:
    """A document out of nothing."""
    names = ["state_dict", "comm_hook_state", "optimizer", "layout", "extra", "format", "errors"]
    body = b"}("
    for name in dice.sample(names, dice.randrange(1, 5)):
        value = _atom(dice)
        if dice.random() < 0.4:
            value = files.call(files.glob(*dice.choice(GLOBALS)), *[_atom(dice) for _ in range(3)])
        if dice.random() < 0.2:
            value += _atom(dice) + b"b"
        body += _text(name) + value
    return files.whole(body + b"u", 4)


def _inserted(dice: random.Random, ops: list[bytes]) -> list[bytes]:
    where = dice.randrange(1, len(ops))
    return [*ops[:where], _atom(dice), *ops[where:]]


def _deleted(dice: random.Random, ops: list[bytes]) -> list[bytes]:
    where = dice.randrange(1, len(ops))
    return ops[:where] + ops[where + dice.randrange(1, 4) :]


def _replaced(dice: random.Random, ops: list[bytes]) -> list[bytes]:
    where = dice.randrange(1, len(ops) - 1)
    return [*ops[:where], _atom(dice), *ops[where + 1 :]]


def _swapped(dice: random.Random, ops: list[bytes]) -> list[bytes]:
    one, other = dice.randrange(1, len(ops) - 1), dice.randrange(1, len(ops) - 1)
    ops = list(ops)
    ops[one], ops[other] = ops[other], ops[one]
    return ops


def _repeated(dice: random.Random, ops: list[bytes]) -> list[bytes]:
    where = dice.randrange(1, len(ops) - 1)
    return ops[:where] + ops[where : where + 3] * dice.choice([2, 50, 3000]) + ops[where + 3 :]


def _globals(dice: random.Random, ops: list[bytes]) -> list[bytes]:
    return [files.glob(*dice.choice(GLOBALS)) if op[:1] == b"c" and dice.random() < 0.1 else op
            for op in ops]  # fmt: skip


def _bytes(dice: random.Random, ops: list[bytes]) -> list[bytes]:
    raw = bytearray(b"".join(ops))
    for _ in range(dice.randrange(1, 6)):
        raw[dice.randrange(len(raw))] = dice.randrange(256)
    return [bytes(raw)]


CHANGES: dict[str, Callable[[random.Random, list[bytes]], list[bytes]]] = {
    "opcode inserted": _inserted,
    "opcodes deleted": _deleted,
    "opcode replaced": _replaced,
    "opcodes swapped": _swapped,
    "opcodes repeated": _repeated,
    "other globals": _globals,
    "bytes changed": _bytes,
}


def inputs(seed: int) -> Iterator[tuple[str, bytes]]:
    """Files without end, each with its class."""
    dice = random.Random(seed)
    pickles = [opcodes(pickled) for pickled in seeds()]
    good, old = (
        files.saved(files.documented()),
        files.saved(files.documented(), _use_new_zipfile_serialization=False),
    )
    layout = torch_bridge.BucketLayout.from_manifest([[("w", (3,))]]).to_json()
    while True:
        for name, change in CHANGES.items():
            body = b"".join(change(dice, dice.choice(pickles)))
            compression = dice.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
            yield name, files.archive(body, STORAGES, compression)
        yield "grammar", files.archive(_grammar(dice), STORAGES)
        yield "legacy bytes", _bytes(dice, [old])[0]
        yield "archive bytes", _bytes(dice, [good])[0]
        yield "cut short", dice.choice([good, old])[: dice.randrange(len(good))]
        text = list(layout)
        for _ in range(dice.randrange(1, 5)):
            text[dice.randrange(len(text))] = dice.choice('[]{}",:0123456789ae-')
        tensor = {"w": torch.ones(3), "layout": "".join(text)}
        yield "layout", files.archive(
            files.whole(files.dictionary(state_dict=files.dictionary(w=files.tensor_call()),
                                         layout=_text(tensor["layout"]))), STORAGES)  # fmt: skip
        yield (
            "plain pickle",
            pickle.dumps(json.loads(json.dumps({"a": [1, "b"]})), dice.randrange(5)),
        )


def fuzz(count: int, *, seed: int = 0, memory: bool = False) -> Result:
    """Read `count` inputs.

    Args:
      count: How many.
      seed: Of the choices.
      memory: Also trace memory, which takes three times as long.
    """
    executed: list[str] = []
    watching = [True]
    sys.addaudithook(
        lambda event, _: executed.append(event) if watching[0] and event in FORBIDDEN else None
    )
    unnamed: list[str] = []
    slowest, largest, read = (0.0, ""), (0, ""), 0
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "f.pt"
        for index, (kind, raw) in zip(range(count), inputs(seed), strict=False):
            path.write_bytes(raw)
            if memory:
                tracemalloc.start()
            start = time.process_time()
            try:
                torch_bridge.load(path)
                read += 1
            except NAMED as error:
                str(error).encode("utf-8", "backslashreplace")
            except Exception as error:
                unnamed.append(f"{index} {kind}: {type(error).__name__}: {error}")
            slowest = max(slowest, (time.process_time() - start, kind))
            if memory:
                peak = tracemalloc.get_traced_memory()[1] - 3 * len(raw)
                tracemalloc.stop()
                largest = max(largest, (peak, kind))
        watching[0] = False
    return Result(count, read, executed, unnamed, slowest, largest)


def main() -> int:
    """Fuzz and print."""
    parser = argparse.ArgumentParser(description="Fuzz torch_bridge.load.")
    parser.add_argument("--inputs", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--memory", action="store_true")
    options = parser.parse_args()
    found = fuzz(options.inputs, seed=options.seed, memory=options.memory)
    print(f"{found.inputs} inputs of {len(CHANGES) + 6} classes, {found.read} of them read")
    print(f"executed {len(found.executed)}, unnamed errors {len(found.unnamed)}")
    print("\n".join(found.unnamed[:20]))
    print(f"slowest {found.slowest[0]:.2f} s ({found.slowest[1]})")
    if options.memory:
        print(f"largest {found.largest[0] >> 20} MiB above 3 x the file ({found.largest[1]})")
    good = not found.executed and not found.unnamed
    return 0 if good and found.slowest[0] < SECONDS and found.largest[0] < OVERHEAD else 1


if __name__ == "__main__":
    sys.exit(main())
