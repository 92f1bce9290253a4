"""Fits two laws of the loss of a rank to committed runs, and compares them with other runs.

The law of `jaxcomp.advise` uses the model's width and the tokens in a step. The law of
`jaxcomp.predict_gap` uses the tail of the momentum's spectrum in the second quarter of an exact
run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from statistics import mean
from typing import NamedTuple

import numpy as np

from benchmarks.common.paths import RESULTS
from benchmarks.common.runs import Run, made_on, read_runs
from benchmarks.common.tables import in_page, markdown, with_interval
from benchmarks.convergence import strategies
from benchmarks.convergence.runs import results
from benchmarks.optimizers import tail
from benchmarks.optimizers.report import made
from benchmarks.optimizers.settings import (
    BY_KIND,
    FIRST_STEPS,
    FROM_ONE_RANK,
    OTHERS,
    PREDICTED,
    STUDIES,
    UNSEEN,
    Study,
)
from benchmarks.time_to_loss import report as over_links
from benchmarks.time_to_loss.task import Config as OverLinks
from jaxcomp._bytes.gap import LAWS, TAIL_LAWS, USUAL_TOKENS, Law, TailLaw

LAW = "python -m benchmarks.optimizers --law"
TAIL = "python -m benchmarks.optimizers --tail"
_LEAST_STEPS = 480  # runs of fewer are not fitted: they lose less
_LEAST_SEEDS = 8  # of a rank that a law of the tail is fitted to
# Of `benchmarks.time_to_loss`, with what sets them apart.
_OVER_LINKS = {
    "jax/powersgd-32-int6": "int6",
    "jax/powersgd-32-int6-every-4": "rounds of 4 steps",
    "torch/powersgd-32": "torch's hook",
}
_WITHOUT_LAW = tuple(study.optimizer for study in OTHERS)
Finished = Sequence[Run]  # of `benchmarks.optimizers`, if nothing else is said


# The first columns of the tables of tails.
_MEASURED = ("", "rank", "tail", "seeds", "above exact (95%)")


class Point(NamedTuple):
    """A rank in a setting, with its gaps and the tail of the exact run's momentum."""

    optimizer: str
    name: str
    steps: int
    width: int
    tokens: int  # in a step of all replicas
    rank: int
    percents: list[float]  # above the exact runs of the same seeds
    kind: str = "transformer"
    tail: float | None = None  # None where it was not read

    @property
    def gap(self) -> float:
        """Returns the mean gap of its runs, in per cent."""
        return mean(self.percents)

    @property
    def guess(self) -> float:
        """Returns the gap that the adviser's law predicts, in per cent."""
        return 100 * LAWS[self.optimizer].gap(self.rank, self.width, self.tokens)


def points(studies: Iterable[Study], runs: Finished, rows: Finished = ()) -> Iterator[Point]:
    """Yields every rank that was run, without ranks by spectrum.

    Args:
      studies: The studies.
      runs: Those that were made.
      rows: Of `tail.measure`.
    """
    for study in studies:
        by_setting = made(study, runs)
        tails = tail.find(study, rows)
        config = study.config
        for setting, result in by_setting.items():
            if setting.rank:
                percents = result.gaps(next(iter(by_setting.values())))
                known = tails.get(setting.kept) if setting.wire == "int6" else None
                yield Point(
                    study.optimizer,
                    study.name,
                    config.steps,
                    config.width,
                    config.tokens,
                    setting.rank,
                    percents,
                    config.kind,
                    known,
                )


def predicted(runs: Finished, rows: Finished = ()) -> list[Point]:
    """Returns the first rank of each setting in `PREDICTED`, so that every model counts once."""
    return [next(points([study], runs, rows)) for study in PREDICTED]


def _logarithmic_error(gaps: Sequence[float], expected: Sequence[float]) -> float:
    """Returns the root mean square of the differences of logarithms."""
    differences = np.log(np.divide(gaps, expected))
    return float(np.sqrt(np.mean(np.square(differences))))


