"""How long a data-parallel step takes, from what each replica sends and what compression costs.

docs/performance.md has the model in formulas, with its assumptions and its error.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from jaxcomp._base.stats import CompressionStats

# Of a training step's time the backward pass takes two thirds: it has two matrix products where the
# forward pass has one.
_BACKWARD_SHARE = 2 / 3
# A break-even bandwidth is a power of this, up to 1e15 bytes per second.
_BASE = 1 + 1e-6
_POWERS = range(round(math.log(1e15, _BASE)))


class Link(NamedTuple):
    """What connects the senders: the replicas, or the hosts that they lie on."""

    senders: int
    bandwidth: float  # bytes per second in each direction
    latency: float  # seconds from one sender to the next, one way


class ReducerCosts(NamedTuple):
    """What the step of one kind of reducer takes on a kind of device, beside its computation."""

    overhead: float  # seconds of a collective, whatever its size
    bandwidth: float = math.inf  # bytes per second that it reaches where no link limits it
    # One after another: ring all-reduces, or pairs of an all-to-all and an all-gather.
    collectives: int = 1
    overlap: float = 0.0  # the share of the backward pass with which it overlaps
    per_value: float = 0.0  # seconds of compression, residual included
    per_column: float = 0.0  # the same, times the rank

    def compression_time(self, sent: CompressionStats) -> float:
        """Returns the seconds to compress the leaves that become fewer bytes."""
        seconds = 0.0
        for leaf in sent.leaves:
            if leaf.bytes_after < leaf.bytes_before:
                seconds += leaf.size * (self.per_value + leaf.rank * self.per_column)
        return seconds

    def communication_time(self, sent: CompressionStats, link: Link) -> float:
        """Returns the seconds from the first to the last byte, before any overlap."""
        if link.senders == 1:
            return 0.0
        hops = 2 * (link.senders - 1)
        fixed = self.collectives * (self.overhead + hops * link.latency)
        bandwidth = min(link.bandwidth, self.bandwidth)
        return fixed + hops / link.senders * sent.bytes_after / bandwidth

    def step_time(self, sent: CompressionStats, compute: float, link: Link) -> float:
        """Returns the seconds of a step, of which `compute` are without communication."""
        hidden = self.overlap * _BACKWARD_SHARE * compute
        exposed = max(0.0, self.communication_time(sent, link) - hidden)
        return compute + self.compression_time(sent) + exposed


@dataclasses.dataclass(frozen=True)
class Calibration:
    """The model's constants for one kind of device, measured by `measure` or assumed."""

    device: str  # what was measured or assumed, in words
    half: str  # the 16-bit dtype to send; XLA's CPU backend would send bfloat16 as float32
    allreduce: ReducerCosts  # of float32
    allreduce_16: ReducerCosts  # of `half`, with its rounding
    int8: ReducerCosts
    powersgd: ReducerCosts  # with factors in integers
    training_flops: float  # per second of a training step, to estimate the tokens of a step


# What to expect of a device that nobody has measured. The adviser prints the words along. Values
# are read and written in float32: 7 times by PowerSGD if ideally fused (the sum of gradient and
# residual, the second product, output and new residual), 9 times by int8 inside of error_feedback
# (the sum, integers and scales, the mean's decoding, the residual). A column takes 8 operations.
ASSUMED = {
    "gpu": Calibration(
        device=(
            "NVIDIA H200, compression as measured (2.2 ms and 59 us per rank for 124 million "
            "values, jax 0.11.2); assumed: 20 us per collective, exact averages beside 70% of the "
            "backward pass"
        ),
        half="bfloat16",
        allreduce=ReducerCosts(20e-6, overlap=0.7),
        allreduce_16=ReducerCosts(20e-6, overlap=0.7),
        int8=ReducerCosts(40e-6, per_value=3 * 9 * 4 / 4.8e12),
        powersgd=ReducerCosts(
            40e-6, collectives=2, per_value=2.2e-3 / 124.4e6, per_column=59e-6 / 124.4e6
        ),
        training_flops=400e12,  # 40% of what an H200's data sheet has for bfloat16
    ),
    "cpu": Calibration(
        device=(
            "assumed, as a core of an AMD EPYC was measured: memory at 20 GB/s and 80 Gflop/s, "
            "500 us per collective, which reaches 1 GB/s (100 MB/s in float16)"
        ),
        half="float16",
        allreduce=ReducerCosts(500e-6, 1e9),
        allreduce_16=ReducerCosts(500e-6, 100e6),
        int8=ReducerCosts(1e-3, 500e6, per_value=4 * 9 * 4 / 20e9),
        powersgd=ReducerCosts(
            1e-3, 500e6, collectives=2, per_value=1.25 * 7 * 4 / 20e9, per_column=1.25 * 8 / 80e9
        ),
        training_flops=120e9,  # 256 tokens of 12.9 million parameters in 160 ms
    ),
}


def break_even(
    step_time: Callable[[Link], float], baselines: Iterable[Callable[[Link], float]], link: Link
) -> float:
    """Finds the bandwidth below which a step is faster than each of the baselines.

    Returns:
      Bytes per second; 0 if it does not win on the slowest link and infinity if it wins on the
      fastest.
    """

    def loses(power: int) -> bool:
        at = link._replace(bandwidth=_BASE**power)
        return any(step_time(at) >= baseline(at) for baseline in baselines)

    power = bisect.bisect(_POWERS, False, key=loses)
    if power == 0:
        return 0.0
    if power == len(_POWERS):
        return math.inf
    return _BASE**power
