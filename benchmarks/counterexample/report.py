"""The study's table, and its place in docs/convergence.md."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import Any

from benchmarks.common.paths import ROOT
from benchmarks.common.runs import made_on, provenance
from benchmarks.common.tables import in_page, markdown, with_spread
from benchmarks.counterexample.cases import CASES

PAGE = ROOT / "docs" / "convergence.md"
PROBLEMS = {
    "apart": "noise of rank 1",
    "rotated": "the same, rotated",
    "four": "noise of rank 4",
}
MODELS = {"r16-int8": "rank 16, int8", "r4": "rank 4"}
_HEADER = ["reducer", *PROBLEMS.values(), *(f"language model, {name}" for name in MODELS.values())]


def paged(page: str, runs: Sequence[dict[str, Any]]) -> str:
    """The page with the table of the finished runs.

    Raises:
      ValueError: There are none, or the page has no place for the table.
    """
    if not runs:
        raise ValueError("no finished runs; run python -m benchmarks.counterexample again.")
    return in_page(page, "python -m benchmarks.counterexample --report", _text(runs))


def _text(runs: Sequence[dict[str, Any]]) -> str:
    found: dict[tuple[str, str], dict[int, float]] = {}
    for run in runs:
        found.setdefault((run["case"], run["setting"]), {})[run["seed"]] = run["loss"]
    rows = []
    for name, case in CASES.items():
        cells = [_largest(found.get((name, problem))) for problem in PROBLEMS]
        cells += [_gap(found, name, model) for model in MODELS]
        rows.append([case.label, *cells])
    made = made_on(provenance(runs))
    return f"{markdown(_HEADER, rows)}\n\n{made}\n"


def _largest(losses: dict[int, float] | None) -> str:
    return f"{max(losses.values()):.0e}" if losses else ""


def _gap(found: dict[tuple[str, str], dict[int, float]], name: str, model: str) -> str:
    """Above the default of the same seed, in per cent; of the default the loss itself."""
    own, default = found.get((name, model), {}), found.get(("default", model), {})
    seeds = sorted(own.keys() & default.keys())
    if not seeds:
        return ""
    if name == "default":
        return f"{mean(own.values()):.3f}"
    gaps = [100 * (own[seed] / default[seed] - 1) for seed in seeds]
    return with_spread(gaps, "+.2f", "%")
