"""Disturbs a running training job again and again, starts it again, and compares how it ends.

    sudo python -m benchmarks.faults                        # everything; root for the full disks
    python -m benchmarks.faults kills --count 3 --steps 100
    python -m benchmarks.faults --report                    # the table in docs/faults.md anew

Trains once without a fault and once with faults of one kind, each time started again with the same
command. `kills` (SIGKILL), `terms` (SIGTERM), `ints` (SIGINT) and `hangs` (SIGSTOP) strike a random
process at a random moment, kills one time in five each while the processes start or while a
checkpoint is written. `disks` fills the file system of the checkpoints, a small one that it mounts,
for which it needs root. `flips` flips one bit in any file of the newest checkpoint and restores as
a run does; after five more of them it starts the whole job again. Everything runs on this machine,
over the loopback interface.

Writes benchmarks/results/faults.json after each kind, and the table in docs/faults.md. The exit
code is 1 if anything that was saved was lost, a process ended otherwise than it should or without a
sentence, or a loss differs from the undisturbed run's in any digit. `resize` continues one run on
4, 2, 3 and 4 processes, and prints how far it is from one on 4.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from signal import SIGINT, SIGTERM
from typing import Any

from benchmarks.common.arguments import at_least, command_line
from benchmarks.common.machine import describe, sentence
from benchmarks.common.paths import RESULTS
from benchmarks.faults.job import MODEL, Job, complete, held_out, losses
from benchmarks.faults.report import PAGE, good, paged
from benchmarks.faults.runs import (
    Disturbed,
    Fault,
    FullDisk,
    Strike,
    compared,
    disturbed,
    hang,
    joined,
    kill,
    run_arguments,
    run_resized,
    send,
    undisturbed,
)

COUNTS = {"kills": 20, "terms": 20, "disks": 10, "hangs": 10, "flips": 200, "ints": 5}
STRIKES: dict[str, Strike] = {
    "kills": kill,
    "terms": send(SIGTERM),
    "ints": send(SIGINT),
    "hangs": hang,
}
FLIPPED_RESTARTS = 5
PACKAGES = ("jax", "optax", "flax", "orbax-checkpoint")
OUT = RESULTS / "faults.json"


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    given = parse(argv)
    signal.signal(SIGTERM, signal.default_int_handler)  # so that no process is left behind
    if given.report:
        PAGE.write_text(paged(PAGE.read_text(), saved()))
        return 0
    bad = []
    with tempfile.TemporaryDirectory() as name:
        # One for all starts; those of the run that nothing disturbs fill it.
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(name) / "xla"))
        if given.what == ["resize"]:
            resize(Path(name), given.steps)
            return 0
        runs = Runs(Path(name), given)
        for kind in given.what or COUNTS:
            about = describe("benchmarks.faults", PACKAGES)
            found = runs.flips() if kind == "flips" else runs.kind(kind)
            about |= {"processes": given.processes, "steps": given.steps, "seed": given.seed}
            bad += [] if good(about | found) else [kind]
            print(f"{kind}: {'NOT GOOD' if kind in bad else 'good'}", flush=True)
            if not given.trial:  # others may have been written meanwhile
                results = saved() | {kind: about | found}
                OUT.write_text(json.dumps(results, indent=1) + "\n")
                PAGE.write_text(paged(PAGE.read_text(), results))
    return int(bool(bad))


def saved() -> dict[str, Any]:
    """The results of each kind so far."""
    return json.loads(OUT.read_text()) if OUT.exists() else {}


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The arguments, checked."""
    parser = command_line("benchmarks.faults", __doc__)
    shown = " (default: %(default)s)"
    counts = ", ".join(f"{n} {what}" for what, n in COUNTS.items())
    kinds = f"of {', '.join(COUNTS)}; or resize (default: all of them but that)"
    parser.add_argument("what", nargs="*", metavar="KIND", help=kinds)
    parser.add_argument("--count", type=int, metavar="N", help=f"of the faults (default: {counts})")
    parser.add_argument("--processes", type=int, default=2, metavar="N", help=shown.strip())
    parser.add_argument("--steps", type=int, default=400, metavar="N", help=shown.strip())
    parser.add_argument("--seed", type=int, default=0, help="of the faults" + shown)
    parser.add_argument("--trial", action="store_true", help="print only, write no results")
    parser.add_argument("--report", action="store_true", help="only write the table anew")
    given = parser.parse_args(argv)
    try:
        if unknown := [k for k in given.what if k not in COUNTS and given.what != ["resize"]]:
            raise ValueError(f"there is no {unknown[0]!r}; choose {kinds}.")
        at_least("--count", 1 if given.count is None else given.count, 1)
        at_least("--processes", given.processes, 2)
        at_least("--steps", given.steps, 40)
    except ValueError as error:
        parser.error(str(error))
    return given


