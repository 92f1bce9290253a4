"""The study's table, and its place in docs/convergence.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from statistics import mean
from typing import Any

from benchmarks.common.paths import ROOT
from benchmarks.common.runs import made_on, provenance
from benchmarks.common.tables import in_page, markdown, with_interval
from benchmarks.convergence.runs import Result, results
from benchmarks.optimizers.settings import STUDIES, Setting, Study

PAGE = ROOT / "docs" / "convergence.md"
COMMAND = "python -m benchmarks.optimizers --report"
_HEADER = ["sent", "seeds", "above exact (95%)", "fewer bytes"]
Finished = Sequence[dict[str, Any]]  # runs of `benchmarks.optimizers`


def made(study: Study, runs: Finished) -> dict[Setting, Result]:
    """The exact average at its best, then what is compressed; nothing while its search goes on.

    Args:
      study: Whose.
      runs: Of `benchmarks.optimizers`.
    """
    found = results(_of(study, runs), Setting)
    try:
        exact = study.exact(lambda setting, seed: found[setting].losses[seed])
    except KeyError:
        return {}
    return {each: found[each] for each in (exact, *study.compressed(exact)) if each in found}


def paged(page: str, runs: Finished) -> str:
    """The page with the table of all studies that are not the law's predictions.

    Raises:
      ValueError: No search has come to its end, or the page has no place for the table.
    """
    rows = [row for study in STUDIES for row in _rows(study, runs)]
    if not rows:
        raise ValueError("no search has come to its end; run python -m benchmarks.optimizers.")
    about = made_on(provenance([run for study in STUDIES for run in _of(study, runs)]))
    return in_page(page, COMMAND, f"{markdown(_HEADER, rows)}\n\n{about}\n")


def _of(study: Study, runs: Finished) -> Finished:
    """Its finished runs."""
    name, config = study.optimizer, asdict(study.config)
    return [r for r in runs if r["config"] == config and r["setting"]["optimizer"] == name]


def _rows(study: Study, runs: Finished) -> Iterator[list[str]]:
    found = made(study, runs)
    for setting, own in found.items():
        exact = next(iter(found.values()))
        label, above = setting.label, f"loss {mean(own.losses.values()):.3f}"
        if own is exact:
            label = f"**{label}**, {study.name}" if study.name else f"**{label}**"
        else:
            label = label.rpartition(": ")[2]
            above = with_interval(own.gaps(exact), "+.1f", "%")
        yield [label, str(len(own.losses)), above, f"{exact.sent / own.sent:.1f}x"]
