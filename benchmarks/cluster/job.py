"""The processes of one framework and model: how they are started and talked to."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any, Self

from benchmarks.cluster.net import Network
from benchmarks.common.machine import ALLOCATOR, ONE_THREAD
from benchmarks.common.paths import ROOT

ENVIRONMENT = {
    **ALLOCATOR,
    **ONE_THREAD,
    "GLOO_SOCKET_IFNAME": "eth0",
    "JAX_PLATFORMS": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
}
_START_SECONDS = 180


class JobFailed(RuntimeError):
    """A process ended, reported an error, or did not answer in time."""


class Job:
    """One process on every host of a network; a context manager that ends them."""

    def __init__(
        self,
        network: Network,
        framework: str,
        model: str,
        *options: str,
        logs: Path,
        module: str = "benchmarks.cluster.process",
    ):
        """Nothing is started before it is entered.

        Args:
          network: Where they run.
          framework: "jax" or "torch".
          model: What is trained, as the module knows it.
          *options: Further arguments of the processes.
          logs: A folder for what they say besides their answers.
          module: What runs in each process.
        """
        self.framework, self.model = framework, model
        self.parameters = 0  # values in the model; known once it runs
        self._network, self._module = network, module
        self._arguments = [framework, model, str(len(network.names)), network.addresses[0]]
        self._arguments += options
        logged = f"{framework}-{Path(model).name}"
        self._logs = [logs / f"{logged}-{i}.log" for i in range(len(network.names))]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[tuple[IO[bytes], IO[bytes]]] = []  # requests, answers

    def __enter__(self) -> Self:
        """Starts the processes and waits until they have found each other.

        Raises:
          JobFailed: If they do not.
        """
        cores = sorted(os.sched_getaffinity(0))
        try:
            for i, log in enumerate(self._logs):
                own = [sys.executable, "-um", self._module, str(i), *self._arguments]
                with log.open("wb") as stderr:
                    process = subprocess.Popen(
                        self._network.command(i, cores[i % len(cores)], own),
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=stderr,
                        cwd=ROOT,
                        env={**os.environ, **ENVIRONMENT},
                        # A Ctrl-C is for the parent, which then ends them.
                        start_new_session=True,
                    )
                assert process.stdin is not None  # both are pipes
                assert process.stdout is not None
                self._processes.append(process)
                self._pipes.append((process.stdin, process.stdout))
            self.parameters = self._answers(_START_SECONDS)[0]["parameters"]
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, seconds: float, **request: Any) -> list[dict[str, Any]]:
        """Sends all processes the same request.

        Args:
          seconds: How long to wait for the last of them.
          **request: See `cluster.process`.

        Returns:
          Their answers, in the order of the hosts.

        Raises:
          JobFailed: If one has none.
        """
        line = json.dumps(request).encode() + b"\n"
        for requests, _ in self._pipes:
            # Of a process that has ended, the missing answer tells.
            with contextlib.suppress(BrokenPipeError):
                requests.write(line)
                requests.flush()
        return self._answers(seconds)

    def _answers(self, seconds: float) -> list[dict[str, Any]]:
        """One line of each process, in whatever order they come: a failure must not wait."""
        end = time.monotonic() + seconds
        waiting = {stream: i for i, (_, stream) in enumerate(self._pipes)}
        answers: list[dict[str, Any]] = [{} for _ in self._pipes]
        while waiting:
            ready, _, _ = select.select(list(waiting), [], [], max(0.0, end - time.monotonic()))
            if not ready:
                late = ", ".join(map(str, waiting.values()))
                first = next(iter(waiting.values()))
                raise self._failure(f"process {late} did not answer in {seconds:.0f} s", first)
            for stream in ready:
                i, line = waiting.pop(stream), stream.readline()
                answers[i] = json.loads(line) if line else {"error": "it ended"}
                if "error" in answers[i]:
                    raise self._failure(f"process {i}: {answers[i]['error']}", i)
        return answers

    def _failure(self, what: str, process: int) -> JobFailed:
        said = self._logs[process].read_text(errors="replace").splitlines()[-12:]
        return JobFailed("\n".join([f"{self.framework} {self.model}, {what}.", *said]))

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        for requests, answers in self._pipes:
            with contextlib.suppress(BrokenPipeError):
                requests.close()
            answers.close()
        self._processes, self._pipes = [], []
