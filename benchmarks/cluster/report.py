"""Figures, table and picture of a run of `benchmarks.cluster`."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.cluster.plan import parse_rate
from benchmarks.common import style
from benchmarks.common.machine import sentence
from benchmarks.common.runs import Run
from benchmarks.common.tables import markdown

# Cores that other programs used just before the run, above which its times are off.
BUSY = 0.2


@dataclasses.dataclass(frozen=True)
class Case:
    """The measurements of one framework, model, rate and strategy."""

    framework: str
    model: str
    rate: str
    strategy: str
    steps_per_sample: int  # see `plan.Strategy`
    seconds: list[list[float]]  # of each process, each sample
    tx_bytes: list[int]  # of each process, over all samples
    rx_bytes: list[int]
    payload: float | None  # bytes per step that jaxcomp promises; None for torch
    loss: float  # in the end


class Figures(NamedTuple):
    """The figures of a case, per training step."""

    median: float  # seconds
    low: float  # seconds; one step in ten was faster
    high: float  # seconds; one step in ten was slower
    wire: float  # bytes sent by a process
    promised: float  # bytes that jaxcomp promises for the wire; NaN where it says nothing


Key = tuple[str, str, str, str]  # model, rate, strategy, framework


def figures_of(case: Case) -> Figures:
    """Returns the medians and bytes of a case.

    It uses the samples of all processes. With communication all processes end together; without it
    their samples are independent measurements.
    """
    steps = np.concatenate(case.seconds) / case.steps_per_sample
    count = len(case.seconds[0]) * case.steps_per_sample
    processes = len(case.seconds)
    low, median, high = np.quantile(steps, (0.1, 0.5, 0.9)).tolist()
    promised = math.nan
    if case.payload is not None:
        # A ring all-reduce sends so many times its payload.
        promised = 2 * (processes - 1) / processes * case.payload
    return Figures(median, low, high, statistics.fmean(case.tx_bytes) / count, promised)


def all_figures(cases: Iterable[Run]) -> dict[Key, Figures]:
    """Returns the figures of every case, by model, rate, strategy and framework."""
    figures = {}
    for fields in cases:
        case = Case(**fields)
        figures[case.model, case.rate, case.strategy, case.framework] = figures_of(case)
    return figures


_HEADER = (
    "strategy", "framework", "ms per step", "10% to 90%", "sent per step, kB", "sent / promised",
)  # fmt: skip


def table(figures: Mapping[Key, Figures]) -> str:
    """Makes an overview of each model, then all figures of each rate, as measured."""
    models, rates, strategies = _names(figures)
    parts = []
    for model in models:
        overview = []
        for strategy in strategies:
            row = [strategy]
            for rate in rates:
                both = []
                for framework in ("jax", "torch"):
                    each = figures.get((model, rate, strategy, framework))
                    both.append(_milliseconds(each.median) if each else "-")
                row.append(" / ".join(both))
            overview.append(row)
        parts.append(f"### {model}\n\nMilliseconds per step, JAX / torch:")
        parts.append(markdown(["strategy", *rates], overview))
        for rate in rates:
            rows = []
            for key, of_case in figures.items():
                if key[:2] == (model, rate):
                    rows.append([*key[2:], *_row(of_case)])
            parts.append(f"#### {model}, {rate}\n\n{markdown(_HEADER, rows)}")
    return "\n\n".join(parts) + "\n"


def _names(figures: Mapping[Key, Figures]) -> list[list[str]]:
    """Returns the models, the rates and the strategies, each once, in the order of the cases."""
    names = []
    for column in range(3):
        several = dict.fromkeys(key[column] for key in figures)
        names.append(list(several))
    return names


def _row(figures: Figures) -> list[str]:
    """Writes the figures of a case."""
    median, low, high, wire, promised = figures
    ratio = ""
    if promised > 0:
        ratio = f"{wire / promised:.3f}"
    between = f"{_milliseconds(low)} to {_milliseconds(high)}"
    return [_milliseconds(median), between, f"{wire / 1e3:,.1f}", ratio]


def _milliseconds(seconds: float) -> str:
    digits = 0 if seconds > 0.9995 else 1
    return f"{seconds * 1e3:,.{digits}f}"


def conditions(run: Run) -> str:
    """Writes how, where and when the run was measured."""
    machine = run["machine"]
    busy = machine["busy_cores_at_start"]
    lines = [
        f"Measured {run['date']} with `{run['command']}`: {run['settings']['processes']} "
        "processes, each in a network namespace of its own, on one core, over gloo.",
        sentence(machine),
        f"Other programs kept {busy:.2f} cores busy at the start.",
    ]
    if busy > BUSY:
        lines.append("**These are no results.**")
    if not run["complete"]:
        lines.append("**The run ended early: cases are missing.**")
    return "\n".join(lines)


def write_report(content: Run, out: Path) -> None:
    """Writes the JSON, the table and the picture."""
    (out / "cluster.json").write_text(json.dumps(content, separators=(",", ":")) + "\n")
    figures = all_figures(content["cases"])
    parts = ["## Step times over shaped links", conditions(content), table(figures)]
    (out / "cluster.md").write_text("\n\n".join(parts))
    plot(figures, out / "cluster.png")
    print(f"{out / 'cluster.json'}, cluster.md, cluster.png")


# What a reader decides between, by strategy and framework; the table has the others.
_LINES = {
    ("none", "jax"): ("no communication", style.MUTED),
    ("fp16", "torch"): ("16-bit all-reduce, torch", style.INK),
    ("local-sgd-8", "jax"): ("local SGD, every 8 steps", style.GREEN),
    ("powersgd-32", "torch"): ("rank 32, torch's hook", style.ORANGE),
    ("powersgd-32", "jax"): ("rank 32, jaxcomp", style.BLUE),
    ("powersgd-32-int6", "jax"): ("rank 32 int6, jaxcomp", style.PURPLE),
}


def plot(figures: Mapping[Key, Figures], path: Path) -> None:
    """Writes a PNG: a panel for each model, a line for each of a few strategies."""
    models, rates, _ = _names(figures)
    figure, axes = style.panels(len(models), 5.6 * len(models), 4.4)
    for axis, model in zip(axes, models, strict=True):
        ends = []
        for of_line, (name, colour) in _LINES.items():
            shown = {}
            for place, rate in enumerate(rates):
                if (model, rate, *of_line) in figures:
                    shown[place] = figures[(model, rate, *of_line)][:3]
            if shown:
                median, low, high = 1e3 * np.transpose([*shown.values()])
                form = {"color": colour, "markersize": 4, "linewidth": 1.6, "capsize": 2}
                axis.errorbar([*shown], median, (median - low, high - median), fmt="o-", **form)
                ends.append((max(shown), median[-1], name, colour))
        axis.set(yscale="log", title=style.TITLES.get(model, model), xlabel="rate of every link")
        axis.set_xticks(range(len(rates)), [parse_rate(rate).shown for rate in rates])
        axis.set_xlim(-0.2, len(rates) + 0.45)  # room for the names
        axis.yaxis.set_major_formatter(lambda y, _: f"{y:,.0f}")
        style.name_points(axis, ends)
    axes[0].set_ylabel("step time, ms (median, 10% to 90%)")
    style.save(figure, path)
