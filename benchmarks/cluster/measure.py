"""The order of the measurements of `benchmarks.cluster`: strategies, rates, numbers of steps."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Generator
from pathlib import Path

from benchmarks.cluster.job import Job
from benchmarks.cluster.net import Network
from benchmarks.cluster.plan import UNLIMITED, Rate, Strategy
from benchmarks.cluster.report import Case
from benchmarks.cluster.task import timed_task

# The first steps compile, and torch's hook is exact in two; likewise of rounds.
_WARM_UP = 2


@dataclasses.dataclass(frozen=True)
class Plan:
    """The strategies, rates and limits to measure."""

    processes: int
    models: tuple[str, ...]
    rates: tuple[Rate, ...]
    strategies: tuple[Strategy, ...]
    frameworks: tuple[str, ...]
    steps: int  # the most of one case
    seconds_per_case: float  # beyond which a case is content with fewer steps, at least two
    tiny: bool  # small models, to try things out


def measure(plan: Plan) -> Generator[Case]:
    """Yields all cases: every strategy for each model and rate, in both frameworks in turn.

    The processes of both frameworks exist while their model is measured. Processes that are not
    measured wait for a line on a pipe, which takes no processor time.

    Raises:
      NetworkUnavailable: If the network cannot be made.
      JobFailed: If a process fails.
    """
    for model in plan.models:
        name = f"tiny-{model}" if plan.tiny else model
        with contextlib.ExitStack() as running:
            network = running.enter_context(Network(plan.processes))
            folder = Path(running.enter_context(tempfile.TemporaryDirectory(suffix=f"-{name}")))
            timed_task(name, plan.processes).write(folder / "0.npz")
            jobs = []
            for framework in plan.frameworks:
                jobs.append(running.enter_context(Job(network, framework, folder)))
            for rate in plan.rates:
                for strategy in plan.strategies:
                    for job in jobs:
                        if strategy.runs_in(job.framework):
                            yield _case(job, model, rate, strategy, plan)


def _case(job: Job, model: str, rate: Rate, strategy: Strategy, plan: Plan) -> Case:
    """Times one strategy at one rate."""
    call = strategy.round_steps
    job.network.shape(UNLIMITED)  # the warm-up may send far more than the steps that are timed
    payload = job.start(strategy)
    job.train(0, _WARM_UP * call)
    seconds, sent = job.sample(rate, plan.steps // call, plan.seconds_per_case)
    return Case(
        framework=job.framework,
        model=model,
        rate=rate.name,
        strategy=strategy.name,
        steps_per_sample=call,
        seconds=seconds.tolist(),
        tx_bytes=sent[:, 0].tolist(),
        rx_bytes=sent[:, 1].tolist(),
        payload=payload,
        loss=job.loss(),
    )
