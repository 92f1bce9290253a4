"""The study's tables, and their place in docs/convergence.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, stdev
from typing import Any

from benchmarks.common.paths import ROOT
from benchmarks.common.tables import in_page, markdown
from benchmarks.convergence.report import provenance
from benchmarks.convergence.training import Config
from benchmarks.optimizers.settings import GRID, MAIN, Setting, frontier, longer

PAGE = ROOT / "docs" / "convergence.md"
COMMAND = "python -m benchmarks.optimizers --report"
_HEADER = ["optimizer", "sent", "seeds", "held-out loss", "above exact", "fewer bytes"]

Loss = Callable[[Setting, int], float]  # of a setting and a seed: the final held-out loss


@dataclass(frozen=True)
class Result:
    """The runs of a setting.

    Attributes:
      losses: Final held-out loss, nats per byte, by seed.
      sent: Bytes sent by each replica in the whole run.
    """

    losses: dict[int, float]
    sent: int


def best(optimizer: str, loss: Loss) -> Setting:
    """The exact average at its best rate and momentum, on seed 0."""
    return min(
        (Setting(optimizer, rate, momentum) for rate, momentum in GRID[optimizer]),
        key=lambda setting: loss(setting, 0),
    )


def results(runs: Sequence[dict[str, Any]]) -> dict[Setting, Result]:
    """The finished runs by their setting."""
    found: dict[Setting, Result] = {}
    for run in runs:
        result = found.setdefault(Setting(**run["setting"]), Result({}, run["bytes"]))
        result.losses[run["seed"]] = run["curve"][-1][1]
    return found


def gaps(own: Result, exact: Result) -> list[float]:
    """How far above the exact run of the same seed, in per cent, for each seed."""
    return [100 * (own.losses[s] / exact.losses[s] - 1) for s in own.losses if s in exact.losses]


def paged(page: str, runs: Sequence[dict[str, Any]], config: Config) -> str:
    """The page with the tables of the runs of a configuration, and of longer ones.

    Raises:
      ValueError: No search has come to its end, or the page has no place for the tables.
    """
    own, long = (
        [run for run in runs if run["config"] == asdict(c)] for c in (config, longer(config))
    )
    found, found_later = results(own), results(long)
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
    about = provenance(own, asdict(config))
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    made = f"{len(own) + len(long)} runs, {about['dates']}, {about['cpu']}; {versions}."
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
        above = "" if setting == exact else _spread(gaps(own, beside), "+.1f", "%")
        ratio = f"{beside.sent / own.sent:.1f}x"
        label = setting.label().partition(": ")[2] + note
        name = setting.label().partition(": ")[0] if setting == exact else ""
        rows.append([name, label, str(len(losses)), _spread(losses, ".3f"), above, ratio])
    return rows


def _spread(values: Sequence[float], form: str, unit: str = "") -> str:
    if not values:
        return ""
    spread = f" ± {stdev(values):{form.lstrip('+')}}" if len(values) > 1 else ""
    return f"{mean(values):{form}}{unit}{spread}"
