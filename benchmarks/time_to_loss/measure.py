"""Makes whole runs of `benchmarks.time_to_loss`, and times steps at every rate."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Generator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.cluster.job import Job
from benchmarks.cluster.net import Network
from benchmarks.cluster.plan import UNLIMITED, Rate, Strategy
from benchmarks.common.runs import Run
from benchmarks.time_to_loss.task import Config, task_of

_SECONDS_PER_RATE = 30  # beyond which a rate is content with fewer samples, at least two

Asked = tuple[str, Strategy, int]  # framework, strategy, seed


def whole_runs(config: Config, asked: Sequence[Asked], rate: Rate) -> Generator[Run]:
    """Yields each whole run, with (steps, seconds, held-out loss) at each evaluation.

    Args:
      config: What is trained.
      asked: Which runs.
      rate: The rate of the links.

    Raises:
      NetworkUnavailable: If the network cannot be made.
      JobFailed: If a process fails.
    """
    for job, row in _started(config, asked):
        job.network.shape(rate)
        call = row["steps_per_call"]
        every = max(1, config.eval_every // call) * call
        row["curve"] = []
        seconds = 0.0
        sent = 0
        for last in range(every, config.steps + 1, every):
            before = job.sent()[0]
            times = np.array(job.train(last - every, every))
            seconds += float(times.max(axis=0).sum())  # by the slowest of the processes
            sent += job.sent()[0][0] - before[0]
            row["curve"].append((last, seconds, job.loss()))
        row["sent_per_step"] = sent / row["curve"][-1][0]
        row["at"] = rate.name
        yield row


def step_times(
    config: Config, asked: Sequence[Asked], rates: Sequence[Rate], samples: int
) -> Generator[Run]:
    """Yields seconds of single steps at every rate, one run after the other.

    Args:
      config: What is trained.
      asked: Which runs.
      rates: The rates of the links.
      samples: The most calls (steps, or rounds of local SGD) to time at a rate.

    Raises:
      NetworkUnavailable: If the network cannot be made.
      JobFailed: If a process fails.
    """
    for job, row in _started(config, asked):
        # Torch's hook sends whole gradients in its first step: that is no time of its steps.
        job.train(0, 2 * row["steps_per_call"])
        row["seconds"] = {}
        for rate in rates:
            times, _ = job.sample(rate, samples, _SECONDS_PER_RATE)
            row["seconds"][rate.name] = times.max(axis=0).tolist()
        yield row


def _started(config: Config, asked: Sequence[Asked]) -> Generator[tuple[Job, Run]]:
    """Yields each run, compiled and before its first step, on links without a limit."""
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(Network(config.processes))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(suffix="-time-to-loss")))
        for seed in {0, *(seed for _, _, seed in asked)}:
            task_of(config, seed).write(folder / f"{seed}.npz")
        jobs: dict[str, Job] = {}
        for framework, strategy, seed in asked:
            network.shape(UNLIMITED)
            if framework not in jobs:
                jobs[framework] = stack.enter_context(Job(network, framework, folder))
            job = jobs[framework]
            job.start(strategy, seed)
            row: Run = {"framework": framework, "strategy": strategy.name, "seed": seed}
            row["steps_per_call"] = strategy.round_steps
            row["parameters"] = job.parameters
            yield job, row
