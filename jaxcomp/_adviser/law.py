"""What a rank costs in loss: a formula of two coefficients, fitted to committed runs."""

from __future__ import annotations

import dataclasses
import math

USUAL_TOKENS = 1024  # tokens in a step of all replicas together, of most runs


@dataclasses.dataclass(frozen=True)
class Law:
    r"""How far above its exact run a compressed one ends, behind one optimizer.

    For PowerSGD in every step, from the first one on, with factors in six or eight bits,

    .. math::
        \mathrm{gap} = a\, \sqrt{t / 1024}\; \max(0,\; 1 / r - k / w)

    in per cent of the held-out loss, with the rank :math:`r`, the model's width :math:`w` and the
    tokens :math:`t` in a step of all replicas together: nothing is lost from rank :math:`w / k` on.
    The runs were of small language models. ``python -m benchmarks.optimizers --law`` fits the
    coefficients again and compares the law with runs that it has not seen.
    """

    runs: int  # that were fitted
    widths: tuple[int, int]  # least and largest of them
    tokens: tuple[int, int]
    a: float  # per cent
    k: float
    spread: float  # standard deviation of a run from the law, in points, at 1,024 tokens

    def gap(self, rank: int, width: float, tokens: float) -> float:
        """The expected gap, as a share: 0.01 is 1% above the exact run.

        Rank 0 stands for an int8 all-reduce, by which nothing is expected to be lost.
        """
        lost = max(0.0, 1 / rank - self.k / width) if rank else 0.0
        return self._slope(tokens) * lost

    def half_width(self, rank: int, width: float, tokens: float) -> float:
        """Of the 95% interval of one run, as a share; wider at what no run had.

        There the loss may end at the rank where it does in the nearest width that a run had, and
        the power of the tokens be off by 0.1.
        """
        near, alike = sorted((width, *self.widths))[1], sorted((tokens, *self.tokens))[1]
        inside = (
            2.1 * self.spread * math.sqrt(alike / USUAL_TOKENS) / 100
        )  # Student's, some twenty runs
        ends = self._slope(tokens) * self.k * abs(1 / near - 1 / width) if rank else 0.0
        power = 0.1 * abs(math.log(tokens / alike)) * self.gap(rank, width, tokens)
        return inside + ends + power

    def rank(self, budget: float, width: float, tokens: float) -> int:
        """The smallest rank whose expected gap is within a share; in multiples of 8."""
        return 8 * math.ceil(1 / (budget / self._slope(tokens) + self.k / width) / 8)

    def _slope(self, tokens: float) -> float:
        return self.a * math.sqrt(tokens / USUAL_TOKENS) / 100


# python -m benchmarks.optimizers --law
LAWS = {
    "adamw": Law(69, (64, 512), (512, 4096), a=41.4, k=2.86, spread=0.33),
    "muon": Law(21, (128, 512), (512, 1024), a=106.1, k=1.57, spread=1.02),
}
