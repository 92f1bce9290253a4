"""Disturbs a training run with signals, full disks and flipped bits, at times over its whole life.

python -m tests.helpers.many_faults --each 20 --disks 5 --bits 100

After each fault the run is started again with the same command. All saved steps must still exist,
and the losses must be those of an undisturbed run, in every digit. The full disk is a small tmpfs,
and only root can mount it.
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
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from tests.helpers.job import Job
from tests.helpers.paths import LANGUAGE_MODEL

sys.path.insert(0, str(LANGUAGE_MODEL))

import train
from checkpoints import CheckpointError, Checkpoints
from training import AXIS, Run

STEPS = 60
MODEL = ["--layers", 1, "--width", 32, "--heads", 2, "--context", 16, "--rank", 2]
MODEL += ["--batch-size", 8, "--start-step", 2, "--comm-dtype", "float32"]
MODEL += ["--eval-sequences", 16]
# A run continues with the mean of the residuals that it saves. This run saves after every step, so
# that the save after a SIGTERM is not an additional one.
RUN = [*MODEL, "--steps", STEPS, "--eval-every", 20, "--checkpoint-every", 1]


def curve(log):
    """Returns step -> (loss, held-out loss or else the loss, bytes sent so far)."""
    _, *lines = log.read_text().splitlines()
    by_step = {}
    for line in lines:
        record = json.loads(line)
        held_out = record.get("held_out", record["loss"])
        by_step[record["step"]] = (record["loss"], held_out, record["bytes_sent"])
    return by_step


def losses_of(curve):
    """Returns a curve's losses and held-out losses, in the order of the steps."""
    return np.array([curve[step][:2] for step in sorted(curve)])


def saved(directory):
    """Lists the steps that have a checkpoint."""
    if not directory.is_dir():
        return []
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdecimal())


def restored(directory, like, must_equal):
    """Returns the newest checkpoint and the entries that were stored beside it."""
    with contextlib.closing(Checkpoints(directory, keep=2, resume=True)) as checkpoints:
        return checkpoints.restore(like, must_equal)


def files_of(checkpoint):
    """Returns the files of a saved step that are not empty, with their sizes in bytes."""
    files = []
    for path in sorted(checkpoint.rglob("*")):
        size = path.stat().st_size
        if path.is_file() and size:
            files.append((path, size))
    return files


def flipped(spots, read):
    """Flips one bit (file, byte, bit) after the other, and reads the checkpoint each time.

    Returns the error messages. A read without an error must return unchanged values.
    """
    errors = []
    whole = read()
    for file, byte, bit in spots:
        data = file.read_bytes()
        broken = bytearray(data)
        broken[byte] ^= 1 << bit
        file.write_bytes(broken)
        try:
            jax.tree.map(np.testing.assert_array_equal, read(), whole)
        except CheckpointError as error:
            errors.append(str(error))
        file.write_bytes(data)
    return errors


def fresh():
    """Makes the initial state of a run, consolidated as in a checkpoint."""
    config = train.config_of(train.parser().parse_args([*map(str, RUN)]))
    return Run(config, Mesh(jax.devices()[:1], (AXIS,))).consolidated()


