"""What compression costs behind AdamW, Muon, SGD with momentum, Lion and Adafactor.

    python -m benchmarks.optimizers                        # what is missing; the report
    python -m benchmarks.optimizers --optimizers muon      # one of them
    python -m benchmarks.optimizers --report               # the tables in docs/convergence.md anew
    python -m benchmarks.optimizers --law                  # of jaxcomp.advise, and the next, anew
    python -m benchmarks.optimizers --tail                 # of jaxcomp.predict_gap, likewise
    python -m benchmarks.optimizers --scale                # two larger models, on a GPU

For each optimizer an exact average at the best of some learning rates and momenta, searched on seed
0; then, with that rate and momentum, PowerSGD at falling bytes. AdamW also in longer runs and with
larger batches, AdamW and Muon in a model of four times the width, where a run takes four to forty
minutes. The first steps at equal bytes. The tail of the momentum's spectrum in the first half of
exact runs, and settings of which a law said in advance where they end. The model, the data and the
simulated replicas are those of `benchmarks.convergence`.

Every finished run is appended to benchmarks/results/optimizers.jsonl, tails to tails.jsonl, and not
made again: stop the command whenever you like and start it again.
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
    FIRST_STEPS,
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
    """Makes what is missing: the tails of exact runs first, so that they foretell the rest.

    Args:
      study: Whose runs.
      out: Of the runs, in JSON lines.
      tails: Likewise, of the tails.
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
    add("--optimizers", type=known, default=",".join(OPTIMIZERS), help="behind which")
    add("--out", type=Path, default=OUT, help="the runs")
    add("--report", action="store_true", help="only write the tables anew")
    add("--law", "--tail", action="store_true", help="only fit both laws, and print them")
    add("--scale", action="store_true", help="only the two larger models")
    add("--dry-run", action="store_true", help="with --scale: at a size for a CPU, nothing is kept")
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
        studies = SCALE if options.scale else (*STUDIES, FIRST_STEPS, *PREDICTED, *UNSEEN)
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
      ValueError: If no search has come to its end, or the page has no place for a table.
    """
    return laws.paged(report.paged(page, runs), runs)


if __name__ == "__main__":
    call(main)
