"""How long a data-parallel step takes, from what each replica sends and what compression costs.

docs/performance.md has the model in formulas, with its assumptions and its error.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from jaxcomp._base.stats import CompressionStats

# Of a training step's time the backward pass takes two thirds: it has two matrix products where the
# forward pass has one.
_BACKWARD_SHARE = 2 / 3
_SLOWEST, _FASTEST = 1.0, 1e15  # bytes per second
# Reads and writes of the gradient in one step, ideally fused. PowerSGD: the sum of gradient and
# residual (3), the second product (1), output and new residual (3). int8 inside error_feedback: the
# sum (3), scales and integers (2.25), the mean's decoding (1.5), the residual (2.25).
_PASSES, _PASSES_INT8 = 7, 9
_PRODUCTS = 4  # M Q, M^T P, the output, the residual
_WORD = 4  # compression works in float32 whatever goes on the wire


class Software(NamedTuple):
    """What a collective takes where the link does not limit it."""

    overhead: float = 0.0  # seconds
    bandwidth: float = math.inf  # bytes sent per second


@dataclasses.dataclass(frozen=True)
class Calibration:
    """The model's constants for one kind of device, measured by `measure` or assumed.

    A factor is the time that something takes, divided by that of a device which reaches
    `memory_bandwidth` and `flops`, as assumed, and does nothing in vain.
    """

    device: str  # what was measured or assumed, in words
    platform: str  # JAX's name of it: "cpu", "gpu", "tpu"
    memory_bandwidth: float  # bytes read and written per second
    flops: float  # float32 operations per second
    powersgd: float  # factor
    int8: float  # factor
    allreduce: Software  # of float32
    allreduce_16: Software  # of `half`; with its rounding
    exchange: Software  # of integers: an all-to-all and an all-gather
    overlap: float  # the share of the backward pass with which an exact average overlaps

    @property
    def half(self) -> str:
        """The 16-bit dtype to send: XLA's CPU backend would send bfloat16 as float32."""
        return "float16" if self.platform == "cpu" else "bfloat16"

    def compression_time(self, sent: CompressionStats) -> float:
        """Seconds to compress, and to keep the residual.

        PowerSGD takes 7 passes over the compressed values and 8 operations a column for each, an
        all-reduce in int8 9 passes over all values.
        """
        operations = 2 * _PRODUCTS * sum(leaf.size * leaf.rank for leaf in sent.leaves)
        if not operations:
            words = _PASSES_INT8 * _WORD * sum(leaf.size for leaf in sent.leaves)
            return self.int8 * words / self.memory_bandwidth
        words = _PASSES * _WORD * sum(leaf.size for leaf in sent.leaves if leaf.compressed)
        return self.powersgd * (words / self.memory_bandwidth + operations / self.flops)


# What to expect of a device that nobody has measured. The adviser prints the words along.
ASSUMED = {
    "gpu": Calibration(
        device=(
            "assumed, never timed: memory at 4.8 TB/s and 67 Tflop/s (data sheet of an H200), "
            "compression at a quarter of that speed, 20 us per collective, exact averages beside "
            "70% of the backward pass"
        ),
        platform="gpu",
        memory_bandwidth=4.8e12,
        flops=67e12,
        powersgd=4.0,
        int8=3.0,
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
        platform="cpu",
        memory_bandwidth=20e9,
        flops=80e9,
        powersgd=1.25,
        int8=4.0,
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
          Bytes per second, by bisection; 0 if it does not win on the slowest link and infinity if
          it wins on the fastest.
        """

        def wins(bandwidth: float) -> bool:
            at = link._replace(bandwidth=bandwidth)
            own = self.step_time(at, compute)
            return all(own < other.step_time(at, compute) for other in baselines)

        low, high = _SLOWEST, _FASTEST
        if link.workers == 1 or not wins(low):
            return 0.0
        if wins(high):
            return math.inf
        while high / low > 1 + 1e-9:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if wins(middle) else (low, middle)
        return low
