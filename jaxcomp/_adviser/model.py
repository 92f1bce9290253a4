r"""How long a data-parallel step takes, from what each replica sends and what compression costs.

A ring all-reduce of :math:`b` bytes among :math:`W` replicas takes :math:`2 (W - 1)` steps, each of
which passes :math:`b / W` bytes to the neighbour. With a latency of :math:`\alpha` per step, the
link's bandwidth :math:`B`, the bandwidth :math:`S` that the software reaches on an unlimited link,
and its :math:`o` seconds per collective,

.. math::
    T(b) = o + 2 (W - 1)\, \alpha + \frac{2 (W - 1)}{W} \cdot \frac{b}{\min(B, S)}

because the software works on one part of the message while another is on the wire. An all-to-all or
an all-gather takes half the steps and bytes. A step of computation :math:`C` (two thirds of it
backward), compression :math:`K` and communication :math:`T` takes

.. math::
    C + K + \max(0,\; T - h), \qquad h = \tfrac{2}{3}\, C \cdot \mathrm{overlap}

where :math:`h = 0` for everything but exact averages: the second all-reduce of PowerSGD needs the
result of the first, and the first needs the whole gradient. With buckets the first needs that of a
bucket's layers only. What bucket :math:`i` sends in :math:`T_i` hides behind the shares
:math:`s_j` of the backward pass that the next ones wait for, so that

.. math::
    x_i = \max(0,\; x_{i - 1} - h s_i) + T_i

of the communication is left when the last gradient is there, and :math:`C + K + x_k` is the step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from jaxcomp._lowrank.matricize import LeafPlan

# Of a training step's time the backward pass takes two thirds: it has two matrix products where the
# forward pass has one.
BACKWARD_SHARE = 2 / 3
_SLOWEST, _FASTEST = 1.0, 1e15  # bytes per second
_WORD = 4  # compression works in float32 whatever goes on the wire

# Reads and writes of the whole gradient in one step, ideally fused. Two-sided: the sum of gradient
# and residual (3), the second product (1), output and new residual (3). One-sided lacks the second
# product. int8 inside error_feedback: the sum (3), scales and integers (2.25), the mean's decoding
# (1.5), the residual (2.25). int8 factors, which are summed with nothing: scales and integers, the
# mean's decoding, and what was sent (1.25).
_PASSES = 7
_PASSES_ONE_SIDED = 6
_PASSES_INT8 = 9
_PASSES_INT8_FACTORS = 5


class Software(NamedTuple):
    """What a collective takes where the link does not limit it."""

    overhead: float = 0.0  # seconds
    bandwidth: float = math.inf  # bytes sent per second


@dataclasses.dataclass(frozen=True)
class Link:
    """What connects the replicas."""

    workers: int
    bandwidth: float  # bytes per second in each direction
    latency: float  # seconds from one replica to the next, one way


class Bucket(NamedTuple):
    """One of several groups of leaves with collectives of their own."""

    payload: float  # share of the bytes
    backward: float  # share of the backward pass that makes its gradients


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What one replica does in one training step, on average over the steps."""

    payload: float  # bytes handed to the collectives
    collectives: float
    hops: float  # messages to a neighbour that wait for each other
    sent: float  # bytes on the link in each direction
    software: Software
    compression: float = 0.0  # seconds
    overlaps: bool = False  # whether it hides behind the backward pass
    buckets: tuple[Bucket, ...] = ()  # of which all but the last do, as they are sent

    def every(self, steps: int) -> Traffic:
        """The same once in so many steps."""
        names = ("payload", "collectives", "hops", "sent", "compression")
        return dataclasses.replace(self, **{name: getattr(self, name) / steps for name in names})


def allreduces(
    payload: float,
    workers: int,
    software: Software,
    *,
    count: int = 1,
    compression: float = 0.0,
    overlaps: bool = False,
) -> Traffic:
    """`count` ring all-reduces with `payload` bytes together."""
    hops = 2 * (workers - 1)
    sent = hops / workers * payload
    return Traffic(payload, count, count * hops, sent, software, compression, overlaps)


def communication_time(traffic: Traffic, link: Link) -> float:
    """Seconds per step from the first to the last byte, before any of it is hidden."""
    if link.workers == 1:
        return 0.0
    fixed = traffic.collectives * traffic.software.overhead + traffic.hops * link.latency
    return fixed + traffic.sent / min(link.bandwidth, traffic.software.bandwidth)


