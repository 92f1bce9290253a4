"""The study's tables, and their place in docs/local_sgd.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from benchmarks.common.paths import ROOT
from benchmarks.common.runs import made_on, provenance
from benchmarks.common.tables import in_page, markdown, with_spread
from benchmarks.convergence.runs import Result, results
from benchmarks.convergence.training import Config
from benchmarks.diloco.settings import (
    INNER,
    LINES,
    Setting,
    in_longer,
    longer,
    parallel,
    search,
)

PAGE = ROOT / "docs" / "local_sgd.md"
_NAMES = {"adamw": "AdamW", "muon": "Muon"}
_SEARCHED = ["line", "tried", "best", "held-out loss", "above data parallel"]
_CHOSEN = ["inner optimizer", "", "seeds", "held-out loss", "above data parallel", "fewer bytes"]


def paged(page: str, runs: Sequence[dict[str, Any]], config: Config) -> str:
    """The page with the tables of the runs of a configuration, and of longer ones.

    Raises:
      ValueError: No search has come to its end, or the page has no place for the tables.
    """
    own, long = (
        [run for run in runs if run["config"] == asdict(c)] for c in (config, longer(config))
    )
    return in_page(page, "python -m benchmarks.diloco --report", _text(own, long, config))


def _text(runs: Sequence[dict[str, Any]], long: Sequence[dict[str, Any]], config: Config) -> str:
    found, found_later = results(runs, Setting), results(long, Setting)

    def known(setting: Setting, seed: int) -> float:
        return found[setting].losses[seed]

    chosen, searched = list[list[str]](), list[list[str]]()
    for inner in INNER:
        try:
            exact, steps = parallel(inner, known), list(search(inner, known))
        except KeyError:
            continue  # not searched to its end
        best = steps[-1][1]
        chosen += _chosen(exact, best, found)
        steps_later = f", {longer(config).steps:,} steps"
        for setting in (exact, *in_longer(best)):
            if exact in found_later and setting in found_later:
                label = setting.label() + steps_later
                chosen.append(["", label, *_figures(setting, exact, found_later)])
        searched += _lines(exact, steps, found)
    if not chosen:
        raise ValueError("no search has come to its end; run python -m benchmarks.diloco again.")
    made = made_on(provenance([*runs, *long]))
    tables = markdown(_CHOSEN, chosen, left=2), markdown(_SEARCHED, searched, left=3)
    return "\n\n".join((*tables, made, ""))


def _chosen(exact: Setting, best: Setting, found: Mapping[Setting, Result]) -> list[list[str]]:
    """What the search chose, its relatives, and what it began with."""
    paper, others = Setting(best.inner, exact.rate), [replace(best, int8=True)]
    others += [s for s in found if s.local and replace(s, every=best.every) == best != s]
    others += [replace(best, start=0.0), paper]
    rows = [[_NAMES[exact.inner], exact.label(), *_figures(exact, exact, found)]]
    shown = dict.fromkeys(setting for setting in [best, *others] if setting in found)
    return rows + [["", setting.label(), *_figures(setting, exact, found)] for setting in shown]


def _figures(setting: Setting, exact: Setting, found: Mapping[Setting, Result]) -> list[str]:
    own, beside = found[setting], found[exact]
    losses = list(own.losses.values())
    gap = "" if setting == exact else with_spread(own.gaps(beside), "+.1f", "%")
    ratio = beside.sent / own.sent
    fewer = "" if setting == exact else f"{ratio:.0f}x" if ratio >= 10 else f"{ratio:.1f}x"
    return [str(len(losses)), with_spread(losses, ".3f"), gap, fewer]


def _lines(
    exact: Setting, steps: Sequence[tuple[Setting, Setting]], found: Mapping[Setting, Result]
) -> list[list[str]]:
    """What each line of the search changed, and what it found."""
    names = ("outer optimizer", "data parallel start", "inner rate", "moments", "momentum again")
    rows = []
    for name, line, (_, best) in zip(names, LINES, steps, strict=True):
        loss = found[best].losses[0]
        gap = f"{100 * (loss / found[exact].losses[0] - 1):+.1f}%"
        tried = str(len(line))
        rows.append([f"{_NAMES[best.inner]}: {name}", tried, best.label(), f"{loss:.3f}", gap])
    return rows
