"""The picture of a run of `benchmarks.cluster`: step time against the rate of the links."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt

from benchmarks.cluster.report import Figures, Key


def plot(figures: Mapping[Key, Figures], path: Path) -> None:
    """Writes a PNG: a panel for each model, a colour for each strategy, dashes for torch."""
    models = list(dict.fromkeys(key[0] for key in figures))
    rates = list(dict.fromkeys(key[1] for key in figures))
    strategies = list(dict.fromkeys(key[2] for key in figures))
    palette = [plt.get_cmap("tab20")(i) for i in (*range(0, 20, 2), *range(1, 20, 2))]
    colours = dict(zip(strategies, palette, strict=False))
    shape = (6.4 * len(models), 5.2)
    picture, panels = plt.subplots(1, len(models), figsize=shape, squeeze=False, sharey=True)
    for panel, model in zip(panels[0], models, strict=True):
        for strategy in strategies:
            for framework, style in (("jax", "o-"), ("torch", "s--")):
                found = [figures.get((model, rate, strategy, framework)) for rate in rates]
                points = [(i, f) for i, f in enumerate(found) if f]
                if not points:
                    continue
                at, medians = [i for i, _ in points], [f.median * 1e3 for _, f in points]
                spread = [
                    [(f.median - f.low) * 1e3 for _, f in points],
                    [(f.high - f.median) * 1e3 for _, f in points],
                ]
                panel.errorbar(
                    at, medians, spread, fmt=style, color=colours[strategy], markersize=4,
                    linewidth=1.2, capsize=2, label=f"{strategy}, {framework}",
                )  # fmt: skip
        panel.set_yscale("log")
        panel.set_xticks(range(len(rates)), rates)
        panel.set_xlabel("rate of every link")
        panel.set_title(model)
        panel.grid(alpha=0.3, which="both")
    panels[0][0].set_ylabel("step time, ms (median, 10% to 90%)")
    panels[0][-1].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    picture.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(picture)
