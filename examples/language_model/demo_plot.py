"""The demo's picture: held-out loss against steps, and against what was sent to get there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pictures
from matplotlib.ticker import LogLocator, NullLocator

if TYPE_CHECKING:
    from demo import Comparison

# The exact run, the ranks from the lowest, more in int6, and by spectrum.
PLAIN = (pictures.BLUE, pictures.SKY, pictures.OCHRE, pictures.GREEN)


def plot(path: Path, rows: Sequence[Comparison], replicas: int) -> None:
    """Draws the two panels.

    Args:
      path: The PNG to write.
      rows: The uncompressed result first, the highest rank in int6 and the ranks by spectrum last.
      replicas: For the caption.
    """
    plain = [PLAIN[i % len(PLAIN)] for i in range(len(rows) - 3)]
    colours = [pictures.INK, *plain, pictures.PURPLE, pictures.ORANGE]
    figure, (by_step, by_bytes) = pictures.panels(2, 10, 4.3)
    at_step, at_bytes = [], []
    for row, colour in zip(rows, colours, strict=True):
        r, sent = row.result, [b / 1e6 for b in row.result.bytes_sent]
        by_step.plot(r.steps, r.held_out, color=colour, linewidth=1.8)
        by_bytes.plot(sent, r.held_out, color=colour, linewidth=1.8)
        by_bytes.plot(sent[-1:], r.held_out[-1:], "o", color=colour, markersize=5)
        excess = "exact" if row.ratio == 1 else f"{row.excess:+.1%}"
        at_step.append((r.steps[-1], r.held_out[-1], f"{r.name}: {excess}", colour))
        if row.ratio != 1:
            at_bytes.append((sent[-1], r.held_out[-1], f"{row.ratio:.1f}x fewer", colour))
    # The first evaluations are far above the rest; showing them would flatten what matters.
    best = min(min(row.result.held_out) for row in rows)
    by_step.set_ylim(best - 0.08, best + 1.0)
    last = rows[0].result.steps[-1]
    by_step.set(xlabel="training step", ylabel="held-out loss (nats per byte)")
    by_step.set_xlim(0, 1.7 * last)  # room for the names
    by_step.set_xticks([last * i // 4 for i in range(5)])
    by_bytes.set(xlabel="MB sent by each replica", xscale="log")
    by_bytes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    by_bytes.xaxis.set_minor_locator(NullLocator())
    by_bytes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    figure.supxlabel(
        f"Byte-level transformer on Python's standard library, {replicas} replicas, AdamW; "
        "same data and seed.",
        fontsize=8,
        color=pictures.MUTED,
    )
    pictures.name_points(by_step, at_step)
    pictures.name_points(by_bytes, at_bytes)
    pictures.save(figure, path)
