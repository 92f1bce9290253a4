"""The table of a run of `gpu_program`."""

from __future__ import annotations

import collections
from typing import Any

from benchmarks.common.tables import markdown

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
    return head + markdown(_HEADER, [_row(case) for case in run["cases"]], left=2) + "\n"


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
