"""Holds the result of `advise`: a prediction for each reducer, and the verdict in words.

All numbers are computed before; this module orders them into a table and sentences. The verdict has
three forms, use it, do not, or not known, and the reason always names what it was compared with.
Programs read the fields, people the text.
"""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Callable
from typing import NamedTuple

from jaxcomp._adviser.model import Calibration, Link
from jaxcomp._base.stats import CompressionStats, aligned
from jaxcomp._base.typing import AxisName
from jaxcomp._bytes.units import with_unit
from jaxcomp._reducers.transformation import Transformation

# Two step times whose ratio is below this are equal within the model's error. So small a gain is
# not worth the loss of compression, nor of a lower rank than necessary.
CLOSE = 1.1
_HEADER = ("reducer", "step", "bytes a step", "speedup", "pays below", "loss")
_WIDTH = 96  # of the text, in characters


class Loss(NamedTuple):
    """Holds the expected loss with a reducer."""

    gap: float | None  # expected excess over the exact run's loss; None: not known
    half_width: float | None  # half-width of the gap's 95% interval
    doubt: str = ""  # why the gap is not known well enough; empty if it is


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Predicts one reducer's step. Times are in seconds, gaps are fractions: 0.01 is 1%."""

    name: str
    make: Callable[..., Transformation] = dataclasses.field(repr=False)  # takes ``axis_name=``
    compressed: bool  # False for the exact averages, which are the baselines
    rank: int  # rank of PowerSGD, else 0
    sent: CompressionStats  # bytes in one step, for each leaf
    step_time: float
    speedup: float  # step time of the faster baseline / step time
    break_even: float  # bytes/s below which it beats both baselines; 0 never, inf always
    gap: float | None  # expected excess over the exact run's loss; None: not known
    half_width: float | None  # half-width of the gap's 95% interval
    doubt: str  # why the gap is not known well enough; empty if it is

    def reducer(self, axis_name: AxisName) -> Transformation:
        """Makes the reducer, for the replicas along `axis_name`."""
        return self.make(axis_name=axis_name)

    @property
    def bytes_per_step(self) -> int:
        """Returns the bytes that each replica hands to the collectives in a step."""
        return self.sent.bytes_after

    @property
    def row(self) -> tuple[str, ...]:
        """Returns the cells of this prediction's row in the table."""
        limit = "-"
        loss = "-"
        if self.compressed:
            words = {0.0: "never", math.inf: "always"}
            limit = words.get(self.break_even, with_unit(8 * self.break_even, "bit/s"))
            loss = "not known"
            if self.gap is not None and self.half_width is not None:
                loss = f"+{self.gap:.1%} ± {100 * self.half_width:.1f}"
        step_time = with_unit(self.step_time, "s")
        sent = with_unit(self.bytes_per_step, "B")
        return (self.name, step_time, sent, f"{self.speedup:.2f}x", limit, loss)


@dataclasses.dataclass(frozen=True)
class Advice:
    """Recommends a reducer, with its reason and predictions of all candidates; `str` is a table."""

    workers: int
    link: Link
    compute_time: float  # seconds
    device: Calibration
    predictions: tuple[Prediction, ...]
    baseline: Prediction  # the faster all-reduce
    # The baseline if compression does not pay; a candidate to try if its loss is not known.
    recommended: Prediction
    notes: tuple[str, ...]  # the assumptions and their limits

    @property
    def compress(self) -> bool | None:
        """Returns whether compression is recommended; None if this is not known."""
        if not self.recommended.compressed:
            return False
        if self.recommended.doubt:
            return None
        return True

    def reducer(self, axis_name: AxisName) -> Transformation:
        """Makes the recommended reducer, or the one to try, for the replicas along `axis_name`.

        Example:
          >>> import jax.numpy as jnp, jaxcomp
          >>> params = {"w": jnp.zeros((512, 2048)), "b": jnp.zeros(2048)}
          >>> link = {"workers": 4, "bandwidth": "100Mbit", "step_time": "20ms"}
          >>> advice = jaxcomp.advise(params, tokens=1024, **link)
          >>> tx = advice.reducer("data")
          >>> advice.recommended.name, tx.init(params).q["w"].shape
          ('powersgd rank 64 int6', (512, 64))
        """
        return self.recommended.reducer(axis_name)

    @property
    def verdict(self) -> str:
        """Returns the recommendation in a few words."""
        if self.compress is None:
            return "Not known: run both."
        if not self.compress:
            return "Do not compress."
        return f"Use {self.recommended.name}."

    @property
    def reason(self) -> str:
        """Returns the reason for the recommendation, in a few sentences."""
        best = self.recommended
        if best is self.baseline:
            if self.link.senders == 1:
                return "There is one sender, so nothing is sent."
            others = [each for each in self.predictions if each.compressed]
            nearest = min(others, key=lambda each: each.step_time)
            return (
                f"With the {self.baseline.name} a step takes {with_unit(best.step_time, 's')}, and "
                f"with the best alternative, {nearest.name}, "
                f"{with_unit(nearest.step_time, 's')}: no gain of {CLOSE - 1:.0%}, the error of "
                "the model."
            )
        # The candidates are in the order of `_predictions` in `advise`: float32 first, int8 third.
        ratio = self.predictions[0].bytes_per_step / best.bytes_per_step
        subject = "With it"
        if best.doubt:
            subject = f"With {best.name}"
        sentences = [
            f"{subject} the step is {best.speedup:.2f} times faster than with the "
            f"{self.baseline.name}, with {ratio:.1f} times fewer bytes than float32 and "
            f"{ratio / 2:.1f} than bfloat16."
        ]
        if best.doubt or best.gap is None or best.half_width is None:
            sentences.append(
                f"What it costs in loss is not known: {best.doubt}. Run both for three quarters of "
                "the steps, and pass the exact run's state and the gap between their losses: "
                f"jaxcomp.advise(..., opt_state=opt_state, measured=({best.rank}, '1.2%'))."
            )
            int8 = self.predictions[2]
            if int8.speedup >= CLOSE:
                sentences.append(
                    f"The {int8.name} lost nothing that could be seen, and is {int8.speedup:.2f} "
                    "times faster."
                )
        else:
            low = max(0.0, best.gap - best.half_width)
            sentences.append(
                f"The loss is expected to end {best.gap:.1%} above the exact run (95%: {low:.1%} "
                f"to {best.gap + best.half_width:.1%})."
            )
        return " ".join(sentences)

    def __str__(self) -> str:
        values = sum(leaf.size for leaf in self.recommended.sent.leaves)
        senders = f"{self.workers:,} workers"
        if self.link.senders < self.workers:
            senders += f" on {self.link.senders:,} hosts"
        bandwidth = with_unit(8 * self.link.bandwidth, "bit/s")
        latency = with_unit(self.link.latency, "s")
        compute_time = with_unit(self.compute_time, "s")
        lines = [
            f"{values:,} parameters, {senders}, {bandwidth}, latency {latency}, {compute_time} of "
            "computation a step",
            "",
        ]
        rows = [_HEADER, *(prediction.row for prediction in self.predictions)]
        lines.append(aligned("<" + ">" * (len(_HEADER) - 1), rows))
        lines += ["", *textwrap.wrap(f"{self.verdict} {self.reason}", _WIDTH)]
        for note in self.notes:
            lines += textwrap.wrap(f"- {note}", _WIDTH, subsequent_indent="  ")
        return "\n".join(lines)
