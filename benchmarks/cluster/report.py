"""The figures of a run of `benchmarks.cluster`: medians, ratios within the run, the table."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common.machine import sentence
from benchmarks.common.tables import markdown


@dataclasses.dataclass(frozen=True)
class Case:
    """What was measured of one framework, model, rate and strategy."""

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
    """A case in figures per training step."""

    median: float  # seconds
    low: float  # seconds; one step in ten was faster
    high: float  # seconds; one step in ten was slower
    wire: float  # bytes sent by a process
    promised: float  # bytes that jaxcomp promises for the wire; NaN where it says nothing


Key = tuple[str, str, str, str]  # model, rate, strategy, framework
_UNKNOWN = Figures(*[math.nan] * 5)


def figures_of(case: Case) -> Figures:
    """Returns the medians and bytes of a case.

    The samples of all processes count: with communication they end together, without they are
    independent measurements of the same thing.
    """
    steps = np.concatenate([np.asarray(x) for x in case.seconds]) / case.steps_per_sample
    count = len(case.seconds[0]) * case.steps_per_sample
    processes = len(case.seconds)
    low, median, high = (float(q) for q in np.quantile(steps, (0.1, 0.5, 0.9)))
    # A ring all-reduce sends so many times its payload.
    ring = 2 * (processes - 1) / processes
    promised = math.nan if case.payload is None else ring * case.payload
    return Figures(median, low, high, statistics.fmean(case.tx_bytes) / count, promised)


def all_figures(cases: Iterable[Case]) -> dict[Key, Figures]:
    """Returns the figures of every case, by model, rate, strategy and framework."""
    return {(c.model, c.rate, c.strategy, c.framework): figures_of(c) for c in cases}


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
    """Makes an overview of each model, then all figures of each rate, as measured in turn."""
    parts = []
    for model in dict.fromkeys(key[0] for key in figures):
        of_model = {key: value for key, value in figures.items() if key[0] == model}
        rates = list(dict.fromkeys(key[1] for key in of_model))
        overview = []
        for strategy in dict.fromkeys(key[2] for key in of_model):
            row = [strategy]
            for rate in rates:
                both = [figures.get((model, rate, strategy, name)) for name in ("jax", "torch")]
                row.append(" / ".join(_milliseconds(each.median) if each else "-" for each in both))
            overview.append(row)
        parts.append(f"### {model}\n\nMilliseconds per step, JAX / torch:")
        parts.append(markdown(["strategy", *rates], overview))
        for rate in rates:
            rows = [_row(of_model, key) for key in of_model if key[1] == rate]
            parts.append(f"#### {model}, {rate}\n\n" + markdown(_HEADER, rows))
    return "\n\n".join(parts) + "\n"


def _row(figures: Mapping[Key, Figures], key: Key) -> list[str]:
    """Writes a case beside others of the same model and rate; empty cells where not run."""
    model, rate, strategy, framework = key
    own = figures[key]

    def median(strategy: str, framework: str) -> float:
        return figures.get((model, rate, strategy, framework), _UNKNOWN).median

    alone = median("none", framework)
    to_alone = own.median / alone
    over_allreduce = median("allreduce", framework) / own.median
    over_torch = median(strategy, "torch") / own.median
    overhead = own.median - alone
    of_torch = median(strategy, "torch") - median("none", "torch")
    # An overhead below zero is noise, and a ratio to it means nothing.
    part = overhead / of_torch if of_torch > 0 else math.nan
    if strategy == "none":
        to_alone = over_allreduce = overhead = math.nan
    if framework != "jax":
        over_torch = part = math.nan
    promised = own.wire / own.promised if own.promised else math.nan
    return [
        strategy,
        framework,
        _milliseconds(own.median),
        f"{_milliseconds(own.low)} to {_milliseconds(own.high)}",
        _number(to_alone),
        _number(over_allreduce),
        _number(over_torch),
        _milliseconds(overhead),
        _number(part),
        f"{own.wire / 1e3:,.1f}",
        _number(promised, digits=3),
    ]


def _milliseconds(seconds: float) -> str:
    if abs(seconds) > 0.9995:
        return f"{seconds * 1e3:,.0f}"
    return _number(seconds * 1e3, digits=1)


def _number(value: float, digits: int = 2) -> str:
    return "" if math.isnan(value) else f"{value:.{digits}f}"


def conditions(run: Mapping[str, Any]) -> str:
    """Says how, where and when it was measured."""
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


# Cores that other programs used just before the run, above which its times are off.
BUSY = 0.2
