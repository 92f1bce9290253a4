"""Kills processes of a running training job at random, starts it again, and compares how it ends.

    python benchmarks/faults.py kills --kills 20
    python benchmarks/faults.py resize

`kills` trains once without a fault and once with one process after the other killed (SIGKILL, a
random process at a random moment, also while it starts or writes a checkpoint), each time started
again with the same command. `resize` continues one run on 4, 2, 3 and 4 processes. Everything runs
on this machine, over the loopback interface.
"""

from __future__ import annotations

import argparse
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
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "train_multihost.py"
# Small enough for four processes on two cores, large enough for every matrix to be compressed.
MODEL = ["--layers", "1", "--width", "32", "--heads", "2", "--context", "32", "--rank", "2"]
MODEL += ["--batch-size", "24", "--start-step", "5", "--eval-sequences", "240"]


class Job:
    """A number of processes of one training run."""

    def __init__(
        self,
        processes: int,
        directory: Path,
        *arguments: object,
        each: Sequence[Sequence[str]] = (),
    ):
        """Starts them; each writes what it says to a file in `directory`.

        Args:
          processes: How many.
          directory: For their output and the compilation cache.
          *arguments: Of examples/train_multihost.py, the same for all.
          each: Further arguments of each process.
        """
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.processes: list[subprocess.Popen] = []
        environment = os.environ | {
            "JAX_COMPILATION_CACHE_DIR": str(directory / "xla"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        for index in range(processes):
            output = (directory / f"output{index}.txt").open("w")
            command = [sys.executable, str(SCRIPT), "--coordinator", f"127.0.0.1:{port}"]
            command += ["--processes", str(processes), "--process-id", str(index)]
            self.processes.append(
                subprocess.Popen(
                    [*command, *map(str, arguments), *(each[index] if each else ())],
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment,
                )
            )
            output.close()

    def said(self, index: int = 0) -> str:
        """What a process has written so far."""
        return (self.directory / f"output{index}.txt").read_text()

    def running(self) -> bool:
        """Whether any process is."""
        return any(process.poll() is None for process in self.processes)

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


@dataclasses.dataclass
class Faults:
    """What happened in `run_with_kills`."""

    kills: int = 0
    while_starting: int = 0
    lost_checkpoints: int = 0
    slowest_end: float = 0.0  # seconds from a kill to the end of the last process
    silent: int = 0  # processes that ended for another's death without saying so


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
    saved = 0
    while True:
        job = Job(processes, directory, *arguments)
        kill = found.kills < kills
        if kill and rng.random() < 0.2:  # while the processes start, find each other, restore
            time.sleep(rng.uniform(0, 15))
        elif kill:
            # Short of steps / kills on average, so that the run does not end before the last kill.
            target = complete(checkpoints) + rng.uniform(0, 0.8 * steps / kills)
            while job.running() and steps_done(log) < target:
                time.sleep(0.02)
            time.sleep(rng.uniform(0, 0.3))
        if not kill or not job.running():
            codes = job.wait(600)
            if any(codes):
                raise RuntimeError(f"exit codes {codes}:\n{job.said()[-2000:]}")
            return found
        began = re.search(r"from step (\d+)", job.said())
        found.while_starting += began is None
        found.lost_checkpoints += began is not None and int(began[1]) < saved
        saved, victim = complete(checkpoints), rng.randrange(processes)
        job.kill(victim)
        killed = time.monotonic()
        job.wait(180)
        found.kills += 1
        found.slowest_end = max(found.slowest_end, time.monotonic() - killed)
        survivors = [i for i in range(processes) if i != victim]
        found.silent += sum(not re.search("lost contact|error", job.said(i)) for i in survivors)
        print(f"kill {found.kills}: process {victim}, checkpoint {saved}", flush=True)


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


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("kills", "resize"))
    parser.add_argument("--kills", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=300, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the kills (default: 0)")
    arguments = parser.parse_args()
    versions = " ".join(f"{name} {version(name)}" for name in ("jax", "optax", "flax"))
    print(f"{versions}; Python {platform.python_version()}, {os.cpu_count()} cores", flush=True)

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


if __name__ == "__main__":
    main()
