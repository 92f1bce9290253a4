"""The study's table, and its place in docs/convergence.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import mean
from typing import Any

from benchmarks.common.paths import ROOT
from benchmarks.common.runs import made_on, provenance
from benchmarks.common.tables import in_page, markdown, with_interval, with_spread
from benchmarks.vision.settings import RATES, STRATEGIES
from benchmarks.vision.training import Config

PAGE = ROOT / "docs" / "convergence.md"
REFERENCE = "allreduce"
_HEADER = ["", "fewer bytes", "held-out loss", "above exact (95%)", "accuracy", "seeds"]

Run = dict[str, Any]


def best_rate(runs: Sequence[Run], config: Config) -> float:
    """The learning rate at which the exact run of seed 0 ends lowest.

    Raises:
      ValueError: Not all rates have been tried.
    """
    losses = {
        run["rate"]: run["curve"][-1][1]
        for run in runs
        if (run["strategy"], run["seed"], run["config"]) == (REFERENCE, 0, asdict(config))
    }
    if set(RATES) - set(losses):
        raise ValueError(
            "not every learning rate was tried; run python -m benchmarks.vision again."
        )
    return min(losses, key=lambda rate: losses[rate])


def paged(page: str, runs: Sequence[Run], config: Config) -> str:
    """The page with the table of the runs of a configuration.

    Raises:
      ValueError: Not every learning rate was tried, or the page has no place for the table.
    """
    return in_page(page, "python -m benchmarks.vision --report", _text(runs, config))


def _text(runs: Sequence[Run], config: Config) -> str:
    rate = best_rate(runs, config)
    found: dict[str, dict[int, Run]] = {}
    for run in runs:
        if run["config"] == asdict(config) and run["rate"] == rate:
            found.setdefault(run["strategy"], {})[run["seed"]] = run
    exact = found[REFERENCE]
    rows = [_row(name, found[name], exact) for name in STRATEGIES if name in found]
    made = made_on(provenance([run for run in runs if run["config"] == asdict(config)]))
    return (
        f"{markdown(_HEADER, rows)}\n\n{made} Learning rate {rate:g}, the best of the exact run.\n"
    )


def _row(name: str, own: dict[int, Run], exact: dict[int, Run]) -> list[str]:
    seeds = sorted(own.keys() & exact.keys())
    losses, accuracies = ([own[seed]["curve"][-1][i] for seed in seeds] for i in (1, 2))
    gaps = [100 * (own[s]["curve"][-1][1] / exact[s]["curve"][-1][1] - 1) for s in seeds]
    ratio = exact[seeds[0]]["bytes"] / own[seeds[0]]["bytes"]
    first = name == REFERENCE
    return [
        STRATEGIES[name],
        "" if first else f"{ratio:.1f}x",
        with_spread(losses, ".3f"),
        "" if first else with_interval(gaps, "+.1f", "%"),
        f"{100 * mean(accuracies):.1f}%",
        str(len(seeds)),
    ]
