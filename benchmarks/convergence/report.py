"""From finished runs to a table and a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.ticker import FixedLocator, NullLocator

from benchmarks.common import style
from benchmarks.common.paths import ROOT
from benchmarks.common.runs import made_on, provenance
from benchmarks.common.tables import half_width, in_page, markdown, with_interval, with_spread
from benchmarks.convergence.runs import Result, results
from benchmarks.convergence.strategies import EXACT, Strategy, by_name

PAGE = ROOT / "docs" / "convergence.md"
COMMAND = "python -m benchmarks.convergence --report"
_GOAL_RATIO, _GOAL_GAP = 20.0, 1.0  # at so many times fewer bytes, at most so many per cent above
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


Found = Mapping[Strategy, Result]


def table(found: Found) -> str:
    """Markdown, a row for each strategy, most bytes first.

    Args:
      found: The runs by their strategy, `EXACT` among them.
    """
    exact = found[EXACT]
    rows = [
        (
            strategy.label,
            f"{exact.sent / result.sent:.1f}",
            "" if result is exact else with_interval(result.gaps(exact), "+.1f", "%"),
            with_spread([*result.losses.values()], ".3f"),
            str(len(result.losses)),
        )
        for strategy, result in sorted(
            found.items(), key=lambda item: (-item[1].sent, mean(item[1].gaps(exact)))
        )
    ]
    return markdown(_HEADER, rows)


def write_report(runs: list[dict[str, Any]], config: dict[str, Any], stem: Path) -> list[Path]:
    """Writes ``stem.png``, and the table of the usual setting into docs/convergence.md.

    Raises:
      ValueError: There is no finished run of the reference.
    """
    own = [run for run in runs if run["config"] == config]
    found = results(own, by_name)
    if EXACT not in found:
        raise ValueError(f"no finished run of {EXACT.name} with this setting to compare with")
    written = [stem.with_suffix(".png")]
    plot(found, written[0])
    text = f"{table(found)}\n\n{made_on(provenance(own))}\n"
    if stem.parent == ROOT / "benchmarks" / "results":
        PAGE.write_text(in_page(PAGE.read_text(), COMMAND, text))
        written.append(PAGE)
    else:
        written.append(stem.with_suffix(".md"))
        written[1].write_text(text)
    return written


def plot(found: Found, path: Path) -> None:
    """Final loss against how many times fewer bytes, with the goal as a shaded corner."""
    figure, (axis,) = style.panels(1, 9, 4.6)
    points, named, exact = list[tuple[float, float]](), [], found[EXACT]
    for strategy, result in found.items():
        colour = _SHOWN.get(strategy.name, style.MUTED)
        shown = strategy.name in _SHOWN
        gaps = result.gaps(exact)
        points.append((exact.sent / result.sent, mean(gaps)))
        axis.errorbar(
            *points[-1], yerr=half_width(gaps) if len(gaps) > 1 else None, fmt="o", color=colour,
            markersize=5.5 if shown else 3.5, alpha=1 if shown else 0.5, capsize=2, linewidth=1,
        )  # fmt: skip
        if shown:
            named.append((*points[-1], strategy.label, colour))
    ratios, means = zip(*points, strict=True)
    right, low = 2.2 * max(ratios), min(-0.5, *means)
    corner = [_GOAL_RATIO, right]
    axis.fill_between(corner, low, _GOAL_GAP, color=style.GREEN, alpha=0.1, linewidth=0)
    axis.axhline(0, color=style.INK, linewidth=0.6)
    axis.set(
        xscale="log", xlim=(0.85, right), ylim=(low, 1.8 * max(means) + 1),
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
    bars = "bars: 95% of the mean, where there are three seeds"
    style.note(axis, f"{bars}\ngrey: others of the table\nshaded: 20 times fewer bytes within 1%")
    style.name_points(axis, named)
    style.save(figure, path)
