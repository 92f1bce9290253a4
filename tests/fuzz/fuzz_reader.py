"""A structure-aware fuzzer of `torch_bridge.load` and of `inspect`, by classes of damage.

    python -m tests.fuzz.fuzz_reader --inputs 50000

Every input is a file that torch could nearly have written: pickles are changed opcode by opcode,
archives keep their checksums. Counts what was executed (Python's audit hooks see it), errors that
are not the reader's own, the slowest input and the largest.
"""

import argparse
import codecs
import collections
import contextlib
import dataclasses
import io
import logging
import pathlib
import resource
import sys
import tempfile

import torch_bridge
from tests.fuzz.fuzz_inputs import documents, inputs
from tests.helpers import torch_files as files
from tests.helpers.watch import watched
from torch_bridge.__main__ import OK, main

NAMED = (torch_bridge.CheckpointMismatch, torch_bridge.UnsafeCheckpoint)
SECONDS = 5.0
OVERHEAD = 100 << 20


@dataclasses.dataclass
class Result:
    inputs: collections.Counter[str]  # files of each class
    read: int = 0  # files without an error
    executed: list[str] = dataclasses.field(default_factory=list)  # what no file may cause
    unnamed: list[str] = dataclasses.field(default_factory=list)  # errors that are not our own
    slowest: tuple[float, str] = (0.0, "")  # seconds, and the file's class
    largest: tuple[int, str] = (0, "")  # bytes above three times the file, and its class
    grown: int = 0  # bytes of resident memory above those at the start, at most


def read(path):
    """Reads a file as `load` and `inspect` do, and shows it as a table and as JSON."""
    torch_bridge.load(path)
    for options in ([], ["--json"]):
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
            code = main(["inspect", str(path), *options])
        if code != OK:
            raise AssertionError(f"inspect {options} gave {code}: {shown.getvalue()}")


def _peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def fuzz(count, *, seed=0, memory=True):
    """Reads `count` inputs; tracing their memory takes twice as long."""
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)  # its note about process groups
    found = Result(collections.Counter())
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "f.pt"
        path.write_bytes(files.saved(documents()[0]))
        read(path)  # imports what it needs
        codecs.lookup("cp437")  # what zipfile takes names for
        before = _peak()
        for index, (kind, raw) in zip(range(count), inputs(seed), strict=False):
            path.write_bytes(raw)
            found.inputs[kind] += 1
            name = f"{index} {kind}"
            cost = watched(lambda: read(path), memory=memory)
            found.executed += cost.executed
            found.read += cost.error is None
            if isinstance(cost.error, NAMED):
                str(cost.error).encode()  # no half characters
            elif cost.error is not None:
                found.unnamed.append(f"{name}: {type(cost.error).__name__}: {cost.error!s:.200}")
            found.largest = max(found.largest, (cost.peak - 3 * len(raw), name))
            if memory and cost.seconds > 1:  # tracing takes most of it
                cost = watched(lambda: read(path), memory=False)
            found.slowest = max(found.slowest, (cost.seconds, name))
        found.grown = _peak() - before
    return found


def run():
    parser = argparse.ArgumentParser(description="Fuzz torch_bridge.load and inspect.")
    parser.add_argument("--inputs", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--untraced", action="store_true", help="the process's memory alone")
    options = parser.parse_args()
    found = fuzz(options.inputs, seed=options.seed, memory=not options.untraced)
    for name, value in vars(found).items():
        print(f"{name}: {value!s:.2000}")
    good = not found.executed and not found.unnamed
    return 0 if good and found.slowest[0] < SECONDS and found.largest[0] < OVERHEAD else 1


if __name__ == "__main__":
    sys.exit(run())
