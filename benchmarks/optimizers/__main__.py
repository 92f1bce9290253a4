"""What compression costs behind AdamW, Muon, SGD with momentum, Lion and Adafactor.

    python -m benchmarks.optimizers                        # what is missing; the report
    python -m benchmarks.optimizers --optimizers muon      # one of them
    python -m benchmarks.optimizers --report               # the tables in docs/convergence.md anew
    python -m benchmarks.optimizers --law                  # the law of jaxcomp.advise, fitted anew

For each optimizer an exact average at the best of some learning rates and momenta, searched on seed
0; then, with that rate and momentum, PowerSGD at falling bytes. AdamW and Muon have three seeds,
AdamW also two of four times the steps. In a model of four times the width, where a run takes four
to fifteen minutes, AdamW has eight seeds and Muon three. So have, behind AdamW, the settings of
which the law said in advance where they end. The model, the data and the simulated replicas are
those of `benchmarks.convergence`.

Every finished run is appended to benchmarks/results/optimizers.jsonl and not made again: stop the
command whenever you like and start it again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.common.arguments import check_runs, command_line, listed, one_of
from benchmarks.common.paths import RESULTS
from benchmarks.common.runs import read_runs
from benchmarks.common.tables import write_page
from benchmarks.convergence.runs import Runs
from benchmarks.convergence.training import Config
from benchmarks.optimizers.law import report as law_report
from benchmarks.optimizers.report import PAGE, best, paged
from benchmarks.optimizers.settings import (
    GRID,
    MAIN,
    UNSEEN,
    WIDE,
    Setting,
    Unseen,
    frontier,
    frontier_of_width,
    longer,
    wider,
)

PROGRAM = "benchmarks.optimizers"
OUT = RESULTS / "optimizers.jsonl"
LONG, LONG_SEEDS = ("adamw",), 2
WIDE_SEEDS = {"adamw": 8, "muon": 3}
UNSEEN_SEEDS = 8


def study(
    optimizer: str, runs: Runs[Setting], more: Runs[Setting], wide: Runs[Setting], seeds: int
) -> None:
    """Makes what is missing.

    Args:
      optimizer: Which.
      runs: Of the main setting.
      more: Of four times the steps.
      wide: Of four times the width.
      seeds: How many.
    """
    main = optimizer in MAIN
    exact = best(optimizer, runs.loss)
    for setting in (exact, *frontier(exact, full=main)):
        for seed in range(seeds if main else 1):
            runs.loss(setting, seed)
    if optimizer in LONG:
        for setting in (exact, replace(exact, rank=21, wire="int6")):
            for seed in range(min(LONG_SEEDS, seeds)):
                more.loss(setting, seed)
    if optimizer in WIDE:
        exact = best(optimizer, wide.loss, WIDE)
        for setting in (exact, *frontier_of_width(exact)):
            for seed in range(WIDE_SEEDS[optimizer]):
                wide.loss(setting, seed)


def predicted(unseen: Unseen, optimizer: str, runs: Runs[Setting]) -> None:
    """Makes what is missing of a setting of which the law said where it ends."""
    exact = best(optimizer, runs.loss, unseen.grid)
    for setting in (exact, replace(exact, rank=unseen.rank, wire="int6")):
        for seed in range(UNSEEN_SEEDS):
            runs.loss(setting, seed)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments, checked."""
    parser = command_line(PROGRAM, __doc__)
    add, shown = parser.add_argument, " (default: %(default)s)"
    add("--optimizers", default=",".join(GRID), help="which" + shown)
    add("--seeds", type=int, default=3, help="of AdamW and Muon" + shown)
    add("--steps", type=int, default=480, help="of each run" + shown)
    add("--out", type=Path, default=OUT, help="the runs" + shown)
    add("--report", action="store_true", help="only write the tables anew")
    add("--law", action="store_true", help="only fit the law of jaxcomp.advise, and print it")
    given = parser.parse_args(argv)
    check_runs(parser, given, Config.eval_every)
    try:
        given.optimizers = listed("--optimizers", given.optimizers, one_of("--optimizers", GRID))
    except ValueError as error:
        parser.error(str(error))
    return given


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    given = parse(argv)
    config = Config(steps=given.steps)
    if given.law:
        print(law_report(read_runs(given.out), read_runs(RESULTS / "time_to_loss.jsonl")))
        return 0
    if not given.report:
        for optimizer in given.optimizers:
            runs, more, wide = (
                Runs(given.out, each, Setting, PROGRAM)
                for each in (config, longer(config), wider(config, optimizer))
            )
            study(optimizer, runs, more, wide, given.seeds)
            for unseen in (each for each in UNSEEN if optimizer in each.grid):
                alike = replace(unseen.config, steps=given.steps, eval_every=given.steps)
                predicted(unseen, optimizer, Runs(given.out, alike, Setting, PROGRAM))
    if given.out == OUT:
        finished = read_runs(OUT)
        return write_page(PROGRAM, PAGE, lambda page: paged(page, finished, config))
    return 0


if __name__ == "__main__":
    sys.exit(main())
