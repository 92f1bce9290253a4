"""The processes of one framework and model: how they are started and talked to."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean
from typing import Any, Self

from benchmarks.cluster.net import Network
from benchmarks.cluster.plan import Strategy
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
_COMPILE_SECONDS = 600
_EVALUATE_SECONDS = 300


class JobFailed(RuntimeError):
    """A process ended, reported an error, or did not answer in time."""


class Job:
    """One process on every host of a network; a context manager that ends them."""

    def __init__(self, network: Network, benchmark: str, framework: str, model: str, logs: Path):
        """Takes what is to be started when it is entered.

        Args:
          network: Where they run.
          benchmark: "cluster" or "time_to_loss", which has the models.
          framework: "jax" or "torch".
          model: What is trained, as the benchmark knows it.
          logs: A folder for what they say besides their answers.
        """
        self.framework = framework
        self.model = model
        self.parameters = 0  # values in the model; known once it runs
        self._network = network
        self._benchmark = benchmark
        logged = f"{framework}-{Path(model).name}"
        self._logs = [logs / f"{logged}-{i}.log" for i in range(len(network.names))]
        self._processes: list[Any] = []  # whose pipes are never None

    def __enter__(self) -> Self:
        """Starts the processes and waits until they have found each other.

        Raises:
          JobFailed: If they do not.
        """
        try:
            for i, log in enumerate(self._logs):
                self._processes.append(self._started(i, log))
            self.parameters = self._answers(_START_SECONDS)[0]["parameters"]
        except BaseException:
            self.close()
            raise
        return self

    def _started(self, index: int, log: Path) -> subprocess.Popen[bytes]:
        network = self._network
        arguments = [self._benchmark, self.framework, self.model, str(index)]
        arguments += [str(len(network.names)), network.addresses[0]]
        program = [sys.executable, "-um", "benchmarks.cluster.process", *arguments]
        cores = sorted(os.sched_getaffinity(0))
        with log.open("wb") as stderr:
            return subprocess.Popen(
                network.command(index, cores[index % len(cores)], program),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                cwd=ROOT,
                env=os.environ | ENVIRONMENT,
                # A Ctrl-C is for the parent, which then ends them.
                start_new_session=True,
            )

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, strategy: Strategy, seed: int = 0) -> float | None:
        """Begins anew; returns the bytes a step that jaxcomp says it sends."""
        request = {"do": "start", "strategy": strategy.name, "seed": seed}
        return self.ask(_COMPILE_SECONDS, **request)[0]["payload"]

    def train(self, first: int, count: int) -> list[list[float]]:
        """Takes so many steps; returns the seconds of each process's calls."""
        # No step of any model here takes minutes, whatever the link.
        answers = self.ask(60 + 120 * count, do="train", first=first, count=count)
        return [answer["seconds"] for answer in answers]

    def loss(self) -> float:
        """Evaluates all shares.

        Raises:
          JobFailed: If the loss is not finite.
        """
        loss = mean(answer["loss"] for answer in self.ask(_EVALUATE_SECONDS, do="evaluate"))
        if not math.isfinite(loss):
            raise JobFailed(f"{self.framework} {self.model}: the loss is {loss}.")
        return loss

    def sent(self) -> list[dict[str, int]]:
        """Reads what every process has sent and received so far, `tx` and `rx`, in bytes."""
        return self.ask(_START_SECONDS, do="bytes")

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
        for process in self._processes:
            # Of a process that has ended, the missing answer tells.
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(line)
                process.stdin.flush()
        return self._answers(seconds)

    def _answers(self, seconds: float) -> list[dict[str, Any]]:
        """Reads a line of each process, in whatever order they come: a failure must not wait."""
        end = time.monotonic() + seconds
        waiting = {process.stdout: i for i, process in enumerate(self._processes)}
        answers: list[dict[str, Any]] = [{} for _ in self._processes]
        while waiting:
            ready, _, _ = select.select(list(waiting), [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise self._failure(next(iter(waiting.values())), f"no answer in {seconds:.0f} s")
            for stream in ready:
                index = waiting.pop(stream)
                line = stream.readline()
                answers[index] = json.loads(line) if line else {"error": "it ended"}
                if "error" in answers[index]:
                    raise self._failure(index, answers[index]["error"])
        return answers

    def _failure(self, process: int, reason: str) -> JobFailed:
        log = self._logs[process].read_text(errors="replace").splitlines()[-12:]
        said = f"{self.framework} {self.model}, process {process}: {reason}."
        return JobFailed("\n".join([said, *log]))

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.communicate()
        self._processes = []
