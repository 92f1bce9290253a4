"""The two plots of the study: loss against steps, and final loss against bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.ticker import FixedLocator, NullLocator

from benchmarks.common import style
from benchmarks.convergence.rows import GOAL_GAP, GOAL_RATIO, REFERENCE, Row

COLOURS = {
    "exact": style.INK,
    "int8": style.OCHRE,
    "PowerSGD": style.BLUE,
    "PowerSGD, narrow factors": style.PURPLE,
    "one-sided": style.SKY,
    "difference": style.ORANGE,
    "local": style.GREEN,
}
# What a reader decides between; the table has the others.
NAMES = {
    REFERENCE: "all-reduce",
    "int8": "int8",
    "powersgd-r1": "rank 1",
    "powersgd-r4": "rank 4",
    "powersgd-r16": "rank 16",
    "powersgd-r8-bf16": "rank 8, bfloat16",
    "powersgd-r16-int8": "rank 16, int8",
    "spectrum-r16-int8": "rank 16 by spectrum, int8",
    "local-h6-int8": "local SGD every 6 steps, int8",
    "diloco-h32": "DiLoCo every 32 steps",
}


def plot_curves(rows: Sequence[Row], path: Path) -> None:
    """Held-out loss against steps, and against the bytes sent, with a band of one deviation."""
    figure, axes = style.panels(2, 11, 4.2)
    seen: dict[str, int] = {}
    ends = []
    for row in rows:
        index = seen[row.family] = seen.get(row.family, -1) + 1
        colour, line = COLOURS[row.family], ("-", "--", ":")[index % 3]
        steps, sent, losses, spreads = zip(*row.curve, strict=True)
        low = [loss - spread for loss, spread in zip(losses, spreads, strict=True)]
        high = [loss + spread for loss, spread in zip(losses, spreads, strict=True)]
        for axis, x in zip(axes, (steps, sent), strict=True):
            axis.plot(x, losses, color=colour, linestyle=line, linewidth=1.6)
            axis.fill_between(x, low, high, color=colour, alpha=0.12, linewidth=0)
        name = NAMES.get(row.strategy, row.strategy)
        ends.append((steps[-1], losses[-1], f"{name} ({row.ratio:.0f}x)", colour))
    axes[0].set(xlabel="steps", ylabel="held-out loss (nats per byte)")
    last = max((x for x, *_ in ends), default=1)
    axes[0].set_xlim(0, 1.6 * last)  # room for the names
    axes[0].set_xticks([last * i // 4 for i in range(5)])
    axes[1].set(xlabel="MB sent by each replica", xscale="log")
    axes[1].xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    style.name_points(axes[0], ends)
    style.save(figure, path)


def plot_frontier(rows: Sequence[Row], path: Path) -> None:
    """Final loss against how many times fewer bytes, with the goal as a shaded corner."""
    figure, (axis,) = style.panels(1, 9, 5.4)
    reference = next(row for row in rows if row.strategy == REFERENCE)
    best = sorted((row for row in rows if row.on_frontier), key=lambda row: row.ratio)
    axis.plot(
        [row.ratio for row in best], [row.gap for row in best], color=style.MUTED, linewidth=1.2,
        zorder=1,
    )  # fmt: skip
    named = []
    for row in rows:
        shown = row.strategy in NAMES
        colour = COLOURS[row.family] if shown else style.MUTED
        axis.errorbar(
            row.ratio, row.gap, yerr=row.gap_spread or None, fmt="o", color=colour,
            markersize=5.5 if shown else 3.5, alpha=1 if shown else 0.5, capsize=2, linewidth=1,
        )  # fmt: skip
        if shown:
            named.append((row.ratio, row.gap, NAMES[row.strategy], colour))
    right = 2.2 * max(row.ratio for row in rows)
    low = min(-0.5, *(row.gap - row.gap_spread for row in rows))
    axis.fill_between([GOAL_RATIO, right], low, GOAL_GAP, color=style.GREEN, alpha=0.1, linewidth=0)
    axis.axhline(0, color=style.INK, linewidth=0.6)
    axis.set(
        xscale="log", xlim=(0.85, right), ylim=(low, 1.8 * max(row.gap for row in rows) + 1),
        xlabel="times fewer bytes than a float32 all-reduce, whole run",
        ylabel=f"final held-out loss above uncompressed ({reference.loss:.3f}), per cent",
    )  # fmt: skip
    # Linear up to 1%, where the goal is; logarithmic above, where most strategies are.
    axis.set_yscale("symlog", linthresh=1.0, linscale=0.8)
    axis.yaxis.set_major_locator(FixedLocator([-1, 0, 0.5, 1, 2, 5, 10, 20, 50]))
    axis.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    axis.xaxis.set_major_locator(FixedLocator([1, 2, 5, 10, 20, 50, 100, 200, 500]))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    style.note(
        axis,
        "line: nothing sends less and ends lower\n"
        "grey: other strategies, named in the table\n"
        f"shaded: {GOAL_RATIO:.0f} times fewer bytes within {GOAL_GAP:g}%",
    )
    style.name_points(axis, named)
    style.save(figure, path)
