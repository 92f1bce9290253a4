"""Where PowerSGD does not converge, which options do, and what they cost in ordinary training.

    python -m benchmarks.counterexample              # what is missing, then the table
    python -m benchmarks.counterexample --report     # the table in docs/convergence.md anew

`problem` has the mathematics. Every case runs on it for 4,000 steps; some also train the language
model of `benchmarks.convergence`, to see what they cost where nothing is wrong.

Every finished run is appended to benchmarks/results/counterexample.jsonl and not made again: stop
the command whenever you like and start it again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import optax

from benchmarks.common.arguments import at_least, command_line
from benchmarks.common.machine import describe
from benchmarks.common.paths import RESULTS
from benchmarks.common.runs import append_run, read_runs
from benchmarks.common.tables import write_page
from benchmarks.convergence.training import Config, Trainer, adamw, corpus
from benchmarks.counterexample.cases import CASES, Case
from benchmarks.counterexample.problem import Problem
from benchmarks.counterexample.report import PAGE, paged

PACKAGES = ("jax", "flax", "optax")
OUT = RESULTS / "counterexample.jsonl"
STEPS = 4_000
# (problem, rank): the rank is that of the noise.
PROBLEMS = {
    "apart": (Problem(), 1),
    "rotated": (Problem(rotated=True), 1),
    "four": (Problem(noisy=4), 4),
}
MODELS = {"r16-int8": (16, "int8"), "r4": (4, None)}
# What decides is trained on several seeds.
SEVERAL = {("default", "r16-int8"), ("cold", "r16-int8"), ("one-fresh", "r16-int8")}


def descend(case: Case, problem: Problem, rank: int) -> float:
    """The largest loss of the last quarter, as a multiple of the first."""
    losses, _ = problem.descend(case.build(rank + case.more), STEPS)
    return float(losses[-STEPS // 4 :].max())


class Model:
    """The language model with a case; compiled once for all seeds."""

    def __init__(self, case: Case, rank: int, wire: str | None):
        options = {"comm_dtype": wire, "min_compression_rate": 2.0}
        config = Config()
        tx = optax.chain(case.build(rank, **options), adamw(config))
        self.trainer = Trainer(config, tx, local=False, corpus=corpus())

    def loss(self, seed: int) -> float:
        """The final held-out loss, nats per byte."""
        return self.trainer.run(seed).curve[-1][1]


def study(path: Path, seeds: int) -> None:
    """Makes what is missing."""
    there = {(run["case"], run["setting"], run["seed"]) for run in read_runs(path)}

    def keep(name: str, setting: str, seed: int, loss: float) -> None:
        about = describe("benchmarks.counterexample", PACKAGES)
        run = {"case": name, "setting": setting, "seed": seed, "loss": loss, "about": about}
        append_run(path, run)
        print(f"{name:12} {setting:9} {seed} {loss:.4g}", flush=True)

    for name, case in CASES.items():
        for setting, (problem, rank) in PROBLEMS.items():
            if (name, setting, 0) not in there:
                keep(name, setting, 0, descend(case, problem, rank))
    trained = [(name, setting) for setting in MODELS for name, x in CASES.items() if x.train]
    for name, setting in trained:
        several = range(seeds if (name, setting) in SEVERAL else 1)
        missing = [seed for seed in several if (name, setting, seed) not in there]
        if missing:
            model = Model(CASES[name], *MODELS[setting])
            for seed in missing:
                keep(name, setting, seed, model.loss(seed))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments, checked."""
    parser = command_line("benchmarks.counterexample", __doc__)
    shown = " (default: %(default)s)"
    parser.add_argument("--seeds", type=int, default=3, help="of what decides" + shown)
    parser.add_argument("--out", type=Path, default=OUT, help="the runs" + shown)
    parser.add_argument("--report", action="store_true", help="only write the table anew")
    given = parser.parse_args(argv)
    try:
        at_least("--seeds", given.seeds, 1)
    except ValueError as error:
        parser.error(str(error))
    return given


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    given = parse(argv)
    if not given.report:
        study(given.out, given.seeds)
    if given.out == OUT:
        finished = read_runs(OUT)
        return write_page("benchmarks.counterexample", PAGE, lambda page: paged(page, finished))
    return 0


if __name__ == "__main__":
    sys.exit(main())
