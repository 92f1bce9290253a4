"""DiLoCo at its best: outer rate and momentum, inner rate, moments, a data parallel start, H.

    python -m benchmarks.diloco                    # what is missing of both searches; the report
    python -m benchmarks.diloco --inner muon       # one of them
    python -m benchmarks.diloco --report           # the table in docs/local_sgd.md anew

For each inner optimizer: data parallel at the best of three learning rates, then DiLoCo with rounds
of 30 steps, searched line by line on seed 0 from the paper's outer optimizer. What it ends with is
trained on three seeds beside data parallel, with other rounds, with 8-bit integers on the wire, and
in a run of four times the steps. The model, the data and the simulated replicas are those of
`benchmarks.convergence`.

Every finished run is appended to benchmarks/results/diloco.jsonl and not made again: stop the
command whenever you like and start it again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.common.arguments import check_runs, command_line
from benchmarks.common.paths import RESULTS
from benchmarks.common.runs import read_runs
from benchmarks.common.tables import write_page
from benchmarks.convergence.runs import Runs
from benchmarks.convergence.training import Config
from benchmarks.diloco.report import PAGE, paged
from benchmarks.diloco.settings import INNER, Setting, in_longer, longer, parallel, search

OUT = RESULTS / "diloco.jsonl"
OTHER_ROUNDS = (8, 60)


def study(inner: str, runs: Runs[Setting], longer: Runs[Setting], seeds: int) -> None:
    """Makes what is missing; `longer` has the runs of `LONGER` times the steps."""
    exact, steps = parallel(inner, runs.loss), list(search(inner, runs.loss))
    chosen = steps[-1][1]
    several = (exact, chosen, replace(chosen, int8=True), replace(chosen, start=0.0))
    for setting in dict.fromkeys(several):
        for seed in range(seeds):
            runs.loss(setting, seed)
    for every in OTHER_ROUNDS:
        runs.loss(replace(chosen, every=every), 0)
    for setting in (exact, *in_longer(chosen)):
        longer.loss(setting, 0)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments, checked."""
    parser = command_line("benchmarks.diloco", __doc__)
    parser.add_argument("--inner", choices=INNER, help="only this inner optimizer")
    parser.add_argument("--seeds", type=int, default=3, help="of the chosen (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=480, help="of each run (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=OUT, help="the runs (default: %(default)s)")
    parser.add_argument("--report", action="store_true", help="only write the table anew")
    given = parser.parse_args(argv)
    check_runs(parser, given, Config.eval_every)
    return given


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    given = parse(argv)
    config = Config(steps=given.steps)
    if not given.report:
        runs, more = (
            Runs(given.out, each, Setting, "benchmarks.diloco") for each in (config, longer(config))
        )
        for inner in [given.inner] if given.inner else INNER:
            study(inner, runs, more, given.seeds)
    if given.out == OUT:
        finished = read_runs(OUT)
        return write_page("benchmarks.diloco", PAGE, lambda page: paged(page, finished, config))
    return 0


if __name__ == "__main__":
    sys.exit(main())
