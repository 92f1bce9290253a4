"""What a rank costs in loss: a formula of three coefficients, fitted to committed runs."""

from __future__ import annotations

import dataclasses
import math

USUAL = 1024  # tokens in a step of all replicas together, of most runs
_BEYOND = 0.5, 0.2  # by which powers of width and tokens may be wrong where no run was


@dataclasses.dataclass(frozen=True)
class Law:
    r"""How far above its exact run a compressed one ends, behind one optimizer.

    For PowerSGD in every step, from the first one on, with factors in six or eight bits,

    .. math::
        \mathrm{gap} = \sqrt{t / 1024}\, \max\bigl(0,\; a\, (w / 128)^{b} / r - c\bigr)

    in per cent of the held-out loss, with the rank :math:`r`, the model's width :math:`w` and the
    tokens :math:`t` in a step of all replicas together. The runs were of small language models.
    ``python -m benchmarks.optimizers --law`` fits the coefficients again and compares the law with
    runs that it has not seen.
    """

    runs: int  # that were fitted
    widths: tuple[int, int]  # least and largest of them
    tokens: tuple[int, int]
    a: float  # per cent, at width 128 and 1,024 tokens
    b: float
    c: float  # per cent
    spread: float  # standard deviation of a run from the law, in points, at 1,024 tokens
    error: float  # standard error of b

    def gap(self, rank: int, width: float, tokens: float) -> float:
        """The expected gap, as a share: 0.01 is 1% above the exact run.

        Rank 0 stands for an int8 all-reduce, by which nothing is expected to be lost.
        """
        above = max(0.0, self._slope(width) / rank - self.c) if rank else 0.0
        return self._times(tokens) * above / 100

    def half_width(self, rank: int, width: float, tokens: float) -> float:
        """Of the 95% interval of one run, as a share; wider at what no run had."""
        near, alike = sorted((width, *self.widths))[1], sorted((tokens, *self.tokens))[1]
        # In the middle of the widths the exponent's error does not count.
        off = self.error * abs(math.log(near / math.sqrt(math.prod(self.widths))))
        off += _BEYOND[0] * abs(math.log(width / near)) + _BEYOND[1] * abs(math.log(tokens / alike))
        slope = self._slope(width) / rank if rank else 0.0
        # 2.1 times a standard deviation are 95%, with some twenty runs.
        return 2.1 * self._times(alike) * math.hypot(self.spread, slope * off) / 100

    def rank(self, budget: float, width: float, tokens: float) -> int:
        """The smallest rank whose expected gap is within a share; in multiples of 8."""
        allowed = 100 * budget / self._times(tokens) + self.c
        return 8 * math.ceil(self._slope(width) / allowed / 8)

    def _slope(self, width: float) -> float:
        return self.a * (width / 128) ** self.b

    @staticmethod
    def _times(tokens: float) -> float:
        return math.sqrt(tokens / USUAL)


# python -m benchmarks.optimizers --law
LAWS = {
    "adamw": Law(57, (128, 512), (512, 4096), a=42.13, b=0.24, c=0.90, spread=0.28, error=0.06),
    "muon": Law(19, (128, 512), (512, 1024), a=106.4, b=0.42, c=1.35, spread=1.03, error=0.20),
}
