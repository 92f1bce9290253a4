"""Measures the seconds until a language model reaches a held-out loss, jaxcomp beside DDP.

    sudo python -m benchmarks.time_to_loss                     # the missing whole runs
    sudo python -m benchmarks.time_to_loss --times             # step times at all rates
    python -m benchmarks.time_to_loss --report                 # only the report

Several processes on this machine, one core each, in network namespaces with links of a given rate,
train the language model of the examples (12.9 million parameters). JAX and PyTorch get the same
initial parameters, batches, learning rates and AdamW, over gloo. Whole runs have links without a
limit, and give the held-out loss after each number of steps. `--times` times single steps of the
same programs at every rate. The time of a run at a rate is its steps times their median there,
because at 10 Mbit/s an exact run would take five hours. `--at RATE` makes whole runs at a rate, to
check that product.

Finished runs are appended to time_to_loss.jsonl and not repeated; of step times, the last ones
count. It needs Linux, root and iproute2, as `benchmarks.cluster` does, a core for each process, and
for `--times` a quiet machine.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

from benchmarks.cluster.command import PACKAGES, over_links
from benchmarks.cluster.plan import FRAMEWORKS, UNLIMITED, Strategy, parse_rate, parse_strategy
from benchmarks.common.arguments import add_fields, at_least, command_line, listed, read_fields
from benchmarks.common.machine import describe
from benchmarks.common.paths import RESULTS
from benchmarks.common.runs import append_run, read_runs
from benchmarks.time_to_loss.measure import Asked, step_times, whole_runs
from benchmarks.time_to_loss.report import RUNS, write_report
from benchmarks.time_to_loss.task import Config

_PROGRAM = "benchmarks.time_to_loss"


def parser() -> argparse.ArgumentParser:
    """Makes the command line."""
    p = command_line(_PROGRAM, __doc__)
    add = p.add_argument
    add("--runs", type=listed(_run), default=",".join(RUNS), help="framework/strategy")
    add("--seeds", type=at_least(int, 1), default=1, help="number of seeds")
    rates = "1gbit,100mbit,10mbit"
    add("--rates", type=listed(parse_rate), default=rates, help="rates for step times")
    add("--at", type=parse_rate, default=UNLIMITED.name, help="rate of whole runs")
    add("--times", action="store_true", help="step times, no whole runs")
    add("--samples", type=at_least(int, 2), default=24, help="timed steps per rate, at most")
    add("--out", type=Path, default=RESULTS / "time_to_loss", help="without a suffix")
    add("--report", action="store_true", help="make no runs, only the report")
    add_fields(p, Config())
    return p


def _run(text: str) -> tuple[str, Strategy]:
    framework, _, name = text.partition("/")
    if framework not in FRAMEWORKS or not name:
        raise ValueError(
            f"takes framework/strategy, as jax/allreduce or torch/powersgd-16, got {text!r}"
        )
    strategy = parse_strategy(name)
    if not strategy.runs_in(framework):
        raise ValueError(f"has {text!r}, which {framework} does not have")
    return framework, strategy


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    p = parser()
    options = p.parse_args(arguments)
    path = options.out.with_suffix(".jsonl")
    try:
        config = read_fields(options, Config())
        if not options.report:
            code = over_links("time_to_loss", lambda: make(config, options, path))
            if code:
                return code
        for written in write_report(read_runs(path), asdict(config), options.out):
            print(written)
    except ValueError as error:
        p.error(str(error))
    return 0


def make(config: Config, options: argparse.Namespace, path: Path) -> None:
    """Makes step times, or the whole runs that are not in the file yet, and appends them.

    Raises:
      NetworkUnavailable: If the network cannot be made.
      JobFailed: If a process fails.
    """
    setting = asdict(config)
    finished = set()
    for row in read_runs(path):
        if row["config"] == setting and row.get("at") == options.at.name:
            finished.add((row["framework"], row["strategy"], row["seed"]))
    asked: dict[Asked, None] = {}
    for seed in range(options.seeds):
        for framework, strategy in options.runs:
            if options.times:
                # Of two phases each is timed by itself.
                asked |= dict.fromkeys((framework, phase, seed) for phase in strategy.phases)
            elif (framework, strategy.name, seed) not in finished:
                asked[framework, strategy, seed] = None
    if options.times:
        measured = step_times(config, list(asked), options.rates, options.samples)
    else:
        measured = whole_runs(config, list(asked), options.at)
    with contextlib.closing(measured) as rows:
        for row in rows:
            about = describe(_PROGRAM, PACKAGES[row["framework"]])
            append_run(path, row | {"config": setting, "about": about})
            line = f"{row['framework']}/{row['strategy']}"
            line = f"{line:28} seed {row['seed']}  "
            for steps, seconds, loss in row.get("curve", [])[-1:]:
                line += f"{loss:.4f} after {steps} steps in {seconds:.0f} s"
            for rate, times in row.get("seconds", {}).items():
                line += f"{rate} {1e3 * median(times):,.0f} ms "
            print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
