"""Measures step times and bytes over slow links, jaxcomp beside PyTorch's DDP.

    sudo python -m benchmarks.cluster
    sudo python -m benchmarks.cluster --rates 1gbit --models mlp --strategies none,powersgd-4

It starts several processes on this machine, each in its own network namespace and on one core, and
joins them by links of a given rate. It then trains the same models with the same strategies in JAX
and in PyTorch, both over gloo. At every rate it times each strategy first in one framework and then
in the other, so that ratios come from one run. It reads bytes from the counters of the interfaces.

It needs Linux, root (namespaces, tc) and iproute2. Everything that it sets up is in namespaces of
this run, and is removed at the end. Links have a rate but no added delay, because some kernels lack
sch_netem; the model of `python -m jaxcomp advise` includes latency. Run it on a quiet machine with
at least one core per process.

It writes cluster.json (all results and samples), cluster.md and cluster.png.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from pathlib import Path

from benchmarks.cluster.command import PACKAGES, over_links
from benchmarks.cluster.job import ENVIRONMENT
from benchmarks.cluster.measure import Plan, measure
from benchmarks.cluster.plan import FRAMEWORKS, STRATEGIES, Strategy, parse_rate, parse_strategy
from benchmarks.cluster.report import BUSY, figures_of, write_report
from benchmarks.common.arguments import at_least, command_line, listed, one_of
from benchmarks.common.machine import describe
from benchmarks.common.paths import RESULTS

TRIAL = Path("out/cluster")
MODELS = ("mlp", "transformer")
_PROGRAM = "benchmarks.cluster"


def parser() -> argparse.ArgumentParser:
    """Makes the command line; its arguments are the fields of a plan."""
    p = command_line(_PROGRAM, __doc__)
    add = p.add_argument
    add("--processes", type=at_least(int, 2), default=2, metavar="N", help="at least 2")
    rates = "unlimited,1gbit,100mbit,10mbit"
    add("--rates", type=listed(parse_rate), default=rates, help="rates of the links")
    add("--models", type=listed(one_of(MODELS)), default="transformer", help=", ".join(MODELS))
    frameworks = ",".join(FRAMEWORKS)
    add("--frameworks", type=listed(one_of(FRAMEWORKS)), default=frameworks, help=frameworks)
    add("--strategies", type=listed(_of_one_phase), default=STRATEGIES, help="any rank")
    add("--steps", type=at_least(int, 2), default=40, help="steps per case, at most")
    fewer = "a case whose steps take longer gets by on fewer, at least 2"
    add("--seconds-per-case", type=at_least(float, 0.1), default=3.0, help=fewer)
    add("--tiny", action="store_true", help="small models, to try the command")
    add("--out", type=Path, help=f"folder, by default benchmarks/results, or {TRIAL} if --tiny")
    add("--report", action="store_true", help="only write table and picture again")
    return p


def _of_one_phase(text: str) -> Strategy:
    strategy = parse_strategy(text)
    if strategy.start:
        names = " and ".join(phase.name for phase in strategy.phases)
        raise ValueError(f"the steps of {text!r} are of two kinds, {names}")
    return strategy


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    p = parser()
    options = vars(p.parse_args(argv))
    out = options.pop("out") or (TRIAL if options["tiny"] else RESULTS)
    anew = options.pop("report")
    plan = Plan(**options)
    if not anew:
        return over_links("cluster", lambda: run(plan, out))
    if not (out / "cluster.json").exists():
        p.error(f"--report needs {out / 'cluster.json'}, which a run without it writes.")
    write_report(json.loads((out / "cluster.json").read_text()), out)
    return 0


def run(plan: Plan, out: Path) -> None:
    """Measures, and writes the results.

    Raises:
      NetworkUnavailable: If the network cannot be made.
      JobFailed: If a process fails.
    """
    packages: list[str] = []
    for framework in plan.frameworks:
        packages += PACKAGES[framework]
    content = describe(_PROGRAM, packages)
    content["settings"] = dataclasses.asdict(plan) | {"environment": ENVIRONMENT}
    content["complete"] = False
    content["cases"] = []
    if content["machine"]["busy_cores_at_start"] > BUSY:
        print("cluster: other programs are running; the times will be off.", file=sys.stderr)
    try:
        with contextlib.closing(measure(plan)) as cases:
            for case in cases:
                content["cases"].append(dataclasses.asdict(case))
                median, low, high, wire, _ = figures_of(case)
                name = f"{case.model:12} {case.rate:10} {case.strategy:24} {case.framework:6}"
                milliseconds = f"{1e3 * median:10.1f} ms ({1e3 * low:.1f} to {1e3 * high:.1f})"
                print(f"{name}{milliseconds}, {wire / 1e3:10,.1f} kB", flush=True)
        content["complete"] = True
    finally:
        # Whatever ends the run, what was measured until then is kept, and marked as a part.
        if content["cases"]:
            out.mkdir(parents=True, exist_ok=True)
            write_report(content, out)


if __name__ == "__main__":
    sys.exit(main())
