"""The two plots of the study: loss against steps, and final loss against bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.ticker import FixedLocator

from benchmarks.convergence.rows import GOAL_GAP, GOAL_RATIO, REFERENCE, Row

matplotlib.use("Agg")

COLOURS = {
    "exact": "#333333",
    "int8": "#8c6d31",
    "PowerSGD": "#1f77b4",
    "PowerSGD, narrow factors": "#17a2a2",
    "one-sided": "#9467bd",
    "difference": "#d62728",
    "local": "#2ca02c",
}


def plot_curves(rows: Sequence[Row], path: Path) -> None:
    """Held-out loss against steps, and against the bytes sent, with a band of one deviation."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.4), sharey=True, layout="constrained")
    lines: dict[str, int] = {}
    for row in rows:
        index = lines[row.family] = lines.get(row.family, -1) + 1
        style: dict[str, Any] = {
            "color": COLOURS[row.family],
            "linestyle": ("-", "--", ":", "-.")[index % 4],
        }
        steps, sent, losses, spreads = zip(*row.curve, strict=True)
        low = [loss - spread for loss, spread in zip(losses, spreads, strict=True)]
        high = [loss + spread for loss, spread in zip(losses, spreads, strict=True)]
        for axis, x in zip(axes, (steps, sent), strict=True):
            axis.plot(x, losses, label=f"{row.strategy} ({row.ratio:.0f}x)", **style)
            axis.fill_between(x, low, high, color=style["color"], alpha=0.12, linewidth=0)
    axes[0].set(xlabel="steps", ylabel="held-out loss (nats per byte)")
    axes[1].set(xlabel="MB sent by each replica", xscale="log")
    axes[0].legend(fontsize=8, frameon=False)
    for axis in axes:
        axis.grid(alpha=0.25)
    _save(figure, path)


def plot_frontier(rows: Sequence[Row], path: Path) -> None:
    """Final loss against how many times fewer bytes, with the goal as a shaded corner."""
    figure, axis = plt.subplots(figsize=(9.5, 6), layout="constrained")
    reference = next(row for row in rows if row.strategy == REFERENCE)
    for family, colour in COLOURS.items():
        own = [row for row in rows if row.family == family]
        if own:
            axis.errorbar(
                [row.ratio for row in own], [row.gap for row in own],
                yerr=[row.gap_spread for row in own], fmt="o", color=colour, markersize=5,
                capsize=3, linewidth=1, label=family,
            )  # fmt: skip
    best = sorted((row for row in rows if row.on_frontier), key=lambda row: row.ratio)
    axis.plot(
        [row.ratio for row in best], [row.gap for row in best],
        color="#999999", linewidth=1, zorder=0, label="nothing is both smaller and better",
    )  # fmt: skip
    right = 2.2 * max(row.ratio for row in rows)
    low = min(-0.5, *(row.gap - row.gap_spread for row in rows))
    axis.fill_between([GOAL_RATIO, right], low, GOAL_GAP, color="#2ca02c", alpha=0.08, linewidth=0)
    axis.axhline(0, color="#333333", linewidth=0.6)
    axis.set(
        xscale="log", xlim=(0.85, right), ylim=(low, 1.8 * max(row.gap for row in rows) + 1),
        xlabel="times fewer bytes than a float32 all-reduce, whole run",
        ylabel=f"final held-out loss above uncompressed ({reference.loss:.3f}), per cent",
    )  # fmt: skip
    # Linear up to 1%, where the goal is; logarithmic above, where most strategies are.
    axis.set_yscale("symlog", linthresh=1.0, linscale=0.8)
    axis.yaxis.set_major_locator(FixedLocator([-1, 0, 0.5, 1, 2, 5, 10, 20, 50]))
    axis.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    axis.set_xticks([t for t in (1, 2, 5, 10, 20, 50, 100, 200, 500) if t < right])
    axis.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axis.minorticks_off()
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8, frameon=False, loc="upper left")
    _label(axis, rows)
    _save(figure, path)


def _label(axis: Any, rows: Sequence[Row]) -> None:
    """Names beside the points, moved up where they would lie on another."""
    axis.figure.canvas.draw()  # so that the transformation to pixels is the final one
    point = 72 / axis.figure.dpi  # one pixel in points
    width, height = 110 / point, 9 / point
    taken: list[tuple[float, float]] = []
    for row in sorted(rows, key=lambda row: row.gap):
        x, y = axis.transData.transform((row.ratio, row.gap))
        wanted = y
        while any(abs(x - a) < width and abs(wanted - b) < height for a, b in taken):
            wanted += 1
        taken.append((x, wanted))
        axis.annotate(
            row.strategy,
            (row.ratio, row.gap),
            xytext=(8, (wanted - y) * point + 1),
            textcoords="offset points",
            fontsize=7,
            arrowprops={"arrowstyle": "-", "color": "#bbbbbb", "linewidth": 0.5, "shrinkB": 3},
        )


def _save(figure: Any, path: Path) -> None:
    # Without a date in the file, so that equal data give equal bytes.
    figure.savefig(path, dpi=150, metadata={"Software": None})
    plt.close(figure)
