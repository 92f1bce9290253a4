"""Starts, controls and times the processes of one framework and model."""

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

import numpy as np

from benchmarks.cluster.net import Network
from benchmarks.cluster.plan import Rate, Strategy
from benchmarks.common.machine import ALLOCATOR, ONE_THREAD
from benchmarks.common.paths import ROOT

ENVIRONMENT = {
    **ALLOCATOR,
    **ONE_THREAD,
    "GLOO_SOCKET_IFNAME": "eth0",
    "JAX_PLATFORMS": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
}
_ANSWER_SECONDS = 600  # of whatever is no step: starts, compiles, evaluates
# Calls at a new rate of which no time counts: they pay for the changed link, and the first ones
# of a run for memory.
_SETTLING = 8

Times = list[list[float]]  # seconds of each process, in each call: a step, or a round of local SGD


class JobFailed(RuntimeError):
    """Reports that a process ended, failed, or did not answer in time."""


class Job:
    """One process on every host of a network; a context manager that ends them at its exit."""

    def __init__(self, network: Network, framework: str, folder: Path):
        """Stores what `__enter__` starts.

        Args:
          network: The network with the hosts.
          framework: "jax" or "torch".
          folder: The folder with the tasks; the processes write their logs there.
        """
        self.network = network
        self.framework = framework
        self.parameters = 0  # values in the model; known once it runs
        self._folder = folder
        self._call = 1  # steps
        self._logs = [folder / f"{framework}-{i}.log" for i in range(len(network.names))]
        self._processes: list[Any] = []  # whose pipes are never None

    def __enter__(self) -> Self:
        """Starts the processes and waits until they are connected.

        Raises:
          JobFailed: If they do not connect.
        """
        try:
            for i, log in enumerate(self._logs):
                self._processes.append(self._started(i, log))
            self.parameters = self._answers(_ANSWER_SECONDS)[0]
        except BaseException:
            self.close()
            raise
        return self

    def _started(self, index: int, log: Path) -> subprocess.Popen[bytes]:
        network = self.network
        arguments = [self.framework, str(self._folder), str(index)]
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
        """Makes new parameters and state; returns the bytes per step that jaxcomp predicts."""
        self._call = strategy.round_steps
        return self._ask(_ANSWER_SECONDS, do="start", strategy=strategy.name, seed=seed)[0]

    def train(self, first: int, count: int) -> Times:
        """Takes `count` steps; returns the seconds of each process's calls."""
        # No step of any model here takes minutes, whatever the link.
        return self._ask(60 + 120 * count, do="train", first=first, count=count)

    def sample(self, rate: Rate, most: int, seconds: float) -> tuple[np.ndarray, np.ndarray]:
        """Times calls at one rate.

        Args:
          rate: The rate of the links.
          most: The largest number of calls.
          seconds: The time after which no more calls are made, but at least two.

        Returns:
          (processes, calls) seconds, and (processes, 2) bytes that each process sent and received.
        """
        self.network.shape(rate)
        # All processes have ended their steps when the counters are read, so nothing is on its way.
        before = self.sent()
        times = np.array(self.train(0, self._call))
        fitting = int(seconds / times.max())
        if fitting >= 4:
            self.train(0, self._call * _SETTLING)
            before = self.sent()
            times = times[:, :0]
        rest = self.train(0, self._call * max(2 - times.shape[1], min(most, fitting)))
        sent = np.subtract(self.sent(), before)
        return np.concatenate([times, rest], axis=1), sent

    def loss(self) -> float:
        """Evaluates the loss on all shares.

        Raises:
          JobFailed: If the loss is not finite.
        """
        loss = mean(self._ask(_ANSWER_SECONDS, do="evaluate"))
        if not math.isfinite(loss):
            raise JobFailed(f"{self.framework} {self._folder.name}: the loss is {loss}.")
        return loss

    def sent(self) -> list[list[int]]:
        """Reads what every process has sent and received so far, in bytes."""
        return self._ask(_ANSWER_SECONDS, do="bytes")

    def _ask(self, seconds: float, **request: Any) -> list[Any]:
        """Sends all processes the same request (see `process`); returns their answers.

        Raises:
          JobFailed: If a process does not answer in time.
        """
        line = json.dumps(request).encode() + b"\n"
        for process in self._processes:
            # Of a process that has ended, the missing answer tells.
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(line)
                process.stdin.flush()
        return self._answers(seconds)

    def _answers(self, seconds: float) -> list[Any]:
        """Reads a line from each process in any order, so that a failure is reported at once."""
        end = time.monotonic() + seconds
        waiting = {}
        for index, process in enumerate(self._processes):
            waiting[process.stdout] = index
        answers: list[Any] = [None] * len(self._processes)
        while waiting:
            ready, _, _ = select.select(list(waiting), [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise self._failure(next(iter(waiting.values())), f"no answer in {seconds:.0f} s")
            for stream in ready:
                index = waiting.pop(stream)
                answer = json.loads(stream.readline() or '{"error": "it ended"}')
                if "error" in answer:
                    raise self._failure(index, answer["error"])
                answers[index] = answer["answer"]
        return answers

    def _failure(self, process: int, reason: str) -> JobFailed:
        log = self._logs[process].read_text(errors="replace").splitlines()[-12:]
        reason = f"{self.framework} {self._folder.name}, process {process}: {reason}."
        return JobFailed("\n".join([reason, *log]))

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.communicate()
        self._processes = []
