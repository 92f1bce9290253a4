"""The picture of a run of `benchmarks.cluster`: step time against the rate of the links."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks.cluster.plan import parse_rate
from benchmarks.cluster.report import Figures, Key
from benchmarks.common import style

Line = tuple[str, str]  # strategy, framework
# What a reader decides between; the table has the others.
_LINES: dict[Line, tuple[str, str]] = {
    ("none", "jax"): ("no communication", style.MUTED),
    ("allreduce", "jax"): ("all-reduce", style.INK),
    ("local-sgd-8", "jax"): ("local SGD, every 8 steps", style.GREEN),
    ("powersgd-4", "torch"): ("rank 4, torch", style.ORANGE),
    ("powersgd-4", "jax"): ("rank 4, jaxcomp", style.BLUE),
    ("powersgd-4-int8", "jax"): ("rank 4 int8, jaxcomp", style.PURPLE),
}
_MOST = len(_LINES)


def plot(figures: Mapping[Key, Figures], path: Path) -> None:
    """Writes a PNG: a panel for each model, a line for each of a few strategies."""
    models = list(dict.fromkeys(key[0] for key in figures))
    rates = list(dict.fromkeys(key[1] for key in figures))
    figure, axes = style.panels(len(models), 5.6 * len(models), 4.4)
    lines = chosen_lines(figures)
    for axis, model in zip(axes, models, strict=True):
        ends = []
        for (strategy, framework), (name, colour) in lines.items():
            found = [figures.get((model, rate, strategy, framework)) for rate in rates]
            points = [(i, f) for i, f in enumerate(found) if f]
            if not points:
                continue
            at, medians = [i for i, _ in points], [f.median * 1e3 for _, f in points]
            spread = [
                [(f.median - f.low) * 1e3 for _, f in points],
                [(f.high - f.median) * 1e3 for _, f in points],
            ]
            axis.errorbar(
                at, medians, spread, fmt="o-", color=colour, markersize=4, linewidth=1.6, capsize=2
            )
            ends.append((at[-1], medians[-1], name, colour))
        axis.set(yscale="log", title=style.TITLES.get(model, model), xlabel="rate of every link")
        axis.set_xticks(range(len(rates)), [parse_rate(rate).shown for rate in rates])
        axis.set_xlim(-0.2, len(rates) + 0.45)  # room for the names
        axis.yaxis.set_major_formatter(lambda y, _: f"{y:,.0f}")
        style.name_points(axis, ends)
    axes[0].set_ylabel("step time, ms (median, 10% to 90%)")
    style.save(figure, path)


def chosen_lines(figures: Mapping[Key, Figures]) -> dict[Line, tuple[str, str]]:
    """Name and colour of what is shown: the usual lines, or the first of a run without them."""
    there = dict.fromkeys(key[2:] for key in figures)
    usual = {line: style for line, style in _LINES.items() if line in there}
    colours = [colour for line, (_, colour) in _LINES.items() if line not in usual]
    others = [line for line in there if line not in usual and len(there) <= _MOST]
    return usual | {
        line: (", ".join(line), colour) for line, colour in zip(others, colours, strict=False)
    }
