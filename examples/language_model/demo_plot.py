"""The demo's picture: held-out loss against steps, and against what was sent to get there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl
import matplotlib.ticker
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from demo import Comparison

INK, MUTED, GRID = "#1f2933", "#66727f", "#e4e8ec"
EXACT = INK
# One hue for one method, darker with rank: readable in grey and with any colour vision.
RANKS = mpl.colormaps["viridis_r"]


def plot(path: Path, rows: Sequence[Comparison], replicas: int) -> None:
    """Draws the two panels.

    Args:
      path: The PNG to write.
      rows: The uncompressed result first.
      replicas: For the caption.
    """
    colours = [EXACT] + [RANKS(0.2 + 0.6 * i / max(1, len(rows) - 2)) for i in range(len(rows) - 1)]
    # A figure of its own, without pyplot: no window system is looked for.
    figure = Figure(figsize=(10, 4.4), dpi=160, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    steps, sent = figure.subplots(1, 2, sharey=True, gridspec_kw={"width_ratios": (1, 1.15)})
    for row, colour in zip(rows, colours, strict=True):
        r = row.result
        style = {"color": colour, "linewidth": 2.0, "solid_capstyle": "round"}
        steps.plot(r.steps, r.held_out, label=_label(row), **style)
        megabytes = [b / 1e6 for b in r.bytes_sent]
        sent.plot(megabytes, r.held_out, **style)
        sent.plot(megabytes[-1:], r.held_out[-1:], "o", color=colour, markersize=6)
        if row.ratio != 1:
            sent.annotate(
                f"{row.total_ratio:.1f}x fewer",
                (megabytes[-1], r.held_out[-1]),
                xytext=(8, -3),
                textcoords="offset points",
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},  # over other curves
                color=INK,
                fontsize=9,
            )
    _axes(steps, rows, "training step")
    _axes(sent, rows, "sent by each replica so far (MB, log scale)")
    steps.set_ylabel("held-out loss (nats per byte)", color=INK)
    sent.set_xscale("log")
    sent.xaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
    sent.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    sent.xaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda x, _: f"{x:g}"))
    steps.legend(frameon=False, fontsize=9.5, labelcolor=INK, loc="upper right")
    steps.set_title("Loss against steps", loc="left", color=INK, fontsize=11)
    sent.set_title("The same runs against bytes sent", loc="left", color=INK, fontsize=11)
    figure.supxlabel(
        f"Byte-level transformer on Python's standard library, {replicas} replicas, AdamW; "
        "same data and seeds. Bytes include the exact first steps.",
        fontsize=8,
        color=MUTED,
    )
    figure.savefig(path)


def _label(row: Comparison) -> str:
    if row.ratio == 1:
        return f"{row.result.name}, exact"
    return f"{row.result.name}, loss {row.excess:+.1%}"


def _axes(axes: Axes, rows: Sequence[Comparison], xlabel: str) -> None:
    axes.set_xlabel(xlabel, color=INK)
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, length=0)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    # The first evaluations are far above the rest; showing them would flatten what matters.
    best = min(min(row.result.held_out) for row in rows)
    axes.set_ylim(best - 0.08, best + 1.35)