class Campaign:
    """Runs the same job in one folder after the other, with one fault in each folder."""

    def __init__(self, root, processes):
        self.root = root
        self.processes = processes
        self.expected = None  # the curve of an undisturbed run

    def start(self, name):
        """Starts or continues a run on two devices in total."""
        here = self.root / name
        (here / "run").mkdir(parents=True, exist_ok=True)
        files = ["--log", here / "log", "--checkpoint-dir", here / "run", "--resume"]
        return Job(self.processes, here, *RUN, *files, "--devices", 2 // self.processes)

    def newest(self, name):
        return max(saved(self.root / name / "run"), default=0)

    def finish(self, name):
        """Continues a run to its end; returns the curve and the seconds that this took."""
        newest = self.newest(name)
        began = time.monotonic()
        with self.start(name) as job:
            assert job.codes(900) == [0] * self.processes, job.said()
            assert f"from step {newest}\n" in job.said()
        found = curve(self.root / name / "log")
        assert found == (self.expected or found)
        return found, time.monotonic() - began

    def harmed(self, name, harm):
        """Runs a job with a fault; returns its output, and the cells of a table row.

        The cells are the exit codes, the seconds until all ended, and the step saved before.
        """
        with self.start(name) as job:
            harm(job)
            before = self.newest(name)
            began = time.monotonic()
            codes = job.codes(900)
            took = time.monotonic() - began
        assert self.newest(name) >= before
        return job.said(), f"{codes} | {took:.1f} | {before}"

    def signalled(self, name, number, after):
        """Sends a signal to the last process."""

        def harm(job):
            time.sleep(after)
            with contextlib.suppress(ProcessLookupError):  # the process may have ended
                job.signal(number, self.processes - 1)

        _, ended = self.harmed(name, harm)
        self.finish(name)
        return f"{number.name} after {after:.1f} s | {ended}"

    def full_disk(self, name, kilobytes):
        """Runs a job on a disk that is too small, and continues when the disk is larger."""
        disk = self.root / name / "run"
        disk.mkdir(parents=True)
        mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "none", disk]
        subprocess.run(mount, check=True)
        try:
            said, ended = self.harmed(name, lambda job: None)
            assert self.newest(name) < STEPS
            subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
            self.finish(name)
        finally:
            subprocess.run(["umount", disk], check=True)
        return f"a disk of {kilobytes} kB: {said.strip().splitlines()[-1]} | {ended}"

    def random_bits(self, name, count):
        """Flips bits of the newest checkpoint; every error must name the checkpoint."""
        generator = np.random.default_rng(0)
        checkpoint = self.root / name / "run" / str(self.newest(name))
        files = files_of(checkpoint)
        spots = []
        for index in generator.integers(len(files), size=count):
            file, size = files[index]
            spots.append((file, generator.integers(size), int(generator.integers(8))))
        like = fresh()
        refused = flipped(spots, lambda: restored(checkpoint.parent, like, {}))
        assert all(str(checkpoint) in said for said in refused), refused
        return f"{count} bits: {len(refused)} refused, the others changed nothing | | |"


def rows(campaign, each, disks, bits):
    """Yields the rows of the table."""
    campaign.expected, _ = campaign.finish("first")  # this run also fills the cache
    _, life = campaign.finish("undisturbed")
    yield f"none | | {life:.1f} | {campaign.newest('undisturbed')}"
    yield campaign.random_bits("undisturbed", bits)
    one = sum(size for _, size in files_of(campaign.root / "undisturbed/run" / str(STEPS)))
    for i, part in enumerate(np.linspace(0.2, 3.2, disks)):
        yield campaign.full_disk(f"disk-{i}", int(part * one / 1024) + 40)
    for after in np.random.default_rng(0).permutation(np.linspace(0.1, life, each)):
        for number in (signal.SIGKILL, signal.SIGTERM):
            yield campaign.signalled(f"{number.name}-{after:.2f}", number, after)


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--each", type=int, default=2, help="SIGKILLs, and SIGTERMs")
    parser.add_argument("--disks", type=int, default=0, help="full disks; takes root")
    parser.add_argument("--bits", type=int, default=10, help="flipped bits")
    parser.add_argument("--processes", type=int, default=2, choices=(1, 2))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", f"{folder}/cache")
        campaign = Campaign(Path(folder), options.processes)
        print("| fault | exit codes | seconds until all ended | step saved before |")
        print("|---|---|--:|--:|", flush=True)
        for row in rows(campaign, options.each, options.disks, options.bits):
            print(f"| {row} |", flush=True)


if __name__ == "__main__":
    main()
