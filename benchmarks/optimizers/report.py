"""The study's tables, and their place in docs/convergence.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.common.paths import ROOT
from benchmarks.common.runs import made_on, provenance
from benchmarks.common.tables import in_page, markdown, with_spread
from benchmarks.convergence.runs import Result, results
from benchmarks.convergence.training import Config
from benchmarks.optimizers.settings import GRID, MAIN, Setting, frontier, longer

PAGE = ROOT / "docs" / "convergence.md"
COMMAND = "python -m benchmarks.optimizers --report"
_HEADER = ["optimizer", "sent", "seeds", "held-out loss", "above exact", "fewer bytes"]

Loss = Callable[[Setting, int], float]  # of a setting and a seed: the final held-out loss


def best(optimizer: str, loss: Loss) -> Setting:
    """The exact average at its best rate and momentum, on seed 0."""
    return min(
        (Setting(optimizer, rate, momentum) for rate, momentum in GRID[optimizer]),
        key=lambda setting: loss(setting, 0),
    )


def paged(page: str, runs: Sequence[dict[str, Any]], config: Config) -> str:
    """The page with the tables of the runs of a configuration, and of longer ones.

    Raises:
      ValueError: No search has come to its end, or the page has no place for the tables.
    """
    own, long = (
        [run for run in runs if run["config"] == asdict(c)] for c in (config, longer(config))
    )
    found, found_later = results(own, Setting), results(long, Setting)
    rows, tried = list[list[str]](), list[list[str]]()
    for optimizer in GRID:
        try:
            exact = best(optimizer, lambda setting, seed: found[setting].losses[seed])
        except KeyError:
            continue  # not searched to its end
        rows += _rows(optimizer, exact, found, "")
        if exact in found_later:
            rows += _rows(optimizer, exact, found_later, f", {longer(config).steps:,} steps")
        tried += [
            [setting.label(), f"{found[setting].losses[0]:.3f}"]
            for setting in (Setting(optimizer, *point) for point in GRID[optimizer])
        ]
    if not rows:
        raise ValueError("no search has come to its end; run python -m benchmarks.optimizers.")
    made = made_on(provenance([*own, *long]))
    searched = markdown(["exact runs, seed 0", "held-out loss"], tried)
    return in_page(
        page, COMMAND, "\n\n".join((markdown(_HEADER, rows, left=2), searched, made, ""))
    )


def _rows(
    optimizer: str, exact: Setting, found: Mapping[Setting, Result], note: str
) -> list[list[str]]:
    wanted = (exact, *frontier(exact, full=optimizer in MAIN))
    rows = []
    for setting in (s for s in wanted if s in found):
        own, beside = found[setting], found[exact]
        losses = list(own.losses.values())
        above = "" if setting == exact else with_spread(own.gaps(beside), "+.1f", "%")
        ratio = f"{beside.sent / own.sent:.1f}x"
        label = setting.label().partition(": ")[2] + note
        name = setting.label().partition(": ")[0] if setting == exact else ""
        rows.append([name, label, str(len(losses)), with_spread(losses, ".3f"), above, ratio])
    return rows
