"""The processes of a training job, started as a user starts them, and what they say."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from paths import LANGUAGE_MODEL


class Job:
    """So many processes of examples/language_model/train.py; a context that leaves none behind."""

    def __init__(
        self,
        processes: int,
        directory: Path,
        *arguments: object,
        scheduler: Callable[[int], dict[str, str]] | None = None,
        each: Sequence[Sequence[str]] = (),
    ):
        """Starts them.

        Args:
          processes: How many.
          directory: For what each says.
          *arguments: The same for all.
          scheduler: The variables by which a scheduler tells a process who the others are; None to
            tell it by flags.
          each: Further arguments of each process.
        """
        self._directory, self.processes = directory, []
        with socket.create_server(("127.0.0.1", 0)) as free:
            where = f"127.0.0.1:{free.getsockname()[1]}"
        for index in range(processes):
            command = [sys.executable, str(LANGUAGE_MODEL / "train.py"), *map(str, arguments)]
            command += each[index] if each else ()
            if scheduler:
                command += ["--distributed"]
            elif processes > 1:
                command += ["--coordinator", where, "--processes", str(processes)]
                command += ["--process-id", str(index)]
            with (directory / f"said{index}.txt").open("w") as said:
                environment = os.environ | (scheduler(index) if scheduler else {})
                self.processes.append(
                    subprocess.Popen(command, stdout=said, stderr=said, env=environment)
                )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def said(self, index: int = 0) -> str:
        """What a process has written so far."""
        return (self._directory / f"said{index}.txt").read_text()

    def wait_until(self, condition: Callable[[], bool], seconds: float = 300) -> None:
        """Returns when the condition holds; fails when no process runs any more, or too late."""
        end = time.monotonic() + seconds
        while not condition():
            running = any(process.poll() is None for process in self.processes)
            said = [self.said(i)[-1000:] for i in range(len(self.processes))]
            assert running, said
            assert time.monotonic() < end, said
            time.sleep(0.02)

    def codes(self, seconds: float = 300) -> list[int]:
        """The exit codes, once all have ended."""
        end = time.monotonic() + seconds
        return [process.wait(max(0.1, end - time.monotonic())) for process in self.processes]
