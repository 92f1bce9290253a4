"""Measures the loss that compression costs behind AdamW, Muon, SGD, Lion and Adafactor.

    python -m benchmarks.optimizers                        # the missing runs, the report
    python -m benchmarks.optimizers --optimizers muon      # one optimizer
    python -m benchmarks.optimizers --report               # only the tables in docs/convergence.md
    python -m benchmarks.optimizers --law                  # only fit the law of jaxcomp.advise
    python -m benchmarks.optimizers --tail                 # only fit that of jaxcomp.predict_gap
    python -m benchmarks.optimizers --scale                # two larger models, on a GPU

For each optimizer it searches the best learning rate and momentum of an exact average, on seed 0.
With these it runs PowerSGD with fewer and fewer bytes. It runs AdamW also with more steps and
larger batches, and AdamW and Muon at four times the width, where a run takes four to forty minutes;
SGD, Lion and Adafactor run at half the width. It compares exact first steps at equal bytes, reads
the tail of the momentum's spectrum in the first half of exact runs, and tests predictions, also for
convolutions and an encoder. The data and the simulated replicas are those of
`benchmarks.convergence`.

Every finished run is appended to benchmarks/results/optimizers.jsonl, and tails to tails.jsonl.
None is repeated: you can stop the command and start it again at any time.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.arguments import call, command_line, listed, one_of
from benchmarks.common.paths import RESULTS
from benchmarks.common.runs import read_runs
from benchmarks.convergence.optimizers import OPTIMIZERS
from benchmarks.convergence.runs import Runs
from benchmarks.optimizers import laws, report, tail
from benchmarks.optimizers.settings import (
    BY_KIND,
    FIRST_STEPS,
    FROM_ONE_RANK,
    LATER,
    OTHERS,
    PREDICTED,
    SCALE,
    STUDIES,
    UNSEEN,
    Setting,
    Study,
    small,
)

OUT = RESULTS / "optimizers.jsonl"
_PROGRAM = "benchmarks.optimizers"


def make(study: Study, out: Path, tails: Path) -> None:
    """Makes the missing runs; reads the tails of exact runs first, as predictions for the others.

    Args:
      study: The study with the runs.
      out: The file of runs, in JSON lines.
      tails: The file of tails, in JSON lines.
    """
    runs = Runs(out, study.config, Setting, _PROGRAM)
    exact = study.exact(runs.loss)
    tail.measure(runs, study, exact, tails)
    for setting in (exact, *study.compressed(exact)):
        for seed in range(study.seeds):
            runs.loss(setting, seed)


def parser() -> argparse.ArgumentParser:
    """Makes the command line."""
    p = command_line(_PROGRAM, __doc__)
    add = p.add_argument
    known = listed(one_of(OPTIMIZERS))
    add("--optimizers", type=known, default=",".join(OPTIMIZERS), help="the optimizers")
    add("--out", type=Path, default=OUT, help="the file of runs")
    add("--report", action="store_true", help="only write the tables again")
    add("--law", "--tail", action="store_true", help="only fit both laws, and print them")
    add("--scale", action="store_true", help="only the two larger models")
    add("--dry-run", action="store_true", help="with --scale: small, nothing is stored")
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    p = parser()
    options = p.parse_args(arguments)
    if options.law:
        print(laws.report(read_runs(options.out)))
        return 0
    if options.scale and options.dry_run:
        with tempfile.TemporaryDirectory() as folder:
            for study in map(small, SCALE):
                make(study, Path(folder, "runs.jsonl"), Path(folder, "tails.jsonl"))
        return 0
    if not options.report:
        studies: Sequence[Study] = SCALE
        if not options.scale:
            studies = (
                *STUDIES,
                BY_KIND,
                *OTHERS,
                *FIRST_STEPS,
                *LATER,
                *PREDICTED,
                *FROM_ONE_RANK,
                *UNSEEN,
            )
        for study in studies:
            if study.optimizer in options.optimizers:
                make(study, options.out, tail.OUT)
    if options.out == OUT:
        try:
            report.PAGE.write_text(paged(report.PAGE.read_text(), read_runs(OUT)))
        except ValueError as error:
            p.error(str(error))
    return 0


def paged(page: str, runs: laws.Finished) -> str:
    """Returns the page with the tables of all studies, of the law and of the tails.

    Raises:
      ValueError: If no search is complete, or the page has no place for a table.
    """
    return laws.paged(report.paged(page, runs), runs)


if __name__ == "__main__":
    call(main)
