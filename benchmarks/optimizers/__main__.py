"""What compression costs behind AdamW, Muon, SGD with momentum, Lion and Adafactor.

    python -m benchmarks.optimizers                        # what is missing; the report
    python -m benchmarks.optimizers --optimizers muon      # one of them
    python -m benchmarks.optimizers --report               # the tables in docs/convergence.md anew
    python -m benchmarks.optimizers --law                  # the law of jaxcomp.advise, fitted anew
    python -m benchmarks.optimizers --spectrum             # the momentum's, by width and batch

For each optimizer an exact average at the best of some learning rates and momenta, searched on seed
0; then, with that rate and momentum, PowerSGD at falling bytes. AdamW also in longer runs and with
larger batches, AdamW and Muon in a model of four times the width, where a run takes four to forty
minutes. Last, behind AdamW, settings of which the law said in advance where they end. The model,
the data and the simulated replicas are those of `benchmarks.convergence`.

Every finished run is appended to benchmarks/results/optimizers.jsonl and not made again: stop the
command whenever you like and start it again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.arguments import command_line, listed, one_of
from benchmarks.common.paths import RESULTS
from benchmarks.common.runs import read_runs
from benchmarks.common.tables import write_page
from benchmarks.convergence.optimizers import OPTIMIZERS
from benchmarks.convergence.runs import Runs
from benchmarks.optimizers.law import report as law_report
from benchmarks.optimizers.report import PAGE, paged
from benchmarks.optimizers.settings import STUDIES, UNSEEN, Setting, Study
from benchmarks.optimizers.spectrum import table as spectrum

PROGRAM = "benchmarks.optimizers"
OUT = RESULTS / "optimizers.jsonl"


def make(study: Study, runs: Runs[Setting]) -> None:
    """Makes what is missing."""
    exact = study.exact(runs.loss)
    for setting in (exact, *study.compressed(exact)):
        for seed in range(study.seeds):
            runs.loss(setting, seed)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments, checked."""
    parser = command_line(PROGRAM, __doc__)
    add, shown = parser.add_argument, " (default: %(default)s)"
    add("--optimizers", default=",".join(OPTIMIZERS), help="which" + shown)
    add("--out", type=Path, default=OUT, help="the runs" + shown)
    add("--report", action="store_true", help="only write the tables anew")
    add("--law", action="store_true", help="only fit the law of jaxcomp.advise, and print it")
    add("--spectrum", action="store_true", help="only print how the momentum's energy is spread")
    given = parser.parse_args(argv)
    try:
        wanted = listed("--optimizers", given.optimizers, one_of("--optimizers", OPTIMIZERS))
    except ValueError as error:
        parser.error(str(error))
    given.optimizers = wanted
    return given


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    given = parse(argv)
    if given.law:
        print(law_report(read_runs(given.out), read_runs(RESULTS / "time_to_loss.jsonl")))
        return 0
    if given.spectrum:
        print(spectrum())
        return 0
    if not given.report:
        for study in (*STUDIES, *UNSEEN):
            if study.optimizer in given.optimizers:
                make(study, Runs(given.out, study.config, Setting, PROGRAM))
    if given.out == OUT:
        finished = read_runs(OUT)
        return write_page(PROGRAM, PAGE, lambda page: paged(page, finished))
    return 0


if __name__ == "__main__":
    sys.exit(main())
