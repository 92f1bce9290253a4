"""The runs as seconds until a loss: tables, their place in docs/time_to_loss.md, a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from benchmarks.cluster.plan import parse_rate
from benchmarks.common.machine import sentence
from benchmarks.common.paths import RESULTS, ROOT
from benchmarks.common.style import (
    BLUE,
    GREEN,
    INK,
    MUTED,
    OCHRE,
    ORANGE,
    PURPLE,
    SKY,
    panels,
    save,
)
from benchmarks.common.tables import in_page, markdown, with_spread

PAGE = ROOT / "docs" / "time_to_loss.md"
COMMAND = "sudo python -m benchmarks.time_to_loss"
EXACT = "jax/allreduce"
_HOOK = "torch/powersgd-"
_WITHIN = 1.01  # of the exact run's final loss: what is to be reached
_COLOURS = {
    EXACT: INK, "jax/powersgd-32-int6": BLUE, "jax/powersgd-24-int6-every-4": PURPLE,
    "jax/powersgd-16-int6": SKY, "torch/powersgd-32": OCHRE, "torch/powersgd-16": ORANGE,
    "jax/local-sgd-8": GREEN,
}  # fmt: skip


@dataclass(frozen=True)
class Result:
    """The runs of one framework and strategy.

    Attributes:
      name: As on the command line.
      losses: Final held-out loss by seed, nats per byte.
      curves: (steps, loss) of every evaluation, by seed.
      needed: Steps until the goal by seed; None where it is not reached.
      sent: Bytes that the interface of a process sent in a step.
      seconds: Of a step, in each timed call, by rate.
    """

    name: str
    losses: dict[int, float]
    curves: dict[int, list[tuple[int, float]]]
    needed: dict[int, float | None]
    sent: float
    seconds: dict[str, list[float]]

    @property
    def reached(self) -> dict[int, float]:
        """Steps until the goal, of the seeds that reach it."""
        return {seed: steps for seed, steps in self.needed.items() if steps is not None}

    @property
    def share(self) -> str:
        """How many seeds reach the goal, where not all do."""
        missed = 0 < len(self.reached) < len(self.needed)
        return f" ({len(self.reached)} of {len(self.needed)})" if missed else ""

    def gaps(self, exact: Result) -> list[float]:
        """Of the final loss, above the exact run of the same seed; per cent."""
        return [100 * (loss / exact.losses[seed] - 1) for seed, loss in self.losses.items()]

    def until(self, rate: str, beside: Result | None = None) -> float | None:
        """Seconds until the goal at a rate, as a mean over the seeds that reach it.

        Args:
          rate: Of the links.
          beside: Only the seeds count with which this one reaches it too.
        """
        seeds = self.reached.keys() & (beside or self).reached.keys()
        if not seeds or rate not in self.seconds:
            return None
        return mean(self.reached[seed] for seed in seeds) * median(self.seconds[rate])


def results(runs: Sequence[Mapping[str, Any]]) -> dict[str, Result]:
    """The runs without a limit, by their name; of seeds that the exact run has too."""
    found: dict[str, dict[int, Mapping[str, Any]]] = {}
    times: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        name = f"{run['framework']}/{run['strategy']}"
        if "seconds" in run:
            each = run["seconds"].items()
            times[name] = {rate: [t / run["steps_per_call"] for t in calls] for rate, calls in each}
        elif run["at"] == "unlimited":
            found.setdefault(name, {})[run["seed"]] = run
    goals = {s: _WITHIN * run["curve"][-1][2] for s, run in found.get(EXACT, {}).items()}
    return {
        name: _result(name, by_seed, goals, times.get(name, {}))
        for name, by_seed in found.items()
        if goals.keys() & by_seed.keys()
    }


def _result(
    name: str,
    runs: Mapping[int, Mapping[str, Any]],
    goals: Mapping[int, float],
    seconds: dict[str, list[float]],
) -> Result:
    runs = {s: run for s, run in runs.items() if s in goals}
    curves = {s: [(steps, loss) for steps, _, loss in r["curve"]] for s, r in runs.items()}
    return Result(
        name,
        {s: curve[-1][1] for s, curve in curves.items()},
        curves,
        {s: steps_until(curve, goals[s]) for s, curve in curves.items()},
        mean(run["sent_per_step"] for run in runs.values()),
        seconds,
    )


def steps_until(curve: Sequence[tuple[int, float]], goal: float) -> float | None:
    """The number of steps after which the loss is `goal`, on straight lines between evaluations.

    Example:
      >>> steps_until([(10, 3.0), (20, 2.0), (30, 1.0)], 1.5)
      25.0
      >>> steps_until([(10, 3.0), (20, 2.0)], 1.5) is None
      True
    """
    for (before, high), (after, low) in zip([curve[0], *curve], curve, strict=False):
        if low <= goal:
            share = (high - goal) / (high - low) if high > low else 1.0
            return before + share * (after - before)
    return None


def write_report(
    runs: Sequence[Mapping[str, Any]], setting: Mapping[str, Any], out: Path
) -> list[Path]:
    """Writes the tables and, where there are step times, the picture.

    The tables also go into the page if `out` is the usual.

    Raises:
      ValueError: There is no exact run of the setting.
    """
    own = [run for run in runs if run["config"] == setting]
    found = results(own)
    if EXACT not in found:
        raise ValueError(f"no finished run of {EXACT} with this setting to compare with.")
    text = _text(found, own)
    written = [out.with_suffix(".md")]
    written[0].write_text(text)
    if found[EXACT].seconds:
        written.append(out.with_suffix(".png"))
        plot(found, written[-1])
    if out == RESULTS / "time_to_loss":
        PAGE.write_text(in_page(PAGE.read_text(), COMMAND, text))
        written.append(PAGE)
    return written


def _text(found: Mapping[str, Result], runs: Sequence[Mapping[str, Any]]) -> str:
    exact = found[EXACT]
    rates = list(exact.seconds)
    losses = [
        [
            f"`{result.name}`",
            str(len(result.losses)),
            f"{mean(result.losses.values()):.3f}",
            "" if result is exact else with_spread(result.gaps(exact), "+.1f", "%"),
            f"{result.sent / 1e6:.3f}",
            f"{exact.sent / result.sent:.1f}x",
            _steps(result),
        ]
        for result in found.values()
    ]
    header = ["run", "seeds", "held-out loss", "above exact", "MB a step", "fewer", "steps to goal"]
    parts = [markdown(header, losses)]
    for rate in rates:
        rows = [_row(result, found, rate) for result in found.values() if rate in result.seconds]
        head = [rate, "ms a step", "10% to 90%", "to the goal", "than exact", "than torch's hook"]
        parts.append(markdown(head, rows))
    about = runs[0]["about"]
    versions = dict(about["machine"]["versions"])
    for run in runs:
        versions |= run["about"]["machine"]["versions"]
    first, last = (f(run["about"]["date"][:10] for run in runs) for f in (min, max))
    dates = first if first == last else f"{first} to {last}"
    made = f"{len(runs)} runs, {dates}; {sentence(about['machine'] | {'versions': versions})}"
    setting = ", ".join(f"{name} {value}" for name, value in runs[0]["config"].items())
    checks = _checks(found, runs)
    return "\n\n".join([*parts, *checks, f"{made} Setting: {setting}.", ""])


def _row(result: Result, found: Mapping[str, Result], rate: str) -> list[str]:
    times = [1e3 * t for t in result.seconds[rate]]
    low, high = np.quantile(times, [0.1, 0.9])
    until = result.until(rate)

    def sooner(others: Sequence[Result]) -> str:
        """Than the best of them, with the same seeds."""
        ratios = []
        for other in others:
            theirs, own = other.until(rate, result), result.until(rate, other)
            if theirs is not None and own is not None:
                ratios.append(theirs / own)
        return f"{min(ratios):.1f}x" if ratios else "-"

    reached = "-" if until is None else _duration(until) + result.share
    spread = f"{low:,.0f} to {high:,.0f}"
    hooks = [other for name, other in found.items() if name.startswith(_HOOK)]
    cells = [f"{median(times):,.0f}", spread, reached, sooner([found[EXACT]]), sooner(hooks)]
    return [f"`{result.name}`", *cells]


def _steps(result: Result) -> str:
    reached = result.reached
    return f"{mean(reached.values()):.0f}{result.share}" if reached else "-"


def _checks(found: Mapping[str, Result], runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Whole runs at a rate, beside what the product says of them."""
    rows = []
    for run in runs:
        name, at = f"{run['framework']}/{run['strategy']}", run.get("at", "unlimited")
        if at == "unlimited" or name not in found or at not in found[name].seconds:
            continue
        steps, seconds, loss = run["curve"][-1]
        product = steps * median(found[name].seconds[at])
        difference = f"{100 * (seconds / product - 1):+.1f}%"
        rows.append(
            [f"`{name}`", at, f"{loss:.3f}", _duration(seconds), _duration(product), difference]
        )
    header = ["whole runs", "at", "held-out loss", "took", "the product", "difference"]
    return [markdown(header, rows)] if rows else []


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def plot(found: Mapping[str, Result], path: Path) -> None:
    """Writes a PNG: loss against seconds, a panel for each rate; the dotted line is the goal."""
    exact = found[EXACT]
    figure, axes = panels(len(exact.seconds), 4.4 * len(exact.seconds), 4.2)
    # One seed, so that a line is a run: the others would lie on each other.
    seed = min(exact.curves)
    top = max(loss for _, loss in exact.curves[seed][len(exact.curves[seed]) // 8 :])
    lines = {}
    for axis, rate in zip(axes, exact.seconds, strict=True):
        for name, colour in _COLOURS.items():
            curve = found[name].curves.get(seed) if name in found else None
            if curve is None or rate not in found[name].seconds:
                continue
            step = median(found[name].seconds[rate])
            times, losses = zip(*((steps * step, loss) for steps, loss in curve), strict=True)
            (lines[name],) = axis.plot(times, losses, color=colour, linewidth=1.5)
        axis.axhline(_WITHIN * exact.losses[seed], color=MUTED, linewidth=0.8, linestyle=":")
        axis.set(xscale="log", xlabel="seconds", title=parse_rate(rate).shown)
        axis.set_ylim(0.98 * exact.losses[seed], 1.02 * top)
    axes[0].set_ylabel("held-out loss, nats per byte")
    figure.legend(
        lines.values(), lines.keys(), loc="outside lower center", ncols=4, frameon=False, fontsize=9
    )
    save(figure, path)