def laws(runs: Finished) -> dict[str, Law]:
    """Fits the law in width and tokens for each optimizer.

    Its error is that of the transformers in `PREDICTED`: it is a law of transformers.
    """
    several = list(points(STUDIES, runs))
    # Depth and context were changed behind AdamW alone.
    law = _law("adamw", several, error=0.0)

    gaps = []
    expected = []
    for point in predicted(runs):
        if point.kind == "transformer":
            gaps.append(point.gap)
            expected.append(100 * law.gap(point.rank, point.width, point.tokens))
    error = _logarithmic_error(gaps, expected)
    return {name: _law(name, several, error) for name in LAWS}


def _law(optimizer: str, several: Sequence[Point], error: float) -> Law:
    """Fits the coefficients by least squares, over single runs."""
    rows = []
    for point in several:
        if point.optimizer == optimizer and point.steps >= _LEAST_STEPS:
            for percent in point.percents:
                rows.append((point.width, point.tokens, point.rank, percent))
    widths, tokens, ranks, percents = np.array(rows, float).T
    times = np.sqrt(tokens / USUAL_TOKENS)
    columns = np.stack([times / ranks, -times / widths], axis=1)
    (a, ak), *_ = np.linalg.lstsq(columns, percents, rcond=None)
    return Law(
        runs=len(rows),
        widths=(int(widths.min()), int(widths.max())),
        tokens=(int(tokens.min()), int(tokens.max())),
        a=float(a),
        k=float(ak / a),
        error=error,
    )


def tail_laws(runs: Finished, rows: Finished) -> dict[str, TailLaw]:
    """Fits the law of the tail for each optimizer; the error is that of AdamW's in `PREDICTED`.

    Args:
      runs: Those that were made.
      rows: Of `tail.measure`.
    """
    several = list(points((*STUDIES, *UNSEEN), runs, rows))
    law = _tail_law(_fitted("adamw", several), error=0.0)
    error = tail_error(law, predicted(runs, rows))
    return {name: _tail_law(_fitted(name, several), error) for name in TAIL_LAWS}


def tail_error(law: TailLaw, several: Iterable[Point]) -> float:
    """Returns the root mean square error of the law's logarithm, over settings with a tail."""
    gaps = []
    expected = []
    for point in several:
        gaps.append(point.gap)
        expected.append(100 * law.gap(point.tail or 0.0))
    return _logarithmic_error(gaps, expected)


def _fitted(optimizer: str, several: Iterable[Point]) -> list[Point]:
    """Returns the settings of an optimizer that a law of the tail is fitted to."""
    fitted = []
    for point in several:
        # A gap below zero has no logarithm.
        fits = point.optimizer == optimizer and point.steps >= _LEAST_STEPS and point.gap > 0
        enough = len(point.percents) >= _LEAST_SEEDS or optimizer in _WITHOUT_LAW
        if fits and enough and point.tail:
            fitted.append(point)
    return fitted


def _tail_law(fitted: Sequence[Point], error: float) -> TailLaw:
    """Fits a line to the logarithms of the mean gaps, by least squares."""
    tails = [point.tail or 0.0 for point in fitted]
    gaps = [point.gap for point in fitted]
    power, constant = np.polyfit(np.log(tails), np.log(gaps), 1)
    extent = (min(tails), max(tails))
    return TailLaw(len(tails), extent, float(np.exp(constant)), float(power), error)


def in_sample(runs: Finished, rows: Finished) -> dict[str, tuple[TailLaw, float]]:
    """Fits a law of the tail to each optimizer with tails; returns it with its error in the fit.

    Args:
      runs: Those that were made.
      rows: Of `tail.measure`.
    """
    several = list(points((*STUDIES, *UNSEEN, *OTHERS), runs, rows))
    laws_and_errors = {}
    for name in (*TAIL_LAWS, *_WITHOUT_LAW):
        fitted = _fitted(name, several)
        if fitted:
            law = _tail_law(fitted, error=0.0)
            laws_and_errors[name] = (law, tail_error(law, fitted))
    return laws_and_errors


