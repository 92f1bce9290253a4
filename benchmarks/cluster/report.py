"""The figures of a run of `benchmarks.cluster`: medians, ratios within the run, the table."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from benchmarks.cluster.plan import ring_factor
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
    loss: float  # of process 0's last batch


@dataclasses.dataclass(frozen=True)
class Figures:
    """A case in figures per training step."""

    median: float  # seconds
    low: float  # seconds; one step in ten was faster
    high: float  # seconds; one step in ten was slower
    wire: float  # bytes sent by a process
    promised: float | None  # bytes that jaxcomp promises for the wire


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Ratios of one framework's case to others of the same model and rate; None where not run."""

    to_alone: float | None  # step time against the same framework without communication
    over_allreduce: float | None  # how many times faster than the framework's own all-reduce
    over_torch: float | None  # how many times faster than torch's same strategy
    overhead: float | None  # seconds more than without communication
    overhead_of_torch: float | None  # that, as a part of torch's


Key = tuple[str, str, str, str]  # model, rate, strategy, framework


def figures_of(case: Case) -> Figures:
    """Medians and bytes of a case.

    The samples of all processes count: with communication they end together, without they are
    independent measurements of the same thing.
    """
    steps = np.concatenate([np.asarray(x) for x in case.seconds]) / case.steps_per_sample
    count = len(case.seconds[0]) * case.steps_per_sample
    processes = len(case.seconds)
    promised = None if case.payload is None else case.payload * ring_factor(processes)
    low, median, high = (float(q) for q in np.quantile(steps, (0.1, 0.5, 0.9)))
    return Figures(median, low, high, statistics.fmean(case.tx_bytes) / count, promised)


def all_figures(cases: Iterable[Case]) -> dict[Key, Figures]:
    """The figures of every case, by model, rate, strategy and framework."""
    return {(c.model, c.rate, c.strategy, c.framework): figures_of(c) for c in cases}


def compare(figures: Mapping[Key, Figures], key: Key) -> Comparison:
    """How a case compares with others of the same run."""
    model, rate, strategy, framework = key

    def median(strategy: str, framework: str) -> float | None:
        found = figures.get((model, rate, strategy, framework))
        return found.median if found else None

    def overhead(framework: str) -> float | None:
        return _difference(median(strategy, framework), median("none", framework))

    own, torch = figures[key].median, median(strategy, "torch")
    jax, alone = framework == "jax", strategy == "none"
    return Comparison(
        to_alone=None if alone else _quotient(own, median("none", framework)),
        over_allreduce=None if alone else _quotient(median("allreduce", framework), own),
        over_torch=_quotient(torch, own) if jax else None,
        overhead=None if alone else overhead(framework),
        overhead_of_torch=_quotient(overhead("jax"), overhead("torch")) if jax else None,
    )


def _quotient(a: float | None, b: float | None) -> float | None:
    # An overhead below zero is noise, and a ratio to it means nothing.
    return a / b if a is not None and b is not None and b > 0 else None


def _difference(a: float | None, b: float | None) -> float | None:
    return a - b if a is not None and b is not None else None


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
    """Markdown: an overview of each model, then all figures of each rate, as measured in turn."""
    parts = []
    for model in dict.fromkeys(key[0] for key in figures):
        own = {key: value for key, value in figures.items() if key[0] == model}
        parts.append(f"### {model}\n\nMilliseconds per step, JAX / torch:\n\n{_overview(own)}")
        for rate in dict.fromkeys(key[1] for key in own):
            rows = [_row(own, key) for key in own if key[1] == rate]
            parts.append(f"#### {model}, {rate}\n\n" + markdown(_HEADER, rows))
    return "\n\n".join(parts) + "\n"


def _overview(figures: Mapping[Key, Figures]) -> str:
    """One model: strategies down, rates across."""
    rates = list(dict.fromkeys(key[1] for key in figures))
    rows = []
    for model, strategy in dict.fromkeys((key[0], key[2]) for key in figures):
        cells = [
            [figures.get((model, rate, strategy, framework)) for framework in ("jax", "torch")]
            for rate in rates
        ]
        texts = (" / ".join(_milliseconds(f.median) if f else "-" for f in c) for c in cells)
        rows.append([strategy, *texts])
    return markdown(["strategy", *rates], rows)


def _row(figures: Mapping[Key, Figures], key: Key) -> list[str]:
    own, ratios = figures[key], compare(figures, key)
    promised = own.wire / own.promised if own.promised else None
    return [
        key[2],
        key[3],
        _milliseconds(own.median),
        f"{_milliseconds(own.low)} to {_milliseconds(own.high)}",
        _number(ratios.to_alone),
        _number(ratios.over_allreduce),
        _number(ratios.over_torch),
        "" if ratios.overhead is None else _milliseconds(ratios.overhead),
        _number(ratios.overhead_of_torch),
        f"{own.wire / 1e3:,.1f}",
        _number(promised, digits=3),
    ]


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}" if abs(seconds) < 0.9995 else f"{seconds * 1e3:,.0f}"


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def conditions(run: Mapping[str, Any]) -> str:
    """Markdown: how, where and when it was measured."""
    machine, settings = run["machine"], run["settings"]
    busy = machine["busy_cores_at_start"]
    lines = [
        f"Measured {run['date']} with `{run['command']}`: {settings['processes']} processes, each "
        "in a network namespace of its own, on one core, over gloo.",
        sentence(machine),
        f"Other programs kept {busy:.2f} cores busy at the start"
        + (": **these are no results.**" if busy > BUSY else "."),
    ]
    if not run["complete"]:
        lines.append("**The run ended early: cases are missing.**")
    return "\n".join(lines)


# Cores that other programs used just before the run, above which its times are off.
BUSY = 0.2
