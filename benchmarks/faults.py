"""Kills processes of a running training job at random, starts it again, and compares how it ends.

    python -m benchmarks.faults kills --kills 20
    python -m benchmarks.faults resize

`kills` trains once without a fault and once with one process after the other killed (SIGKILL), each
time started again with the same command. The process is a random one; the moment is random in the
training, and one time in five each while the processes start or while a checkpoint is written.
`resize` continues one run on 4, 2, 3 and 4 processes. Everything runs on this machine, over the
loopback interface. The exit code is 1 if a checkpoint was lost or a process ended otherwise than it
should.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

from benchmarks.common.paths import LANGUAGE_MODEL

SCRIPT = LANGUAGE_MODEL / "train_multihost.py"
# Small enough for four processes on two cores, large enough for every matrix to be compressed.
MODEL = ["--layers", "1", "--width", "32", "--heads", "2", "--context", "32", "--rank", "2"]
MODEL += ["--batch-size", "24", "--start-step", "5", "--eval-sequences", "240"]

# What a process says whose peer died: the example where it can, JAX where it waits in a barrier.
SAID = re.compile(
    "lost contact with another process|the other processes did not arrive|another task died"
)
SURVIVOR_CODES = (75, -signal.SIGABRT)  # the example's, JAX's


def free_port(first: int = 0) -> int:
    """A port of the loopback interface that nobody uses, from `first` on; 0 for any."""
    for port in range(first, 65536):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return probe.getsockname()[1]
    raise OSError(f"no port from {first} on is free")


class Job:
    """A number of processes of one training run."""

    def __init__(
        self,
        processes: int,
        directory: Path,
        *arguments: object,
        each: Sequence[Sequence[str]] = (),
        scheduler: Sequence[dict[str, str]] = (),
    ):
        """Starts them; each writes what it says to a file in `directory`.

        Args:
          processes: How many.
          directory: For their output and, where the environment names no other, the compilation
            cache.
          *arguments: Of examples/language_model/train_multihost.py, the same for all.
          each: Further arguments of each process.
          scheduler: The variables by which a scheduler tells each process who the others are; empty
            to tell it by flags.
        """
        port = free_port()
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.started = directory, time.time()
        self.processes: list[subprocess.Popen] = []
        cache = {
            "JAX_COMPILATION_CACHE_DIR": str(directory / "xla"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        for index in range(processes):
            output = (directory / f"output{index}.txt").open("w")
            command = [sys.executable, str(SCRIPT)]
            if not scheduler:
                command += ["--coordinator", f"127.0.0.1:{port}", "--processes", str(processes)]
                command += ["--process-id", str(index)]
            self.processes.append(
                subprocess.Popen(
                    [*command, *map(str, arguments), *(each[index] if each else ())],
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=cache | os.environ | (scheduler[index] if scheduler else {}),
                )
            )
            output.close()

    def said(self, index: int = 0) -> str:
        """What a process has written so far."""
        return (self.directory / f"output{index}.txt").read_text()

    def start(self) -> int | None:
        """The step that it began at, once the processes have found each other."""
        found = re.search(r"from step (\d+)", self.said())
        return int(found[1]) if found else None

    def running(self) -> bool:
        """Whether any process is."""
        return any(process.poll() is None for process in self.processes)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Returns when the condition holds, or when no process runs any more."""
        while self.running() and not condition():
            time.sleep(0.005)

    def wait(self, seconds: float) -> list[int]:
        """The exit codes. Whatever is left after the time is killed, and a TimeoutError raised."""
        end = time.monotonic() + seconds
        while self.running() and time.monotonic() < end:
            time.sleep(0.05)
        late = [i for i, process in enumerate(self.processes) if process.poll() is None]
        self.kill(*late)
        if late:
            tail = "\n".join(self.said(i)[-500:] for i in late)
            raise TimeoutError(f"processes {late} did not end within {seconds:.0f} s:\n{tail}")
        return [process.returncode for process in self.processes]

    def kill(self, *indices: int) -> None:
        """SIGKILL, by process id."""
        for index in indices:
            self.processes[index].send_signal(signal.SIGKILL)
            self.processes[index].wait()


def steps_done(log: Path) -> int:
    """The last step in the curve that a run writes as it goes."""
    try:
        return max((json.loads(x).get("step", 0) for x in log.read_text().splitlines()), default=0)
    except (OSError, json.JSONDecodeError):
        return 0


def held_out(log: Path) -> dict[int, float]:
    """Held-out loss by step."""
    records = [json.loads(line) for line in log.read_text().splitlines()]
    return {r["step"]: r["held_out"] for r in records if "held_out" in r}


def complete(checkpoints: Path) -> int:
    """The last checkpoint that is complete; one being written has another name."""
    names = [p.name for p in checkpoints.iterdir()] if checkpoints.is_dir() else []
    return max((int(name) for name in names if name.isdigit()), default=0)


def being_written(checkpoints: Path, since: float) -> bool:
    """Whether orbax's temporary directory exists, and is not one that a dead job left before."""
    with contextlib.suppress(FileNotFoundError):  # renamed in between
        for path in checkpoints.glob("*.orbax-checkpoint-tmp"):
            if path.stat().st_mtime >= since:
                return True
    return False


@dataclasses.dataclass
class Faults:
    """What happened in `run_with_kills`."""

    kills: int = 0
    while_starting: int = 0  # before process 0 had restored the state
    while_saving: int = 0  # while orbax's temporary directory existed
    lost_checkpoints: int = 0  # restarts from an earlier one than the last complete one
    slowest_end: float = 0.0  # seconds from a kill to the end of the last process
    silent: int = 0  # processes that ended for another's death without saying so
    wrong_codes: list[int] = dataclasses.field(default_factory=list)  # of these processes