def step_time(traffic: Traffic, link: Link, compute: float, overlap: float) -> float:
    """Seconds per step.

    Args:
      traffic: What is sent, and what compressing it takes.
      link: The network.
      compute: Seconds of a step without communication.
      overlap: The share of the backward pass behind which communication can hide.
    """
    hiding = overlap * BACKWARD_SHARE * compute
    total = communication_time(traffic, link)
    exposed = total
    if traffic.overlaps:
        exposed = max(0.0, total - hiding)
    elif traffic.buckets:
        exposed = _left_of_buckets(traffic, link, hiding)
    return compute + traffic.compression + exposed


def _left_of_buckets(traffic: Traffic, link: Link, hiding: float) -> float:
    """Seconds of communication that are left when the last bucket's gradients are there."""
    count, left = len(traffic.buckets), 0.0
    for bucket in traffic.buckets:
        own = dataclasses.replace(
            traffic,
            collectives=traffic.collectives / count,
            hops=traffic.hops / count,
            sent=traffic.sent * bucket.payload,
        )
        left = max(0.0, left - hiding * bucket.backward) + communication_time(own, link)
    return left


def break_even(
    traffic: Traffic, baselines: Sequence[Traffic], link: Link, compute: float, overlap: float
) -> float:
    """The bandwidth below which `traffic` makes the faster step than every one of the baselines.

    Returns:
      Bytes per second, by bisection; 0 if it does not win on the slowest link and infinity if it
      wins on the fastest.
    """
    if link.workers == 1:
        return 0.0

    def wins(bandwidth: float) -> bool:
        at = dataclasses.replace(link, bandwidth=bandwidth)
        own = step_time(traffic, at, compute, overlap)
        return all(own < step_time(other, at, compute, overlap) for other in baselines)

    low, high = _SLOWEST, _FASTEST
    if not wins(low):
        return 0.0
    if wins(high):
        return math.inf
    while high / low > 1 + 1e-9:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if wins(middle) else (low, middle)
    return low


def powersgd_work(
    plans: Sequence[LeafPlan],
    memory_bandwidth: float,
    flops: float,
    *,
    alternating: bool = False,
    words: float | None = None,
) -> float:
    """Seconds that compressing takes on a device that does nothing in vain.

    Memory: 7 passes over the compressed values (6 one-sided), or `words`. Arithmetic: per value and
    column two operations for each of the products ``M Q``, ``M^T P``, the output and the residual
    (one-sided: one product less); and ``4 n r^2`` to orthogonalise ``(n, r)``, for both factors (or
    one).

    Args:
      plans: Of all leaves; those that are not compressed cost nothing.
      memory_bandwidth: Bytes per second.
      flops: Operations per second in float32.
      alternating: One factor a step; the mean of an even and an odd step.
      words: What is read and written, where a program's are known.
    """
    passes, products, sides = (_PASSES_ONE_SIDED, 3, 0.5) if alternating else (_PASSES, 4, 1.0)
    values = operations = 0.0
    for plan in plans:
        if plan.view is None:
            continue
        values += plan.size
        operations += 2 * products * plan.size * plan.rank
        operations += sides * 4 * plan.wire_size * plan.rank  # wire_size is (rows + cols) * r
    words = passes * values if words is None else words
    return _WORD * words / memory_bandwidth + operations / flops


def int8_work(values: int, memory_bandwidth: float) -> float:
    """Seconds for quantising and its residual on a device that does nothing in vain."""
    return _PASSES_INT8 * _WORD * values / memory_bandwidth


def int8_factors_work(
    plans: Sequence[LeafPlan], memory_bandwidth: float, *, alternating: bool = False
) -> float:
    """Seconds for rounding the factors to int8 on a device that does nothing in vain."""
    values = sum(plan.wire_size for plan in plans if plan.view is not None)
    if alternating:
        values /= 2  # the mean of an even and an odd step
    return _PASSES_INT8_FACTORS * _WORD * values / memory_bandwidth


def interpolate(table: Sequence[tuple[int, float]], rank: int) -> float:
    """A factor at `rank`, linear in the logarithm of the rank between entries, flat outside."""
    below = [entry for entry in table if entry[0] <= rank]
    above = [entry for entry in table if entry[0] > rank]
    if not below or not above:
        return (below[-1] if below else above[0])[1]
    (low, first), (high, last) = below[-1], above[0]
    share = math.log(rank / low) / math.log(high / low)
    return first + share * (last - first)
