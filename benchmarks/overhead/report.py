"""The table and the picture of a run of `benchmarks.overhead`."""

from __future__ import annotations

import itertools
import math
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
    """Makes a table of medians and ratios, with where and how they were measured."""
    header = _HEADER
    rows = [_row(case) for case in run["cases"]]
    if not any("torch" in case for case in run["cases"]):
        keep = [not name.startswith("torch") for name in _HEADER]
        header = list(itertools.compress(header, keep))
        rows = [list(itertools.compress(row, keep)) for row in rows]
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
    floor = case.get("floor", math.nan)
    ours = case.get("jax", {})
    median = ours.get("median", math.nan)
    theirs = case.get("torch", {}).get("median", math.nan)
    memory = ours.get("temporary_bytes", math.nan) / (4 * case["words"])
    row = [
        f"{case['tree']} ({case['words'] / 1e6:,.1f} M, {_leaves(case)} leaves)",
        str(case["rank"]),
        f"{1e3 * floor:.1f}",
        f"{1e3 * median:.1f}",
        f"{median / floor:.2f}x",
        f"{1e3 * theirs:.1f}",
        f"{theirs / median:.2f}x",
        f"{memory:.2f}",
        f"{ours.get('compile_seconds', math.nan):.1f}",
    ]
    return ["" if cell.startswith("nan") else cell for cell in row]


def _leaves(case: Mapping[str, Any]) -> int:
    return len(TREES[case["tree"]]())


def plot(run: Mapping[str, Any], path: Path) -> None:
    """Draws for every tree the medians as multiples of the floor against the rank."""
    trees = list(dict.fromkeys(case["tree"] for case in run["cases"]))
    figure, axes = panels(len(trees), 3.8 * len(trees), 3.8)
    names = []
    for axis, tree in zip(axes, trees, strict=True):
        cases = [case for case in run["cases"] if case["tree"] == tree and "floor" in case]
        ends = [(max(0, len(cases) - 1), 1.0, "floor", MUTED)]
        for framework, name, colour in (("jax", "jaxcomp", BLUE), ("torch", "torch", ORANGE)):
            timed = [case for case in cases if framework in case]
            if timed:
                places = [cases.index(case) for case in timed]
                times = [case[framework]["median"] / case["floor"] for case in timed]
                axis.plot(places, times, "o-", color=colour, linewidth=1.6)
                ends.append((places[-1], times[-1], name, colour))
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
    """Draws time and memory of an update against parameters, compilation against leaves."""
    figure, axes = panels(3, 11.4, 3.8, share_y=False)
    axes[0].set(xlabel="parameters", xscale="log", yscale="log", title="seconds of an update")
    axes[1].set(xlabel="parameters", xscale="log", title="temporary memory / gradients")
    axes[2].set(xlabel="leaves", xscale="log", yscale="log", title="seconds of compilation")
    for rank, colour in ((4, BLUE), (32, ORANGE)):
        for case in run["cases"]:
            if case["rank"] == rank:
                jax = case["jax"]
                words = case["words"]
                axes[0].plot(words, jax["median"], "o", color=colour)
                axes[1].plot(words, jax["temporary_bytes"] / 4 / words, "o", color=colour)
                axes[2].plot(_leaves(case), jax["compile_seconds"], "o", color=colour)
        axes[0].plot([], [], "o", color=colour, label=f"rank {rank}")
    axes[0].legend(frameon=False)
    save(figure, path)
