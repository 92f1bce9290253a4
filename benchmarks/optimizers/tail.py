"""The tail of the momentum's spectrum in exact runs, and the gaps that it foretells.

The law of `jaxcomp.predict_gap` is fitted here, to tails from the second quarter of exact runs and
to the gaps of compressed ones; and settings are predicted that it was not fitted to.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common.machine import describe
from benchmarks.common.paths import RESULTS
from benchmarks.common.runs import append_run, made_on, read_runs
from benchmarks.common.tables import in_page, markdown, with_interval
from benchmarks.convergence.runs import PACKAGES
from benchmarks.convergence.training import Trainer
from benchmarks.optimizers.report import Finished, Gaps, gaps_of, logarithmic_error, made
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
    gaps: Gaps  # without percents where no run is finished
    tail: float


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
        config = study.config
        tokens = config.replicas * config.batch_size * config.context
        by_rank = {}
        for setting, gaps in zip(_ranked(study, runs), gaps_of(study, runs), strict=True):
            if setting.wire == "int6":
                by_rank[gaps.rank] = gaps
        for rank, tail in _second_quarter(row).items():
            none = Gaps(study.name, config.width, tokens, rank, [])
            yield Point(study, by_rank.get(rank, none), tail)


def _ranked(study: Study, runs: Finished) -> list[Setting]:
    return [setting for setting in made(study, runs) if setting.rank]


def _second_quarter(row: dict[str, Any]) -> dict[int, float]:
    """Returns the mean tail by rank, over the readings from a quarter of a run to a half."""
    steps = row["config"]["steps"]
    several = defaultdict[int, list[float]](list)
    for step, tails in row["tails"].items():
        if steps // 4 <= int(step) <= steps // 2:
            for rank, tail in tails.items():
                several[int(rank)].append(tail)
    return {rank: mean(tails) for rank, tails in several.items()}


def fitted(optimizer: str, runs: Finished, rows: Finished) -> TailLaw:
    """Fits the two coefficients to the logarithms of the mean gaps, by least squares."""
    tails = []
    gaps = []
    for study, (*_, percents), tail in points((*STUDIES, *UNSEEN), runs, rows):
        long = study.config.steps >= _LEAST_STEPS
        if study.optimizer == optimizer and long and percents and mean(percents) > 0:
            tails.append(tail)
            gaps.append(mean(percents))
    power, constant = np.polyfit(np.log(tails), np.log(gaps), 1)
    law = TailLaw(len(tails), (min(tails), max(tails)), float(np.exp(constant)), float(power), 0.0)
    expected = [100 * law.gap(tail) for tail in tails]
    return replace(law, error=logarithmic_error(gaps, expected))


def laws(runs: Finished, rows: Finished) -> dict[str, TailLaw]:
    """Fits the law of each optimizer; its error is that of the settings that were predicted."""
    adamw = fitted("adamw", runs, rows)
    run = [point for point in points(PREDICTED, runs, rows) if point.gaps.percents]
    means = [mean(point.gaps.percents) for point in run]
    error = logarithmic_error(means, [100 * adamw.gap(point.tail) for point in run])
    return {name: replace(fitted(name, runs, rows), error=error) for name in TAIL_LAWS}


def table(studies: Sequence[Study], runs: Finished, rows: Finished) -> str:
    """Shows tails and gaps, and what both laws say of them."""
    lines = []
    for study, gaps, tail in points(studies, runs, rows):
        guess = LAWS[study.optimizer].gap(gaps.rank, gaps.width, gaps.tokens)
        lines.append(
            [
                f"{study.optimizer}, {study.name}" if study.name else study.optimizer,
                str(gaps.rank),
                f"{tail:.3f}",
                str(len(gaps.percents)),
                with_interval(gaps.percents, "+.1f", "%"),
                f"+{100 * TAIL_LAWS[study.optimizer].gap(tail):.1f}%",
                f"+{100 * guess:.1f}%",
            ]
        )
    return markdown(_HEADER, lines)


def paged(page: str, runs: Finished, rows: Finished) -> str:
    """Returns the page with the tables of what the momentum foretold.

    Raises:
      ValueError: If the page has no place for a table.
    """
    fit = table((*STUDIES, *UNSEEN), runs, rows)
    page = in_page(page, COMMAND, f"{fit}\n\n{made_on(rows)}\n")
    return in_page(page, f"{COMMAND}, predicted", f"{table(PREDICTED, runs, rows)}\n")


def report(runs: Finished, rows: Finished) -> str:
    """Returns the coefficients as fitted now, the fit, and the predictions."""
    lines = []
    for name, law in laws(runs, rows).items():
        lines.append(f"{name}: {law}, of the fit {fitted(name, runs, rows).error:.2f}")
    fit = table((*STUDIES, *UNSEEN), runs, rows)
    return "\n".join([*lines, "", fit, "", table(PREDICTED, runs, rows)])
