"""Disturbs a running training job again and again, starts it again, and compares how it ends.

    python -m benchmarks.faults kills
    python -m benchmarks.faults hangs --count 3 --processes 2 --steps 120
    sudo python -m benchmarks.faults disks

Trains once without a fault and once with faults of one kind, each time started again with the same
command. `kills` (SIGKILL), `terms` (SIGTERM or SIGINT) and `hangs` (SIGSTOP) strike a random
process at a random moment, kills one time in five each while the processes start or while a
checkpoint is written. `disks` fills the file system of the checkpoints, a small one that it mounts,
for which it needs root. `flips` flips one bit in any file of the newest checkpoint. `resize`
continues one run on 4, 2, 3 and 4 processes. Everything runs on this machine, over the loopback
interface. The exit code is 1 if anything that was saved was lost, a process ended otherwise than it
should or without a sentence, or the losses differ.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.common.arguments import at_least, command_line
from benchmarks.common.machine import describe, sentence
from benchmarks.faults.job import MODEL, held_out
from benchmarks.faults.runs import (
    FullDisk,
    Strike,
    disturbed,
    hang,
    kill,
    run_resized,
    terminate,
    undisturbed,
)

COUNTS = {"kills": 20, "terms": 20, "hangs": 10, "disks": 10, "flips": 200, "resize": 0}
STRIKES: dict[str, Strike] = {"kills": kill, "terms": terminate, "hangs": hang}


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    given = parse(argv)
    flags = [*MODEL, "--eval-every", str(max(1, given.steps // 4))]
    run = describe("benchmarks.faults", ("jax", "optax", "flax", "orbax-checkpoint"))
    print(f"{run['command']}\n{sentence(run['machine'])}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        if given.what == "flips":
            return flips(given, root, flags)
        if given.what == "resize":
            plain = undisturbed(root / "plain", flags, 4, given.steps)
            other = run_resized(root / "resize", flags, [4, 2, 3, 4], given.steps)
            compare(plain, other)  # apart by rounding, as the number of replicas differs
            return 0
        disk = small_disk(root / "disk") if given.what == "disks" else contextlib.nullcontext()
        with disk as folder:
            found = disturbed(
                root / "disturbed",
                flags,
                FullDisk(folder) if folder else STRIKES[given.what],
                processes=given.processes,
                steps=given.steps,
                faults=given.count,
                seed=given.seed,
                checkpoints=folder and folder / "checkpoints",
            )
        print(found)
        # A run goes on from what it saved, where residuals are their mean: to be equal in every
        # digit the other one saves after the same steps.
        plain = undisturbed(
            root / "plain", flags, given.processes, given.steps, sorted(set(found.saved_after))
        )
        same = compare(plain, root / "disturbed" / "curve.jsonl")
    return int(not (found.good and same))


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The arguments, checked."""
    parser = command_line("benchmarks.faults", __doc__)
    shown = " (default: %(default)s)"
    counts = ", ".join(f"{n} {what}" for what, n in COUNTS.items() if n)
    parser.add_argument("what", choices=COUNTS)
    parser.add_argument("--count", type=int, metavar="N", help=f"of the faults (default: {counts})")
    parser.add_argument("--processes", type=int, default=4, metavar="N", help=shown.strip())
    parser.add_argument("--steps", type=int, default=300, metavar="N", help=shown.strip())
    parser.add_argument("--seed", type=int, default=0, help="of the faults" + shown)
    given = parser.parse_args(argv)
    try:
        given.count = COUNTS[given.what] if given.count is None else given.count
        at_least("--count", given.count, 0)
        at_least("--processes", given.processes, 2)
        at_least("--steps", given.steps, 4)
    except ValueError as error:
        parser.error(str(error))
    return given


def flips(given: argparse.Namespace, root: Path, flags: list[str]) -> int:
    """The flipped bits, in the checkpoints of a short run."""
    from benchmarks.faults.flips import flip_bits  # JAX, which the other kinds do without

    undisturbed(root / "plain", flags, given.processes, 30)
    found = flip_bits(
        root / "plain" / "checkpoints", root / "scratch", flips=given.count, seed=given.seed
    )
    print(dataclasses.asdict(found))
    return int(bool(found.silent or found.lost))


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of a few megabytes.

    Raises:
      SystemExit: It cannot be mounted.
    """
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"benchmarks.faults: a full disk needs root: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def compare(plain: Path, other: Path) -> bool:
    """Prints the held-out losses of two curves; whether they are equal in every digit."""
    expected, found = held_out(plain), held_out(other)
    for step, loss in expected.items():
        print(f"step {step:4}  {loss:.7f}  {found[step]:.7f}  {found[step] / loss - 1:+.2e}")
    return all(found[step] == loss for step, loss in expected.items())


if __name__ == "__main__":
    sys.exit(main())
