"""The adviser's answer as text and as JSON."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from typing import TYPE_CHECKING, Any

from jaxcomp._advise_units import format_bandwidth, format_bytes, format_time

if TYPE_CHECKING:
    from jaxcomp._advise import Advice, Prediction

_WIDTH = 96
_HEADER = (
    "strategy", "step", "communication", "compression", "bytes a step", "speedup", "pays below",
)  # fmt: skip


def advice_table(advice: Advice) -> str:
    """What was asked, a line for each strategy, the verdict, and what was assumed."""
    rows = [_HEADER, *(_row(p) for p in advice.predictions)]
    widths = [max(len(row[k]) for row in rows) for k in range(len(_HEADER))]
    link = f"{format_bandwidth(advice.bandwidth)}, latency {format_time(advice.latency)}"
    if math.isinf(advice.bandwidth):
        link = "the measured link"
    lines = [
        f"{advice.values:,} parameters, {advice.workers} workers, {link}, "
        f"{format_time(advice.compute_time)} of computation a step",
        "",
        *("  ".join(_cells(row, widths)).rstrip() for row in rows),
        "",
    ]
    verdict = f"Use {advice.recommended.name}." if advice.compress else "Do not compress."
    lines += textwrap.wrap(f"{verdict} {advice.reason}", _WIDTH)
    for sentence in advice.assumptions:
        lines += textwrap.wrap(f"- {sentence}", _WIDTH, subsequent_indent="  ")
    return "\n".join(lines)


def advice_dict(advice: Advice) -> dict[str, Any]:
    """The same for a program: times in seconds, bandwidths in bytes per second."""
    fields = dataclasses.asdict(advice)
    for prediction in fields["predictions"]:
        if prediction["break_even"] == math.inf:
            prediction["break_even"] = "always"
    if math.isinf(advice.bandwidth):
        fields["bandwidth"] = "measured"
    fields |= {"baseline": advice.baseline.name, "recommended": advice.recommended.name}
    return fields | {"compress": advice.compress}


def _cells(row: tuple[str, ...], widths: list[int]) -> list[str]:
    return [
        row[0].ljust(widths[0]),
        *(x.rjust(n) for x, n in zip(row[1:], widths[1:], strict=True)),
    ]


def _row(prediction: Prediction) -> tuple[str, ...]:
    limit = prediction.break_even
    words = {None: "-", 0: "never", math.inf: "always"}
    pays = words.get(limit) or format_bandwidth(limit or 0)
    return (
        prediction.name,
        format_time(prediction.step_time),
        format_time(prediction.communication),
        format_time(prediction.compression) if prediction.compression else "-",
        format_bytes(prediction.bytes_per_step),
        f"{prediction.speedup:.2f}x",
        pays,
    )
