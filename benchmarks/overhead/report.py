"""The table and the picture of a run of `benchmarks.overhead`."""

from __future__ import annotations

from pathlib import Path

from benchmarks.common.machine import sentence
from benchmarks.common.runs import Run
from benchmarks.common.style import BLUE, MUTED, ORANGE, TITLES, name_points, panels, save
from benchmarks.common.tables import markdown
from benchmarks.overhead.trees import TREES


def table(run: Run) -> str:
    """Makes a table of medians and ratios, and describes where and how they were measured."""
    header = ["gradients of", "rank", "jaxcomp, ms"]
    note = "Medians."
    compared = any("torch" in case for case in run["cases"])
    if compared:
        header += ["torch, ms", "torch / jaxcomp", "floor, ms", "jaxcomp / floor"]
        note = (
            "Medians; the floor is 7 words for every gradient value at the copy bandwidth measured "
            "in the same run."
        )
    header += ["temporary memory / gradients", "compilation, s"]
    rows = []
    for case in run["cases"]:
        millions = case["words"] / 1e6
        ours = case["jax"]
        time = ours["median"]
        row = [f"{case['tree']} ({millions:,.1f} M, {_leaves(case)} leaves)"]
        row += [str(case["rank"]), f"{1e3 * time:.1f}"]
        if compared:
            theirs = case["torch"]["median"]
            floor = case["floor"]
            row += [f"{1e3 * theirs:.1f}", f"{theirs / time:.2f}x"]
            row += [f"{1e3 * floor:.1f}", f"{time / floor:.2f}x"]
        memory = ours["temporary_bytes"] / (4 * case["words"])
        row += [f"{memory:.2f}", f"{ours['compile_seconds']:.1f}"]
        rows.append(row)
    lines = [
        "## Compress, decompress and keep the residual, on one device",
        f"`{run['command']}`, {run['date']}. {sentence(run['machine'])}",
        note,
        markdown(header, rows),
    ]
    return "\n\n".join(lines) + "\n"


def _leaves(case: Run) -> int:
    return len(TREES[case["tree"]]())


def plot(run: Run, path: Path) -> None:
    """Draws the medians of every tree, as multiples of the floor, against the rank."""
    by_tree: dict[str, list[Run]] = {}
    for case in run["cases"]:
        by_tree.setdefault(case["tree"], []).append(case)
    figure, axes = panels(len(by_tree), 3.8 * len(by_tree), 3.8)
    ends = []
    for axis, (tree, cases) in zip(axes, by_tree.items(), strict=True):
        last = len(cases) - 1
        named = [(last, 1.0, "floor", MUTED)]
        for framework, name, colour in (("jax", "jaxcomp", BLUE), ("torch", "torch", ORANGE)):
            if framework in cases[0]:
                times = [case[framework]["median"] / case["floor"] for case in cases]
                axis.plot(range(len(cases)), times, "o-", color=colour, linewidth=1.6)
                named.append((last, times[-1], name, colour))
        axis.axhline(1, color=MUTED, linewidth=1)
        axis.set_xticks(range(len(cases)), [str(case["rank"]) for case in cases])
        axis.set_xlim(-0.2, len(cases) - 0.2)  # room for the names
        axis.set(xlabel="rank", title=TITLES.get(tree, tree))
        ends.append(named)
    axes[0].set_ylabel("time / floor of 7 words a value")
    axes[0].set_ylim(bottom=0)  # of all panels, once they all have their lines
    for axis, named in zip(axes, ends, strict=True):
        name_points(axis, named)
    save(figure, path)


def plot_growth(run: Run, path: Path) -> None:
    """Draws time and memory of an update against parameters, compilation against leaves."""
    figure, (times, memory, compilation) = panels(3, 11.4, 3.8, share_y=False)
    times.set(xlabel="parameters", xscale="log", yscale="log", title="seconds of an update")
    memory.set(xlabel="parameters", xscale="log", title="temporary memory / gradients")
    compilation.set(xlabel="leaves", xscale="log", yscale="log", title="seconds of compilation")
    for rank, colour in ((4, BLUE), (32, ORANGE)):
        for case in run["cases"]:
            if case["rank"] == rank:
                jax = case["jax"]
                words = case["words"]
                times.plot(words, jax["median"], "o", color=colour)
                memory.plot(words, jax["temporary_bytes"] / 4 / words, "o", color=colour)
                compilation.plot(_leaves(case), jax["compile_seconds"], "o", color=colour)
        times.plot([], [], "o", color=colour, label=f"rank {rank}")
    times.legend(frameon=False)
    save(figure, path)
