"""The table and the picture of a run of `benchmarks.overhead`."""

from __future__ import annotations

from pathlib import Path

from benchmarks.common.machine import sentence
from benchmarks.common.runs import Run
from benchmarks.common.style import BLUE, MUTED, ORANGE, TITLES, name_points, panels, save
from benchmarks.common.tables import markdown
from benchmarks.overhead.trees import TREES


def table(run: Run) -> str:
    """Makes a table of medians and ratios, with where and how they were measured."""
    rows = []
    with_torch = any("torch" in case for case in run["cases"])
    for case in run["cases"]:
        ours = case["jax"]
        millions = case["words"] / 1e6
        floor = 1e3 * case["floor"]
        time = 1e3 * ours["median"]
        row = {
            "gradients of": f"{case['tree']} ({millions:,.1f} M, {_leaves(case)} leaves)",
            "rank": str(case["rank"]),
            "floor, ms": f"{floor:.1f}",
            "jaxcomp, ms": f"{time:.1f}",
            "of the floor": f"{time / floor:.2f}x",
        }
        if with_torch:
            theirs = 1e3 * case["torch"]["median"]
            row |= {"torch, ms": f"{theirs:.1f}", "torch / jaxcomp": f"{theirs / time:.2f}x"}
        memory = ours["temporary_bytes"] / (4 * case["words"])
        row["temporary memory / gradients"] = f"{memory:.2f}"
        row["compilation, s"] = f"{ours['compile_seconds']:.1f}"
        rows.append(row)
    lines = [
        "## Compress, decompress and keep the residual, on one device",
        f"`{run['command']}`, {run['date']}. {sentence(run['machine'])}",
        "Medians; the floor is 7 words for every gradient value at the copy bandwidth measured in "
        "the same run.",
        markdown([*rows[0]], [[*row.values()] for row in rows]),
    ]
    return "\n\n".join(lines) + "\n"


def _leaves(case: Run) -> int:
    return len(TREES[case["tree"]]())


def plot(run: Run, path: Path) -> None:
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


def plot_growth(run: Run, path: Path) -> None:
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
