"""Runs of real processes that are disturbed again and again, and started again with one command."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.faults.job import (
    AGAIN,
    SAID,
    WRITE_FAILED,
    Job,
    being_written,
    complete,
    steps_done,
)

_EVERY = 10  # steps between checkpoints
_PATIENCE = 180.0  # seconds after which a run that should have ended counts as one that hangs


@dataclasses.dataclass
class Found:
    """What happened in a disturbed run."""

    faults: int = 0
    while_starting: int = 0  # before process 0 had restored the state
    while_saving: int = 0  # while orbax's temporary directory existed
    lost_checkpoints: int = 0  # restarts from an earlier one than the last complete one
    slowest_end: float = 0.0  # seconds from a fault to the end of the last process
    silent: int = 0  # processes that ended without saying why
    codes: dict[str, int] = dataclasses.field(default_factory=dict)  # how often each was seen
    wrong_codes: list[int] = dataclasses.field(default_factory=list)
    saved_after: list[int] = dataclasses.field(default_factory=list)  # steps, because of a signal

    @property
    def good(self) -> bool:
        """Whether nothing was lost, and everybody ended as documented."""
        return not (self.lost_checkpoints or self.silent or self.wrong_codes)


class Moments:
    """When to strike: in the training, while the processes start, or while a checkpoint is written.

    Attributes:
      startup: Seconds that the last job took to its first step, which on this machine differs with
        the load and with what is in the compilation cache.
    """

    def __init__(self, rng: random.Random, checkpoints: Path, log: Path, stride: float):
        """The moments in the training lie up to `stride` steps after the last checkpoint."""
        self.rng, self.checkpoints, self.log, self.stride = rng, checkpoints, log, stride
        self.startup: float | None = None

    def wait(self, job: Job, *, running: bool) -> None:
        """Returns at the moment, or when the job has ended; `running`: only in the training."""
        kind = self.rng.random()
        if kind < 0.2 and self.startup is not None and not running:
            time.sleep(self.rng.uniform(0, self.startup))
            return
        job.wait_until(lambda: job.start() is not None)
        self.startup = time.time() - job.started
        if kind < 0.4 and not running:
            job.wait_until(lambda: being_written(self.checkpoints, job.started))
            time.sleep(self.rng.uniform(0, 0.05))  # a save takes about so long
            return
        target = complete(self.checkpoints) + self.rng.uniform(0, self.stride)
        job.wait_until(lambda: steps_done(self.log) >= target)
        time.sleep(self.rng.uniform(0, 0.3))


# Disturbs a job; returns all exit codes, and which ones are right for a process other than AGAIN.
Strike = Callable[[Job, random.Random], tuple[list[int], dict[int, set[int]]]]


def kill(job: Job, rng: random.Random) -> tuple[list[int], dict[int, set[int]]]:
    """SIGKILL to one process."""
    victim = rng.randrange(len(job.processes))
    job.kill(victim)
    return job.wait(_PATIENCE), {victim: {-signal.SIGKILL}}


def terminate(job: Job, rng: random.Random) -> tuple[list[int], dict[int, set[int]]]:
    """SIGTERM or SIGINT to one process."""
    victim = rng.randrange(len(job.processes))
    job.processes[victim].send_signal(rng.choice([signal.SIGTERM, signal.SIGINT]))
    return job.wait(_PATIENCE), {}


def hang(job: Job, rng: random.Random) -> tuple[list[int], dict[int, set[int]]]:
    """One process is suspended, and goes on when the others have ended."""
    victim = rng.randrange(len(job.processes))
    process = job.processes[victim]
    process.send_signal(signal.SIGSTOP)
    others = [p for p in job.processes if p is not process]
    end = time.monotonic() + _PATIENCE
    while any(p.poll() is None for p in others) and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGCONT)
    # Its own end, long after the others', may be JAX's.
    return job.wait(_PATIENCE), {victim: {AGAIN, -signal.SIGABRT}}


class FullDisk:
    """Fills the file system on which the checkpoints are until the job has ended."""

    def __init__(self, folder: Path):
        """`folder` is a small file system."""
        self.filler = folder / "filler"

    def __call__(self, job: Job, rng: random.Random) -> tuple[list[int], dict[int, set[int]]]:
        """Writes until there is no room."""
        del rng
        with contextlib.suppress(OSError), self.filler.open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        try:
            return job.wait(_PATIENCE), {0: {WRITE_FAILED}}
        finally:
            self.filler.unlink(missing_ok=True)


def disturbed(
    directory: Path,
    arguments: Sequence[str],
    strike: Strike,
    *,
    processes: int,
    steps: int,
    faults: int,
    seed: int,
    checkpoints: Path | None = None,
) -> Found:
    """Trains to the end, however often it is disturbed on the way; the curve is in curve.jsonl.

    Raises:
      RuntimeError: A run failed for another reason than the fault.
    """
    rng, found = random.Random(seed), Found()
    checkpoints, log = checkpoints or directory / "checkpoints", directory / "curve.jsonl"
    checkpoints.mkdir(parents=True, exist_ok=True)
    directory.mkdir(parents=True, exist_ok=True)
    arguments = [*arguments, *run_arguments(steps, log, checkpoints)]
    # Short of steps / faults on average, so that the run does not end before the last one.
    moments = Moments(rng, checkpoints, log, stride=0.8 * steps / max(1, faults))
    saved = 0
    while True:
        job = Job(processes, directory, *arguments)
        if found.faults < faults:
            moments.wait(job, running=strike is not kill)
        ended = found.faults == faults or not job.running()
        if ended:
            codes = job.wait(600)
            if any(codes):
                raise RuntimeError(f"exit codes {codes}:\n{job.said()[-2000:]}")
        else:
            found.while_saving += being_written(checkpoints, job.started)
            _strike(strike, job, rng, found)
        began = job.start()
        found.while_starting += began is None
        found.lost_checkpoints += began is not None and began < saved
        if ended:
            return found
        saved = complete(checkpoints)
        print(f"fault {found.faults}: checkpoint {saved} is the last complete one", flush=True)


def _strike(strike: Strike, job: Job, rng: random.Random, found: Found) -> None:
    began = time.monotonic()
    codes, own = strike(job, rng)
    found.faults += 1
    found.slowest_end = max(found.slowest_end, time.monotonic() - began)
    for index, code in enumerate(codes):
        found.codes[str(code)] = found.codes.get(str(code), 0) + 1
        if code == 0:  # it may have reached the last step just before
            continue
        found.wrong_codes += [code] * (code not in own.get(index, {AGAIN}))
        said = job.said(index)
        told = SAID.search(said) or "stopped by a signal" in said or "could not be written" in said
        found.silent += not told and code >= 0
    if (stopped := job.stopped_after()) is not None:
        found.saved_after.append(stopped)


def run_arguments(steps: int, log: Path, checkpoints: Path) -> list[str]:
    """Of every run that can be continued."""
    return [
        "--steps", str(steps), "--log", str(log), "--resume",
        "--checkpoint-dir", str(checkpoints), "--checkpoint-every", str(_EVERY),
        # Whoever waits for a process that died before it joined gives up after the first of these.
        "--start-timeout", "45", "--heartbeat-timeout", "30",
    ]  # fmt: skip


def undisturbed(
    directory: Path, arguments: Sequence[str], processes: int, steps: int, also: Sequence[int] = ()
) -> Path:
    """Trains without a fault, with checkpoints `also` after these steps; returns the curve."""
    extra = ["--checkpoint-at", *map(str, also)] if also else []
    return run_resized(directory, [*arguments, *extra], [processes], steps)


def run_resized(directory: Path, arguments: Sequence[str], sizes: list[int], steps: int) -> Path:
    """Trains with as many processes as `sizes` says, one after the other; returns the curve."""
    checkpoints, log = directory / "checkpoints", directory / "curve.jsonl"
    checkpoints.mkdir(parents=True)
    arguments = [*arguments, *run_arguments(steps, log, checkpoints)]
    for part, size in enumerate(sizes, 1):
        job = Job(size, directory, *arguments, "--stop-at", steps * part // len(sizes))
        codes = job.wait(900)
        if any(codes):
            raise RuntimeError(f"exit codes {codes}:\n{job.said()[-2000:]}")
    return log
