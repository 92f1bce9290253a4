"""Runs of real processes that are disturbed again and again, and started again with one command."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.faults.job import (
    AGAIN,
    SAID,
    STACK_TRACE,
    WRITE_FAILED,
    Job,
    being_written,
    complete,
    losses,
    steps_done,
)

HEARTBEAT, START = 30, 30  # seconds: the run's --heartbeat-timeout and --start-timeout
_EVERY = 10  # steps between checkpoints
_PATIENCE = 180.0  # seconds after which a run that should have ended counts as one that hangs


@dataclasses.dataclass
class Fault:
    """One of them, and what came of it."""

    moment: str  # while the processes were "starting", "saving" or "training"
    saved: int  # step of the last complete checkpoint at that moment
    codes: list[int]  # exit codes, by process
    seconds: float  # until the last process had ended
    left: int  # step of the last complete checkpoint after that
    wrong: list[str]  # what a process should not have done
    resumed: int | None = None  # step that the next start began at, if it got so far


@dataclasses.dataclass
class Disturbed:
    """A run that was disturbed to its end."""

    faults: list[Fault] = dataclasses.field(default_factory=list)
    # Of each start of the job, with those before it: step -> training loss, held-out loss.
    curves: list[dict[int, list[float | None]]] = dataclasses.field(default_factory=list)
    stopped: set[int] = dataclasses.field(default_factory=set)  # steps after which a signal did


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
        time.sleep(self.rng.uniform(0, 1))  # the log has every tenth step, as checkpoints are

    def now(self, job: Job) -> str:
        """Which one it is."""
        if job.start() is None:
            return "starting"
        return "saving" if being_written(self.checkpoints, job.started) else "training"


# Disturbs a job; returns all exit codes, and which ones are right for a process other than AGAIN.
Strike = Callable[[Job, random.Random], tuple[list[int], dict[int, set[int]]]]


def kill(job: Job, rng: random.Random) -> tuple[list[int], dict[int, set[int]]]:
    """SIGKILL to one process."""
    victim = rng.randrange(len(job.processes))
    job.kill(victim)
    others = range(len(job.processes)) if victim == 0 else ()
    # With process 0 JAX's coordinator dies, and JAX aborts the others if it is the first to notice.
    right = {other: {AGAIN, -signal.SIGABRT} for other in others}
    return job.wait(_PATIENCE), right | {victim: {-signal.SIGKILL}}


def send(number: signal.Signals) -> Strike:
    """A signal to one process, which asks the run to stop."""

    def strike(job: Job, rng: random.Random) -> tuple[list[int], dict[int, set[int]]]:
        rng.choice(job.processes).send_signal(number)
        return job.wait(_PATIENCE), {}

    return strike


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
        """Writes until there is no room, also where deleted checkpoints left some."""
        del rng
        end = time.monotonic() + _PATIENCE
        try:
            while job.running() and time.monotonic() < end:
                with contextlib.suppress(OSError), self.filler.open("ab", buffering=0) as file:
                    while file.write(bytes(4096)):
                        pass
                time.sleep(0.05)
            return job.wait(1), {0: {WRITE_FAILED}}
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
) -> Disturbed:
    """Trains to the end, however often it is disturbed on the way.

    Raises:
      RuntimeError: A run failed for another reason than the fault.
    """
    rng, found = random.Random(seed), Disturbed()
    checkpoints, log = checkpoints or directory / "checkpoints", directory / "curve.jsonl"
    checkpoints.mkdir(parents=True, exist_ok=True)
    directory.mkdir(parents=True, exist_ok=True)
    arguments = [*arguments, *run_arguments(steps, log, checkpoints)]
    # Short of steps / faults on average, so that the run does not end before the last one.
    moments = Moments(rng, checkpoints, log, stride=0.8 * steps / max(1, faults))
    while True:
        job = Job(processes, directory, *arguments)
        if len(found.faults) < faults:
            moments.wait(job, running=strike is not kill)
        ended = len(found.faults) == faults or not job.running()
        fault = None
        if ended:
            _succeeded(job)
        else:
            fault = _struck(strike, job, rng, moments)
        if found.faults:
            found.faults[-1].resumed = job.start()
        found.curves.append(losses(log))
        if (stopped := job.stopped_after()) is not None:
            found.stopped.add(stopped)
        if fault is None:
            return found
        found.faults.append(fault)
        print(f"{len(found.faults):3}: {dataclasses.asdict(fault)}", flush=True)


def _struck(strike: Strike, job: Job, rng: random.Random, moments: Moments) -> Fault:
    moment, saved, began = moments.now(job), complete(moments.checkpoints), time.monotonic()
    codes, own = strike(job, rng)
    seconds, wrong = time.monotonic() - began, []
    for index, code in enumerate(codes):
        said = job.said(index)
        if code == 0 or code < 0:  # at the last step just before; killed, or aborted by JAX
            wrong += [f"process {index} ended with {code}"] * (code not in {0, *own.get(index, ())})
            continue
        if code not in own.get(index, {AGAIN}):
            wrong.append(f"process {index} ended with {code}")
        if not SAID.search(said):
            wrong.append(f"process {index} did not say why it ended")
        if STACK_TRACE.search(said):
            wrong.append(f"process {index} printed a stack trace")
    return Fault(moment, saved, codes, round(seconds, 2), complete(moments.checkpoints), wrong)


def compared(plain: Path, found: Disturbed) -> dict[str, Any]:
    """The losses after each start with those of the undisturbed run, in every digit."""
    expected, last = losses(plain), found.curves[-1]
    pairs = [(curve[step], expected[step]) for curve in found.curves for step in curve]
    end = max(expected)
    return {
        "faults": [dataclasses.asdict(fault) for fault in found.faults],
        "stopped": sorted(found.stopped),
        "compared": len(pairs),
        "different": sum(a != b for a, b in pairs),
        "held_out": [expected[end][1], last[end][1] if end in last else None],
    }


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What `compared` found of several runs, as of one."""
    unfinished = [part for part in parts if part["held_out"][1] is None]
    return {
        "faults": [fault for part in parts for fault in part["faults"]],
        "stopped": [step for part in parts for step in part["stopped"]],
        "compared": sum(part["compared"] for part in parts),
        "different": sum(part["different"] for part in parts),
        "held_out": (unfinished or parts)[-1]["held_out"],
    }


def run_arguments(steps: int, log: Path, checkpoints: Path) -> list[str]:
    """Of every run that can be continued."""
    return [
        "--steps", str(steps), "--log", str(log), "--resume",
        "--checkpoint-dir", str(checkpoints), "--checkpoint-every", str(_EVERY),
        # Whoever waits for a process that died before it joined gives up after the first of these.
        "--start-timeout", str(START), "--heartbeat-timeout", str(HEARTBEAT),
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
        _succeeded(Job(size, directory, *arguments, "--stop-at", steps * part // len(sizes)))
    return log


def _succeeded(job: Job) -> None:
    codes = job.wait(900)
    if any(codes):
        raise RuntimeError(f"exit codes {codes}:\n{job.said()[-2000:]}")
