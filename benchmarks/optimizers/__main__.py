"""What compression costs behind AdamW, Muon, SGD with momentum, Lion and Adafactor.

    python -m benchmarks.optimizers                        # what is missing; the report
    python -m benchmarks.optimizers --optimizers muon      # one of them
    python -m benchmarks.optimizers --report               # the tables in docs/convergence.md anew
    python -m benchmarks.optimizers --law                  # the law in width and tokens, anew
    python -m benchmarks.optimizers --tail                 # the law of jaxcomp.predict_gap, anew
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
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.arguments import call, command_line, listed, one_of
from benchmarks.common.paths import RESULTS
from benchmarks.common.runs import read_runs
from benchmarks.common.tables import write_page
from benchmarks.convergence.optimizers import OPTIMIZERS
from benchmarks.convergence.runs import Runs
from benchmarks.optimizers import law, report, scale, tail
from benchmarks.optimizers.settings import FIRST_STEPS, PREDICTED, STUDIES, UNSEEN, Setting, Study

PROGRAM = "benchmarks.optimizers"
OUT = RESULTS / "optimizers.jsonl"


def make(study: Study, runs: Runs[Setting]) -> None:
    """Makes what is missing: the tails of exact runs first, so that they foretell the rest."""
    exact = study.exact(runs.loss)
    if study.optimizer in tail.TAIL_LAWS:
        tail.measure(tail.OUT, PROGRAM, study, exact)
    for setting in (exact, *study.compressed(exact)):
        for seed in range(study.seeds):
            runs.loss(setting, seed)


def parser() -> argparse.ArgumentParser:
    """Makes the command line."""
    p = command_line(PROGRAM, __doc__)
    add = p.add_argument
    shown = " (default: %(default)s)"
    known = listed(one_of(OPTIMIZERS))
    add("--optimizers", type=known, default=",".join(OPTIMIZERS), help="which" + shown)
    add("--out", type=Path, default=OUT, help="the runs" + shown)
    add("--report", action="store_true", help="only write the tables anew")
    add("--law", action="store_true", help="only fit the law in width and tokens, and print it")
    add("--tail", action="store_true", help="only fit the law of the momentum's tail, and print it")
    add("--scale", action="store_true", help="only the two larger models")
    add("--dry-run", action="store_true", help="with --scale: a step of each, and what it would be")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    options = parser().parse_args(argv)
    if options.law:
        links = read_runs(RESULTS / "time_to_loss.jsonl")
        others = read_runs(RESULTS / "convergence.jsonl")
        print(law.report(read_runs(options.out), links, others))
        return 0
    if options.tail:
        print(tail.report(read_runs(options.out), read_runs(tail.OUT)))
        return 0
    if options.scale:
        scale.run(PROGRAM, dry=options.dry_run)
        return 0
    if not options.report:
        for study in (*STUDIES, FIRST_STEPS, *PREDICTED, *UNSEEN):
            if study.optimizer in options.optimizers:
                make(study, Runs(options.out, study.config, Setting, PROGRAM))
    if options.out == OUT:
        finished = read_runs(OUT)
        return write_page(PROGRAM, report.PAGE, lambda page: paged(page, finished))
    return 0


def paged(page: str, finished: report.Finished) -> str:
    """Returns the page with the tables of all studies, of the law and of the tails.

    Raises:
      ValueError: If no search has come to its end, or the page has no place for a table.
    """
    page = report.paged(page, finished)
    page = law.paged(page, finished, read_runs(RESULTS / "time_to_loss.jsonl"))
    return tail.paged(page, finished, read_runs(tail.OUT))


if __name__ == "__main__":
    call(main)
