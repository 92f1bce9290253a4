"""The measuring of `benchmarks.time_to_loss`: whole runs, and the time of a step at every rate."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.cluster.job import Job
from benchmarks.cluster.net import Network
from benchmarks.cluster.plan import UNLIMITED, Rate, Strategy
from benchmarks.time_to_loss.task import Config, write_task

_COMPILE_SECONDS = 600
_EVALUATE_SECONDS = 300
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
    """Each run from its beginning to its end: (steps, seconds, held-out loss) on the way.

    Raises:
      NetworkUnavailable: If the network cannot be made.
      JobFailed: If a process fails.
    """
    for network, job, run in _started(plan):
        network.shape(plan.rate)
        yield _record(job, run) | _trained(job, plan.config, run[1]) | {"at": plan.rate.name}


def step_times(plan: Plan) -> Generator[dict[str, Any]]:
    """Seconds of single steps at every rate, one run after the other.

    Raises:
      NetworkUnavailable: If the network cannot be made.
      JobFailed: If a process fails.
    """
    for network, job, run in _started(plan):
        # Torch's hook sends whole gradients in its first step: that is no time of its steps.
        _train(job, 0, 2 * run[1].round_steps, plan.config.steps)
        times = {rate.name: _times(network, job, plan, rate, run[1]) for rate in plan.rates}
        yield _record(job, run) | {"seconds": times}


def _started(plan: Plan) -> Generator[tuple[Network, Job, Run]]:
    """Each run, compiled and before its first step, on links without a limit."""
    config = plan.config
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(Network(config.processes))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="time-to-loss-")))
        (folder / "config.json").write_text(json.dumps(asdict(config)))
        for seed in {0, *(seed for _, _, seed in plan.runs)}:
            write_task(config, seed, folder / f"{seed}.npz")
        jobs: dict[str, Job] = {}
        for run in plan.runs:
            framework, strategy, seed = run
            network.shape(UNLIMITED)
            if framework not in jobs:
                module = "benchmarks.time_to_loss.process"
                job = Job(network, framework, str(folder), logs=folder, module=module)
                jobs[framework] = stack.enter_context(job)
            jobs[framework].ask(_COMPILE_SECONDS, do="start", strategy=strategy.name, seed=seed)
            yield network, jobs[framework], run


def _record(job: Job, run: Run) -> dict[str, Any]:
    framework, strategy, seed = run
    named = {"framework": framework, "strategy": strategy.name, "seed": seed}
    return named | {"steps_per_call": strategy.round_steps, "parameters": job.parameters}


def _trained(job: Job, config: Config, strategy: Strategy) -> dict[str, Any]:
    call = strategy.round_steps
    every = max(1, config.eval_every // call) * call
    curve, seconds, sent, first = [], 0.0, 0, 0
    while first + every <= config.steps:
        answers = _train(job, first, every, config.steps)
        # The slowest of the processes is what a step took.
        seconds += sum(_slowest(answers))
        sent += answers[0]["sent"]
        first += every
        shares = job.ask(_EVALUATE_SECONDS, do="evaluate")
        curve.append((first, seconds, mean(share["loss"] for share in shares)))
    return {"curve": curve, "sent_per_step": sent / first}


def _times(network: Network, job: Job, plan: Plan, rate: Rate, strategy: Strategy) -> list[float]:
    """Seconds of calls at a rate."""
    network.shape(rate)
    call, steps = strategy.round_steps, plan.config.steps
    settled = _slowest(_train(job, 0, call, steps))[-1]
    if settled > _SECONDS_PER_RATE / 4:
        count, kept = max(1, int(_SECONDS_PER_RATE / settled)), [settled]
    else:
        _train(job, 0, call * _SETTLING, steps)
        count, kept = int(_SECONDS_PER_RATE / settled), []
    count = max(2 - len(kept), min(plan.samples, count))
    return kept + _slowest(_train(job, 0, call * count, steps))


def _train(job: Job, first: int, count: int, steps: int) -> list[dict[str, Any]]:
    # No step of any model here takes minutes, whatever the link.
    return job.ask(60 + 120 * count, do="train", first=first % steps, count=count)


def _slowest(answers: Sequence[dict[str, Any]]) -> list[float]:
    return [max(times) for times in zip(*(a["seconds"] for a in answers), strict=True)]