def int8_gaps(runs: Finished) -> list[float]:
    """Returns the gap of the int8 all-reduce to the exact run, in per cent, for each run."""
    by_strategy = results(read_runs(RESULTS / "convergence.jsonl"), strategies.by_name)
    int8 = by_strategy[strategies.STRATEGIES["int8"]]
    percents = int8.gaps(by_strategy[strategies.EXACT])
    for study in FIRST_STEPS:
        by_setting = made(study, runs)
        for setting, result in by_setting.items():
            if setting.wire == "int8":
                percents += result.gaps(next(iter(by_setting.values())))
    return percents


def _over_links() -> Iterator[Point]:
    """Yields the runs of PowerSGD over links in the default setting."""
    usual = OverLinks()
    links = read_runs(RESULTS / "time_to_loss.jsonl")
    by_name = over_links.results([run for run in links if run["config"] == asdict(usual)])
    tokens = usual.processes * usual.sequences * usual.context
    for name, way in _OVER_LINKS.items():
        percents = by_name[name].gaps(by_name[over_links.EXACT])
        label = f"over links, {way}"
        yield Point("adamw", label, usual.steps, usual.width, tokens, 32, percents)


def compared(runs: Finished) -> str:
    """Returns a table of runs that are not in the fit, and the predictions of the law in width."""
    several = list(points(UNSEEN, runs))
    several += [point for point in points(STUDIES, runs) if point.steps < _LEAST_STEPS]
    several += _over_links()
    rows = []
    for point in several:
        half = 100 * LAWS["adamw"].half_width(point.rank, point.width, point.tokens)
        inside = abs(point.gap - point.guess) <= half
        rows.append(
            [
                f"{point.name}, rank {point.rank}",
                str(len(point.percents)),
                with_interval(point.percents, "+.1f", "%"),
                f"+{point.guess:.1f}% ± {half:.1f}",
                "inside" if inside else "outside",
            ]
        )
    return markdown(["not fitted", "seeds", "above exact", "the law", "its interval"], rows)


def foretold(studies: Sequence[Study], runs: Finished, rows: Finished) -> str:
    """Returns a table of tails and gaps, and the predictions of both laws."""
    lines = []
    for point in points(studies, runs, rows):
        if point.tail:
            name = ", ".join(filter(None, (point.optimizer, point.name)))
            by_tail = 100 * TAIL_LAWS[point.optimizer].gap(point.tail)
            lines.append(_row(name, point, by_tail, point.guess))
    return markdown([*_MEASURED, "by the tail", "by width and tokens"], lines)


