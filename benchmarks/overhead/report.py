"""The table and the picture of a run of `benchmarks.overhead`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt

from benchmarks.common.tables import markdown

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
    machine = run["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    lines = [
        "## Compress, decompress and keep the residual, on one device",
        "",
        f"`{run['command']}`, {run['date']}; {machine['cpu']}; {versions}. Medians; the floor is 7",
        "words for every gradient value at the copy bandwidth measured in the same run.",
        "",
        markdown(_HEADER, [_row(case) for case in run["cases"]]),
    ]
    return "\n".join(lines) + "\n"


def _row(case: Mapping[str, Any]) -> list[str]:
    ours, theirs, floor = case.get("jax"), case.get("torch"), case.get("floor")
    row = [f"{case['tree']} ({case['words'] / 1e6:.1f} M)", str(case["rank"])]
    row += [_ms(floor), _ms(ours and ours["median"]), _ratio(ours and ours["median"], floor, "x")]
    row += [_ms(theirs and theirs["median"])]
    row += [_ratio(theirs and theirs["median"], ours and ours["median"], "x")]
    row += [_ratio(ours and ours["temporary_bytes"], 4 * case["words"], "")]
    return [*row, f"{ours['compile_seconds']:.1f}" if ours else ""]


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.1f}"


def _ratio(a: float | None, b: float | None, unit: str) -> str:
    return f"{a / b:.2f}{unit}" if a is not None and b else ""


def plot(run: Mapping[str, Any], path: Path) -> None:
    """Writes a PNG: for every tree, the medians as multiples of the floor against the rank."""
    trees = list(dict.fromkeys(case["tree"] for case in run["cases"]))
    picture, panels = plt.subplots(
        1, len(trees), figsize=(4.2 * len(trees), 4), squeeze=False, sharey=True
    )
    for panel, tree in zip(panels[0], trees, strict=True):
        cases = [case for case in run["cases"] if case["tree"] == tree and "floor" in case]
        for framework, name, style in (("jax", "jaxcomp", "o-"), ("torch", "torch's hook", "s--")):
            points = [
                (i, case[framework]["median"] / case["floor"])
                for i, case in enumerate(cases)
                if framework in case
            ]
            if points:
                panel.plot(*zip(*points, strict=True), style, label=name)
        panel.axhline(1, color="gray", linewidth=1, label="floor: 7 words a value")
        panel.set_xticks(range(len(cases)), [str(case["rank"]) for case in cases])
        panel.set_xlabel("rank")
        panel.set_title(tree)
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("time / floor")
    panels[0][0].set_ylim(bottom=0)
    panels[0][0].legend(fontsize=8)
    picture.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(picture)
