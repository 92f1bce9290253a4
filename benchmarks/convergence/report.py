"""Makes a table and a picture from finished runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

from benchmarks.common import style
from benchmarks.common.paths import ROOT
from benchmarks.common.runs import Run, made_on
from benchmarks.common.tables import half_width, markdown, with_interval, write_table
from benchmarks.convergence.runs import Result, results
from benchmarks.convergence.strategies import EXACT, Strategy, by_name
from benchmarks.convergence.training import Config

PAGE = ROOT / "docs" / "convergence.md"
COMMAND = "python -m benchmarks.convergence --report"
_GOAL_RATIO = 20.0  # times fewer bytes
_GOAL_GAP = 1.0  # at most so many per cent above
_HEADER = ("sent", "times fewer bytes", "above uncompressed (95%)", "final loss", "seeds")
# What a reader decides between; the table has the others.
_SHOWN = {
    EXACT.name: style.INK,
    "int8": style.OCHRE,
    "powersgd-r4": style.BLUE,
    "powersgd-r16": style.BLUE,
    "spectrum-r16-int8": style.PURPLE,
    "local-h6-int8": style.GREEN,
}


Results = Mapping[Strategy, Result]


def table(several: Results) -> str:
    """Makes a row for each strategy, most bytes first.

    Args:
      several: The runs by strategy; `EXACT` must be among them.
    """
    exact = several[EXACT]
    rows = []
    by_bytes = sorted(several.items(), key=lambda x: (-x[1].sent, mean(x[1].gaps(exact))))
    for strategy, result in by_bytes:
        above = "" if result is exact else with_interval(result.gaps(exact), "+.1f", "%")
        losses = with_interval([*result.losses.values()], ".3f", spread=stdev)
        fewer = f"{exact.sent / result.sent:.1f}"
        rows.append((strategy.label, fewer, above, losses, str(len(result.losses))))
    return markdown(_HEADER, rows)


def write_report(runs: list[Run], config: Config, stem: Path) -> list[Path]:
    """Writes ``stem.png``; with the default setting also the table in docs/convergence.md.

    Raises:
      ValueError: There is no finished run of the reference.
    """
    of_setting = [run for run in runs if Config(**run["config"]) == config]
    several = results(of_setting, by_name)
    if EXACT not in several:
        raise ValueError(f"no finished run of {EXACT.name} with this setting to compare with")
    picture = stem.with_suffix(".png")
    plot(several, picture)
    text = f"{table(several)}\n\n{made_on(of_setting)}\n"
    return [picture, write_table(text, COMMAND, PAGE, stem)]


def plot(several: Results, path: Path) -> None:
    """Draws the loss against the ratio of bytes, with the goal as a shaded corner."""
    exact = several[EXACT]
    figure, (axis,) = style.panels(1, 9, 4.6)
    named = []
    ratios = []
    means = []
    for strategy, result in several.items():
        gaps = result.gaps(exact)
        ratios.append(exact.sent / result.sent)
        means.append(mean(gaps))
        form: dict[str, Any] = {"color": style.MUTED, "markersize": 3.5, "alpha": 0.5}
        if strategy.name in _SHOWN:
            form = {"color": _SHOWN[strategy.name], "markersize": 5.5}
            named.append((ratios[-1], means[-1], strategy.label, form["color"]))
        if len(gaps) > 1:
            form["yerr"] = half_width(gaps)
        axis.errorbar(ratios[-1], means[-1], fmt="o", capsize=2, linewidth=1, **form)
    right = 2.2 * max(ratios)
    low = min(-0.5, *means)
    corner = [_GOAL_RATIO, right]
    axis.fill_between(corner, low, _GOAL_GAP, color=style.GREEN, alpha=0.1, linewidth=0)
    axis.axhline(0, color=style.INK, linewidth=0.6)
    axis.set(xscale="log", xlim=(0.85, right), ylim=(low, 1.8 * max(means) + 1))
    axis.set_xlabel("times fewer bytes than a float32 all-reduce, whole run")
    axis.set_ylabel("final held-out loss above uncompressed, per cent")
    # Linear up to 1%, where the goal is; logarithmic above, where most strategies are.
    axis.set_yscale("symlog", linthresh=1.0, linscale=0.8)
    axis.yaxis.set_major_locator(FixedLocator([-1, 0, 0.5, 1, 2, 5, 10, 20, 50]))
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.xaxis.set_major_locator(FixedLocator([1, 2, 5, 10, 20, 50, 100, 200, 500]))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    bars = "bars: 95% of the mean, where there are three seeds"
    style.note(axis, f"{bars}\ngrey: others of the table\nshaded: 20 times fewer bytes within 1%")
    style.name_points(axis, named)
    style.save(figure, path)
