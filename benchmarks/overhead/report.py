"""The table and the picture of a run of `benchmarks.overhead`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.common.machine import sentence
from benchmarks.common.style import BLUE, MUTED, ORANGE, TITLES, name_points, panels, save
from benchmarks.common.tables import markdown
from benchmarks.overhead.trees import TREES

_HEADER = [
    "gradients of",
    "rank",
    "floor, ms",
    "jaxcomp, ms",
    "of the floor",
    "torch, ms",
    "torch / jaxcomp",
    "temporary memory / gradients",
    "compilation, s",
]


def table(run: Mapping[str, Any]) -> str:
    """Medians and ratios as Markdown, with where and how they were measured."""
    columns = zip(_HEADER, *map(_row, run["cases"]), strict=True)
    # Those of torch are empty where it was not timed.
    header, *rows = zip(*(column for column in columns if any(column[1:])), strict=True)
    lines = [
        "## Compress, decompress and keep the residual, on one device",
        "",
        f"`{run['command']}`, {run['date']}. {sentence(run['machine'])}",
        "",
        "Medians; the floor is 7 words for every gradient value at the copy bandwidth measured in "
        "the same run.",
        "",
        markdown(header, rows),
    ]
    return "\n".join(lines) + "\n"


def _row(case: Mapping[str, Any]) -> list[str]:
    ours, theirs, floor = case.get("jax"), case.get("torch"), case.get("floor")
    size = f"{case['words'] / 1e6:,.1f} M, {_leaves(case)} leaves"
    row = [f"{case['tree']} ({size})", str(case["rank"])]
    row += [_ms(floor), _ms(ours and ours["median"]), _ratio(ours and ours["median"], floor, "x")]
    row += [_ms(theirs and theirs["median"])]
    row += [_ratio(theirs and theirs["median"], ours and ours["median"], "x")]
    row += [_ratio(ours and ours["temporary_bytes"], 4 * case["words"], "")]
    return [*row, f"{ours['compile_seconds']:.1f}" if ours else ""]


def _leaves(case: Mapping[str, Any]) -> int:
    return len(TREES[case["tree"]]())


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.1f}"


def _ratio(a: float | None, b: float | None, unit: str) -> str:
    return f"{a / b:.2f}{unit}" if a is not None and b else ""


def plot(run: Mapping[str, Any], path: Path) -> None:
    """Writes a PNG: for every tree, the medians as multiples of the floor against the rank."""
    trees = list(dict.fromkeys(case["tree"] for case in run["cases"]))
    figure, axes = panels(len(trees), 3.8 * len(trees), 3.8)
    names = []
    for axis, tree in zip(axes, trees, strict=True):
        cases = [case for case in run["cases"] if case["tree"] == tree and "floor" in case]
        ends = [(max(0, len(cases) - 1), 1.0, "floor", MUTED)]
        for framework, name, colour in (("jax", "jaxcomp", BLUE), ("torch", "torch", ORANGE)):
            points = [
                (i, case[framework]["median"] / case["floor"])
                for i, case in enumerate(cases)
                if framework in case
            ]
            if points:
                axis.plot(*zip(*points, strict=True), "o-", color=colour, linewidth=1.6)
                ends.append((*points[-1], name, colour))
        axis.axhline(1, color=MUTED, linewidth=1)
        axis.set_xticks(range(len(cases)), [str(case["rank"]) for case in cases])
        axis.set_xlim(-0.2, len(cases) - 0.2)  # room for the names
        axis.set(xlabel="rank", title=TITLES.get(tree, tree))
        names.append(ends)
    axes[0].set_ylabel("time / floor of 7 words a value")
    axes[0].set_ylim(bottom=0)  # of all panels, once they all have their lines
    for axis, ends in zip(axes, names, strict=True):
        name_points(axis, ends)
    save(figure, path)


def plot_growth(run: Mapping[str, Any], path: Path) -> None:
    """Writes a PNG: time and memory of an update against parameters, compilation against leaves."""
    figure, axes = panels(3, 11.4, 3.8, share_y=False)
    axes[0].set(xlabel="parameters", xscale="log", yscale="log", title="seconds of an update")
    axes[1].set(xlabel="parameters", xscale="log", title="temporary memory / gradients")
    axes[2].set(xlabel="leaves", xscale="log", yscale="log", title="seconds of compilation")
    for rank, colour in ((4, BLUE), (32, ORANGE)):
        cases = [(case, case["jax"]) for case in run["cases"] if case["rank"] == rank]
        shown = (
            [(case["words"], jax["median"]) for case, jax in cases],
            [(case["words"], jax["temporary_bytes"] / 4 / case["words"]) for case, jax in cases],
            [(_leaves(case), jax["compile_seconds"]) for case, jax in cases],
        )
        for axis, points in zip(axes, shown, strict=True):
            axis.plot(*zip(*points, strict=True), "o", color=colour, label=f"rank {rank}")
    axes[0].legend(frameon=False)
    save(figure, path)
