"""The tail of the momentum's spectrum in exact runs, and the gaps that it foretells.

The law of `jaxcomp.predict_gap` is fitted here, to tails from the second quarter of exact runs and
to the gaps of compressed ones; and settings are predicted that it was not fitted to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common.machine import describe
from benchmarks.common.paths import RESULTS
from benchmarks.common.runs import append_run, made_on, provenance, read_runs
from benchmarks.common.tables import in_page, markdown, with_interval
from benchmarks.convergence.runs import PACKAGES
from benchmarks.convergence.training import Trainer
from benchmarks.optimizers.report import Finished, made
from benchmarks.optimizers.settings import PREDICTED, STUDIES, UNSEEN, Setting, Study
from jaxcomp._bytes.gap import LAWS, TAIL_LAWS, TailLaw, ranks_of, read_momentum

OUT = RESULTS / "tails.jsonl"
COMMAND = "python -m benchmarks.optimizers --tail"
_READINGS = 8  # in a run, evenly spaced; those of its first half are made
_LEAST_STEPS = 480  # runs of fewer are not fitted: they lose less
_HEADER = ["", "rank", "tail", "seeds", "above exact (95%)", "by the tail", "by width and tokens"]


class Point(NamedTuple):
    """A rank in a setting: what the exact run's momentum leaves out, and what that cost."""

    study: Study
    rank: int
    tail: float
    gaps: list[float]  # per cent, by seed; none where no run is finished


