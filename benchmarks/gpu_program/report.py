"""The table of a run of `gpu_program`, and those of docs/gpu.md."""

from __future__ import annotations

import collections
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.tables import in_page, markdown
from benchmarks.gpu_program.target import TARGETS

_TIMES = ("ms", "torch's hook, ms", "floor, ms")
_HEADER = (
    "gradients",
    "reducer",
    "rank",
    "kernels",
    "words per value",
    "floor",
    "temporary / gradients",
    "library calls",
    "collectives: dtype and bytes",
    "compiled in s (processor)",
)


def table(run: dict[str, Any]) -> str:
    """A row for every program, under a line that says how they were made."""
    machine = run["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    head = (
        f"`{run['command']}`, {run['date']}. Compiled for {run['settings']['devices']} "
        f"{run['settings']['target'].upper()}s on {machine['cores']} cores of {machine['cpu']}, "
        f"{machine['busy_cores_at_start']:.1f} of them busy with something else at the start; "
        f"{versions}.\n\n"
    )
    if earlier := [f"`{made['command']}`, {made['date']}" for made in run.get("earlier", [])]:
        head += f"Programs that it did not compile again are of {'; '.join(earlier)}.\n\n"
    cases = run["cases"]
    if not any("seconds" in case for case in cases):
        return head + markdown(_HEADER, [_row(case) for case in cases], left=2) + "\n"
    rows = [_row(case) + _times(case) for case in cases]
    devices = dict.fromkeys(str(case["device"]) for case in cases if "device" in case)
    head += f"Timed on {', '.join(devices)} by `benchmarks.overhead`, medians.\n\n"
    return head + markdown((*_HEADER, *_TIMES), rows, left=2) + "\n"


def _times(case: dict[str, Any]) -> list[str]:
    """Of a GPU; empty where the case was not timed."""
    seconds = [case.get(name) for name in ("seconds", "torch_seconds", "floor_seconds")]
    return ["" if x is None else f"{1e3 * x:.2f}" for x in seconds]


def _row(case: dict[str, Any]) -> list[str]:
    rank = "-" if case["reducer"].startswith(("allreduce", "quantized")) else str(case["rank"])
    start = [case["tree"], case["reducer"], rank]
    if "error" in case:
        return [*start, case["error"], *[""] * 6]
    calls = ", ".join(f"{number} {name}" for name, number in case["library_calls"].items())
    return [
        *start,
        f"{case['kernels']:.0f}",
        f"{case['words']:.2f}",
        "-" if case["floor"] is None else f"{case['floor']:.2f}",
        f"{case['temporary']:.2f}",
        calls or "none",
        _collectives(case["collectives"]),
        f"{case['compile_seconds']:.0f} ({case['processor_seconds']:.0f})",
    ]


def _collectives(found: list[dict[str, Any]]) -> str:
    """Kinds and dtypes with the number and the bytes of all of them."""
    groups: dict[tuple[str, str], list[int]] = collections.defaultdict(list)
    for x in found:
        groups[x["kind"], x["dtype"]].append(x["bytes"])
    return "; ".join(
        f"{len(sizes)} {kind} {dtype}, {sum(sizes):,}" for (kind, dtype), sizes in groups.items()
    )


# What docs/gpu.md shows of the first results.
_SHOWN = (
    "powersgd, gpu_kernels",
    "powersgd",
    "powersgd, gpu_kernels, int8",
    "powersgd, int8",
    "allreduce",
    "quantized_allreduce",
)
_TREE = "gpt2-small"


def results(folder: Path) -> dict[str, dict[str, Any]]:
    """The runs in a folder by the names of their files, that of H200s without a tag first."""
    files = sorted(
        folder.glob("gpu_program-*.json"),
        key=lambda file: (file.stem != f"gpu_program-{TARGETS[0]}", file.stem),
    )
    return {file.stem: json.loads(file.read_text()) for file in files}


def paged(page: str, runs: dict[str, dict[str, Any]]) -> str:
    """The page with GPT-2 small's rows of the first of the runs, and a line for every run.

    Raises:
      ValueError: There are none, or the page has no place for a table.
    """
    if not runs:
        raise ValueError("no results to report; run without `--report` first.")
    first = next(iter(runs.values()))
    cases = [x for x in first["cases"] if x["tree"] == _TREE and x["reducer"] in _SHOWN]
    cases.sort(key=lambda x: (_SHOWN.index(x["reducer"]), x["rank"]))
    rows = [_row(case)[1:] for case in cases]
    page = in_page(
        page,
        "python -m benchmarks.gpu_program --report",
        markdown(_HEADER[1:], rows, left=1) + "\n",
    )
    header = ("results", "compiled for", "programs", "failed", "longest, s of processor")
    lines = markdown(header, [_line(name, run) for name, run in runs.items()], left=2)
    return in_page(page, "python -m benchmarks.gpu_program --report, all", lines + "\n")


def _line(name: str, run: dict[str, Any]) -> Sequence[str]:
    settings, cases = run["settings"], run["cases"]
    target = f"{settings['target'].upper()}, {settings['map']}, jaxlib {_jaxlib(run)}"
    seconds = [case["processor_seconds"] for case in cases if "error" not in case]
    failed = sum("error" in case for case in cases)
    link = f"[{name}](../benchmarks/results/{name}.md)"
    return link, target, str(len(cases)), str(failed), f"{max(seconds):.0f}" if seconds else ""


def _jaxlib(run: dict[str, Any]) -> str:
    return run["machine"]["versions"]["jaxlib"]