class Runs:
    """Disturbed runs, and the undisturbed one that they are compared with."""

    def __init__(self, root: Path, given: argparse.Namespace):
        """`root` is a temporary folder."""
        self.root, self.given = root, given
        self.flags = [*MODEL, "--eval-every", str(given.steps // 4)]
        self._plain: Path | None = None

    def kind(self, kind: str) -> dict[str, Any]:
        """The faults of one kind, and the losses compared.

        A run that comes to its end before the last fault is followed by another.
        """
        count, parts = self.given.count or COUNTS[kind], list[dict[str, Any]]()
        left = count
        while left > 0:
            parts.append(self._part(kind, len(parts), left))
            if not parts[-1]["faults"]:
                break  # a run that is too short for any
            left -= len(parts[-1]["faults"])
        return joined(parts)

    def _part(self, kind: str, number: int, faults: int) -> dict[str, Any]:
        given, directory = self.given, self.root / f"{kind}{number}"
        disk = small_disk(self.root / "disk") if kind == "disks" else contextlib.nullcontext()
        with disk as folder:
            found = disturbed(
                directory,
                self.flags,
                FullDisk(folder) if folder else STRIKES[kind],
                processes=given.processes,
                steps=given.steps,
                faults=faults,
                seed=given.seed + number,
                checkpoints=folder and folder / "checkpoints",
            )
        plain = self.plain()
        if found.stopped:
            # A run goes on from what it saved, where residuals are their mean: to be equal in
            # every digit the other one saves after the same steps.
            plain = undisturbed(
                self.root / f"{kind}{number}-plain",
                self.flags,
                given.processes,
                given.steps,
                sorted(found.stopped),
            )
        return compared(plain, found)

    def plain(self) -> Path:
        """The curve of a run without a fault, and beside it its last checkpoints."""
        if self._plain is None:
            arguments = self.given.processes, self.given.steps
            self._plain = undisturbed(self.root / "plain", self.flags, *arguments)
        return self._plain

    def flips(self) -> dict[str, Any]:
        """Flipped bits one after the other, and a few starts of the whole job after one."""
        plain, seed = self.plain(), self.given.seed
        checkpoints = plain.parent / "checkpoints"
        command = [sys.executable, "-m", "benchmarks.faults.flips", checkpoints]
        command += [self.root / "scratch", self.given.count or COUNTS["flips"], seed]
        done = subprocess.run(
            [str(part) for part in command], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(done.stderr)
        flips = [json.loads(line) for line in done.stdout.splitlines()]
        restarts, rng = Disturbed(), random.Random(seed)
        for number in range(min(FLIPPED_RESTARTS, len(flips))):
            self._restart(self.root / f"flipped{number}", plain.parent, rng, restarts)
        return {"flips": flips, "stderr": done.stderr} | compared(plain, restarts)

    def _restart(self, directory: Path, plain: Path, rng: random.Random, found: Disturbed) -> None:
        """The command of a run that had ended, after a bit of its last checkpoint flipped."""
        from benchmarks.faults.flips import flip  # JAX, which the other kinds do without

        log, checkpoints = directory / "curve.jsonl", directory / "checkpoints"
        shutil.copytree(plain / "checkpoints", checkpoints)
        shutil.copy(plain / "curve.jsonl", log)
        newest = complete(checkpoints)
        before = max(int(p.name) for p in checkpoints.glob("[0-9]*") if p.name != str(newest))
        file, where = flip(checkpoints / str(newest), rng)
        arguments = [*self.flags, *run_arguments(self.given.steps, log, checkpoints)]
        job = Job(self.given.processes, directory, *arguments)
        codes = job.wait(600)
        # One of orbax's own notes, on which nothing depends, may be passed by in silence.
        told = f"checkpoint {checkpoints / str(newest)} is not used" in job.said()
        harmless = job.start() == newest and not told
        wrong = [f"no sentence names {where}"] * (not harmless and where not in job.said())
        wrong += [f"exit codes {codes}"] * any(codes)
        wrong += ["a stack trace"] * ("Traceback" in job.said())
        found.faults.append(Fault(f"in {file}", before, codes, 0.0, before, wrong, job.start()))
        found.curves.append(losses(log))
        print(found.faults[-1], flush=True)


def resize(root: Path, steps: int) -> None:
    """Prints held-out losses, apart by rounding, as the number of replicas differs."""
    about = describe("benchmarks.faults", PACKAGES)
    print(f"{about['command']}, {about['date']}\n{sentence(about['machine'])}", flush=True)
    flags = [*MODEL, "--eval-every", str(steps // 4)]
    expected = held_out(undisturbed(root / "plain", flags, 4, steps))
    found = held_out(run_resized(root / "resize", flags, [4, 2, 3, 4], steps))
    for step, loss in expected.items():
        print(f"step {step:4}  {loss:.7f}  {found[step]:.7f}  {found[step] / loss - 1:+.2e}")


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of a few megabytes.

    Raises:
      SystemExit: It cannot be mounted.
    """
    folder.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"benchmarks.faults: a full disk needs root: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


if __name__ == "__main__":
    sys.exit(main())
