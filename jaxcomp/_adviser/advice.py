"""The adviser's answer: as data, as text and as JSON."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from typing import Any

from jaxcomp._adviser.units import format_bandwidth, format_bytes, format_time

_WIDTH = 96
_HEADER = (
    "strategy", "step", "communication", "compression", "bytes a step", "speedup", "pays below",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What the cost model says of one strategy. Times in seconds."""

    name: str
    compressed: bool  # False for the exact averages, which are the baselines
    step_time: float
    communication: float  # per step, before any of it is hidden
    compression: float  # per step
    bytes_per_step: float  # handed to the collectives by each replica, on average over the steps
    bytes_sent: float  # that leave each replica
    speedup: float  # over the best baseline
    break_even: float | None  # bytes per second below which it is faster; 0 never, inf always


@dataclasses.dataclass(frozen=True)
class Advice:
    """What to use, why, and what every strategy is predicted to take; `str` gives the table."""

    values: int  # floating-point values in the parameters
    workers: int
    bandwidth: float  # bytes per second; infinite for the link that was measured
    latency: float  # seconds
    compute_time: float  # seconds
    predictions: tuple[Prediction, ...]
    baseline: Prediction  # the fastest without compression
    recommended: Prediction  # the baseline itself where compression does not pay
    reason: str  # one sentence
    assumptions: tuple[str, ...]

    @property
    def compress(self) -> bool:
        """Whether anything but an exact average in every step is recommended."""
        return self.recommended.compressed

    def __str__(self) -> str:
        return advice_table(self)


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
