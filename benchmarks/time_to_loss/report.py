"""Makes the tables of seconds until a loss for docs/performance.md, and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median, stdev

import numpy as np
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from benchmarks.cluster.plan import parse_rate, parse_strategy
from benchmarks.common.paths import ROOT
from benchmarks.common.runs import Run, made_on
from benchmarks.common.style import BLUE, INK, MUTED, ORANGE, PURPLE, panels, save
from benchmarks.common.tables import markdown, student, with_interval, write_table

PAGE = ROOT / "docs" / "performance.md"
COMMAND = "sudo python -m benchmarks.time_to_loss"
EXACT = "jax/allreduce"
_OURS = "jax/powersgd-"
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
_SIXTEEN_BITS = {
    "jax/fp16": EXACT,
    "torch/fp16": EXACT,
    "torch/powersgd-32-fp16": "torch/powersgd-32",
}
Curve = list[tuple[int, float]]  # steps and held-out loss, nats per byte, of each evaluation
Seconds = Mapping[str, list[float]]  # of a step, in each timed call, by rate


@dataclass(frozen=True)
class Result:
    """The runs of one framework and strategy.

    Attributes:
      name: The name on the command line.
      curves: The curves of held-out loss, by seed.
      goals: The loss to reach, by seed.
      sent: The bytes that the interface of a process sent in a step.
      seconds: The seconds of its steps from step `start` on.
      start: The first step of its second phase; 0 if it has one phase.
      before: The seconds of the steps before `start`.
      borrowed: Whether losses and steps come from a run with 32 bits on the wire.
    """

    name: str
    curves: dict[int, Curve]
    goals: Mapping[int, float]
    sent: float
    seconds: Seconds
    start: int
    before: Seconds
    borrowed: bool = False

    def clock(self, rate: str, steps: float) -> float:
        """Returns the seconds of a number of steps at a rate."""
        early = min(steps, self.start)
        seconds = (steps - early) * median(self.seconds[rate])
        if early:
            seconds += early * median(self.before[rate])
        return seconds

    @property
    def reached(self) -> dict[int, float]:
        """Returns the steps until the goal, for the seeds that reach it."""
        reached = {}
        for seed, curve in sorted(self.curves.items()):
            steps = steps_until(curve, self.goals[seed])
            if steps is not None:
                reached[seed] = steps
        return reached

    def gaps(self, exact: Result) -> list[float]:
        """Returns the gaps of the final losses to the exact runs of the same seeds, in per cent."""
        gaps = []
        for seed, curve in sorted(self.curves.items()):
            gaps.append(100 * (curve[-1][1] / exact.curves[seed][-1][1] - 1))
        return gaps

    def sooner_than(self, other: Result, rate: str) -> list[float]:
        """Returns how many times sooner it reaches the goal, for each seed where both do."""
        if rate not in self.seconds or rate not in other.seconds:
            return []
        ours = self.reached
        ratios = []
        for seed, steps in other.reached.items():
            if seed in ours:
                ratios.append(other.clock(rate, steps) / self.clock(rate, ours[seed]))
        return ratios

    def timing_error(self, rate: str) -> float:
        """Returns the relative standard error of its median step."""
        times = self.seconds[rate]  # of two calls at least
        # The median of normal values scatters a quarter more than their mean.
        return 1.25 * stdev(times) / len(times) ** 0.5 / median(times)


def steps_until(curve: Curve, goal: float) -> float | None:
    """Returns the steps until the loss is `goal`, by linear interpolation between evaluations.

    Example:
      >>> steps_until([(10, 3.0), (20, 2.0), (30, 1.0)], 1.5)
      25.0
      >>> steps_until([(10, 3.0), (20, 2.0)], 1.5) is None
      True
    """
    for (before, high), (after, low) in zip([curve[0], *curve], curve, strict=False):
        if low <= goal:
            return float(np.interp(-goal, [-high, -low], [before, after]))
    return None


def results(runs: Sequence[Run]) -> dict[str, Result]:
    """Returns the runs without a limit by name, for the seeds of the exact run.

    If only steps were timed for 16 bits on the wire, the losses are those of 32 bits.
    """
    whole: dict[str, list[Run]] = {}
    times: dict[str, dict[str, list[float]]] = {}
    goals = {}
    for run in runs:
        name = f"{run['framework']}/{run['strategy']}"
        for rate, calls in run.get("seconds", {}).items():
            of_steps = np.array(calls) / run["steps_per_call"]
            times.setdefault(name, {})[rate] = of_steps.tolist()
        if run.get("at") == "unlimited":
            whole.setdefault(name, []).append(run)
            if name == EXACT:
                goals[run["seed"]] = _WITHIN * run["curve"][-1][-1]
    several = {}
    for name, made in whole.items():
        curves: dict[int, Curve] = {}
        for run in made:
            if run["seed"] in goals:
                curves[run["seed"]] = [(steps, loss) for steps, _, loss in run["curve"]]
        framework, _, strategy = name.partition("/")
        parsed = parse_strategy(strategy)
        # The phases of a run were timed as strategies of their own.
        first, last = parsed.phases[0].name, parsed.phases[-1].name
        if curves:
            several[name] = Result(
                name,
                curves,
                goals,
                sent=mean(run["sent_per_step"] for run in made),
                seconds=times.get(f"{framework}/{last}", {}),
                start=parsed.start,
                before=times.get(f"{framework}/{first}", {}),
            )
    for name, alike in _SIXTEEN_BITS.items():
        if name in times and alike in several and name not in several:
            several[name] = replace(several[alike], name=name, seconds=times[name], borrowed=True)
    return several


def sooner_than_the_best(
    several: Mapping[str, Result], result: Result, rate: str
) -> dict[str, str]:
    """Compares with the all-reduce and with torch's hook that reach the goal first at a rate.

    Returns:
      Name -> how many times sooner the result is at the goal, with a 95% interval over seeds and
      repeated steps; the all-reduce first.
    """
    best: dict[bool, tuple[float, Result]] = {}
    for name, other in several.items():
        ratios = result.sooner_than(other, rate)
        if name.startswith(_OURS) or not ratios:
            continue
        is_hook = name.startswith(_HOOK)
        if is_hook not in best or mean(ratios) < best[is_hook][0]:
            best[is_hook] = mean(ratios), other
    written = {}
    for _, (times, other) in sorted(best.items()):
        written[other.name] = f"{times:.1f}x ± {times_half_width(result, other, rate):.1f}"
    return written


def times_half_width(result: Result, other: Result, rate: str) -> float:
    """Returns half the 95% interval of `Result.sooner_than`, over seeds and repeated steps."""
    ratios = result.sooner_than(other, rate)
    times = mean(ratios)
    variance = result.timing_error(rate) ** 2 + other.timing_error(rate) ** 2
    if len(ratios) > 1:
        variance += (stdev(ratios) / times) ** 2 / len(ratios)
    return student(len(ratios)) * variance**0.5 * times


def write_report(runs: Sequence[Run], setting: Run, out: Path) -> list[Path]:
    """Writes the tables and, if there are step times, the picture.

    The tables go into the page if `out` is the default, else beside the picture.

    Raises:
      ValueError: There is no exact run of the setting.
    """
    of_setting = []
    for run in runs:
        # No learning rate changes how long a step takes.
        alike = all(run["config"][name] == setting[name] for name in _SIZES)
        if run["config"] == setting or ("seconds" in run and alike):
            of_setting.append(run)
    several = results(of_setting)
    if EXACT not in several:
        raise ValueError(f"no finished run of {EXACT} with this setting to compare with.")
    written = []
    if several[EXACT].seconds:
        written.append(out.with_suffix(".png"))
        plot(several, written[0])
    text = f"{tables(several)}\n\n{made_on(of_setting)}\n"
    return [*written, write_table(text, COMMAND, PAGE, out)]


def tables(several: Mapping[str, Result]) -> str:
    """Returns the table of losses; if steps were timed, also those of times and of gains."""
    parts = [_losses(several)]
    rates = list(several[EXACT].seconds)
    if rates:
        shown = [parse_rate(rate).shown for rate in rates]
        parts.append(markdown(["milliseconds a step", *shown], _times(several, rates)))
        gains = _gains(several, rates)
        parts.append(markdown(["sooner at the goal than the best", *shown], gains))
    return "\n\n".join(parts)


def _losses(several: Mapping[str, Result]) -> str:
    """Returns the table of losses, bytes and steps to the goal."""
    exact = several[EXACT]
    rows = []
    for name, result in several.items():
        if result.borrowed:
            continue
        above = ""
        if result is not exact:
            above = with_interval(result.gaps(exact), "+.1f", "%")
        reached = result.reached.values()
        number = len(result.curves)
        steps = "-"
        if reached:
            steps = f"{mean(reached):.0f}"
        if 0 < len(reached) < number:
            steps += f" ({len(reached)} of {number})"
        fewer = f"{exact.sent / result.sent:.1f}x"
        rows.append([f"`{name}`", str(number), above, fewer, steps])
    header = ["run", "seeds", "above exact (95%)", "fewer bytes", "steps to goal"]
    return markdown(header, rows)


def _times(several: Mapping[str, Result], rates: Sequence[str]) -> list[list[str]]:
    """Returns a row of milliseconds a step for each timed run."""
    rows = []
    for name, result in several.items():
        if not result.seconds:
            continue
        row = [f"`{name}`"]
        steps = next(iter(result.curves.values()))[-1][0]
        for rate in rates:
            time = ""
            if rate in result.seconds:
                time = f"{1e3 * result.clock(rate, steps) / steps:,.0f}"
            row.append(time)
        rows.append(row)
    return rows


def _gains(several: Mapping[str, Result], rates: Sequence[str]) -> list[list[str]]:
    """Returns a row for each of jaxcomp's runs that were timed and reach the goal."""
    rows = []
    for name, result in several.items():
        if name.startswith(_OURS) and result.seconds and result.reached:
            row = [f"`{name}`"]
            for rate in rates:
                better = sooner_than_the_best(several, result, rate)
                row.append(", ".join(f"{better[other]} than `{other}`" for other in better))
            rows.append(row)
    return rows