class Moments:
    """When to kill: in the training, while the processes start, or while a checkpoint is written.

    Attributes:
      startup: Seconds that the last job took to its first step, which on this machine differs with
        the load and with what is in the compilation cache.
    """

    def __init__(self, rng: random.Random, checkpoints: Path, log: Path, stride: float):
        """The moments in the training lie up to `stride` steps after the last checkpoint."""
        self.rng, self.checkpoints, self.log, self.stride = rng, checkpoints, log, stride
        self.startup: float | None = None

    def wait(self, job: Job) -> None:
        """Returns at the moment, or when the job has ended."""
        kind = self.rng.random()
        if kind < 0.2 and self.startup is not None:
            time.sleep(self.rng.uniform(0, self.startup))
            return
        job.wait_until(lambda: job.start() is not None)
        self.startup = time.time() - job.started
        if kind < 0.4:
            job.wait_until(lambda: being_written(self.checkpoints, job.started))
            time.sleep(self.rng.uniform(0, 0.05))  # a save takes about so long
            return
        target = complete(self.checkpoints) + self.rng.uniform(0, self.stride)
        job.wait_until(lambda: steps_done(self.log) >= target)
        time.sleep(self.rng.uniform(0, 0.3))


def run_with_kills(
    directory: Path, arguments: list[str], *, processes: int, steps: int, kills: int, seed: int
) -> Faults:
    """Trains to the end, however often processes are killed on the way.

    Raises:
      RuntimeError: A run failed for another reason than the kill.
    """
    rng, found = random.Random(seed), Faults()
    checkpoints, log = directory / "checkpoints", directory / "curve.jsonl"
    checkpoints.mkdir(parents=True)
    arguments = [*arguments, "--steps", str(steps), "--log", str(log), "--resume"]
    arguments += ["--checkpoint-dir", str(checkpoints), "--checkpoint-every", "10"]
    # Whoever waits for a process that died before it joined gives up after the start timeout.
    arguments += ["--start-timeout", "45"]
    # Short of steps / kills on average, so that the run does not end before the last kill.
    moments = Moments(rng, checkpoints, log, stride=0.8 * steps / max(1, kills))
    saved = 0
    while True:
        job = Job(processes, directory, *arguments)
        if found.kills < kills:
            moments.wait(job)
        ended = found.kills == kills or not job.running()
        if ended:
            codes = job.wait(600)
            if any(codes):
                raise RuntimeError(f"exit codes {codes}:\n{job.said()[-2000:]}")
        else:
            found.while_saving += being_written(checkpoints, job.started)
            kill_one(job, rng.randrange(processes), found)
        began = job.start()
        found.while_starting += began is None
        found.lost_checkpoints += began is not None and began < saved
        if ended:
            return found
        saved = complete(checkpoints)
        print(f"kill {found.kills}: checkpoint {saved} is the last complete one", flush=True)


def kill_one(job: Job, victim: int, found: Faults) -> None:
    """Kills one process of a job, and notes how the others end."""
    job.kill(victim)
    killed = time.monotonic()
    codes = job.wait(180)
    found.kills += 1
    found.slowest_end = max(found.slowest_end, time.monotonic() - killed)
    for index, code in enumerate(codes):
        # A process may have reached the last step just before.
        if index != victim and code != 0:
            found.silent += not SAID.search(job.said(index))
            found.wrong_codes += [code] * (code not in SURVIVOR_CODES)


def run_resized(directory: Path, arguments: list[str], sizes: list[int], steps: int) -> Path:
    """Trains with as many processes as `sizes` says, one after the other; returns the curve."""
    checkpoints, log = directory / "checkpoints", directory / "curve.jsonl"
    checkpoints.mkdir(parents=True)
    arguments = [*arguments, "--steps", str(steps), "--log", str(log), "--resume"]
    arguments += ["--checkpoint-dir", str(checkpoints), "--checkpoint-every", "10"]
    for part, size in enumerate(sizes, 1):
        job = Job(size, directory, *arguments, "--stop-at", steps * part // len(sizes))
        codes = job.wait(900)
        if any(codes):
            raise RuntimeError(f"exit codes {codes}:\n{job.said()[-2000:]}")
    return log


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("kills", "resize"))
    parser.add_argument("--kills", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=300, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the kills (default: 0)")
    arguments = parser.parse_args()
    if arguments.kills < 0 or arguments.steps < 4:
        parser.error("--kills must not be negative, and --steps at least 4")
    versions = " ".join(f"{name} {version(name)}" for name in ("jax", "optax", "flax"))
    print(f"{versions}; Python {platform.python_version()}, {os.cpu_count()} cores", flush=True)

    found = Faults()
    steps, flags = arguments.steps, [*MODEL, "--eval-every", str(max(1, arguments.steps // 4))]
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        plain = held_out(run_resized(root / "plain", flags, [4], steps))
        if arguments.what == "kills":
            found = run_with_kills(
                root / "kills", flags, processes=4, steps=steps, kills=arguments.kills,
                seed=arguments.seed,
            )  # fmt: skip
            print(found)
            curve = held_out(root / "kills" / "curve.jsonl")
        else:
            curve = held_out(run_resized(root / "resize", flags, [4, 2, 3, 4], steps))
    for step, loss in plain.items():
        difference = curve[step] / loss - 1
        print(f"step {step:4}  held-out {loss:.7f}  {curve[step]:.7f}  {difference:+.2e}")
    return int(bool(found.lost_checkpoints or found.silent or found.wrong_codes))


if __name__ == "__main__":
    sys.exit(main())
