"""What compression cost in loss, as a study measured it: what `recommend` goes by.

The tables below are written by the command that their first line names, and by nobody else.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Study:
    """What all its runs have in common."""

    parameters: int  # floating-point values of its model
    uncompressed: float  # the share of its bytes in leaves that are not compressed
    width: int  # features of its model
    context: int  # bytes in a sequence
    batch_size: int  # sequences of a replica in a step
    replicas: int
    steps: int


@dataclasses.dataclass(frozen=True)
class Measured:
    """How far above the exact average of the same optimizer runs ended."""

    optimizer: str
    steps: int
    wire: str  # of the factors; "int8 all-reduce" where gradients go as they are, but in int8
    rank: int  # of the study's model; 0 for that all-reduce
    ratio: float  # how many times fewer bytes in the whole run
    gap: float  # of the held-out loss: 0.01 is 1% above, on average over the seeds
    spread: float | None  # standard deviation over the seeds; None for a single one
    seeds: int
    every: int = 1  # steps that replicas take alone, whose sum is compressed: a round of local SGD


# python -m benchmarks.optimizers --evidence
STUDY = Study(
    parameters=467584,
    uncompressed=0.001369,
    width=128,
    context=64,
    batch_size=4,
    replicas=4,
    steps=480,
)
EXACT: dict[str, str] = {
    "adamw": "rate 0.002 and momentum 0.8",
    "muon": "rate 0.004 and momentum 0.8",
    "sgd": "rate 0.1 and momentum 0.9",
    "lion": "rate 0.0008",
    "adafactor": "rate 0.03",
}
INT8 = Measured("adamw", 480, "int8 all-reduce", 0, 3.94, -0.0008, None, 1)
MEASURED: Sequence[Measured] = [
    Measured("adamw", 480, "int6", 32, 6.8, 0.0054, 0.0021, 3),
    Measured("adamw", 480, "int6", 21, 21.79, 0.013, 0.0034, 3),
    Measured("adamw", 480, "int6", 11, 40.27, 0.0308, 0.0023, 3),
    Measured("adamw", 480, "int6", 5, 82.96, 0.0745, 0.0025, 3),
    Measured("adamw", 480, "int8", 16, 21.74, 0.0169, 0.0013, 3),
    Measured("adamw", 1920, "int6", 21, 21.79, 0.0093, 0.0077, 2),
    Measured("muon", 480, "int6", 32, 6.8, 0.0102, 0.0115, 3),
    Measured("muon", 480, "int6", 21, 21.79, 0.0398, 0.0033, 3),
    Measured("muon", 480, "int6", 11, 40.27, 0.0894, 0.0125, 3),
    Measured("muon", 480, "int6", 5, 82.96, 0.1959, 0.0143, 3),
    Measured("muon", 480, "int8", 16, 21.74, 0.0578, 0.0081, 3),
    Measured("sgd", 480, "int6", 21, 21.79, 0.0059, None, 1),
    Measured("sgd", 480, "int6", 11, 40.27, 0.0208, None, 1),
    Measured("sgd", 480, "int6", 5, 82.96, 0.0492, None, 1),
    Measured("lion", 480, "int6", 21, 21.79, 0.0014, None, 1),
    Measured("lion", 480, "int6", 11, 40.27, 0.0152, None, 1),
    Measured("lion", 480, "int6", 5, 82.96, 0.0439, None, 1),
    Measured("adafactor", 480, "int6", 21, 21.79, 0.0043, None, 1),
    Measured("adafactor", 480, "int6", 11, 40.27, 0.003, None, 1),
    Measured("adafactor", 480, "int6", 5, 82.96, 0.0117, None, 1),
]
WIDTH = 512
WIDE_REPLICAS = 2
WIDE: Sequence[Measured] = [
    Measured("muon", 480, "int6", 84, 21.46, 0.005, 0.0022, 3),
    Measured("muon", 480, "int6", 43, 39.58, 0.0241, None, 1),
    Measured("adamw", 480, "int6", 32, 51.06, -0.0029, 0.0062, 3),
    Measured("adamw", 480, "int6", 16, 112.87, 0.013, 0.005, 3),
    Measured("adamw", 480, "int6", 32, 204.24, -0.0015, 0.0069, 3, 4),
    Measured("adamw", 480, "int6", 24, 305.54, 0.0044, 0.0044, 3, 4),
    Measured("adamw", 480, "int6", 20, 364.5, 0.0079, 0.0066, 3, 4),
]
# end


@dataclasses.dataclass(frozen=True)
class Curve:
    """Gaps between the measured ratios of one optimizer and wire, never beyond them.

    Attributes:
      points: By ratio. No gap is below that of a smaller ratio: where the study found such a thing
        it is noise, and the larger gap counts.
    """

    points: tuple[Measured, ...]

    @classmethod
    def of(cls, measured: Sequence[Measured]) -> Curve:
        """Of what was measured, in any order."""
        points = list[Measured]()
        for point in sorted(measured, key=lambda m: m.ratio):
            before = points[-1].gap if points else -math.inf
            points.append(dataclasses.replace(point, gap=max(point.gap, before)))
        return cls(tuple(points))

    def gap(self, ratio: float) -> float:
        """At a ratio, linear in its logarithm between measured ones; at the ends the end's own."""
        low, high = self.around(ratio)
        if low.ratio == high.ratio:
            return low.gap
        share = math.log(ratio / low.ratio) / math.log(high.ratio / low.ratio)
        return low.gap + share * (high.gap - low.gap)

    def around(self, ratio: float) -> tuple[Measured, Measured]:
        """The measured points on both sides of a ratio; twice the same where it is measured."""
        below = [p for p in self.points if p.ratio <= ratio]
        above = [p for p in self.points if p.ratio >= ratio]
        low = below[-1] if below else above[0]
        return low, above[0] if above else low

    def largest_ratio(self, budget: float) -> float | None:
        """The most times fewer bytes whose gap is within the budget; None if none is."""
        fits = [p for p in self.points if p.gap <= budget]
        if not fits:
            return None
        low = fits[-1]
        if low is self.points[-1]:
            return low.ratio
        high = self.points[len(fits)]
        share = (budget - low.gap) / (high.gap - low.gap)
        return low.ratio * (high.ratio / low.ratio) ** share