def plot(several: Mapping[str, Result], path: Path) -> None:
    """Writes a PNG: loss against seconds, a panel for each rate; the dotted line is the goal."""
    exact = several[EXACT]
    figure, axes = panels(len(exact.seconds), 4.4 * len(exact.seconds), 4.2)
    # One seed, so that a line is a run: the others would lie on each other.
    seed = min(exact.curves)
    goal = exact.goals[seed]
    settled = exact.curves[seed][len(exact.curves[seed]) // 8 :]
    lines = {}
    for axis, rate in zip(axes, exact.seconds, strict=True):
        for name, (words, colour, dashes) in RUNS.items():
            result = several.get(name)
            if result and seed in result.curves and rate in result.seconds:
                steps, losses = zip(*result.curves[seed], strict=True)
                times = [result.clock(rate, number) for number in steps]
                form = {"color": colour, "linewidth": 1.5, "linestyle": dashes}
                (lines[words],) = axis.plot(times, losses, **form)
        axis.axhline(goal, color=MUTED, linewidth=0.8, linestyle=":")
        axis.set(xscale="log", xlabel="seconds", title=parse_rate(rate).shown)
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.set_ylim(0.98 * goal / _WITHIN, 1.02 * max(loss for _, loss in settled))
    axes[0].set_ylabel("held-out loss, nats per byte")
    figure.legend(
        lines.values(), lines.keys(), loc="outside lower center", ncols=3, frameon=False, fontsize=9
    )
    save(figure, path)
