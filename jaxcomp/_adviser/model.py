"""How long a data-parallel step takes, from what each replica sends and what compression costs.

docs/performance.md has the model in formulas, with its assumptions and its error.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from jaxcomp._base.stats import CompressionStats

# Of a training step's time the backward pass takes two thirds: it has two matrix products where the
# forward pass has one.
_BACKWARD_SHARE = 2 / 3
# A break-even bandwidth is a power of this, up to 1e15 bytes per second.
_BASE = 1 + 1e-6
_POWERS = range(round(math.log(1e15, _BASE)))


class Software(NamedTuple):
    """What a collective takes where the link does not limit it."""

    overhead: float = 0.0  # seconds
    bandwidth: float = math.inf  # bytes sent per second


@dataclasses.dataclass(frozen=True)
class Calibration:
    """The model's constants for one kind of device, measured by `measure` or assumed."""

    device: str  # what was measured or assumed, in words
    half: str  # the 16-bit dtype to send; XLA's CPU backend would send bfloat16 as float32
    # Seconds of compression for each value, the residual included.
    powersgd: float  # of a compressed leaf: sums and residual
    powersgd_column: float  # of the same, times the rank: products
    int8: float
    allreduce: Software  # of float32
    allreduce_16: Software  # of `half`; with its rounding
    exchange: Software  # of integers: an all-to-all and an all-gather
    overlap: float  # the share of the backward pass with which an exact average overlaps

    def compression_time(self, sent: CompressionStats) -> float:
        """Seconds of PowerSGD, or of an all-reduce in int8 where no leaf has a rank."""
        low_rank = [leaf for leaf in sent.leaves if leaf.rank]
        if not low_rank:
            return self.int8 * sum(leaf.size for leaf in sent.leaves)
        return sum(x.size * (self.powersgd + x.rank * self.powersgd_column) for x in low_rank)


# What to expect of a device that nobody has measured. The adviser prints the words along. Values
# are read and written in float32: 7 times by PowerSGD if ideally fused (the sum of gradient and
# residual, the second product, output and new residual), 9 times by int8 inside of error_feedback
# (the sum, integers and scales, the mean's decoding, the residual). A column takes 8 operations.
ASSUMED = {
    "gpu": Calibration(
        device=(
            "assumed, never timed: memory at 4.8 TB/s and 67 Tflop/s (data sheet of an H200), "
            "compression at a quarter of that speed, 20 us per collective, exact averages beside "
            "70% of the backward pass"
        ),
        half="bfloat16",
        powersgd=4 * 7 * 4 / 4.8e12,
        powersgd_column=4 * 8 / 67e12,
        int8=3 * 9 * 4 / 4.8e12,
        allreduce=Software(20e-6),
        allreduce_16=Software(20e-6),
        exchange=Software(40e-6),
        overlap=0.7,
    ),
    "cpu": Calibration(
        device=(
            "assumed, as a core of an AMD EPYC was measured: memory at 20 GB/s and 80 Gflop/s, "
            "500 us per collective, which reaches 1 GB/s (100 MB/s in float16)"
        ),
        half="float16",
        powersgd=1.25 * 7 * 4 / 20e9,
        powersgd_column=1.25 * 8 / 80e9,
        int8=4 * 9 * 4 / 20e9,
        allreduce=Software(500e-6, 1e9),
        allreduce_16=Software(500e-6, 100e6),
        exchange=Software(1e-3, 500e6),
        overlap=0.0,
    ),
}


class Link(NamedTuple):
    """What connects the replicas."""

    workers: int
    bandwidth: float  # bytes per second in each direction
    latency: float  # seconds from one replica to the next, one way


class Traffic(NamedTuple):
    """What one replica does in one training step beside its computation."""

    payload: float  # bytes handed to the collectives
    collectives: int  # ring all-reduces, or pairs of an all-to-all and an all-gather
    software: Software
    compression: float = 0.0  # seconds
    overlap: float = 0.0  # the share of the backward pass that it overlaps with

    def communication_time(self, link: Link) -> float:
        """Seconds per step from the first to the last byte, before any overlap."""
        if link.workers == 1:
            return 0.0
        steps = 2 * (link.workers - 1)
        fixed = self.collectives * (self.software.overhead + steps * link.latency)
        sent = steps / link.workers * self.payload
        return fixed + sent / min(link.bandwidth, self.software.bandwidth)

    def step_time(self, link: Link, compute: float) -> float:
        """Seconds per step, of which `compute` are without communication."""
        hidden = self.overlap * _BACKWARD_SHARE * compute
        return compute + self.compression + max(0.0, self.communication_time(link) - hidden)

    def break_even(self, baselines: Sequence[Traffic], link: Link, compute: float) -> float:
        """The bandwidth below which this makes a faster step than every one of the baselines.

        Returns:
          Bytes per second; 0 if it does not win on the slowest link and infinity if it wins on the
          fastest.
        """

        def loses(power: int) -> bool:
            at = link._replace(bandwidth=_BASE**power)
            own = self.step_time(at, compute)
            return any(own >= other.step_time(at, compute) for other in baselines)

        power = bisect.bisect(_POWERS, False, key=loses)
        return {0: 0.0, len(_POWERS): math.inf}.get(power, _BASE**power)