def from_one_rank(runs: Finished, rows: Finished) -> list[tuple[Point, Point, float]]:
    """Predicts the gaps of two ranks in each setting of `FROM_ONE_RANK` from that of a third one.

    Args:
      runs: Those that were made.
      rows: Of `tail.measure`.

    Returns:
      For each rank that was run: what was measured, with the gap at three quarters of the run; the
      rank, with the gap at the end; and its prediction in per cent. The measured ranks come first.
    """
    shortened = []
    for run in runs:
        shortened.append({**run, "curve": run["curve"][: 3 * len(run["curve"]) // 4]})
    predictions = []
    for study in FROM_ONE_RANK:
        measured, *_ = points([study], shortened, rows)
        law = TAIL_LAWS["adamw"].through(measured.tail or 0.0, measured.gap / 100)
        for point in points([study], runs, rows):
            predictions.append((measured, point, 100 * law.gap(point.tail or 0.0)))
    return predictions


def error_from_one_rank(runs: Finished, rows: Finished) -> float:
    """Returns the root mean square error of log(gap) of the ranks that were not measured."""
    gaps = []
    expected = []
    for measured, point, predicted in from_one_rank(runs, rows):
        if point.rank != measured.rank:
            gaps.append(point.gap)
            expected.append(predicted)
    return _logarithmic_error(gaps, expected)


def _table_from_one_rank(runs: Finished, rows: Finished) -> str:
    lines = []
    for measured, point, predicted in from_one_rank(runs, rows):
        row = _row(point.name, point, predicted, point.guess)
        row.append(f"{measured.gap:+.1f}% at rank {measured.rank}")
        lines.append(row)
    header = [*_MEASURED, "foretold", "by width and tokens", "foretold from, at three quarters"]
    return markdown(header, lines)


def without_law(runs: Finished, rows: Finished) -> str:
    """Returns a table of optimizers without a law, beside AdamW's law and a fit to each one's gaps.

    Args:
      runs: Those that were made.
      rows: Of `tail.measure`.
    """
    lines = []
    fits = in_sample(runs, rows)
    for point in points(OTHERS, runs, rows):
        if point.tail:
            fitted, _ = fits[point.optimizer]
            of_adamw = 100 * TAIL_LAWS["adamw"].gap(point.tail)
            lines.append(_row(point.optimizer, point, of_adamw, 100 * fitted.gap(point.tail)))
    return markdown([*_MEASURED, "AdamW's formula", "its own fit"], lines)


def by_kind(runs: Finished, rows: Finished) -> str:
    """Returns a table of the gaps of one kind of leaf each.

    Args:
      runs: Those that were made.
      rows: Of `tail.measure`.
    """
    by_setting = made(BY_KIND, runs)
    exact = next(iter(by_setting.values()))
    tails = tail.find(BY_KIND, rows)
    lines = []
    for setting, result in by_setting.items():
        if setting.only:
            decrease = tails[f"{setting.kept}{tail.OF_DECREASE}"]
            line = [setting.only.replace("|", " and "), f"{tails[setting.kept]:.3f}"]
            line += [f"{decrease:.3f}", str(len(result.losses))]
            lines.append([*line, with_interval(result.gaps(exact), "+.1f", "%")])
    header = ["compressed", "tail", "of the decrease", "seeds", "above exact (95%)"]
    return markdown(header, lines)


def _row(name: str, point: Point, *predicted: float) -> list[str]:
    """Returns the cells of a point: those of `_MEASURED`, and predicted gaps in per cent."""
    above = with_interval(point.percents, "+.1f", "%")
    row = [name, str(point.rank), f"{point.tail:.3f}", str(len(point.percents)), above]
    for gap in predicted:
        row.append(f"+{gap:.1f}%")
    return row


def paged(page: str, runs: Finished) -> str:
    """Returns docs/convergence.md with the tables of the laws.

    Raises:
      ValueError: If the page has no place for a table.
    """
    rows = read_runs(tail.OUT)
    page = in_page(page, LAW, f"{compared(runs)}\n")
    fit = foretold((*STUDIES, *UNSEEN), runs, rows)
    page = in_page(page, f"{TAIL}, others", f"{without_law(runs, rows)}\n")
    page = in_page(page, TAIL, f"{fit}\n\nThe tails of all tables on this page: {made_on(rows)}\n")
    page = in_page(page, f"{TAIL}, predicted", f"{foretold(PREDICTED, runs, rows)}\n")
    page = in_page(page, f"{TAIL}, by kind", f"{by_kind(runs, rows)}\n")
    return in_page(page, f"{TAIL}, from one rank", f"{_table_from_one_rank(runs, rows)}\n")


def report(runs: Finished) -> str:
    """Returns the fitted coefficients of both laws, and the gap of the int8 all-reduce."""
    rows = read_runs(tail.OUT)
    fitted = (*laws(runs).items(), *tail_laws(runs, rows).items())
    lines = [f"{name}: {law}" for name, law in fitted]
    for name, (law, error) in in_sample(runs, rows).items():
        form = f"{law.c:.1f} * tail ** {law.power:.2f}"
        lines.append(f"{name}, by the tail: {form}, {error:.0%} of error in the fit")
    lines.append(f"int8 all-reduce: {with_interval(int8_gaps(runs), '+.2f', '%')}")
    return "\n".join([*lines, "", compared(runs)])
