"""One style for all pictures of this repository: few lines, each with its name beside it.

Every picture has a white background, so that it looks the same on a light and on a dark page. The
colours are those of Okabe and Ito. Most people with a colour vision deficiency can distinguish
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, cast

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

INK = "#1f2933"
MUTED = "#7b8794"
GRID = "#e4e8ec"
BLUE = "#0072b2"
ORANGE = "#d55e00"
GREEN = "#009e73"
SKY = "#56b4e9"
PURPLE = "#aa3f86"
OCHRE = "#a67c00"
_SMALL = 8.5  # points, of labels


def panels(
    count: int, width: float, height: float, *, share_y: bool = True
) -> tuple[Figure, list[Axes]]:
    """Makes a figure of so many panels side by side; sizes in inches."""
    # A figure without pyplot needs no window system.
    figure = Figure(figsize=(width, height), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(1, count, squeeze=False, sharey=share_y)[0])
    for axis in axes:
        axis.grid(color=GRID, linewidth=0.8)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.spines[["left", "bottom"]].set_color(MUTED)
        axis.tick_params(colors=INK, labelsize=_SMALL, width=0.6)
        axis.tick_params(which="minor", width=0.4)
        for text in (axis.title, axis.xaxis.label, axis.yaxis.label):
            text.set(color=INK, fontsize=9.5)
    return figure, axes


def name_points(axis: Axes, points: Sequence[tuple[float, float, str, str]]) -> None:
    """Writes names beside points, and moves a name up if it would cover another.

    Call it after you have set the limits and scales of the axis.

    Args:
      axis: The panel.
      points: (x, y, name, colour) of each.
    """
    figure = cast(Figure, axis.figure)  # an axis of `panels` is not in a subfigure
    figure.canvas.draw()  # fixes the layout and the size of a pixel
    pixel = 72 / figure.dpi  # in points
    taken: list[tuple[float, float, float]] = []
    for x, y, name, colour in sorted(points, key=lambda point: point[1]):
        at, height = axis.transData.transform((x, y))
        wide = len(name) * 0.62 * _SMALL / pixel
        lift = height
        for left, right, other in sorted(taken, key=lambda t: t[2]):
            overlaps = at < right and left < at + wide
            if overlaps and abs(lift - other) < 1.25 * _SMALL / pixel:
                lift = other + 1.25 * _SMALL / pixel
        taken.append((at, at + wide, lift))
        moved = (lift - height) * pixel
        leader = {"arrowstyle": "-", "color": GRID, "linewidth": 0.8}
        axis.annotate(
            name, (x, y), xytext=(7, moved - 0.35 * _SMALL), textcoords="offset points",
            color=colour, fontsize=_SMALL, annotation_clip=False,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.6},
            arrowprops=leader if moved > 2 * _SMALL else None,
        )  # fmt: skip


def note(axis: Axes, text: str) -> None:
    """Writes a remark in the panel's upper left corner."""
    axis.text(
        0.015, 0.985, text, transform=axis.transAxes, va="top", color=MUTED, fontsize=_SMALL,
        linespacing=1.5,
    )  # fmt: skip


def save(figure: Figure, path: Path) -> None:
    """Writes a PNG; equal data give equal bytes."""
    figure.savefig(path, dpi=150, metadata={"Software": None})


class Curve(NamedTuple):
    """Held-out loss of a run of the language model."""

    by_step: str  # the name beside the end of the curve against steps
    by_bytes: str  # the name beside the curve against bytes
    colour: str
    steps: Sequence[int]
    held_out: Sequence[float]
    bytes_sent: Sequence[float]  # bytes that each replica sent up to these steps


def draw(path: Path, curves: Sequence[Curve], replicas: int) -> None:
    """Draws held-out loss against steps, and against the bytes sent; writes a PNG."""
    figure, (by_step, by_bytes) = panels(2, 10, 4.3)
    for c in curves:
        sent = [x / 1e6 for x in c.bytes_sent]
        by_step.plot(c.steps, c.held_out, color=c.colour, linewidth=1.8)
        by_bytes.plot(sent, c.held_out, color=c.colour, linewidth=1.8)
        by_bytes.plot(sent[-1:], c.held_out[-1:], "o", color=c.colour, markersize=5)
    # The first evaluations are far above the rest; showing them would flatten what matters.
    best = min(min(c.held_out) for c in curves)
    last = curves[0].steps[-1]
    by_step.set_ylim(best - 0.08, best + 1.0)
    by_step.set(xlabel="optimizer step", ylabel="held-out loss (nats per byte)")
    by_step.set_xlim(0, 1.7 * last)  # room for the names
    by_step.set_xticks([last * i // 4 for i in range(5)])
    by_bytes.set(xlabel="MB sent by each replica", xscale="log")
    by_bytes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    by_bytes.xaxis.set_minor_locator(NullLocator())
    by_bytes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    figure.supxlabel(
        f"Byte-level transformer on Python's standard library, {replicas} replicas, same data",
        fontsize=8, color=MUTED,
    )  # fmt: skip
    name_points(by_step, [(last, c.held_out[-1], c.by_step, c.colour) for c in curves])
    ends = [(c.bytes_sent[-1] / 1e6, c.held_out[-1], c.by_bytes, c.colour) for c in curves]
    name_points(by_bytes, [end for end in ends if end[2]])
    save(figure, path)
