"""The processes of a training job, and what can be seen of a run from outside."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.common.paths import LANGUAGE_MODEL

SCRIPT = LANGUAGE_MODEL / "train_multihost.py"
# Small enough for four processes on two cores, large enough for every matrix to be compressed.
MODEL = ["--layers", "1", "--width", "32", "--heads", "2", "--context", "32", "--rank", "2"]
MODEL += ["--batch-size", "24", "--start-step", "5", "--eval-sequences", "240"]

# What a process says that ends because of a fault.
SAID = re.compile(
    "lost contact with another process|the other processes did not arrive|stopped by a signal"
    "|could not be written"
)
# Python's, Abseil's and glog's.
STACK_TRACE = re.compile("^Traceback|stack trace|^\\*\\*\\* SIG|^    @ +0x", re.MULTILINE)
AGAIN, WRITE_FAILED = 75, 74  # the example's exit codes


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
            command = [sys.executable, "-m", "benchmarks.faults.program", str(SCRIPT)]
            if not scheduler:
                command += ["--coordinator", f"127.0.0.1:{port}", "--processes", str(processes)]
                command += ["--process-id", str(index)]
            self.processes.append(
                subprocess.Popen(
                    [*command, *map(str, arguments), *(each[index] if each else ())],
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C is for this program, and no fault
                    env=cache | os.environ | (scheduler[index] if scheduler else {}),
                )
            )
            output.close()
        atexit.register(self.end)

    def said(self, index: int = 0) -> str:
        """What a process has written so far."""
        return (self.directory / f"output{index}.txt").read_text()

    def start(self) -> int | None:
        """The step that it began at, once the processes have found each other."""
        found = re.search(r"from step (\d+)", self.said())
        return int(found[1]) if found else None

    def stopped_after(self) -> int | None:
        """The step after which a signal has stopped it, if one has."""
        found = re.search(r"stopped by a signal after step (\d+)", self.said())
        return int(found[1]) if found else None

    def running(self) -> bool:
        """Whether any process is."""
        return any(process.poll() is None for process in self.processes)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Returns when the condition holds, or when no process runs any more."""
        while self.running() and not condition():
            time.sleep(0.02)

    def wait(self, seconds: float) -> list[int]:
        """The exit codes. Whatever is left after the time is killed, and a TimeoutError raised."""
        end = time.monotonic() + seconds
        while self.running() and time.monotonic() < end:
            time.sleep(0.05)
        if late := self.end():
            tail = "\n".join(self.said(i)[-500:] for i in late)
            raise TimeoutError(f"processes {late} did not end within {seconds:.0f} s:\n{tail}")
        return [process.returncode for process in self.processes]

    def end(self) -> list[int]:
        """Kills the processes that are left, and returns their indices."""
        late = [i for i, process in enumerate(self.processes) if process.poll() is None]
        self.kill(*late)
        return late

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


def losses(log: Path) -> dict[int, list[float | None]]:
    """Training loss of every tenth step, and held-out loss where there is one."""
    records = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return {r["step"]: [r["loss"], r.get("held_out")] for r in records if "step" in r}


def held_out(log: Path) -> dict[int, float]:
    """Held-out loss by step."""
    return {step: loss for step, (_, loss) in losses(log).items() if loss is not None}


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
