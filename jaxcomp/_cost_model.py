r"""How long a data-parallel step takes, from what each replica sends and what compression costs.

A ring all-reduce of :math:`b` bytes among :math:`W` replicas takes :math:`2 (W - 1)` steps, each of
which passes :math:`b / W` bytes to the neighbour. With a latency of :math:`\alpha` per step, a
bandwidth of :math:`B`, and in software :math:`o` per collective and :math:`\gamma` per byte,

.. math::
    T(b) = o + 2 (W - 1)\, \alpha + \frac{2 (W - 1)}{W}\, b \Big(\frac{1}{B} + \gamma\Big)

and an all-to-all or an all-gather half of it, with one :math:`o`. A step of computation
:math:`C` (two thirds of it backward), compression :math:`K` and communication :math:`T` takes

.. math::
    C + K + \max(0,\; T - h), \qquad h = \tfrac{2}{3}\, C \cdot \mathrm{overlap}

where :math:`h = 0` for everything but exact averages: the second all-reduce of PowerSGD needs the
result of the first, and the first needs the whole gradient.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from jaxcomp._matricize import LeafPlan

# Of a training step's time the backward pass takes two thirds: it has two matrix products where the
# forward pass has one.
BACKWARD_SHARE = 2 / 3
_WORD = 4  # compression works in float32 whatever goes on the wire

# Reads and writes of the whole gradient in one step, ideally fused. Two-sided: the sum of gradient
# and residual (3), the second product (1), output and new residual (3). One-sided lacks the second
# product. int8 inside error_feedback: the sum (3), scales and integers (2.25), the mean's decoding
# (1.5), the residual (2.25).
_PASSES = 7
_PASSES_ONE_SIDED = 6
_PASSES_INT8 = 9


@dataclasses.dataclass(frozen=True)
class Link:
    """What connects the replicas, and the software that drives it."""

    workers: int
    bandwidth: float  # bytes per second in each direction
    latency: float  # seconds from one replica to the next, one way
    overhead: float = 0.0  # seconds of software per collective
    seconds_per_byte: float = 0.0  # of software, on top of 1 / bandwidth


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What one replica does in one training step, on average over the steps."""

    payload: float  # bytes handed to the collectives
    collectives: float
    hops: float  # messages to a neighbour that wait for each other
    sent: float  # bytes on the link in each direction
    compression: float = 0.0  # seconds
    overlaps: bool = False  # whether it hides behind the backward pass

    def every(self, steps: int) -> Traffic:
        """The same once in so many steps."""
        names = ("payload", "collectives", "hops", "sent", "compression")
        return dataclasses.replace(self, **{name: getattr(self, name) / steps for name in names})


def allreduces(
    payload: float,
    workers: int,
    *,
    count: int = 1,
    compression: float = 0.0,
    overlaps: bool = False,
) -> Traffic:
    """`count` ring all-reduces with `payload` bytes together."""
    hops = 2 * (workers - 1)
    sent = hops / workers * payload
    return Traffic(payload, count, count * hops, sent, compression, overlaps)


def exchanges(payload: float, workers: int, *, compression: float = 0.0) -> Traffic:
    """An all-to-all and an all-gather of `payload` bytes each: int8's way to average."""
    hops = 2 * (workers - 1)
    return Traffic(payload, 2, hops, hops / workers * payload, compression)


def communication_time(traffic: Traffic, link: Link) -> float:
    """Seconds per step from the first to the last byte, before any of it is hidden."""
    if link.workers == 1:
        return 0.0
    return _fixed(traffic, link) + traffic.sent / link.bandwidth


def step_time(traffic: Traffic, link: Link, compute: float, overlap: float) -> float:
    """Seconds per step.

    Args:
      traffic: What is sent, and what compressing it takes.
      link: The network.
      compute: Seconds of a step without communication.
      overlap: The share of the backward pass behind which exact averages hide.
    """
    exposed = communication_time(traffic, link) - hidden_time(traffic, compute, overlap)
    return compute + traffic.compression + max(0.0, exposed)


def hidden_time(traffic: Traffic, compute: float, overlap: float) -> float:
    """Seconds of communication that cost nothing, at most."""
    return overlap * BACKWARD_SHARE * compute if traffic.overlaps else 0.0


def break_even(
    traffic: Traffic, baselines: Sequence[Traffic], link: Link, compute: float, overlap: float
) -> float:
    r"""The bandwidth below which `traffic` makes the faster step than every one of the baselines.

    Both times are affine in :math:`1 / B` where the baseline is not hidden, and where it is hidden
    nothing can win, so they cross at most once.

    Returns:
      Bytes per second; 0 if it never wins and infinity if it always does.
    """
    own = _fixed(traffic, link) + traffic.compression
    crossings = []
    for other in baselines:
        excess = own - (_fixed(other, link) - hidden_time(other, compute, overlap))
        saved = other.sent - traffic.sent
        if link.workers == 1 or saved < 0 or saved == 0 <= excess:
            crossings.append(0.0)
        else:
            crossings.append(saved / excess if excess > 0 else math.inf)
    return min(crossings)


def _fixed(traffic: Traffic, link: Link) -> float:
    """The part of the communication that no bandwidth of the link changes."""
    software = traffic.collectives * link.overhead + traffic.sent * link.seconds_per_byte
    return software + traffic.hops * link.latency


def powersgd_work(
    plans: Sequence[LeafPlan], memory_bandwidth: float, flops: float, *, alternating: bool = False
) -> float:
    """Seconds that compressing takes on a device that does nothing in vain.

    Memory: 7 passes over the compressed values (6 one-sided). Arithmetic: per value and column two
    operations for each of the products ``M Q``, ``M^T P``, the output and the residual (one-sided:
    one product less); and ``4 n r^2`` to orthogonalise ``(n, r)``, for both factors (or one).

    Args:
      plans: Of all leaves; those that are not compressed cost nothing.
      memory_bandwidth: Bytes per second.
      flops: Operations per second in float32.
      alternating: One factor a step; the mean of an even and an odd step.
    """
    passes, products, sides = (_PASSES_ONE_SIDED, 3, 0.5) if alternating else (_PASSES, 4, 1.0)
    values = operations = 0.0
    for plan in plans:
        if plan.view is None:
            continue
        values += plan.size
        operations += 2 * products * plan.size * plan.rank
        operations += sides * 4 * plan.wire_size * plan.rank  # wire_size is (rows + cols) * r
    return passes * _WORD * values / memory_bandwidth + operations / flops


def int8_work(values: int, memory_bandwidth: float) -> float:
    """Seconds for quantising and its residual on a device that does nothing in vain."""
    return _PASSES_INT8 * _WORD * values / memory_bandwidth


def interpolate(table: Sequence[tuple[int, float]], rank: int) -> float:
    """A factor at `rank`, linear in the logarithm of the rank between entries, flat outside."""
    below = [entry for entry in table if entry[0] <= rank]
    above = [entry for entry in table if entry[0] > rank]
    if not below or not above:
        return (below[-1] if below else above[0])[1]
    (low, first), (high, last) = below[-1], above[0]
    share = math.log(rank / low) / math.log(high / low)
    return first + share * (last - first)
