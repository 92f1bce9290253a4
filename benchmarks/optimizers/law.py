"""The law of `jaxcomp.advise`, fitted to the committed runs and compared with others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from statistics import mean
from typing import Any, NamedTuple

import numpy as np

import jaxcomp
from benchmarks.cluster.plan import parse_strategy
from benchmarks.common.tables import markdown, with_interval
from benchmarks.convergence.runs import Result, results
from benchmarks.convergence.training import Config
from benchmarks.optimizers.report import best
from benchmarks.optimizers.settings import (
    GRID,
    MAIN,
    UNSEEN,
    WIDE,
    Grid,
    Setting,
    longer,
    wider,
)
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
    return Law(len(gaps), float(a), exponent, float(c), float(variance**0.5), error)


def fitted_runs(optimizer: str, runs: Sequence[dict[str, Any]]) -> list[Gap]:
    """Those with a rank, of which the exact run has the best rate and momentum of its width.

    Args:
      optimizer: Whose.
      runs: Of `benchmarks.optimizers`.
    """

    def found(config: Config) -> dict[Setting, Result]:
        return results([run for run in runs if run["config"] == asdict(config)], Setting)

    def best_of(config: Config, grid: Grid) -> Setting:
        return best(optimizer, lambda setting, seed: found(config)[setting].losses[seed], grid)

    usual = Config()
    wide = wider(usual, optimizer)
    exact = best_of(usual, GRID)
    gaps = list[Gap]()
    for config, beside in ((usual, exact), (longer(usual), exact), (wide, best_of(wide, WIDE))):
        for setting, result in found(config).items():
            if setting.rank and replace(setting, rank=0, wire="float32") == beside:
                percents = result.gaps(found(config)[beside])
                gaps += [Gap(config.width, setting.rank, percent) for percent in percents]
    return gaps


def _unseen(runs: Sequence[dict[str, Any]]) -> Iterator[tuple[str, int, int, list[float]]]:
    """Name, width, rank and gaps of the settings whose gap was predicted before they were run."""
    for unseen in UNSEEN:
        config = asdict(unseen.config)
        found = results([run for run in runs if run["config"] == config], Setting)
        if sent := next((setting for setting in found if setting.rank == unseen.rank), None):
            exact = found[replace(sent, rank=0, wire="float32")]
            yield unseen.name, unseen.config.width, unseen.rank, found[sent].gaps(exact)


def _over_links(links: Sequence[dict[str, Any]]) -> Iterator[tuple[str, int, int, list[float]]]:
    """The same of PowerSGD over links in the usual setting; of rounds, those of 3 and 4 steps."""
    found = over_links.results([run for run in links if run["config"] == asdict(OverLinks())])
    exact = found[over_links.EXACT]
    for name in sorted(found):
        strategy = parse_strategy(name.partition("/")[2])
        if strategy.kind == "powersgd" and strategy.every in (1, 3, 4) and not strategy.start:
            way = "torch's hook" if name.startswith("torch") else "int6"
            way = f"rounds of {strategy.every} steps" if strategy.in_rounds else way
            yield f"over links, {way}", OverLinks.width, strategy.number, found[name].gaps(exact)


def compared(runs: Sequence[dict[str, Any]], links: Sequence[dict[str, Any]]) -> str:
    """A table of runs that were not fitted, and what the law says of them."""
    law, rows = law_of_adviser("adamw"), list[list[str]]()
    for said, width, rank, percents in (*_unseen(runs), *_over_links(links)):
        gap, half = (100 * of(rank, width) for of in (law.gap, law.half_width))
        inside = abs(mean(percents) - gap) <= half
        rows.append(
            [
                f"{said}, rank {rank}",
                str(len(percents)),
                with_interval(percents, "+.1f", "%"),
                f"+{gap:.1f}% ± {half:.1f}",
                "inside" if inside else "outside",
            ]
        )
    return markdown(_HEADER, rows)


def report(runs: Sequence[dict[str, Any]], links: Sequence[dict[str, Any]]) -> str:
    """The coefficients as fitted now, and the comparison."""
    laws = [f"{name}: {fitted(fitted_runs(name, runs))}" for name in MAIN]
    return "\n".join([*laws, "", compared(runs, links)])
