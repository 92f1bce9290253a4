"""The runs as seconds until a loss: tables, their place in docs/performance.md, a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from benchmarks.cluster.plan import parse_rate, parse_strategy
from benchmarks.common.paths import RESULTS, ROOT
from benchmarks.common.runs import made_on, provenance
from benchmarks.common.style import BLUE, INK, MUTED, ORANGE, PURPLE, panels, save
from benchmarks.common.tables import in_page, markdown, student, with_interval

PAGE = ROOT / "docs" / "performance.md"
COMMAND = "sudo python -m benchmarks.time_to_loss"
EXACT = "jax/allreduce"
_HOOK = "torch/powersgd-"
_SIZES = ("processes", "sequences", "layers", "width", "heads", "context")
_WITHIN = 1.01  # of the exact run's final loss: what is to be reached
# What is run where nothing else is said, and shown in the picture: by its name, in words.
RUNS = {
    EXACT: ("float32 all-reduce", INK),
    "jax/powersgd-32-int6": ("PowerSGD rank 32, int6", BLUE),
    "jax/powersgd-32-int6-every-4-from-160": ("rank 32, int6, rounds of 4 from step 160", PURPLE),
    "torch/powersgd-32": ("torch's hook, rank 32", ORANGE),
}
# With 16 bits on the wire. Nobody has run these on a quiet machine yet, and their step times are
# estimated from those with 32 bits: name each to `--runs` to measure it.
FAIR = ("jax/fp16", "torch/fp16", "torch/powersgd-32-fp16")
_HALVED = {EXACT: "a 16-bit all-reduce", "torch/powersgd-32": "torch's hook in 16 bits"}


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
      start: Steps before these, which took `before`.
      before: Likewise of them.
    """

    name: str
    losses: dict[int, float]
    curves: dict[int, list[tuple[int, float]]]
    needed: dict[int, float | None]
    sent: float
    seconds: dict[str, list[float]]
    start: int
    before: dict[str, list[float]]

    def clock(self, rate: str, steps: float) -> float:
        """Seconds that so many steps take at a rate."""
        early = min(steps, self.start)
        waited = early * median(self.before[rate]) if early else 0.0
        return waited + (steps - early) * median(self.seconds[rate])

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

    def sooner_than(self, other: Result, rate: str) -> list[float]:
        """Returns how many times sooner it is at the goal, by seed with which both reach it."""
        if self is other or rate not in self.seconds or rate not in other.seconds:
            return []
        ours = self.reached
        theirs = other.reached
        ratios = []
        for seed in sorted(ours.keys() & theirs.keys()):
            ratios.append(other.clock(rate, theirs[seed]) / self.clock(rate, ours[seed]))
        return ratios

    def timing_error(self, rate: str) -> float:
        """Returns the standard error of its median step, relative to it."""
        times = self.seconds[rate]
        if len(times) < 2:
            return 0.0
        # The median of normal values scatters a quarter more than their mean.
        return 1.25 * stdev(times) / len(times) ** 0.5 / median(times)

    def with_half_the_bytes(self) -> Result:
        """Returns an estimate of the same steps with 16 bits on the wire in the place of 32.

        What a link takes is inversely proportional to its rate, which is read off the two slowest.
        """
        bits = {rate: parse_rate(rate).bits_per_second or math.inf for rate in self.seconds}
        slowest, slow = sorted(bits, key=lambda rate: bits[rate])[:2]
        longer = median(self.seconds[slowest]) - median(self.seconds[slow])
        sent = longer / (1 / bits[slowest] - 1 / bits[slow])
        seconds = {}
        for rate, times in self.seconds.items():
            seconds[rate] = [time - sent / bits[rate] / 2 for time in times]
        return replace(self, seconds=seconds)


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
        name: _result(name, by_seed, goals, times)
        for name, by_seed in found.items()
        if goals.keys() & by_seed.keys()
    }


