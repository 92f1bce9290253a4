"""What `torch_bridge.load` and ``torch.load(weights_only=True)`` do with bad files, as a table.

    python tests/fuzz/beside_torch.py --write docs/security.md

Each file is read in a process of its own, which may take 1 GiB more and 10 seconds of a processor.
"""

from __future__ import annotations

import argparse
import logging
import os
import pathlib
import resource
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable

sys.path.append(str(pathlib.Path(__file__).parents[1] / "support"))

import torch
from bad_inputs import bad_inputs, bypasses

import torch_bridge

SECONDS, MEMORY = 10, 1 << 30
MARK = "<!-- python tests/fuzz/beside_torch.py -->"
# What torch says of a file that it does not read.
TORCH_NAMES = {"UnpicklingError", "RuntimeError", "EOFError", "OSError", "ValueError"}
# From the most strict to the least; a file that ends the process is no refusal.
REFUSED, RAISED, READ = "refused", "raised", "read"


def outcome(read: Callable[[pathlib.Path], object], path: pathlib.Path) -> tuple[str, str]:
    """What `read` does with a file: how strict that is, and a few words for the table."""
    receive, send = os.pipe()
    child = os.fork()
    if not child:
        os.write(send, _in_child(read, path).encode())
        os._exit(0)
    os.close(send)
    _, status = os.waitpid(child, 0)
    said = os.read(receive, 1000).decode()
    os.close(receive)
    if os.WIFSIGNALED(status):
        slow = os.WTERMSIG(status) == signal.SIGPROF
        return RAISED, f"not done after {SECONDS} s" if slow else "**the process ends**"
    kind, _, text = said.partition(" ")
    return kind, text


def _in_child(read: Callable[[pathlib.Path], object], path: pathlib.Path) -> str:
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY,) * 2)
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    try:
        read(path)
        said = f"{READ} reads it"
    except Exception as error:
        name = type(error).__name__
        ours = isinstance(error, torch_bridge.CheckpointMismatch | torch_bridge.UnsafeCheckpoint)
        said = f"{REFUSED if ours or name in TORCH_NAMES else RAISED} {name}"
    took = time.process_time() - start
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
    said += f", {peak} MiB" if peak > 64 else ""
    return said + (f", {took:.0f} s" if took > 3 else "")


def rows(files: dict[str, bytes]) -> list[tuple[str, str, str, bool]]:
    """Per file what it is, what torch and what this reader does, and whether it is as strict."""
    readers = (lambda path: torch.load(path, weights_only=True), torch_bridge.load)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "file.pt"
        for name, raw in files.items():
            path.write_bytes(raw)
            (theirs, torch_says), (ours, we_say) = (outcome(read, path) for read in readers)
            found.append((name, torch_says, we_say, ours in (REFUSED, theirs)))
    return found


def table(title: str, lines: list[tuple[str, str, str, bool]]) -> str:
    head = f"| {title} | `torch.load(weights_only=True)` | `torch_bridge.load` |\n|---|---|---|\n"
    return head + "".join(f"| {name} | {theirs} | {ours} |\n" for name, theirs, ours, _ in lines)


def main() -> int:
    """Read everything, print or write the tables; 1 if this reader is less strict anywhere."""
    parser = argparse.ArgumentParser(description="Bad files beside torch.load.")
    parser.add_argument("--write", type=pathlib.Path, help="the page behind whose mark they go")
    options = parser.parse_args()
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)  # a note about process groups
    warnings.simplefilter("ignore")  # JAX's of forks, torch's of protocols
    parts = [("21 kinds of bad input", bad_inputs()), ("45 scanner bypasses", bypasses())]
    done = [(title, rows(files)) for title, files in parts]
    text = "\n".join(table(title, lines) for title, lines in done)
    if options.write is None:
        print(text)
    else:
        page = options.write.read_text().partition(MARK)[0]
        options.write.write_text(f"{page}{MARK}\n\n{text}")
    lax = [name for _, lines in done for name, *_, strict in lines if not strict]
    print(f"torch {torch.__version__}; less strict than torch: {', '.join(lax) or 'nowhere'}")
    return int(bool(lax))


if __name__ == "__main__":
    sys.exit(main())
