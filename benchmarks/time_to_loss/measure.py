"""The measuring of `benchmarks.time_to_loss`: whole runs, and the time of a step at every rate."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Generator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.cluster.job import Job
from benchmarks.cluster.net import Network
from benchmarks.cluster.plan import UNLIMITED, Rate, Strategy
from benchmarks.time_to_loss.task import Config, write_task

# Calls at a new rate of which no time counts: they pay for the changed link, and the first ones
# of a run for memory.
_SETTLING = 8
_SECONDS_PER_RATE = 30  # beyond which a rate is content with fewer samples, at least two

Run = tuple[str, Strategy, int]  # framework, strategy, seed


@dataclass(frozen=True)
class Plan:
    """What is to be measured.

    Attributes:
      config: What is trained.
      runs: Framework, strategy and seed of each run.
      rate: Of the links in these runs.
      rates: Of the links, for step times.
      samples: Calls (steps, or rounds of local SGD) that are timed at a rate, at most.
    """

    config: Config
    runs: tuple[Run, ...]
    rate: Rate
    rates: tuple[Rate, ...]
    samples: int


def whole_runs(plan: Plan) -> Generator[dict[str, Any]]:
    """Yields each run from its beginning to its end: (steps, seconds, held-out loss) on the way.

    Raises:
      NetworkUnavailable: If the network cannot be made.
      JobFailed: If a process fails.
    """
    config = plan.config
    for network, job, strategy, row in _started(plan):
        network.shape(plan.rate)
        call = strategy.round_steps
        every = max(1, config.eval_every // call) * call
        row["curve"] = []
        seconds = 0.0
        sent = 0
        first = 0
        while first + every <= config.steps:
            before = job.sent()
            seconds += sum(_train(job, first, every))
            sent += job.sent()[0]["tx"] - before[0]["tx"]
            first += every
            row["curve"].append((first, seconds, job.loss()))
        row["sent_per_step"] = sent / first
        row["at"] = plan.rate.name
        yield row


def step_times(plan: Plan) -> Generator[dict[str, Any]]:
    """Yields seconds of single steps at every rate, one run after the other.

    Raises:
      NetworkUnavailable: If the network cannot be made.
      JobFailed: If a process fails.
    """
    for network, job, strategy, row in _started(plan):
        call = strategy.round_steps
        # Torch's hook sends whole gradients in its first step: that is no time of its steps.
        _train(job, 0, 2 * call)
        row["seconds"] = {}
        for rate in plan.rates:
            network.shape(rate)
            kept = _train(job, 0, call)
            fitting = int(_SECONDS_PER_RATE / kept[0])
            if fitting >= 4:
                _train(job, 0, call * _SETTLING)
                kept = []
            count = max(2 - len(kept), min(plan.samples, fitting))
            row["seconds"][rate.name] = kept + _train(job, 0, call * count)
        yield row


def _started(plan: Plan) -> Generator[tuple[Network, Job, Strategy, dict[str, Any]]]:
    """Yields each run, compiled and before its first step, on links without a limit."""
    config = plan.config
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(Network(config.processes))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="time-to-loss-")))
        (folder / "config.json").write_text(json.dumps(asdict(config)))
        for seed in {0, *(seed for _, _, seed in plan.runs)}:
            write_task(config, seed, folder / f"{seed}.npz")
        jobs: dict[str, Job] = {}
        for framework, strategy, seed in plan.runs:
            network.shape(UNLIMITED)
            if framework not in jobs:
                job = Job(network, "time_to_loss", framework, str(folder), folder)
                jobs[framework] = stack.enter_context(job)
            job = jobs[framework]
            job.start(strategy, seed)
            row: dict[str, Any] = {"framework": framework, "strategy": strategy.name, "seed": seed}
            row["steps_per_call"] = strategy.round_steps
            row["parameters"] = job.parameters
            yield network, job, strategy, row


def _train(job: Job, first: int, count: int) -> list[float]:
    """Takes steps; returns the seconds of each call, by the slowest of the processes."""
    return [max(times) for times in zip(*job.train(first, count), strict=True)]
