"""Signals, full disks and flipped bits, spread over the whole life of a run.

python -m tests.helpers.many_faults --each 20 --disks 5 --bits 100

After each of them the run is started again with the same command. Then everything that was saved
must still be there, and the losses be those of a run that nothing happened to, in every digit.
The disk that fills up is a small tmpfs, which takes root to mount.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import fields
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from tests.helpers.job import Job
from tests.helpers.paths import LANGUAGE_MODEL

sys.path.insert(0, str(LANGUAGE_MODEL))

import train
from checkpoints import CheckpointError, Checkpoints
from training import AXIS, Run, RunConfig

STEPS = 60
MODEL = ["--layers", 1, "--width", 32, "--heads", 2, "--context", 16, "--rank", 2]
MODEL += ["--batch-size", 8, "--start-step", 2, "--eval-sequences", 16]
# A run goes on with the mean of residuals that it saves. This one saves after every step, so that
# the save of a SIGTERM is no further one.
RUN = [*MODEL, "--steps", STEPS, "--eval-every", 20, "--checkpoint-every", 1]


def curve(log):
    """Returns by step the loss, the held-out loss where there is one, and the bytes sent so far."""
    _, *records = [json.loads(line) for line in log.read_text().splitlines()]
    return {r["step"]: (r["loss"], r.get("held_out", r["loss"]), r["bytes_sent"]) for r in records}


def losses_of(curve):
    """Returns a curve's losses, and those that were held out, in the order of their steps."""
    return np.array([curve[step][:2] for step in sorted(curve)])


def saved(directory):
    names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    return sorted(int(name) for name in names if name.isdecimal())


def start(here, processes):
    """Processes of two devices in all that begin a run in `here`, or continue it."""
    (here / "run").mkdir(exist_ok=True)
    files = ["--log", here / "log", "--checkpoint-dir", here / "run", "--resume"]
    return Job(processes, here, *RUN, *files, "--devices", 2 // processes)


def finish(here, expected, at_least, processes):
    """Starts again, and compares with the run that nothing happened to."""
    newest = (saved(here / "run") or [0])[-1]
    assert newest >= at_least, f"step {at_least} was saved, {newest} is left"
    with start(here, processes) as job:
        codes = job.codes(900)
        assert codes == [0] * processes, (codes, job.said())
        assert f"from step {newest}\n" in job.said()
    assert curve(here / "log") == expected


def signalled(here, number, after, expected, processes):
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


def full_disk(here, size, expected, processes):
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


def fresh():
    given = vars(train.parser().parse_args([*map(str, RUN)]))
    config = RunConfig(**{field.name: given[field.name] for field in fields(RunConfig)})
    return Run(config, Mesh(jax.devices()[:1], (AXIS,))).consolidated()


def restored(directory, like, must_equal):
    """Returns the newest checkpoint, and what was stored beside it."""
    checkpoints = Checkpoints(directory, keep=2, resume=True)
    try:
        return checkpoints.restore(like, must_equal)
    finally:
        checkpoints.close()


def files_of(checkpoint):
    """Returns the files of a saved step that have bytes, and how many."""
    sizes = {path: path.stat().st_size for path in sorted(checkpoint.rglob("*")) if path.is_file()}
    return [(path, size) for path, size in sizes.items() if size]


def flipped(spots, read):
    """Flips one bit (file, byte, bit) after another; the errors of `read`, else nothing changes."""
    errors, whole = [], jax.tree.leaves(read())
    for file, byte, bit in spots:
        data = file.read_bytes()
        broken = bytearray(data)
        broken[byte] ^= 1 << bit
        file.write_bytes(broken)
        try:
            assert all(map(np.array_equal, whole, jax.tree.leaves(read()))), (file, byte, bit)
        except CheckpointError as error:
            errors.append(str(error))
        file.write_bytes(data)
    return errors


def random_bits(directory, count):
    """Flips bits of the newest checkpoint: how many were refused, all by its name."""
    rng, newest, like = np.random.default_rng(0), directory / str(saved(directory)[-1]), fresh()
    files = files_of(newest)
    chosen = [files[k] for k in rng.integers(len(files), size=count)]
    spots = [(file, int(rng.integers(size)), int(rng.integers(8))) for file, size in chosen]
    refused = flipped(spots, lambda: restored(directory, like, {}))
    assert all(str(newest) in said for said in refused), refused
    return f"{len(refused)} of {count} flipped bits were refused, the others changed nothing"


def main():
    p = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    p.add_argument("--each", type=int, default=2, help="SIGKILLs, and SIGTERMs")
    p.add_argument("--disks", type=int, default=0, help="full disks; takes root")
    p.add_argument("--bits", type=int, default=10, help="flipped bits")
    p.add_argument("--processes", type=int, default=2, choices=(1, 2))
    given = p.parse_args()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(root / "cache"))

        def place(what):
            (root / what).mkdir()
            return root / what

        for what in ("first", "undisturbed"):  # the first fills the cache
            began, whole = time.monotonic(), place(what)
            with start(whole, given.processes) as job:
                assert job.codes(900) == [0] * given.processes, job.said()
            life = time.monotonic() - began
        expected = curve(whole / "log")
        assert curve(root / "first/log") == expected
        print(f"undisturbed: {life:.0f} s, saved {saved(whole / 'run')}", flush=True)
        print(random_bits(whole / "run", given.bits), flush=True)
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
