r"""How long a data-parallel step takes, from what each replica sends and what compression costs.

A ring all-reduce of :math:`b` bytes among :math:`W` replicas takes :math:`2 (W - 1)` steps, each of
which passes :math:`b / W` bytes to the neighbour. With a latency of :math:`\alpha` per step, the
link's bandwidth :math:`B`, the bandwidth :math:`S` that the software reaches on an unlimited link,
and its :math:`o` seconds per collective,

.. math::
    T(b) = o + 2 (W - 1)\, \alpha + \frac{2 (W - 1)}{W} \cdot \frac{b}{\min(B, S)}

because the software works on one part of the message while another is on the wire. An all-to-all
and an all-gather together take as many steps and bytes. A step of computation :math:`C` (two thirds
of it backward), compression :math:`K` and communication :math:`T` takes

.. math::
    C + K + \max(0,\; T - h), \qquad h = \tfrac{2}{3}\, C \cdot \mathrm{overlap}

where :math:`h = 0` for everything but exact averages: PowerSGD's second all-reduce needs the result
of the first, and the first needs the whole gradient.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

# Of a training step's time the backward pass takes two thirds: it has two matrix products where the
# forward pass has one.
BACKWARD_SHARE = 2 / 3
_SLOWEST, _FASTEST = 1.0, 1e15  # bytes per second


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


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What one replica does in one training step."""

    payload: float  # bytes handed to the collectives
    collectives: int  # ring all-reduces, or pairs of an all-to-all and an all-gather
    software: Software
    compression: float = 0.0  # seconds
    overlaps: bool = False  # whether it overlaps with the backward pass


def communication_time(traffic: Traffic, link: Link) -> float:
    """Seconds per step from the first to the last byte, before any overlap."""
    if link.workers == 1:
        return 0.0
    steps = 2 * (link.workers - 1)
    fixed = traffic.collectives * (traffic.software.overhead + steps * link.latency)
    sent = steps / link.workers * traffic.payload
    return fixed + sent / min(link.bandwidth, traffic.software.bandwidth)


def step_time(traffic: Traffic, link: Link, compute: float, overlap: float) -> float:
    """Seconds per step.

    Args:
      traffic: What is sent, and what compressing it takes.
      link: The network.
      compute: Seconds of a step without communication.
      overlap: The share of the backward pass with which communication can overlap.
    """
    hidden = overlap * BACKWARD_SHARE * compute if traffic.overlaps else 0.0
    return compute + traffic.compression + max(0.0, communication_time(traffic, link) - hidden)


def break_even(
    traffic: Traffic, baselines: Sequence[Traffic], link: Link, compute: float, overlap: float
) -> float:
    """The bandwidth below which `traffic` makes the faster step than every one of the baselines.

    Returns:
      Bytes per second, by bisection; 0 if it does not win on the slowest link and infinity if it
      wins on the fastest.
    """

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
