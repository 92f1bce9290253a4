"""From finished runs to a table and a picture."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from matplotlib.ticker import FixedLocator, NullLocator

from benchmarks.common import style
from benchmarks.common.paths import ROOT
from benchmarks.common.runs import made_on, provenance
from benchmarks.common.tables import in_page, markdown, with_interval, with_spread
from benchmarks.convergence.strategies import REFERENCE, STRATEGIES

PAGE = ROOT / "docs" / "convergence.md"
COMMAND = "python -m benchmarks.convergence --report"
_GOAL_RATIO, _GOAL_GAP = 20.0, 1.0  # at so many times fewer bytes, at most so many per cent above
_HEADER = ("sent", "times fewer bytes", "above uncompressed (95%)", "final loss", "seeds")
# What a reader decides between; the table has the others.
_SHOWN = {
    REFERENCE: style.INK,
    "int8": style.OCHRE,
    "powersgd-r4": style.BLUE,
    "powersgd-r16": style.BLUE,
    "spectrum-r16-int8": style.PURPLE,
    "local-h6-int8": style.GREEN,
}


@dataclass(frozen=True)
class Row:
    """One strategy over its seeds.

    Attributes:
      strategy: Its name.
      losses: Final held-out losses, nats per byte.
      gaps: How far above the uncompressed run of the *same* seed each ended, in per cent. The same
        seed has the same initial parameters and data, so this varies less than the loss.
      ratio: How many times fewer bytes than the uncompressed run.
    """

    strategy: str
    losses: list[float]
    gaps: list[float]
    ratio: float

    @property
    def name(self) -> str:
        """In words."""
        return STRATEGIES[self.strategy].summary

    @property
    def gap(self) -> float:
        """The mean gap, in per cent."""
        return mean(self.gaps)


def summarise(runs: Iterable[dict[str, Any]], config: dict[str, Any]) -> list[Row]:
    """One row for each strategy of today, most bytes first.

    Args:
      runs: As `read_runs` gives them.
      config: Only runs with these settings count, of seeds that the reference has too.
    """
    found: dict[str, dict[int, Any]] = {}
    for run in runs:
        if run["config"] == config and run["strategy"] in STRATEGIES:
            found.setdefault(run["strategy"], {})[run["seed"]] = run["curve"][-1]
    exact = found.get(REFERENCE, {})
    rows = list[Row]()
    for name, ends in found.items():
        seeds = sorted(ends.keys() & exact.keys())
        if seeds:
            losses = [ends[seed][2] for seed in seeds]
            gaps = [100 * (ends[seed][2] / exact[seed][2] - 1) for seed in seeds]
            sent, whole = ends[seeds[0]][1], exact[seeds[0]][1]
            rows.append(Row(name, losses, gaps, whole / sent))
    return sorted(rows, key=lambda row: (row.ratio, row.gap))


def table(rows: Iterable[Row]) -> str:
    """Markdown, a row for each strategy."""
    cells = [
        (
            row.name,
            f"{row.ratio:.1f}",
            "" if row.strategy == REFERENCE else with_interval(row.gaps, "+.1f", "%"),
            with_spread(row.losses, ".3f"),
            str(len(row.losses)),
        )
        for row in rows
    ]
    return markdown(_HEADER, cells)


def write_report(runs: list[dict[str, Any]], config: dict[str, Any], stem: Path) -> list[Path]:
    """Writes ``stem.png``, and the table of the usual setting into docs/convergence.md.

    Raises:
      ValueError: There is no finished run of the reference.
    """
    rows = summarise(runs, config)
    if not rows:
        raise ValueError("no finished runs of this setting")
    made = made_on(provenance([run for run in runs if run["config"] == config]))
    written = [stem.with_suffix(".png")]
    plot(rows, written[0])
    text = f"{table(rows)}\n\n{made}\n"
    if stem.parent == ROOT / "benchmarks" / "results":
        PAGE.write_text(in_page(PAGE.read_text(), COMMAND, text))
        written.append(PAGE)
    else:
        written.append(stem.with_suffix(".md"))
        written[1].write_text(text)
    return written


def plot(rows: list[Row], path: Path) -> None:
    """Final loss against how many times fewer bytes, with the goal as a shaded corner."""
    figure, (axis,) = style.panels(1, 9, 4.6)
    named = []
    for row in rows:
        colour = _SHOWN.get(row.strategy, style.MUTED)
        shown = row.strategy in _SHOWN
        spread = stdev(row.gaps) if len(row.gaps) > 1 else None
        axis.errorbar(
            row.ratio, row.gap, yerr=spread, fmt="o", color=colour,
            markersize=5.5 if shown else 3.5, alpha=1 if shown else 0.5, capsize=2, linewidth=1,
        )  # fmt: skip
        if shown:
            named.append((row.ratio, row.gap, row.name, colour))
    right = 2.2 * max(row.ratio for row in rows)
    low = min(-0.5, *(row.gap for row in rows))
    corner = [_GOAL_RATIO, right]
    axis.fill_between(corner, low, _GOAL_GAP, color=style.GREEN, alpha=0.1, linewidth=0)
    axis.axhline(0, color=style.INK, linewidth=0.6)
    axis.set(
        xscale="log", xlim=(0.85, right), ylim=(low, 1.8 * max(row.gap for row in rows) + 1),
        xlabel="times fewer bytes than a float32 all-reduce, whole run",
        ylabel="final held-out loss above uncompressed, per cent",
    )  # fmt: skip
    # Linear up to 1%, where the goal is; logarithmic above, where most strategies are.
    axis.set_yscale("symlog", linthresh=1.0, linscale=0.8)
    axis.yaxis.set_major_locator(FixedLocator([-1, 0, 0.5, 1, 2, 5, 10, 20, 50]))
    axis.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    axis.xaxis.set_major_locator(FixedLocator([1, 2, 5, 10, 20, 50, 100, 200, 500]))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    style.note(axis, "grey: others of the table\nshaded: 20 times fewer bytes within 1%")
    style.name_points(axis, named)
    style.save(figure, path)
