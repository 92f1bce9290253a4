"""Models the time of a data-parallel step from bytes sent and the time of compression.

docs/performance.md has the formulas of the model, its assumptions and its error. A step takes its
computation, its compression, and that part of its collectives which does not overlap with the
backward pass. The constants of a device are in a `Calibration`, one `ReducerCosts` for each kind of
reducer; `advise` applies them to a `Link`.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from jaxcomp._base.stats import CompressionStats

# The backward pass takes two thirds of a step's time: it has two matrix products for each one of
# the forward pass.
_BACKWARD_SHARE = 2 / 3
# A break-even bandwidth is rounded to a power of this base, at most 1e15 bytes per second.
_BASE = 1 + 1e-6
_POWERS = range(round(math.log(1e15, _BASE)))


class Link(NamedTuple):
    """Describes the network link between senders: replicas, or hosts with several replicas."""

    senders: int
    bandwidth: float  # bytes per second in each direction
    latency: float  # seconds from one sender to the next, one way


class ReducerCosts(NamedTuple):
    """Holds the costs of one kind of reducer in a step, on one kind of device."""

    overhead: float  # seconds that a collective takes in addition to its bytes
    bandwidth: float = math.inf  # bytes per second that it reaches if no link is slower
    # Number of collectives that follow one another; an all-to-all with its all-gather counts once.
    collectives: int = 1
    overlap: float = 0.0  # fraction of the backward pass that the collectives overlap with
    per_value: float = 0.0  # seconds to compress one value, with its residual
    per_column: float = 0.0  # seconds for one value and one column of the factors

    def compression_time(self, sent: CompressionStats) -> float:
        """Returns the seconds to compress all leaves that compression makes smaller."""
        seconds = 0.0
        for leaf in sent.leaves:
            if leaf.bytes_after < leaf.bytes_before:
                seconds += leaf.size * (self.per_value + leaf.rank * self.per_column)
        return seconds

    def communication_time(self, sent: CompressionStats, link: Link) -> float:
        """Returns the seconds of all collectives, without any overlap."""
        if link.senders == 1:
            return 0.0
        # A ring passes every share around twice: once to sum it, once to hand it out.
        hops = 2 * (link.senders - 1)
        fixed = self.collectives * (self.overhead + hops * link.latency)
        bandwidth = min(link.bandwidth, self.bandwidth)
        return fixed + hops / link.senders * sent.bytes_after / bandwidth

    def step_time(self, sent: CompressionStats, compute: float, link: Link) -> float:
        """Returns the seconds of a step whose computation takes `compute` seconds."""
        hidden = self.overlap * _BACKWARD_SHARE * compute
        exposed = max(0.0, self.communication_time(sent, link) - hidden)
        return compute + self.compression_time(sent) + exposed


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Holds the model's constants for one kind of device, measured by `measure` or assumed."""

    device: str  # a description: what was measured, what was assumed
    half: str  # the 16-bit wire dtype; XLA's CPU backend sends bfloat16 as float32
    allreduce: ReducerCosts  # all-reduce of float32
    allreduce_16: ReducerCosts  # all-reduce of `half`, with the cast
    int8: ReducerCosts
    powersgd: ReducerCosts  # with factors in integers
    training_flops: float  # operations per second in training, to estimate the tokens of a step


# Constants for a device that was not measured; the adviser prints `device` with its result. Each
# value is read or written in float32: 7 times by an ideally fused PowerSGD (the sum of gradient and
# residual, the second product, output and new residual), and 9 times by int8 in error_feedback (the
# sum, integers and scales, decoding the mean, the residual). A column takes 8 operations.
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
        training_flops=400e12,  # 40% of the bfloat16 rate in an H200's data sheet
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
      Bytes per second; 0 if a baseline is faster even on the slowest link, infinity if the step is
      faster even on the fastest link.
    """

    def loses(power: int) -> bool:
        at = link._replace(bandwidth=_BASE**power)
        return any(step_time(at) >= baseline(at) for baseline in baselines)

    # A faster link helps the baselines more, because they send more: so it loses from some power
    # on.
    power = bisect.bisect(_POWERS, False, key=loses)
    if power == 0:
        return 0.0
    if power == len(_POWERS):
        return math.inf
    return _BASE**power
