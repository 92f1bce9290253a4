"""Step times and bytes of data-parallel training over slow links: jaxcomp beside PyTorch's DDP.

    sudo python -m benchmarks.cluster
    sudo python -m benchmarks.cluster --rates 1gbit --models mlp --strategies none,powersgd-4

Starts several processes on this machine, each in its own network namespace and on one core, joins
them by links of a given rate, and trains the same models with the same strategies in JAX and in
PyTorch, both over gloo, in turn: at every rate each strategy is timed in the one and then in the
other, so that ratios are within one run. Bytes are read from the counters of the interfaces.

Needs Linux, root (namespaces, tc) and iproute2; everything that it sets up lies in namespaces of
this run, and is gone afterwards. Links have a rate but no added delay, because the kernels this was
written for lack sch_netem: what latency costs is in the model of `python -m jaxcomp advise`. Run it
on a quiet machine with at least one core per process.

Writes cluster.json (everything, each sample too), cluster.md and cluster.png.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.cluster.job import ENVIRONMENT, JobFailed
from benchmarks.cluster.measure import Plan, measure
from benchmarks.cluster.net import NetworkUnavailable, check_available
from benchmarks.cluster.plan import (
    DEFAULT_RATES,
    DEFAULT_STRATEGIES,
    FRAMEWORKS,
    MODELS,
    Strategy,
    parse_rate,
    parse_strategy,
)
from benchmarks.cluster.report import BUSY, Case, all_figures, conditions, figures_of, table
from benchmarks.common.arguments import at_least, command_line, listed, one_of
from benchmarks.common.machine import describe
from benchmarks.common.paths import RESULTS

# Exit codes; 2 is argparse's, for wrong arguments.
EXIT_FAILED, EXIT_UNAVAILABLE = 1, 3
TRIAL = Path("out/cluster")
_PACKAGES = {"jax": ("jax", "flax", "optax"), "torch": ("torch",)}


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    plan, out, anew = parse(argv)
    if anew:
        report(json.loads((out / "cluster.json").read_text()), out)
        return 0
    try:
        check_available()
        check_packages(plan)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _interrupt)
        run = {**settings(plan), "complete": False, "cases": []}
        if run["machine"]["busy_cores_at_start"] > BUSY:
            print("cluster: other programs are running; the times will be off.", file=sys.stderr)
        out.mkdir(parents=True, exist_ok=True)
        try:
            with contextlib.closing(measure(plan)) as cases:
                for case in cases:
                    run["cases"].append(dataclasses.asdict(case))
                    print(_line(case), flush=True)
            run["complete"] = True
        finally:
            # Whatever ends the run, what was measured until then is kept, and marked as a part.
            if run["cases"]:
                report(run, out)
    except (NetworkUnavailable, JobFailed) as error:
        print(f"cluster: {error}", file=sys.stderr)
        return EXIT_UNAVAILABLE if isinstance(error, NetworkUnavailable) else EXIT_FAILED
    except KeyboardInterrupt:
        print("cluster: interrupted; processes and namespaces are gone.", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


def parse(argv: list[str] | None) -> tuple[Plan, Path, bool]:
    """Arguments as a plan, where the results go, and whether only the report is made."""
    parser = command_line("benchmarks.cluster", __doc__)
    shown = " (default: %(default)s)"
    add = parser.add_argument
    add("--processes", type=int, default=2, metavar="N", help="at least 2" + shown)
    add("--rates", default=",".join(DEFAULT_RATES), help="of every link" + shown)
    add("--models", default=",".join(MODELS), help="10 million parameters each" + shown)
    add("--strategies", default=",".join(DEFAULT_STRATEGIES), help="with any rank" + shown)
    add("--frameworks", default=",".join(FRAMEWORKS), help=shown.strip())
    add("--steps", type=int, default=40, metavar="N", help="at most, per case" + shown)
    add("--seconds-per-case", type=float, default=3.0, metavar="S",
        help="a case whose steps take longer gets by on fewer, at least 2" + shown)  # fmt: skip
    add("--tiny", action="store_true", help="small models, to see whether it works here")
    add("--out", type=Path, help=f"folder (default: benchmarks/results; {TRIAL} if --tiny)")
    add("--report", action="store_true", help="only write table and picture of a cluster.json anew")
    given = parser.parse_args(argv)
    try:
        plan = Plan(
            processes=at_least("--processes", given.processes, 2),
            models=listed("--models", given.models, one_of("--models", MODELS)),
            rates=listed("--rates", given.rates, parse_rate),
            strategies=listed("--strategies", given.strategies, _of_one_phase),
            frameworks=listed("--frameworks", given.frameworks, one_of("--frameworks", FRAMEWORKS)),
            steps=at_least("--steps", given.steps, 2),
            seconds_per_case=at_least("--seconds-per-case", given.seconds_per_case, 0.1),
            tiny=given.tiny,
        )
    except ValueError as error:
        parser.error(str(error))
    out = given.out or (TRIAL if plan.tiny else RESULTS)
    if given.report and not (out / "cluster.json").exists():
        parser.error(f"--report needs {out / 'cluster.json'}, which a run without it writes.")
    return plan, out, given.report


def _of_one_phase(text: str) -> Strategy:
    strategy = parse_strategy(text)
    if strategy.start:
        names = " and ".join(phase.name for phase in strategy.phases)
        raise ValueError(f"`--strategies`: the steps of {text!r} are of two kinds, {names}.")
    return strategy


def check_packages(plan: Plan) -> None:
    """Makes sure that what the plan needs is installed.

    Raises:
      NetworkUnavailable: If not.
    """
    wanted = [package for name in plan.frameworks for package in _PACKAGES[name]]
    missing = [p for p in [*wanted, "matplotlib"] if importlib.util.find_spec(p) is None]
    if missing:
        raise NetworkUnavailable(
            f"benchmarks.cluster needs {', '.join(missing)}: pip install -e '.[test]' brings all."
        )


def settings(plan: Plan) -> dict[str, Any]:
    """Where, how and with what this run is made."""
    packages = [package for name in plan.frameworks for package in _PACKAGES[name]]
    how = {**dataclasses.asdict(plan), "environment": ENVIRONMENT}
    return {**describe("benchmarks.cluster", packages), "settings": how}


def _line(case: Case) -> str:
    figures = figures_of(case)
    return (
        f"{case.model:12} {case.rate:10} {case.strategy:24} {case.framework:6}"
        f"{figures.median * 1e3:10.1f} ms ({figures.low * 1e3:.1f} to {figures.high * 1e3:.1f}), "
        f"{figures.wire / 1e3:10,.1f} kB"
    )


def report(run: dict[str, Any], out: Path) -> None:
    """Writes everything, the table and the picture."""
    from benchmarks.cluster.plot import plot  # matplotlib, which a refusal does not need

    (out / "cluster.json").write_text(json.dumps(run, separators=(",", ":")) + "\n")
    figures = all_figures(Case(**case) for case in run["cases"])
    text = "\n".join(["## Step times over shaped links", "", conditions(run), "", table(figures)])
    (out / "cluster.md").write_text(text)
    plot(figures, out / "cluster.png")
    print(f"{out / 'cluster.json'}, cluster.md, cluster.png")


def _interrupt(*_: Any) -> NoReturn:
    # The first one ends the run; what takes it down must not be interrupted in turn.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
