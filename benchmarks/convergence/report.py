"""From finished runs to a table, a JSON summary and two plots."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.common import tables
from benchmarks.common.runs import made_on
from benchmarks.convergence.plot import plot_curves, plot_frontier
from benchmarks.convergence.rows import REFERENCE, Row


def summarise(runs: Iterable[dict[str, Any]], config: dict[str, Any]) -> list[Row]:
    """One row for each strategy, most bytes first.

    Args:
      runs: As `read_runs` gives them.
      config: Only runs with these settings count, of seeds that the reference has too.
    """
    by_strategy: dict[str, dict[int, dict[str, Any]]] = {}
    for run in runs:
        if run["config"] == config:
            by_strategy.setdefault(run["strategy"], {})[run["seed"]] = run
    reference = by_strategy.get(REFERENCE, {})
    rows = []
    for own in by_strategy.values():
        seeds = sorted(own.keys() & reference.keys())
        if seeds:
            rows.append(_row([own[s] for s in seeds], [reference[s] for s in seeds]))
    rows = [replace(row, on_frontier=_undominated(rows, row)) for row in rows]
    return sorted(rows, key=lambda row: (row.ratio, row.gap))


def _row(own: Sequence[dict[str, Any]], reference: Sequence[dict[str, Any]]) -> Row:
    losses = [run["curve"][-1][2] for run in own]
    exact = [run["curve"][-1][2] for run in reference]
    gaps = [100 * (a / b - 1) for a, b in zip(losses, exact, strict=True)]
    sent, whole = own[0]["curve"][-1][1], reference[0]["curve"][-1][1]
    curve = []
    for points in zip(*(run["curve"] for run in own), strict=True):
        values = [loss for _, _, loss in points]
        curve.append((points[0][0], points[0][1] / 1e6, mean(values), _spread(values)))
    return Row(
        strategy=own[0]["strategy"],
        family=own[0]["family"],
        seeds=len(own),
        loss=mean(losses),
        spread=_spread(losses),
        gap=mean(gaps),
        gap_spread=_spread(gaps),
        megabytes=sent / 1e6,
        ratio=whole / sent if sent else math.inf,
        on_frontier=False,
        curve=curve,
    )


def _undominated(rows: Sequence[Row], row: Row) -> bool:
    """Whether none sends as little and ends as low, and is better at one of the two."""
    return not any(
        other.ratio >= row.ratio
        and other.gap <= row.gap
        and (other.ratio, other.gap) != (row.ratio, row.gap)
        for other in rows
    )


def _spread(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0


_HEADER = (
    "strategy", "times fewer bytes", "above uncompressed", "final loss", "seeds", "frontier",
)  # fmt: skip


def markdown(rows: Sequence[Row], setting: str) -> str:
    """The table, with the setting above it."""
    cells = []
    for row in rows:
        several = row.seeds > 1
        loss = f"{row.loss:.3f}" + f" ± {row.spread:.3f}" * several
        gap = f"{row.gap:+.2f}%" + f" ± {row.gap_spread:.2f}" * several
        gap = "" if row.strategy == REFERENCE else gap
        star = "*" * row.on_frontier
        cells.append((row.strategy, f"{row.ratio:.1f}", gap, loss, str(row.seeds), star))
    return f"{setting}\n\n{tables.markdown(_HEADER, cells)}\n"


def write_report(
    rows: Sequence[Row], *, stem: Path, about: dict[str, Any], curves: Sequence[str]
) -> list[Path]:
    """Writes ``stem.json``, ``stem.md``, ``stem_curves.png`` and ``stem_frontier.png``.

    Args:
      rows: As `summarise` gives them.
      stem: Path without a suffix; its directory is made.
      about: Machine, versions and dates, as `provenance` gives them, and the setting.
      curves: The strategies of the plot over steps. Of them, those with as many seeds as the
        reference are shown: means over other seeds would not compare.

    Returns:
      The paths.
    """
    stem.parent.mkdir(parents=True, exist_ok=True)
    summary, table = stem.with_suffix(".json"), stem.with_suffix(".md")
    over_steps = stem.with_name(stem.name + "_curves.png")
    frontier = stem.with_name(stem.name + "_frontier.png")
    document = {"about": about, "rows": [asdict(row) for row in rows]}
    summary.write_text(json.dumps(document, indent=1) + "\n")
    table.write_text(markdown(rows, _sentence(about)))
    seeds = max((row.seeds for row in rows if row.strategy == REFERENCE), default=0)
    plot_curves([row for row in rows if row.strategy in curves and row.seeds == seeds], over_steps)
    plot_frontier(rows, frontier)
    return [summary, table, over_steps, frontier]


def _sentence(about: dict[str, Any]) -> str:
    setting = ", ".join(f"{name} {value}" for name, value in about["setting"].items())
    return f"{made_on(about)} Setting: {setting}."
