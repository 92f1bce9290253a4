"""The runs as seconds until a loss: tables, their place in docs/performance.md, a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from benchmarks.cluster.plan import parse_rate, parse_strategy
from benchmarks.common.paths import RESULTS, ROOT
from benchmarks.common.runs import made_on
from benchmarks.common.style import BLUE, INK, MUTED, ORANGE, PURPLE, panels, save
from benchmarks.common.tables import in_page, markdown, student, with_interval

PAGE = ROOT / "docs" / "performance.md"
COMMAND = "sudo python -m benchmarks.time_to_loss"
EXACT = "jax/allreduce"
_HOOK = "torch/powersgd-"
_SIZES = ("processes", "sequences", "layers", "width", "heads", "context")
_WITHIN = 1.01  # of the exact run's final loss: what is to be reached
# What is shown in the picture: by its name, in words, with its colour and dashes.
RUNS = {
    EXACT: ("float32 all-reduce", INK, "-"),
    "torch/fp16": ("torch's 16-bit all-reduce", INK, "--"),
    "jax/powersgd-32-int6": ("PowerSGD rank 32, int6", BLUE, "-"),
    "jax/powersgd-32-int6-every-4-from-160": ("with rounds of 4 from step 160", PURPLE, "-"),
    "torch/powersgd-32": ("torch's hook, rank 32", ORANGE, "-"),
    "torch/powersgd-32-fp16": ("torch's hook, rank 32, 16 bits", ORANGE, "--"),
}
# With 16 bits on the wire. Where only steps were timed, a run is taken to need as many of them as
# the one with 32 bits that is named here.
SIXTEEN_BITS = {
    "jax/fp16": EXACT,
    "torch/fp16": EXACT,
    "torch/powersgd-32-fp16": "torch/powersgd-32",
}


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
      borrowed: Whether losses and steps are those of a run with 32 bits on the wire.
    """

    name: str
    losses: dict[int, float]
    curves: dict[int, list[tuple[int, float]]]
    needed: dict[int, float | None]
    sent: float
    seconds: dict[str, list[float]]
    start: int
    before: dict[str, list[float]]
    borrowed: bool = False

    def clock(self, rate: str, steps: float) -> float:
        """Returns the seconds that so many steps take at a rate."""
        early = min(steps, self.start)
        waited = early * median(self.before[rate]) if early else 0.0
        return waited + (steps - early) * median(self.seconds[rate])

    @property
    def reached(self) -> dict[int, float]:
        """Returns the steps until the goal, of the seeds that reach it."""
        return {seed: steps for seed, steps in self.needed.items() if steps is not None}

    @property
    def share(self) -> str:
        """Says how many seeds reach the goal, where not all do."""
        missed = 0 < len(self.reached) < len(self.needed)
        return f" ({len(self.reached)} of {len(self.needed)})" if missed else ""

    def gaps(self, exact: Result) -> list[float]:
        """Returns how far the final losses are above the exact ones of their seeds, per cent."""
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


def results(runs: Sequence[Mapping[str, Any]]) -> dict[str, Result]:
    """Returns the runs without a limit, by their name; of seeds that the exact run has too.

    Where only steps with 16 bits on the wire were timed, the losses are those of 32 bits.
    """
    by_name: dict[str, dict[int, Mapping[str, Any]]] = {}
    times: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        name = f"{run['framework']}/{run['strategy']}"
        if "seconds" in run:
            times.setdefault(name, {}).update(_seconds_a_step(run))
        elif run["at"] == "unlimited":
            by_name.setdefault(name, {})[run["seed"]] = run
    goals = {}
    for seed, run in by_name.get(EXACT, {}).items():
        goals[seed] = _WITHIN * run["curve"][-1][2]
    several = {}
    for name, by_seed in by_name.items():
        shared = {seed: run for seed, run in by_seed.items() if seed in goals}
        if shared:
            several[name] = _result(name, shared, goals, times)
    for name, alike in SIXTEEN_BITS.items():
        if name in times and alike in several and name not in several:
            several[name] = replace(several[alike], name=name, seconds=times[name], borrowed=True)
    return several


def _seconds_a_step(run: Mapping[str, Any]) -> dict[str, list[float]]:
    """Returns what the steps of each timed call took, by rate."""
    seconds = {}
    for rate, calls in run["seconds"].items():
        seconds[rate] = [call / run["steps_per_call"] for call in calls]
    return seconds


def _result(
    name: str,
    runs: Mapping[int, Mapping[str, Any]],
    goals: Mapping[int, float],
    times: Mapping[str, dict[str, list[float]]],
) -> Result:
    framework, _, strategy = name.partition("/")
    parsed = parse_strategy(strategy)
    # The phases of a run were timed as strategies of their own.
    first = times.get(f"{framework}/{parsed.phases[0].name}", {})
    last = times.get(f"{framework}/{parsed.phases[-1].name}", {})
    losses = {}
    curves = {}
    needed = {}
    for seed, run in runs.items():
        curves[seed] = [(steps, loss) for steps, _, loss in run["curve"]]
        losses[seed] = curves[seed][-1][1]
        needed[seed] = steps_until(curves[seed], goals[seed])
    sent = mean(run["sent_per_step"] for run in runs.values())
    return Result(name, losses, curves, needed, sent, last, parsed.start, first)


