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
import signal
import sys
from collections.abc import Generator, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

from benchmarks.cluster.job import JobFailed
from benchmarks.cluster.net import NetworkUnavailable, check_available
from benchmarks.cluster.plan import FRAMEWORKS, UNLIMITED, Strategy, parse_rate, parse_strategy
from benchmarks.common.arguments import at_least, command_line, listed
from benchmarks.common.machine import describe
from benchmarks.common.paths import RESULTS
from benchmarks.common.runs import append_run, read_runs
from benchmarks.time_to_loss.measure import Plan, step_times, whole_runs
from benchmarks.time_to_loss.report import RUNS, write_report
from benchmarks.time_to_loss.task import Config

# Exit codes; 2 is argparse's, for wrong arguments.
EXIT_FAILED, EXIT_UNAVAILABLE = 1, 3
RATES = "1gbit,100mbit,10mbit"
_PACKAGES = {"jax": ("jax", "flax", "optax"), "torch": ("torch",)}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = command_line("benchmarks.time_to_loss", __doc__)
    shown = " (default: %(default)s)"
    p.add_argument("--runs", default=",".join(RUNS), help="framework/strategy" + shown)
    p.add_argument("--seeds", type=int, default=1, help="how many" + shown)
    p.add_argument("--rates", default=RATES, help="for step times" + shown)
    p.add_argument("--at", default=UNLIMITED.name, help="rate of whole runs" + shown)
    p.add_argument("--times", action="store_true", help="no whole runs, but step times")
    p.add_argument("--samples", type=int, default=24, help="timed at a rate, at most" + shown)
    p.add_argument("--out", type=Path, default=RESULTS / "time_to_loss", help="without a suffix")
    p.add_argument("--report", action="store_true", help="make no runs, only the report")
    group = p.add_argument_group("setting (runs with another one do not count in a report)")
    for field in fields(Config):
        name = "--" + field.name.replace("_", "-")
        group.add_argument(name, type=type(field.default), default=field.default, help=shown[1:])
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    p = parser()
    args = p.parse_args(arguments)
    try:
        plan = _plan(args)
    except ValueError as error:
        p.error(str(error))
    path = args.out.with_suffix(".jsonl")
    try:
        if args.times:
            _append(plan, path, step_times(plan))
        elif not args.report:
            _make_missing(plan, path)
        for written in write_report(read_runs(path), asdict(plan.config), args.out):
            print(written)
    except NetworkUnavailable as error:
        print(f"time_to_loss: {error}", file=sys.stderr)
        return EXIT_UNAVAILABLE
    except (JobFailed, ValueError) as error:
        print(f"time_to_loss: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("time_to_loss: interrupted; processes and namespaces are gone.", file=sys.stderr)
        return 130
    return 0


def _plan(args: argparse.Namespace) -> Plan:
    config = Config(**{field.name: getattr(args, field.name) for field in fields(Config)})
    config.check()
    at_least("--samples", args.samples, 2)
    seeds = range(at_least("--seeds", args.seeds, 1))
    named = listed("--runs", args.runs, _parse_run)
    if args.times:  # of two phases each by itself
        named = tuple(dict.fromkeys((name, phase) for name, run in named for phase in run.phases))
    runs = tuple((framework, strategy, seed) for seed in seeds for framework, strategy in named)
    return Plan(
        config,
        runs,
        rate=parse_rate(args.at),
        rates=listed("--rates", args.rates, parse_rate),
        samples=args.samples,
    )


def _parse_run(text: str) -> tuple[str, Strategy]:
    framework, _, name = text.partition("/")
    if framework not in FRAMEWORKS or not name:
        raise ValueError(
            f"`--runs` takes framework/strategy, as jax/allreduce or torch/powersgd-16, "
            f"got {text!r}."
        )
    strategy = parse_strategy(name)
    if not strategy.runs_in(framework):
        raise ValueError(f"`--runs` has {text!r}, which {framework} does not have.")
    return framework, strategy


def _make_missing(plan: Plan, path: Path) -> None:
    """Makes the runs that are not in the file yet."""
    setting, at = asdict(plan.config), plan.rate.name
    there = {
        _key(run) for run in read_runs(path) if run["config"] == setting and run.get("at") == at
    }
    missing = [run for run in plan.runs if (run[0], run[1].name, run[2]) not in there]
    if missing:
        plan = replace(plan, runs=tuple(missing))
        _append(plan, path, whole_runs(plan))


def _append(plan: Plan, path: Path, runs: Generator[dict[str, Any]]) -> None:
    """Adds what is measured to the file, as it comes."""
    check_available()
    signal.signal(signal.SIGTERM, _interrupt)
    setting = asdict(plan.config)
    with contextlib.closing(runs):
        for run in runs:
            about = describe("benchmarks.time_to_loss", _PACKAGES[run["framework"]])
            append_run(path, {**run, "config": setting, "about": about})
            print(_line(run), flush=True)


def _key(run: dict[str, Any]) -> tuple[str, str, int]:
    return run["framework"], run["strategy"], run["seed"]


def _line(run: dict[str, Any]) -> str:
    name = f"{run['framework']}/{run['strategy']}"
    if "curve" in run:
        steps, seconds, loss = run["curve"][-1]
        said = f"{loss:.4f} after {steps} steps in {seconds:.0f} s"
    else:
        each = {rate: 1e3 * median(times) for rate, times in run["seconds"].items()}
        said = ", ".join(f"{rate} {ms:,.0f} ms" for rate, ms in each.items())
    return f"{name:28} seed {run['seed']}  {said}"


def _interrupt(number: int, frame: object) -> NoReturn:
    del number, frame
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