def measure(path: Path, program: str, study: Study, exact: Setting) -> None:
    """Makes the first half of an exact run, seed 0, and appends its tails unless they are there.

    Args:
      path: Of the JSON lines.
      program: The module whose rows these are.
      study: Whose ranks are looked at.
      exact: Its exact average.
    """
    if _row(study, read_runs(path)) is not None:
        return
    config = study.config
    trainer = Trainer(config, exact.build(config), local=False)
    carry = trainer.start(0)
    stride = config.steps // _READINGS
    tails = dict[int, dict[int, float]]()
    for first in range(0, config.steps // 2, stride):
        carry = trainer.advance(carry, 0, first, first + stride)
        momentum = read_momentum(carry[1])
        tails[first + stride] = {}
        for setting in study.compressed(exact):
            if setting.rank:
                ranks = ranks_of(momentum.tree, setting.rank, setting.min_compression_rate, None)
                tails[first + stride][setting.rank] = round(momentum.tail(ranks), 4)
    run = {
        "setting": exact.stored,
        "seed": 0,
        "tails": tails,
        "config": asdict(config),
        "about": describe(program, PACKAGES),
    }
    append_run(path, run)
    print(f"{study.name or exact.label}: {tails}", flush=True)


def _row(study: Study, rows: Finished) -> dict[str, Any] | None:
    """Finds the exact run of a study among those whose tails were read."""
    config = asdict(study.config)
    # How often and on how much a run is evaluated changes nothing in its momentum.
    for name in ("eval_every", "eval_sequences"):
        del config[name]
    for row in rows:
        same = all(row["config"][name] == value for name, value in config.items())
        setting = row["setting"]
        searched = (setting["rate"], setting["momentum"]) in study.rates
        if same and searched and setting["optimizer"] == study.optimizer:
            return row
    return None


def points(studies: Sequence[Study], runs: Finished, rows: Finished) -> Iterator[Point]:
    """Yields every rank of which the tail is known.

    Args:
      studies: Whose.
      runs: Of `benchmarks.optimizers`.
      rows: Of `measure`.
    """
    for study in studies:
        row = _row(study, rows)
        if row is None:
            continue
        gaps = dict[int, list[float]]()
        results = made(study, runs)
        for setting, result in results.items():
            if setting.rank and setting.wire == "int6":
                gaps[setting.rank] = result.gaps(next(iter(results.values())))
        for rank, tail in _second_quarter(row).items():
            yield Point(study, rank, tail, gaps.get(rank, []))


def _second_quarter(row: dict[str, Any]) -> dict[int, float]:
    """Returns the mean tail by rank, over the readings from a quarter of a run to a half."""
    steps = row["config"]["steps"]
    several = dict[int, list[float]]()
    for step, tails in row["tails"].items():
        if steps // 4 <= int(step) <= steps // 2:
            for rank, tail in tails.items():
                several.setdefault(int(rank), []).append(tail)
    return {rank: mean(tails) for rank, tails in several.items()}


def fitted(optimizer: str, runs: Finished, rows: Finished) -> TailLaw:
    """Fits the two coefficients to the logarithms of the mean gaps, by least squares."""
    tails = []
    gaps = []
    for point in points((*STUDIES, *UNSEEN), runs, rows):
        long = point.study.config.steps >= _LEAST_STEPS
        if point.study.optimizer == optimizer and long and point.gaps and mean(point.gaps) > 0:
            tails.append(point.tail)
            gaps.append(mean(point.gaps))
    columns = np.stack([np.ones(len(tails)), np.log(tails)], 1)
    solution = np.linalg.lstsq(columns, np.log(gaps), rcond=None)[0]
    return TailLaw(
        settings=len(tails),
        tails=(min(tails), max(tails)),
        c=float(np.exp(solution[0])),
        power=float(solution[1]),
        error=float(np.std(np.log(gaps) - columns @ solution)),
    )


def laws(runs: Finished, rows: Finished) -> dict[str, TailLaw]:
    """Fits the law of each optimizer; its error is that of the settings that were predicted."""
    adamw = fitted("adamw", runs, rows)
    errors = []
    for point in points(PREDICTED, runs, rows):
        if point.gaps:
            errors.append(np.log(mean(point.gaps) / (100 * adamw.gap(point.tail))))
    error = float(np.sqrt(np.mean(np.square(errors))))
    by_optimizer = {}
    for name in TAIL_LAWS:
        by_optimizer[name] = replace(fitted(name, runs, rows), error=error)
    return by_optimizer


def table(several: Sequence[Point]) -> str:
    """Shows tails and gaps, and what both laws say of them."""
    lines = []
    for point in several:
        study = point.study
        law = TAIL_LAWS[study.optimizer]
        config = study.config
        tokens = config.replicas * config.batch_size * config.context
        guess = LAWS[study.optimizer].gap(point.rank, config.width, tokens)
        lines.append(
            [
                f"{study.optimizer}, {study.name}" if study.name else study.optimizer,
                str(point.rank),
                f"{point.tail:.3f}",
                str(len(point.gaps)),
                with_interval(point.gaps, "+.1f", "%"),
                f"+{100 * law.gap(point.tail):.1f}%",
                f"+{100 * guess:.1f}%",
            ]
        )
    return markdown(_HEADER, lines)


def paged(page: str, runs: Finished, rows: Finished) -> str:
    """Returns the page with the tables of what the momentum foretold.

    Raises:
      ValueError: If the page has no place for a table.
    """
    fit = table(list(points((*STUDIES, *UNSEEN), runs, rows)))
    page = in_page(page, COMMAND, f"{fit}\n\n{made_on(provenance(rows))}\n")
    predictions = table(list(points(PREDICTED, runs, rows)))
    return in_page(page, f"{COMMAND}, predicted", f"{predictions}\n")


def report(runs: Finished, rows: Finished) -> str:
    """Returns the coefficients as fitted now, the fit, and the predictions."""
    lines = []
    for name, law in laws(runs, rows).items():
        lines.append(f"{name}: {law}, of the fit {fitted(name, runs, rows).error:.2f}")
    lines += ["", table(list(points((*STUDIES, *UNSEEN), runs, rows)))]
    lines += ["", table(list(points(PREDICTED, runs, rows)))]
    return "\n".join(lines)
