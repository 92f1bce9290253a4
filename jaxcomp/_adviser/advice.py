"""The adviser's answer: as data, as text and as JSON."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from typing import Any

from jaxcomp._adviser.units import format_bandwidth, format_bytes, format_time
from jaxcomp._base.typing import AxisName, MatrixDimsFn
from jaxcomp._reducers.allreduce import allreduce
from jaxcomp._reducers.error_feedback import error_feedback
from jaxcomp._reducers.powersgd import powersgd
from jaxcomp._reducers.quantized import quantized_allreduce
from jaxcomp._reducers.transformation import Transformation

_WIDTH = 96
_HEADER = ("strategy", "step", "communication", "compression", "bytes a step", "fewer", "speedup",
           "pays below", "loss")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What is expected of one reducer. Times in seconds, gaps as shares: 0.01 is 1%."""

    name: str
    compressed: bool  # False for the exact averages, which are the baselines
    rank: int = 0  # of PowerSGD
    comm_dtype: str | None = None
    gap: float = 0.0  # how far above the exact run the loss is expected to end
    half_width: float = 0.0  # of its 95% interval
    matrix_dims: MatrixDimsFn | None = None
    step_time: float = 0.0
    communication: float = 0.0  # per step, before any overlap
    compression: float = 0.0  # per step
    bytes_per_step: float = 0.0  # handed to the collectives by each replica
    ratio: float = 1.0  # how many times fewer than gradients as they are
    speedup: float = 1.0  # over the faster baseline
    break_even: float | None = None  # bytes per second below which it is faster; inf always

    def reducer(self, axis_name: AxisName) -> Transformation:
        """Makes it.

        Args:
          axis_name: Of the replicas.

        Example:
          >>> import jax.numpy as jnp, jaxcomp
          >>> params = {"w": jnp.zeros((512, 2048)), "b": jnp.zeros(2048)}
          >>> advice = jaxcomp.advise(params, workers=4, bandwidth="100Mbit", step_time="20ms")
          >>> tx = advice.reducer("data")  # that of advice.recommended
          >>> advice.recommended.name, tx.init(params).q["w"].shape
          ('powersgd rank 32 int6', (512, 32))
        """
        if self.rank:
            return powersgd(
                self.rank,
                axis_name=axis_name,
                start_step=0,
                comm_dtype=self.comm_dtype,
                matrix_dims=self.matrix_dims,
            )
        if self.compressed:
            return error_feedback(quantized_allreduce(axis_name=axis_name))
        return allreduce(axis_name=axis_name, comm_dtype=self.comm_dtype)

    def gap_text(self) -> str:
        """``0.5% (95% of runs: -0.4% to 1.4%)``."""
        low, high = self.gap - self.half_width, self.gap + self.half_width
        return f"{self.gap:.1%} (95% of runs: {low:.1%} to {high:.1%})"


@dataclasses.dataclass(frozen=True)
class Advice:
    """What to use, why, and what was expected of every candidate; `str` gives the table."""

    values: int  # floating-point values in the parameters
    workers: int
    bandwidth: float  # bytes per second; infinite for the link that was measured
    latency: float  # seconds
    compute_time: float  # seconds
    loss_budget: float  # a share
    predictions: tuple[Prediction, ...]
    baseline: Prediction  # the faster all-reduce
    recommended: Prediction  # the baseline itself where compression does not pay
    reason: str
    notes: tuple[str, ...]  # what was assumed, and how far it holds

    @property
    def compress(self) -> bool:
        """Whether anything but an all-reduce is recommended."""
        return self.recommended.compressed

    def reducer(self, axis_name: AxisName) -> Transformation:
        """Makes what is recommended, for the replicas along `axis_name`."""
        return self.recommended.reducer(axis_name)

    def __str__(self) -> str:
        link = f"{format_bandwidth(self.bandwidth)}, latency {format_time(self.latency)}"
        if math.isinf(self.bandwidth):
            link = "the measured link"
        rows = [_HEADER, *(_row(p) for p in self.predictions)]
        widths = [max(len(row[k]) for row in rows) for k in range(len(_HEADER))]
        verdict = f"Use {self.recommended.name}." if self.compress else "Do not compress."
        lines = [
            f"{self.values:,} parameters, {self.workers} workers, {link}, "
            f"{format_time(self.compute_time)} of computation a step",
            "",
            *("  ".join(_aligned(row, widths)).rstrip() for row in rows),
            "",
            *textwrap.wrap(f"{verdict} {self.reason}", _WIDTH),
        ]
        for note in self.notes:
            lines += textwrap.wrap(f"- {note}", _WIDTH, subsequent_indent="  ")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The same for a program: times in seconds, bandwidths in bytes per second."""
        fields = {name: getattr(self, name) for name in _PLAIN}
        if math.isinf(self.bandwidth):
            fields["bandwidth"] = "measured"
        fields |= {"baseline": self.baseline.name, "recommended": self.recommended.name}
        return fields | {
            "compress": self.compress,
            "predictions": [_as_dict(prediction) for prediction in self.predictions],
        }


_PLAIN = ("values", "workers", "bandwidth", "latency", "compute_time", "loss_budget", "reason",
          "notes")  # fmt: skip


def _as_dict(prediction: Prediction) -> dict[str, Any]:
    fields = dataclasses.asdict(prediction)
    del fields["matrix_dims"]
    return fields | {"break_even": "always"} if fields["break_even"] == math.inf else fields


def _row(prediction: Prediction) -> tuple[str, ...]:
    limit, loss = prediction.break_even, "-"
    pays = {None: "-", 0: "never", math.inf: "always"}.get(limit)
    if prediction.compressed:
        loss = f"+{prediction.gap:.1%} ± {100 * prediction.half_width:.1f}"
    return (
        prediction.name,
        format_time(prediction.step_time),
        format_time(prediction.communication),
        format_time(prediction.compression) if prediction.compression else "-",
        format_bytes(prediction.bytes_per_step),
        f"{prediction.ratio:.1f}x",
        f"{prediction.speedup:.2f}x",
        pays or format_bandwidth(limit or 0),
        loss,
    )


def _aligned(row: tuple[str, ...], widths: list[int]) -> list[str]:
    rest = zip(row[1:], widths[1:], strict=True)
    return [row[0].ljust(widths[0]), *(text.rjust(width) for text, width in rest)]
