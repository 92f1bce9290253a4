"""The picture of a run of `benchmarks.cluster`: step time against the rate of the links."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from benchmarks.cluster.plan import parse_rate
from benchmarks.cluster.report import Figures, Key
from benchmarks.common import style

# What a reader decides between, by strategy and framework; the table has the others.
_LINES = {
    ("none", "jax"): ("no communication", style.MUTED),
    ("allreduce", "jax"): ("all-reduce", style.INK),
    ("local-sgd-8", "jax"): ("local SGD, every 8 steps", style.GREEN),
    ("powersgd-4", "torch"): ("rank 4, torch", style.ORANGE),
    ("powersgd-4", "jax"): ("rank 4, jaxcomp", style.BLUE),
    ("powersgd-4-int8", "jax"): ("rank 4 int8, jaxcomp", style.PURPLE),
}


def plot(figures: Mapping[Key, Figures], path: Path) -> None:
    """Writes a PNG: a panel for each model, a line for each of a few strategies."""
    models = list(dict.fromkeys(key[0] for key in figures))
    rates = list(dict.fromkeys(key[1] for key in figures))
    figure, axes = style.panels(len(models), 5.6 * len(models), 4.4)
    for axis, model in zip(axes, models, strict=True):
        ends = []
        for (strategy, framework), (name, colour) in _LINES.items():
            keys = [(model, rate, strategy, framework) for rate in rates]
            places = [place for place, key in enumerate(keys) if key in figures]
            if not places:
                continue
            shown = [figures[keys[place]] for place in places]
            low, median, high = 1e3 * np.array([[x.low, x.median, x.high] for x in shown]).T
            spread = (median - low, high - median)
            form = {"color": colour, "markersize": 4, "linewidth": 1.6, "capsize": 2}
            axis.errorbar(places, median, spread, fmt="o-", **form)
            ends.append((places[-1], median[-1], name, colour))
        axis.set(yscale="log", title=style.TITLES.get(model, model), xlabel="rate of every link")
        axis.set_xticks(range(len(rates)), [parse_rate(rate).shown for rate in rates])
        axis.set_xlim(-0.2, len(rates) + 0.45)  # room for the names
        axis.yaxis.set_major_formatter(lambda y, _: f"{y:,.0f}")
        style.name_points(axis, ends)
    axes[0].set_ylabel("step time, ms (median, 10% to 90%)")
    style.save(figure, path)
