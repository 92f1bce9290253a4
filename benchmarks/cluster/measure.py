"""The measuring of `benchmarks.cluster`: who runs when, at which rate, for how many steps."""

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

# The first steps compile; until about the eighth an allocator still asks the system for memory, and
# torch's hook is exact in two.
_WARM_UP = 10


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
    """Yields all cases: for each model and rate every strategy, in each framework in turn.

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
                jobs = []
                for framework in plan.frameworks:
                    name = f"tiny-{model}" if plan.tiny else model
                    job = Job(network, "cluster", framework, name, logs)
                    jobs.append(running.enter_context(job))
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
    call = strategy.round_steps
    network.shape(UNLIMITED)  # the warm-up may send far more than the steps that are timed
    payload = job.start(strategy)
    job.train(0, _WARM_UP * call)
    network.shape(rate)

    # All processes have ended their steps when the counters are read, so nothing is on its way.
    before = job.sent()
    seconds = job.train(0, call)
    first = max(times[0] for times in seconds)
    if first <= plan.seconds_per_case / 4:
        # The first sample also pays for the changed link, which is dropped where that is cheap.
        before = job.sent()
        seconds = [[] for _ in seconds]
    # A median of one has no spread.
    fitting = max(2, min(plan.steps // call, int(plan.seconds_per_case / first)))
    rest = job.train(0, call * (fitting - len(seconds[0])))
    after = job.sent()
    return Case(
        framework=job.framework,
        model=job.model,
        rate=rate.name,
        strategy=strategy.name,
        steps_per_sample=call,
        seconds=[a + b for a, b in zip(seconds, rest, strict=True)],
        tx_bytes=[b["tx"] - a["tx"] for a, b in zip(before, after, strict=True)],
        rx_bytes=[b["rx"] - a["rx"] for a, b in zip(before, after, strict=True)],
        payload=payload,
        loss=job.loss(),
    )
