"""The measuring of `benchmarks.time_to_loss`: whole runs, and then their steps at every rate."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.cluster.job import Job
from benchmarks.cluster.net import Network
from benchmarks.cluster.plan import UNLIMITED, Rate, Strategy
from benchmarks.time_to_loss.task import Config, write_task

_COMPILE_SECONDS = 600
_EVALUATE_SECONDS = 300
# Steps at a new rate of which no time counts: they also pay for the changed link.
_SETTLING = 2


@dataclass(frozen=True)
class Plan:
    """What is to be measured.

    Attributes:
      config: What is trained.
      rates: Of the links, for step times.
      runs: Framework, strategy and seed of each run.
      samples: Calls (steps, or rounds of local SGD) that are timed at a rate, at most.
      seconds_per_rate: Beyond which a rate is content with fewer, at least two.
      throughout: A rate at which whole runs are made, instead of without a limit.
    """

    config: Config
    rates: tuple[Rate, ...]
    runs: tuple[tuple[str, Strategy, int], ...]
    samples: int
    seconds_per_rate: float
    throughout: Rate = UNLIMITED


def measure(plan: Plan) -> Generator[dict[str, Any]]:
    """Each run as a dictionary: its curve of (steps, held-out loss) and its step times.

    Raises:
      NetworkUnavailable: If the network cannot be made.
      JobFailed: If a process fails.
    """
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
                module = "benchmarks.time_to_loss.process"
                job = Job(network, framework, str(folder), logs=folder, module=module)
                jobs[framework] = stack.enter_context(job)
            run = _run(network, jobs[framework], plan, strategy, seed)
            yield {"framework": framework, "strategy": strategy.name, "seed": seed, **run}


def _run(network: Network, job: Job, plan: Plan, strategy: Strategy, seed: int) -> dict[str, Any]:
    config = plan.config
    started = job.ask(_COMPILE_SECONDS, do="start", strategy=strategy.name, seed=seed)
    network.shape(plan.throughout)
    # A round is trained as a whole, so that what is evaluated is an average.
    call = strategy.number if strategy.in_rounds else 1
    every = max(1, config.eval_every // call) * call
    curve, seconds, sent, first = [], list[float](), 0, 0
    while first + every <= config.steps:
        answers = _train(job, first, every, config.steps)
        # The slowest of the processes is what a step took.
        seconds += _slowest(answers)
        sent += answers[0]["sent"]
        first += every
        loss = job.ask(_EVALUATE_SECONDS, do="evaluate")[0]["loss"]
        curve.append((first, sum(seconds), loss))
    times = {rate.name: _times(network, job, plan, rate, call, config.steps) for rate in plan.rates}
    return {
        "payload": started[0]["payload"],
        "steps_per_call": call,
        "curve": curve,
        "at": plan.throughout.name,
        "sent_per_step": sent / first,
        "seconds": times,
        "parameters": job.parameters,
    }


def _times(
    network: Network, job: Job, plan: Plan, rate: Rate, call: int, first: int
) -> list[float]:
    """Seconds of calls at a rate, after the run's end: the same program, state and batches."""
    network.shape(rate)
    settled = _slowest(_train(job, first, call, first))[-1]
    if settled * _SETTLING > plan.seconds_per_rate / 4:
        count, kept = max(1, int(plan.seconds_per_rate / settled)), [settled]
    else:
        _train(job, first, call * _SETTLING, first)
        count, kept = int(plan.seconds_per_rate / settled), []
    count = max(2 - len(kept), min(plan.samples, count))
    return kept + _slowest(_train(job, first, call * count, first))


def _train(job: Job, first: int, count: int, steps: int) -> list[dict[str, Any]]:
    # No step of any model here takes minutes, whatever the link.
    return job.ask(60 + 120 * count, do="train", first=first % steps, count=count)


def _slowest(answers: Sequence[dict[str, Any]]) -> list[float]:
    return [max(times) for times in zip(*(a["seconds"] for a in answers), strict=True)]
