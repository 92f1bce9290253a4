"""The study's tables, and their place in docs/convergence.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from statistics import mean
from typing import Any

from benchmarks.common.paths import ROOT
from benchmarks.common.runs import made_on, provenance
from benchmarks.common.tables import in_page, markdown, with_interval
from benchmarks.convergence.runs import Result, results
from benchmarks.convergence.training import Config
from benchmarks.optimizers.settings import (
    GRID,
    MAIN,
    WIDE,
    Grid,
    Setting,
    frontier,
    frontier_of_width,
    longer,
    wider,
)

PAGE = ROOT / "docs" / "convergence.md"
COMMAND = "python -m benchmarks.optimizers --report"
_HEADER = ["optimizer", "sent", "seeds", "above exact (95%)", "fewer bytes"]

Loss = Callable[[Setting, int], float]  # of a setting and a seed: the final held-out loss


def best(optimizer: str, loss: Loss, grid: Grid = GRID) -> Setting:
    """The exact average at its best rate and momentum of the grid, on seed 0."""
    return min(searched(optimizer, grid), key=lambda setting: loss(setting, 0))


def searched(optimizer: str, grid: Grid) -> list[Setting]:
    """The exact averages of a grid."""
    return [Setting(optimizer, rate, momentum) for rate, momentum in grid[optimizer]]


def paged(page: str, runs: Sequence[dict[str, Any]], config: Config) -> str:
    """The page with the tables of the runs of a configuration, of longer and of wider ones.

    Raises:
      ValueError: No search has come to its end, or the page has no place for the tables.
    """
    kinds = (config, longer(config), *(wider(config, name) for name in WIDE))
    counted = [[run for run in runs if run["config"] == asdict(kind)] for kind in kinds]
    found, later, *wides = (results(some, Setting) for some in counted)
    wide_of, rows = dict(zip(WIDE, wides, strict=True)), list[list[str]]()
    for optimizer in GRID:
        if (exact := _best(optimizer, found, GRID)) is None:
            continue
        wanted = [*frontier(exact, full=optimizer in MAIN)]
        rows += _rows(exact, wanted, found, "")
        if exact in later:
            rows += _rows(exact, wanted, later, f", {longer(config).steps:,} steps")
        if optimizer in WIDE and (exact := _best(optimizer, wide_of[optimizer], WIDE)):
            note = f", width {wider(config, optimizer).width}"
            rows += _rows(exact, frontier_of_width(exact), wide_of[optimizer], note)
    if not rows:
        raise ValueError("no search has come to its end; run python -m benchmarks.optimizers.")
    made = made_on(provenance([run for some in counted for run in some]))
    return in_page(page, COMMAND, f"{markdown(_HEADER, rows, left=2)}\n\n{made}\n")


def _best(optimizer: str, found: Mapping[Setting, Result], grid: Grid) -> Setting | None:
    """None for a search that has not come to its end."""
    try:
        return best(optimizer, lambda setting, seed: found[setting].losses[seed], grid)
    except KeyError:
        return None


def _rows(
    exact: Setting, compressed: Iterable[Setting], found: Mapping[Setting, Result], note: str
) -> list[list[str]]:
    rows = []
    for setting in (s for s in (exact, *compressed) if s in found):
        own, beside = found[setting], found[exact]
        losses = list(own.losses.values())
        above = f"loss {mean(losses):.3f}"
        if setting != exact:
            above = with_interval(own.gaps(beside), "+.1f", "%")
        ratio = f"{beside.sent / own.sent:.1f}x"
        label = setting.label.partition(": ")[2] + note
        name = setting.label.partition(": ")[0] if setting == exact else ""
        rows.append([name, label, str(len(losses)), above, ratio])
    return rows
