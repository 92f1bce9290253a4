"""The law of `jaxcomp.advise`, fitted to the committed runs and compared with others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import mean
from typing import Any, NamedTuple

import numpy as np

import jaxcomp
from benchmarks.cluster.plan import parse_strategy
from benchmarks.common.tables import markdown, with_interval
from benchmarks.optimizers.settings import MAIN, Setting
from benchmarks.time_to_loss import report as over_links
from benchmarks.time_to_loss.task import Config as OverLinks
from jaxcomp.types import Law

COMMAND = "python -m benchmarks.optimizers --law"
WIDTHS = (128, 512)  # of the runs
_EXPONENTS = np.arange(-1.0, 1.501, 0.01)
_HEADER = ["not fitted", "seeds", "above exact", "the law", "its interval"]


def law_of_adviser(optimizer: str) -> Law:
    """What `jaxcomp.advise` says of an optimizer."""
    given = {"workers": 2, "bandwidth": "1Gbit", "step_time": "1s"}
    return jaxcomp.advise(10_000, optimizer=optimizer, **given).law


class Gap(NamedTuple):
    """How far above the exact run of its seed a run ended."""

    width: int
    rank: int
    percent: float


def fitted(gaps: Sequence[Gap]) -> Law:
    """The coefficients with the least squares; `error` is where these grow by the variance.

    Args:
      gaps: Of single runs, of several ranks and widths.
    """
    widths = np.array([gap.width for gap in gaps], float)
    ranks = np.array([gap.rank for gap in gaps], float)
    percent = np.array([gap.percent for gap in gaps])

    def least(exponent: float) -> tuple[float, np.ndarray]:
        columns = np.stack([(widths / WIDTHS[0]) ** exponent / ranks, -np.ones(len(ranks))], 1)
        found = np.linalg.lstsq(columns, percent, rcond=None)[0]
        return float(np.sum((percent - columns @ found) ** 2)), found

    squares = np.array([least(exponent)[0] for exponent in _EXPONENTS])
    exponent = float(_EXPONENTS[squares.argmin()])
    rest, (a, c) = least(exponent)
    variance = rest / (len(gaps) - 3)
    within = _EXPONENTS[squares <= rest + variance]
    error = float(within[-1] - within[0]) / 2
    off = percent - (a * (widths / WIDTHS[0]) ** exponent / ranks - c)
    # The three coefficients are shared out among the widths; wider models never spread less.
    lost = 3 / len(WIDTHS)
    narrow, wide = (
        (np.sum(off[widths == w] ** 2) / (np.sum(widths == w) - lost)) ** 0.5 for w in WIDTHS
    )
    spread = (float(narrow), max(float(narrow), float(wide)))
    return Law(len(gaps), float(a), exponent, float(c), spread, error)


def fitted_runs(
    optimizer: str, runs: Sequence[dict[str, Any]], links: Sequence[dict[str, Any]]
) -> list[Gap]:
    """Those with a rank behind an optimizer, and with AdamW those over links at width 512.

    Args:
      optimizer: Whose.
      runs: Of `benchmarks.optimizers`.
      links: Of `benchmarks.time_to_loss`.
    """

    def key(run: dict[str, Any], **exact: Any) -> tuple[Any, ...]:
        return Setting(**run["setting"] | exact), run["seed"], str(run["config"])

    losses = {key(run): run["curve"][-1][1] for run in runs}
    gaps = list[Gap]()
    for run in runs:
        setting = Setting(**run["setting"])
        if setting.optimizer == optimizer and setting.rank:
            beside = losses[key(run, rank=0, wire="float32")]
            percent = 100 * (run["curve"][-1][1] / beside - 1)
            gaps.append(Gap(run["config"]["width"], setting.rank, percent))
    if optimizer == "adamw":
        gaps += [
            Gap(OverLinks.width, rank, percent)
            for name, rank, percents in _over_links(links)
            if name == f"jax/powersgd-{rank}-int6"
            for percent in percents
        ]
    return gaps


def _over_links(links: Sequence[dict[str, Any]]) -> list[tuple[str, int, list[float]]]:
    """Name, rank and gaps of PowerSGD's runs of the usual setting."""
    found = over_links.results([run for run in links if run["config"] == asdict(OverLinks())])
    exact = found[over_links.EXACT]
    named = [(name, parse_strategy(name.partition("/")[2])) for name in found]
    return [
        (name, strategy.number, found[name].gaps(exact))
        for name, strategy in named
        if strategy.kind == "powersgd"
    ]


def compared(links: Sequence[dict[str, Any]]) -> str:
    """A table of runs that were not fitted, and what the law says of them."""
    law, rows = law_of_adviser("adamw"), list[list[str]]()
    for name, rank, percents in sorted(_over_links(links)):
        every = name.rpartition("-every-")[2] if "-every-" in name else ""
        if name.startswith("torch") or every in ("3", "4"):
            said = f"rank {rank}, " + (f"rounds of {every} steps" if every else "torch's hook")
            gap, half = (100 * f(rank, OverLinks.width) for f in (law.gap, law.half_width))
            inside = abs(mean(percents) - gap) <= half
            rows.append(
                [
                    said,
                    str(len(percents)),
                    with_interval(percents, "+.1f", "%"),
                    f"+{gap:.1f}% ± {half:.1f}",
                    "inside" if inside else "outside",
                ]
            )
    return markdown(_HEADER, rows)


def report(runs: Sequence[dict[str, Any]], links: Sequence[dict[str, Any]]) -> str:
    """The coefficients as fitted now, and the comparison."""
    laws = [f"{name}: {fitted(fitted_runs(name, runs, links))}" for name in MAIN]
    return "\n".join([*laws, "", compared(links)])
