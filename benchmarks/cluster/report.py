"""Figures, ratios, table and picture of a run of `benchmarks.cluster`."""

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
_UNKNOWN = Figures(*[math.nan] * 5)


def figures_of(case: Case) -> Figures:
    """Returns the medians and bytes of a case.

    It uses the samples of all processes. With communication all processes end together; without it
    their samples are independent measurements.
    """
    steps = np.concatenate(case.seconds) / case.steps_per_sample
    count = len(case.seconds[0]) * case.steps_per_sample
    processes = len(case.seconds)
    low, median, high = (float(q) for q in np.quantile(steps, (0.1, 0.5, 0.9)))
    # A ring all-reduce sends so many times its payload.
    ring = 2 * (processes - 1) / processes
    promised = math.nan if case.payload is None else ring * case.payload
    return Figures(median, low, high, statistics.fmean(case.tx_bytes) / count, promised)


def all_figures(cases: Iterable[Run]) -> dict[Key, Figures]:
    """Returns the figures of every case, by model, rate, strategy and framework."""
    figures = {}
    for fields in cases:
        case = Case(**fields)
        figures[case.model, case.rate, case.strategy, case.framework] = figures_of(case)
    return figures


_HEADER = (
    "strategy",
    "framework",
    "ms per step",
    "10% to 90%",
    "to no communication",
    "faster than own all-reduce",
    "faster than torch",
    "overhead, ms",
    "overhead, part of torch's",
    "sent per step, kB",
    "sent / promised",
)


def table(figures: Mapping[Key, Figures]) -> str:
    """Makes an overview of each model, then all figures of each rate, as measured."""
    models, rates, strategies, _ = (
        list(dict.fromkeys(names)) for names in zip(*figures, strict=True)
    )
    parts = []
    for model in models:
        overview = []
        for strategy in strategies:
            row = [strategy]
            for rate in rates:
                both = (figures.get((model, rate, strategy, name)) for name in ("jax", "torch"))
                row.append(" / ".join(_milliseconds(each.median) if each else "-" for each in both))
            overview.append(row)
        parts.append(f"### {model}\n\nMilliseconds per step, JAX / torch:")
        parts.append(markdown(["strategy", *rates], overview))
        for rate in rates:
            rows = [_row(figures, key) for key in figures if key[:2] == (model, rate)]
            parts.append(f"#### {model}, {rate}\n\n" + markdown(_HEADER, rows))
    return "\n\n".join(parts) + "\n"


def _row(figures: Mapping[Key, Figures], key: Key) -> list[str]:
    """Writes a case beside others of the same model and rate; cells without a run are empty."""
    model, rate, strategy, framework = key
    median, low, high, wire, promised = figures[key]

    def other(strategy: str, framework: str) -> float:
        return figures.get((model, rate, strategy, framework), _UNKNOWN).median

    alone = other("none", framework)
    ratios = {"alone": median / alone, "all-reduce": other("allreduce", framework) / median}
    overhead = 1e3 * (median - alone)
    of_torch = 1e3 * (other(strategy, "torch") - other("none", "torch"))
    over_torch = other(strategy, "torch") / median
    # An overhead below zero is noise, and a ratio to it means nothing.
    part = overhead / of_torch if of_torch > 0 else math.nan
    if strategy == "none":
        ratios = dict.fromkeys(ratios, math.nan)
        overhead = math.nan
    if framework != "jax":
        over_torch = part = math.nan
    return [
        strategy,
        framework,
        _milliseconds(median),
        f"{_milliseconds(low)} to {_milliseconds(high)}",
        _number(ratios["alone"]),
        _number(ratios["all-reduce"]),
        _number(over_torch),
        _milliseconds(overhead / 1e3),
        _number(part),
        f"{wire / 1e3:,.1f}",
        _number(wire / (promised or math.nan), digits=3),
    ]


def _milliseconds(seconds: float) -> str:
    if abs(seconds) > 0.9995:
        return f"{seconds * 1e3:,.0f}"
    return _number(seconds * 1e3, digits=1)


def _number(value: float, digits: int = 2) -> str:
    return "" if math.isnan(value) else f"{value:.{digits}f}"


def conditions(run: Run) -> str:
    """Writes how, where and when the run was measured."""
    machine = run["machine"]
    busy = machine["busy_cores_at_start"]
    lines = [
        f"Measured {run['date']} with `{run['command']}`: {run['settings']['processes']} "
        "processes, each in a network namespace of its own, on one core, over gloo.",
        sentence(machine),
        f"Other programs kept {busy:.2f} cores busy at the start"
        + (": **these are no results.**" if busy > BUSY else "."),
    ]
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
    ("allreduce", "jax"): ("all-reduce", style.INK),
    ("local-sgd-8", "jax"): ("local SGD, every 8 steps", style.GREEN),
    ("powersgd-4", "torch"): ("rank 4, torch", style.ORANGE),
    ("powersgd-4", "jax"): ("rank 4, jaxcomp", style.BLUE),
    ("powersgd-4-int8", "jax"): ("rank 4 int8, jaxcomp", style.PURPLE),
}


def plot(figures: Mapping[Key, Figures], path: Path) -> None:
    """Writes a PNG: a panel for each model, a line for each of a few strategies."""
    models, rates, *_ = (list(dict.fromkeys(names)) for names in zip(*figures, strict=True))
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