def _result(
    name: str,
    runs: Mapping[int, Mapping[str, Any]],
    goals: Mapping[int, float],
    times: Mapping[str, dict[str, list[float]]],
) -> Result:
    framework, _, strategy = name.partition("/")
    sent = parse_strategy(strategy)
    # Of two phases each was timed as a strategy of its own.
    timed = [times.get(f"{framework}/{phase.name}", {}) for phase in sent.phases]
    runs = {s: run for s, run in runs.items() if s in goals}
    curves = {s: [(steps, loss) for steps, _, loss in r["curve"]] for s, r in runs.items()}
    return Result(
        name,
        {s: curve[-1][1] for s, curve in curves.items()},
        curves,
        {s: steps_until(curve, goals[s]) for s, curve in curves.items()},
        mean(run["sent_per_step"] for run in runs.values()),
        timed[-1],
        sent.start,
        timed[0],
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

    The tables go into the page if `out` is the usual, else beside the picture.

    Raises:
      ValueError: There is no exact run of the setting.
    """
    own = [run for run in runs if run["config"] == setting or _times_it(run, setting)]
    found = results(own)
    if EXACT not in found:
        raise ValueError(f"no finished run of {EXACT} with this setting to compare with.")
    text, written = _text(found, own), list[Path]()
    if found[EXACT].seconds:
        written.append(out.with_suffix(".png"))
        plot(found, written[-1])
    if out == RESULTS / "time_to_loss":
        written.append(PAGE)
        PAGE.write_text(in_page(PAGE.read_text(), COMMAND, text))
    else:
        written.append(out.with_suffix(".md"))
        written[-1].write_text(text)
    return written


def _times_it(run: Mapping[str, Any], setting: Mapping[str, Any]) -> bool:
    """Whether it timed steps of the same program: no learning rate changes how long they take."""
    same = all(run["config"][name] == setting[name] for name in _SIZES)
    return "seconds" in run and same


def _text(found: Mapping[str, Result], runs: Sequence[Mapping[str, Any]]) -> str:
    exact = found[EXACT]
    losses = [
        [
            f"`{result.name}`",
            str(len(result.losses)),
            "" if result is exact else with_interval(result.gaps(exact), "+.1f", "%"),
            f"{exact.sent / result.sent:.1f}x",
            _steps(result),
        ]
        for result in found.values()
    ]
    parts = [
        markdown(["run", "seeds", "above exact (95%)", "fewer bytes", "steps to goal"], losses)
    ]
    if rates := list(exact.seconds):
        timed = [result for result in found.values() if result.seconds]
        rows = [
            [f"`{result.name}`", *(_at(rate, result, found) for rate in rates)] for result in timed
        ]
        parts.append(markdown(["run", *(parse_rate(rate).shown for rate in rates)], rows))
        parts.append(_fair(found, rates))
    return "\n\n".join([*parts, made_on(provenance(runs)), ""])


def _at(rate: str, result: Result, found: Mapping[str, Result]) -> str:
    """Milliseconds a step, and how many times sooner at the goal than exact and torch's hook."""
    if rate not in result.seconds:
        return ""
    hooks = [other for name, other in found.items() if name.startswith(_HOOK)]
    than_exact = result.sooner_than(found[EXACT], rate)
    # Of torch's hook the rank that is best for it.
    each_hook = (result.sooner_than(hook, rate) for hook in hooks)
    than_hook = min(filter(None, each_hook), key=mean, default=[])
    exact = _with_timing(than_exact, rate, result, found[EXACT])
    hook = _with_timing(than_hook, rate, result, *hooks)
    curve = next(iter(result.curves.values()))
    return ", ".join(
        [f"{1e3 * result.clock(rate, curve[-1][0]) / curve[-1][0]:,.0f} ms", exact, hook]
    )


def _with_timing(ratios: Sequence[float], rate: str, *timed: Result) -> str:
    """Writes the mean and half the width of its 95% interval, over seeds and repeated steps."""
    if not ratios:
        return "-"
    variance = sum(result.timing_error(rate) ** 2 for result in timed if rate in result.seconds)
    if len(ratios) > 1:
        variance += (stdev(ratios) / mean(ratios)) ** 2 / len(ratios)
    half = student(len(ratios)) * variance**0.5 * mean(ratios)
    return f"{mean(ratios):.1f}x ± {half:.1f}"


def _fair(found: Mapping[str, Result], rates: Sequence[str]) -> str:
    """Shows how many times sooner than with 16 bits on the wire, in an estimate."""
    rows = []
    for result in found.values():
        if result.name in _HALVED or not (result.seconds and result.reached):
            continue
        row = [f"`{result.name}`"]
        for rate in rates:
            cells = []
            for name in _HALVED:
                if name in found and found[name].seconds:
                    halved = found[name].with_half_the_bytes()
                    ratios = result.sooner_than(halved, rate)
                    cells.append(_with_timing(ratios, rate, result, halved))
            row.append(", ".join(cells))
        rows.append(row)
    header = [f"sooner than {' and '.join(_HALVED.values())}, estimated"]
    for rate in rates:
        header.append(parse_rate(rate).shown)
    return markdown(header, rows)


def _steps(result: Result) -> str:
    reached = result.reached
    return f"{mean(reached.values()):.0f}{result.share}" if reached else "-"


def plot(found: Mapping[str, Result], path: Path) -> None:
    """Writes a PNG: loss against seconds, a panel for each rate; the dotted line is the goal."""
    exact = found[EXACT]
    figure, axes = panels(len(exact.seconds), 4.4 * len(exact.seconds), 4.2)
    # One seed, so that a line is a run: the others would lie on each other.
    seed = min(exact.curves)
    top = max(loss for _, loss in exact.curves[seed][len(exact.curves[seed]) // 8 :])
    lines = {}
    for axis, rate in zip(axes, exact.seconds, strict=True):
        for name, (words, colour) in RUNS.items():
            curve = found[name].curves.get(seed) if name in found else None
            if curve is None or rate not in found[name].seconds:
                continue
            times = [found[name].clock(rate, steps) for steps, _ in curve]
            losses = [loss for _, loss in curve]
            (lines[words],) = axis.plot(times, losses, color=colour, linewidth=1.5)
        axis.axhline(_WITHIN * exact.losses[seed], color=MUTED, linewidth=0.8, linestyle=":")
        axis.set(xscale="log", xlabel="seconds", title=parse_rate(rate).shown)
        axis.set_ylim(0.98 * exact.losses[seed], 1.02 * top)
    axes[0].set_ylabel("held-out loss, nats per byte")
    figure.legend(
        lines.values(), lines.keys(), loc="outside lower center", ncols=3, frameon=False, fontsize=9
    )
    save(figure, path)
