"""Signals, full disks and flipped bits, spread over the whole life of a run.

python tests/support/many_faults.py --each 20 --disks 5 --bits 100

After each of them the run is started again with the same command. Then everything that was saved
must still be there, and the losses be those of a run that nothing happened to, in every digit.
The disk that fills up is a small tmpfs, which takes root to mount.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests/support"), str(ROOT / "examples/language_model")]

import jax  # noqa: E402
import train  # noqa: E402
from checkpoints import CheckpointError, Checkpoints  # noqa: E402
from jax.sharding import Mesh  # noqa: E402
from job import Job  # noqa: E402
from training import AXIS, Run, RunConfig  # noqa: E402

STEPS = 60
MODEL = ["--layers", 1, "--width", 32, "--heads", 2, "--context", 16, "--rank", 2]
MODEL += ["--batch-size", 8, "--start-step", 2, "--eval-sequences", 16]
# A run goes on with the mean of residuals that it saves. This one saves after every step, so that
# the save of a SIGTERM is no further one.
RUN = [*MODEL, "--steps", STEPS, "--eval-every", 20, "--checkpoint-every", 1]


def losses(log: Path) -> dict[int, tuple[float, float | None]]:
    """Loss and held-out loss by step."""
    records = [json.loads(line) for line in log.read_text().splitlines()]
    return {r["step"]: (r["loss"], r.get("held_out")) for r in records if "step" in r}


def saved(directory: Path) -> list[int]:
    """The steps that are saved there, ascending."""
    names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    return sorted(int(name) for name in names if name.isdecimal())


def start(here: Path, processes: int) -> Job:
    """Processes of two devices in all that begin a run in `here`, or continue it."""
    (here / "run").mkdir(exist_ok=True)
    files = ["--log", here / "log", "--checkpoint-dir", here / "run", "--resume"]
    return Job(processes, here, *RUN, *files, "--devices", 2 // processes)


def finish(here: Path, expected: dict, at_least: int, processes: int) -> None:
    """Starts again, and compares with the run that nothing happened to."""
    newest = (saved(here / "run") or [0])[-1]
    assert newest >= at_least, f"step {at_least} was saved, {newest} is left"
    with start(here, processes) as job:
        codes = job.codes(900)
        assert codes == [0] * processes, (codes, job.said())
        assert f"from step {newest}\n" in job.said()
    assert losses(here / "log") == expected


def signalled(here: Path, number: int, after: float, expected: dict, processes: int) -> str:
    """Sends a signal to the last process; says the exit codes, and how long all lived then."""
    with start(here, processes) as job:
        time.sleep(after)
        before = (saved(here / "run") or [0])[-1]
        sent = time.monotonic()
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself
            job.signal(number, processes - 1)
        codes = job.codes(120)
        took = time.monotonic() - sent
    finish(here, expected, before, processes)
    return f"{codes} after {took:.1f} s, step {before} was saved before"


def full_disk(here: Path, size: int, expected: dict, processes: int) -> str:
    """Saves on a disk of so many kilobytes, and again when it is larger; how the first ended."""
    disk = here / "run"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}k", "none", str(disk)]
    subprocess.run(mount, check=True)
    try:
        began = time.monotonic()
        with start(here, processes) as job:
            codes, said = job.codes(900), job.said()
            before = saved(disk)
        took = time.monotonic() - began
        assert 0 not in codes, said
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        finish(here, expected, (before or [0])[-1], processes)
        why = said.strip().splitlines()[-1]
        return f"{codes} after {took:.1f} s, steps {before} saved: {why}"
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def fresh() -> Any:
    """A state of such a run, for its structure."""
    given = vars(train.parser().parse_args([*map(str, RUN)]))
    config = RunConfig(**{field.name: given[field.name] for field in fields(RunConfig)})
    return Run(config, Mesh(jax.devices()[:1], (AXIS,))).consolidated()


def flipped(directory: Path, count: int) -> Counter:
    """Flips bits of the newest checkpoint: how many were refused, and how many changed nothing."""
    rng, found, like = np.random.default_rng(0), Counter(), fresh()
    newest = directory / str(saved(directory)[-1])
    files = [path for path in sorted(newest.rglob("*")) if path.is_file() and path.stat().st_size]

    def read() -> list[np.ndarray]:
        checkpoints = Checkpoints(directory, keep=3, resume=True)
        try:
            return jax.tree.leaves((checkpoints.restore(like, {}) or [()])[0])
        finally:
            checkpoints.close()

    whole = read()
    for _ in range(count):
        file = files[rng.integers(len(files))]
        data = file.read_bytes()
        broken = bytearray(data)
        broken[rng.integers(len(data))] ^= 1 << int(rng.integers(8))
        file.write_bytes(broken)
        try:
            same = all(map(np.array_equal, whole, read()))
            found["harmless" if same else "UNNOTICED"] += 1
        except CheckpointError as error:
            found["refused" if str(newest) in str(error) else "NOT NAMED"] += 1
        file.write_bytes(data)
    return found


def main() -> None:
    """The command line's entry point."""
    p = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    p.add_argument("--each", type=int, default=2, help="SIGKILLs, and SIGTERMs")
    p.add_argument("--disks", type=int, default=0, help="full disks; takes root")
    p.add_argument("--bits", type=int, default=10, help="flipped bits")
    p.add_argument("--processes", type=int, default=2, choices=(1, 2))
    given = p.parse_args()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(root / "cache"))

        def place(what: str) -> Path:
            (root / what).mkdir()
            return root / what

        for what in ("first", "undisturbed"):  # the first fills the cache
            began, whole = time.monotonic(), place(what)
            with start(whole, given.processes) as job:
                assert job.codes(900) == [0] * given.processes, job.said()
            life = time.monotonic() - began
        expected = losses(whole / "log")
        assert losses(root / "first/log") == expected
        print(f"undisturbed: {life:.0f} s, saved {saved(whole / 'run')}", flush=True)
        found = flipped(whole / "run", given.bits) if given.bits else Counter()
        print(f"{given.bits} flipped bits: {dict(found)}", flush=True)
        assert not found["UNNOTICED"] + found["NOT NAMED"]
        one = sum(x.stat().st_size for x in (whole / "run" / str(STEPS)).rglob("*")) // 1024
        for i, part in enumerate(np.linspace(0.2, 3.2, given.disks)):
            said = full_disk(place(f"disk-{i}"), int(part * one) + 40, expected, given.processes)
            print(f"a disk for {part:.1f} checkpoints: {said}", flush=True)
        moments = np.random.default_rng(0).permutation(np.linspace(0.1, life, given.each))
        for i, after in enumerate(moments):
            for number in (signal.SIGKILL, signal.SIGTERM):
                here = place(f"{number.name}-{i}")
                said = signalled(here, number, after, expected, given.processes)
                print(f"{number.name} after {after:.1f} s: {said}", flush=True)


if __name__ == "__main__":
    main()