def steps_until(curve: Sequence[tuple[int, float]], goal: float) -> float | None:
    """Returns the steps after which the loss is `goal`, on straight lines between evaluations.

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
    of_setting = []
    for run in runs:
        if run["config"] == setting or _times_it(run, setting):
            of_setting.append(run)
    several = results(of_setting)
    if EXACT not in several:
        raise ValueError(f"no finished run of {EXACT} with this setting to compare with.")
    text = _text(several, of_setting)
    written = []
    if several[EXACT].seconds:
        picture = out.with_suffix(".png")
        plot(several, picture)
        written.append(picture)
    if out == RESULTS / "time_to_loss":
        PAGE.write_text(in_page(PAGE.read_text(), COMMAND, text))
        return [*written, PAGE]
    table = out.with_suffix(".md")
    table.write_text(text)
    return [*written, table]


def _times_it(run: Mapping[str, Any], setting: Mapping[str, Any]) -> bool:
    """Tells whether it timed steps of the same program: no learning rate changes their length."""
    same = all(run["config"][name] == setting[name] for name in _SIZES)
    return "seconds" in run and same


def _text(several: Mapping[str, Result], runs: Sequence[Mapping[str, Any]]) -> str:
    exact = several[EXACT]
    losses = []
    times = []
    sooner = []
    for name, result in several.items():
        if not result.borrowed:
            above = "" if result is exact else with_interval(result.gaps(exact), "+.1f", "%")
            fewer = f"{exact.sent / result.sent:.1f}x"
            losses.append([f"`{name}`", str(len(result.losses)), above, fewer, _steps(result)])
        if result.seconds:
            times.append([f"`{name}`"])
            times[-1] += [_milliseconds(result, rate) for rate in exact.seconds]
        if _is_ours(name) and result.seconds and result.reached:
            sooner.append([f"`{name}`"])
            sooner[-1] += [_sooner(result, rate, several) for rate in exact.seconds]
    rates = [parse_rate(rate).shown for rate in exact.seconds]
    parts = [
        markdown(["run", "seeds", "above exact (95%)", "fewer bytes", "steps to goal"], losses)
    ]
    if rates:
        parts.append(markdown(["milliseconds a step", *rates], times))
        parts.append(markdown(["sooner at the goal than the best", *rates], sooner))
    return "\n\n".join([*parts, made_on(runs), ""])


def _is_ours(name: str) -> bool:
    return name.startswith("jax/powersgd-")


def _milliseconds(result: Result, rate: str) -> str:
    """Writes the mean step of a whole run, if it was timed at the rate."""
    if rate not in result.seconds:
        return ""
    curve = next(iter(result.curves.values()))
    last = curve[-1][0]
    return f"{1e3 * result.clock(rate, last) / last:,.0f}"


def _sooner(result: Result, rate: str, several: Mapping[str, Result]) -> str:
    """Writes how many times sooner it is than the best all-reduce and the best of torch's hook."""
    cells = []
    for name, times in sooner_than_the_best(several, result, rate).items():
        cells.append(f"{times} than `{name}`")
    return ", ".join(cells)


def sooner_than_the_best(
    several: Mapping[str, Result], result: Result, rate: str
) -> dict[str, str]:
    """Compares with the all-reduce and the hook of torch that are at the goal first at a rate.

    Returns:
      Name -> how many times sooner the result is there, with its interval; the all-reduce first.
    """
    best: dict[bool, tuple[list[float], Result]] = {}
    for name, other in several.items():
        ratios = result.sooner_than(other, rate)
        if _is_ours(name) or not ratios:
            continue
        is_hook = name.startswith(_HOOK)
        if is_hook not in best or mean(ratios) < mean(best[is_hook][0]):
            best[is_hook] = ratios, other
    written = {}
    for _, (ratios, other) in sorted(best.items()):
        written[other.name] = _with_timing(ratios, rate, result, other)
    return written


def _with_timing(ratios: Sequence[float], rate: str, *timed: Result) -> str:
    """Writes the mean and half the width of its 95% interval, over seeds and repeated steps."""
    variance = sum(result.timing_error(rate) ** 2 for result in timed)
    if len(ratios) > 1:
        variance += (stdev(ratios) / mean(ratios)) ** 2 / len(ratios)
    half = student(len(ratios)) * variance**0.5 * mean(ratios)
    return f"{mean(ratios):.1f}x ± {half:.1f}"


def _steps(result: Result) -> str:
    reached = result.reached
    return f"{mean(reached.values()):.0f}{result.share}" if reached else "-"


def plot(several: Mapping[str, Result], path: Path) -> None:
    """Writes a PNG: loss against seconds, a panel for each rate; the dotted line is the goal."""
    exact = several[EXACT]
    figure, axes = panels(len(exact.seconds), 4.4 * len(exact.seconds), 4.2)
    # One seed, so that a line is a run: the others would lie on each other.
    seed = min(exact.curves)
    settled = exact.curves[seed][len(exact.curves[seed]) // 8 :]
    top = max(loss for _, loss in settled)
    lines = {}
    for axis, rate in zip(axes, exact.seconds, strict=True):
        for name, (words, colour, dashes) in RUNS.items():
            result = several.get(name)
            if result is None or seed not in result.curves or rate not in result.seconds:
                continue
            times = [result.clock(rate, steps) for steps, _ in result.curves[seed]]
            losses = [loss for _, loss in result.curves[seed]]
            (lines[words],) = axis.plot(
                times, losses, color=colour, linewidth=1.5, linestyle=dashes
            )
        axis.axhline(_WITHIN * exact.losses[seed], color=MUTED, linewidth=0.8, linestyle=":")
        axis.set(xscale="log", xlabel="seconds", title=parse_rate(rate).shown)
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.set_ylim(0.98 * exact.losses[seed], 1.02 * top)
    axes[0].set_ylabel("held-out loss, nats per byte")
    figure.legend(
        lines.values(), lines.keys(), loc="outside lower center", ncols=3, frameon=False, fontsize=9
    )
    save(figure, path)
