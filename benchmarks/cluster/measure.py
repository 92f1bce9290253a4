"""The measuring of `benchmarks.cluster`: who runs when, at which rate, for how many steps."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import tempfile
from collections.abc import Generator
from pathlib import Path

from benchmarks.cluster.job import Job, JobFailed
from benchmarks.cluster.net import Network
from benchmarks.cluster.plan import UNLIMITED, Rate, Strategy, counts_as_sample, sample_count
from benchmarks.cluster.report import Case

# A sample that takes this many times longer than expected is taken for a hang.
_PATIENCE = 10
_PREPARE_SECONDS = 600
_BYTES_PER_PARAMETER = 4


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is to be measured."""

    processes: int
    models: tuple[str, ...]
    rates: tuple[Rate, ...]
    strategies: tuple[Strategy, ...]
    frameworks: tuple[str, ...]
    steps: int  # the most of one case
    seconds_per_case: float  # beyond which a case is content with fewer steps, at least two
    tiny: bool  # small models, to try things out


def measure(plan: Plan) -> Generator[Case]:
    """All cases: for each model and rate every strategy, in each framework in turn.

    Both frameworks' processes live as long as their model is measured; who is not measured waits
    for a line on a pipe, which takes no time of the cores.

    Raises:
      NetworkUnavailable: If the network cannot be made.
      JobFailed: If a process fails.
    """
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(Network(plan.processes))
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cluster-")))
        for model in plan.models:
            with contextlib.ExitStack() as running:
                network.shape(UNLIMITED)
                options = ["tiny"] if plan.tiny else []
                jobs = [
                    running.enter_context(Job(network, name, model, *options, logs=logs))
                    for name in plan.frameworks
                ]
                for rate in plan.rates:
                    for strategy in plan.strategies:
                        for job in jobs:
                            if strategy.runs_in(job.framework):
                                yield measure_case(network, job, rate, strategy, plan)


def measure_case(network: Network, job: Job, rate: Rate, strategy: Strategy, plan: Plan) -> Case:
    """Times one strategy at one rate.

    Raises:
      JobFailed: If a process fails, or what it trains is no longer finite.
    """
    network.shape(UNLIMITED)  # the warm-up may send far more than the steps that are timed
    prepared = job.ask(_PREPARE_SECONDS, do="prepare", strategy=strategy.name)
    network.shape(rate)
    most = plan.steps // strategy.round_steps

    # All processes have ended their steps when the counters are read, so nothing is on its way.
    before = job.ask(_PATIENCE, do="bytes")
    seconds = _run(job, 1, _expected(job, rate))
    first = max(times[0] for times in seconds)
    if not counts_as_sample(first, plan.seconds_per_case):
        before, seconds = job.ask(_PATIENCE, do="bytes"), [[] for _ in seconds]
    wanted = sample_count(first, plan.seconds_per_case, most) - len(seconds[0])
    rest, loss = _timed(job, wanted, first)
    after = job.ask(_PATIENCE, do="bytes")
    return Case(
        framework=job.framework,
        model=job.model,
        rate=rate.name,
        strategy=strategy.name,
        steps_per_sample=strategy.round_steps,
        seconds=[a + b for a, b in zip(seconds, rest, strict=True)],
        tx_bytes=[b["tx"] - a["tx"] for a, b in zip(before, after, strict=True)],
        rx_bytes=[b["rx"] - a["rx"] for a, b in zip(before, after, strict=True)],
        payload=prepared[0]["payload"],
        loss=loss,
    )


def _run(job: Job, samples: int, expected: float) -> list[list[float]]:
    return _timed(job, samples, expected)[0]


def _timed(job: Job, samples: int, expected: float) -> tuple[list[list[float]], float]:
    """Seconds of each process's samples, and the last loss of the first process."""
    answers = job.ask(60 + _PATIENCE * samples * expected, do="run", samples=samples)
    loss = answers[0]["loss"]
    if not math.isfinite(loss):
        raise JobFailed(f"{job.framework} {job.model}: the loss is {loss} after the timed steps.")
    return [answer["seconds"] for answer in answers], loss


def _expected(job: Job, rate: Rate) -> float:
    """Seconds in which all parameters pass a link: no sample should take much more."""
    if rate.bits_per_second is None:
        return 1.0
    return 8 * _BYTES_PER_PARAMETER * job.parameters / rate.bits_per_second
