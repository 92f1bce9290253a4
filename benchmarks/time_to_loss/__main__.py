"""Seconds until a language model reaches a held-out loss: jaxcomp beside PyTorch's DDP.

    sudo python -m benchmarks.time_to_loss                     # what is missing of whole runs
    sudo python -m benchmarks.time_to_loss --times             # step times, all in one go
    python -m benchmarks.time_to_loss --report                 # of what is there

Several processes on this machine, one core each, in network namespaces that are joined by links of
a given rate, train the language model of the examples (12.9 million parameters) with the same
initial parameters, batches, learning rates and AdamW in JAX and in PyTorch, both over gloo. Whole
runs are made without a limit on the links, for the held-out loss after so many steps; `--times`
takes single steps of the same programs at every rate, one run after the other. What a run takes at
a rate is its steps times their median there: at 10 Mbit/s an exact run would take five hours. With
`--at RATE` whole runs are made at a rate, to see whether that product is true.

Finished runs are appended to time_to_loss.jsonl and not made again; of step times the last count.
Needs Linux, root and iproute2, as `benchmarks.cluster` does, a core for each process, and for
`--times` a quiet machine.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cluster.command import EXIT_FAILED, PACKAGES, over_links
from benchmarks.cluster.plan import FRAMEWORKS, UNLIMITED, Strategy, parse_rate, parse_strategy
from benchmarks.common.arguments import add_fields, at_least, command_line, listed, read_fields
from benchmarks.common.machine import describe
from benchmarks.common.paths import RESULTS
from benchmarks.common.runs import append_run, read_runs
from benchmarks.time_to_loss.measure import Plan, step_times, whole_runs
from benchmarks.time_to_loss.report import RUNS, write_report
from benchmarks.time_to_loss.task import Config

RATES = "1gbit,100mbit,10mbit"
_PROGRAM = "benchmarks.time_to_loss"


def parser() -> argparse.ArgumentParser:
    """Makes the command line."""
    p = command_line(_PROGRAM, __doc__)
    add = p.add_argument
    shown = " (default: %(default)s)"
    runs = ",".join(RUNS)
    add("--runs", type=listed(_run), default=runs, help="framework/strategy" + shown)
    add("--seeds", type=at_least(int, 1), default=1, help="how many" + shown)
    add("--rates", type=listed(parse_rate), default=RATES, help="for step times" + shown)
    add("--at", type=listed(parse_rate), default=UNLIMITED.name, help="of whole runs" + shown)
    add("--times", action="store_true", help="no whole runs, but step times")
    add("--samples", type=at_least(int, 2), default=24, help="timed at a rate, at most" + shown)
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
    try:
        config = read_fields(options, Config())
    except ValueError as error:
        p.error(str(error))
    runs = []
    for seed in range(options.seeds):
        for framework, strategy in options.runs:
            # Of two phases each is timed by itself.
            for part in strategy.phases if options.times else (strategy,):
                runs.append((framework, part, seed))
    (at,) = options.at
    plan = Plan(config, tuple(dict.fromkeys(runs)), at, options.rates, options.samples)
    path = options.out.with_suffix(".jsonl")
    code = 0
    if not options.report:
        code = over_links("time_to_loss", lambda: _make(plan, path, times=options.times))
    if code:
        return code
    try:
        for written in write_report(read_runs(path), asdict(config), options.out):
            print(written)
    except ValueError as error:
        print(f"time_to_loss: {error}", file=sys.stderr)
        return EXIT_FAILED
    return 0


def _make(plan: Plan, path: Path, *, times: bool) -> None:
    """Makes step times, or the whole runs that are not in the file yet, and appends them.

    Raises:
      NetworkUnavailable: If the network cannot be made.
      JobFailed: If a process fails.
    """
    setting = asdict(plan.config)
    if not times:
        finished = set()
        for row in read_runs(path):
            if row["config"] == setting and row.get("at") == plan.rate.name:
                finished.add((row["framework"], row["strategy"], row["seed"]))
        missing = [run for run in plan.runs if (run[0], run[1].name, run[2]) not in finished]
        plan = replace(plan, runs=tuple(missing))
    measured = step_times(plan) if times else whole_runs(plan)
    with contextlib.closing(measured) as rows:
        for row in rows:
            row["config"] = setting
            row["about"] = describe(_PROGRAM, PACKAGES[row["framework"]])
            append_run(path, row)
            print(_line(row), flush=True)


def _line(row: dict[str, Any]) -> str:
    if "curve" in row:
        steps, seconds, loss = row["curve"][-1]
        said = f"{loss:.4f} after {steps} steps in {seconds:.0f} s"
    else:
        each = {rate: 1e3 * median(times) for rate, times in row["seconds"].items()}
        said = ", ".join(f"{rate} {ms:,.0f} ms" for rate, ms in each.items())
    name = f"{row['framework']}/{row['strategy']}"
    return f"{name:28} seed {row['seed']}  {said}"


if __name__ == "__main__":
    sys.exit(main())
