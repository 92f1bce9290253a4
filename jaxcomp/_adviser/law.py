"""What a rank costs in loss: a formula of three coefficients, fitted to committed runs."""

from __future__ import annotations

import dataclasses
import math

WIDTHS = (128, 512)  # that the runs had
_MIDDLE = 256  # between them; there the exponent's error does not count
_STUDENT = 2.1  # of a 95% interval, with twenty to thirty runs
_BEYOND = 0.5  # by which the exponent may be wrong at widths that no run had


@dataclasses.dataclass(frozen=True)
class Law:
    r"""How far above its exact run a compressed one ends, behind one optimizer.

    For PowerSGD in every step, from the first one on, with factors in six or eight bits,

    .. math::
        \mathrm{gap} = \max\bigl(0,\; a\, (w / 128)^{b} / r - c\bigr)

    in per cent of the held-out loss, with the rank :math:`r` and the model's width :math:`w`. The
    coefficients come from runs of small language models of widths 128 and 512, with 1,024 and 512
    tokens a step; at 4,096 rank 21 lost 2.0 and not 1.2%. ``python -m benchmarks.optimizers --law``
    fits them again and compares the law with runs that it has not seen.
    """

    runs: int  # that were fitted
    a: float  # per cent, at width 128
    b: float
    c: float  # per cent
    spread: float  # standard deviation of a run from the law, in points
    error: float  # standard error of b

    def gap(self, rank: int, width: float) -> float:
        """The expected gap, as a share: 0.01 is 1% above the exact run.

        Args:
          rank: Of PowerSGD; 0 for an int8 all-reduce, of which nothing is expected to be lost.
          width: Of the model.
        """
        return max(0.0, self._slope(width) / rank - self.c) / 100 if rank else 0.0

    def half_width(self, rank: int, width: float) -> float:
        """Of the 95% interval of one run, as a share; wider where no run had such a width."""
        inside = min(max(width, WIDTHS[0]), WIDTHS[1])
        off = self.error * abs(math.log(inside / _MIDDLE))
        off += _BEYOND * abs(math.log(width / inside))
        slope = self._slope(width) / rank if rank else 0.0
        return _STUDENT * math.hypot(self.spread, slope * off) / 100

    def rank(self, budget: float, width: float) -> int:
        """The smallest rank whose expected gap is within a share; in multiples of 8."""
        return 8 * math.ceil(self._slope(width) / (100 * budget + self.c) / 8)

    def _slope(self, width: float) -> float:
        return self.a * (width / WIDTHS[0]) ** self.b


# python -m benchmarks.optimizers --law
LAWS = {
    "adamw": Law(runs=33, a=40.82, b=0.07, c=0.73, spread=0.26, error=0.055),
    "muon": Law(runs=19, a=106.2, b=0.28, c=1.32, spread=1.02, error=0.18),
}
