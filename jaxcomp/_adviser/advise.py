"""Whether compression pays on a given network: every strategy's step time beside the others'."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxcomp._adviser.advice import Advice, Prediction
from jaxcomp._adviser.calibration import Calibration, assumed_constants
from jaxcomp._adviser.model import BACKWARD_SHARE, Link, Traffic, break_even, communication_time
from jaxcomp._adviser.model import step_time as modelled_step_time
from jaxcomp._adviser.shapes import assumed_params, count_values
from jaxcomp._adviser.strategies import LOCAL_SGD, ONE_SIDED, Strategies
from jaxcomp._adviser.units import format_time, parse_bandwidth, parse_time
from jaxcomp._base.checks import ParameterError, check_flag, check_int, check_number
from jaxcomp._base.leaves import checked_factor_dtype
from jaxcomp._base.typing import DType, PyTree

# A gain below this is within the error of the model, and not worth what compression costs in loss.
_WORTHWHILE = 1.1
# Among strategies whose steps are that close the one that sends most is to be preferred.
_AS_FAST = 1.1
# Buckets are not worth a line, and their conditions, for less of a step than this.
_SAVING = 0.02


def advise(
    params: PyTree | int,
    *,
    workers: int,
    step_time: str | float,
    bandwidth: str | float | None = None,
    latency: str | float | None = None,
    backward_overlap: float = 0.7,
    ranks: Sequence[int] | None = None,
    min_compression_rate: float = 2.0,
    comm_dtype: DType | None = None,
    sync_every: int = 8,
    device: str = "gpu",
    calibration: Calibration | None = None,
    gpu_kernels: bool = False,
    buckets: Sequence[int] = (2, 4, 8),
) -> Advice:
    r"""Predicts step time, bytes and speedup of every strategy, and says whether to compress.

    A ring all-reduce of :math:`b` bytes among :math:`W` workers takes

    .. math::
        T(b) = o + 2 (W - 1)\, \alpha + \frac{2 (W - 1)}{W} \cdot \frac{b}{\min(B, S)}

    with the latency :math:`\alpha`, the bandwidth :math:`B` of the link, and :math:`o` and
    :math:`S` of the software. Exact averages hide behind `backward_overlap` of the backward pass,
    for which two thirds of `step_time` are taken; what is compressed is sent after it, and with
    buckets, on GPUs, the last bucket's only. Compression takes the time of 7 passes over the
    compressed values (6 one-sided, 9 for int8) at the device's memory bandwidth, and of the
    products, times a factor for what the device does not reach. On GPUs it takes that of the words
    that compiled programs move instead of 7 passes, and of their kernels' launches. The fair
    baseline is the faster of a 32-bit and a 16-bit all-reduce.

    Args:
      params: Arrays or shapes, of which only shape and dtype are read; or a number of parameters,
        for which a transformer's shapes are assumed.
      workers: Number of replicas.
      step_time: A step without any communication: ``"120ms"``, or seconds.
      bandwidth: Of each replica's link, in each direction: ``"10Gbit"``, or bytes per second. None
        for what `calibration` measured.
      latency: From one replica to the next, one way: ``"50us"``, or seconds. None for 50 us, or
        with no `bandwidth` for what `calibration` measured.
      backward_overlap: The share of the backward pass behind which an exact average can hide, and
        what buckets send before the last one.
      ranks: The ranks to predict; None for the powers of two that the shapes allow.
      min_compression_rate: As for `powersgd`.
      comm_dtype: As for `powersgd`, whose predictions then name it. With int8 each all-reduce is an
        all-to-all and an all-gather, and rounding the factors costs 5 passes over them.
      sync_every: Of local SGD.
      device: ``"gpu"`` or ``"cpu"``: whose constants to assume without a `calibration`.
      calibration: The present device's constants, from `measure`.
      gpu_kernels: As for `powersgd`. One-sided steps are predicted in the plain form.
      buckets: On GPUs, numbers of buckets to try for `powersgd`; the best of them is predicted
        beside one bucket where it saves 2% of the step and more. ``()`` for none.

    Returns:
      The predictions, the recommendation and its reason. ``print`` shows them as a table.

    Raises:
      ValueError: If an argument is unusable.

    Example:
      >>> import jaxcomp
      >>> advice = jaxcomp.advise(
      ...     124_000_000, workers=16, bandwidth="10Gbit", latency="50us", step_time="120ms")
      >>> advice.compress, advice.baseline.name
      (True, 'all-reduce bfloat16')
      >>> jaxcomp.advise(124_000_000, workers=8, bandwidth="3.2Tbit", step_time="120ms").compress
      False
    """
    workers = check_int("workers", workers, 1)
    compute = parse_time("step_time", step_time, positive=True)
    overlap = check_number("backward_overlap", backward_overlap, 0, 1)
    sync_every = check_int("sync_every", sync_every, 1)
    buckets = [check_int("buckets", count, 1) for count in buckets]
    constants = assumed_constants(device, calibration)
    link = _link(workers, bandwidth, latency, constants)
    assumptions = [f"device: {constants.device}"]
    if isinstance(params, (int, np.integer)):
        params, sentence = assumed_params(int(params))
        assumptions.insert(0, sentence)
    if overlap:
        hidden = format_time(overlap * BACKWARD_SHARE * compute)
        assumptions.append(
            f"overlap: exact averages hide behind {overlap:.0%} of the backward pass, {hidden}"
        )

    wire = checked_factor_dtype("comm_dtype", comm_dtype)
    strategies = Strategies(
        params,
        workers,
        constants,
        min_compression_rate,
        wire,
        check_flag("gpu_kernels", gpu_kernels),
    )
    chosen = strategies.ranks(ranks)
    two_sided = [strategies.two_sided(rank) for rank in chosen]
    tried = [strategies.in_buckets(rank, buckets) for rank in chosen]
    in_buckets = _worthwhile(two_sided, tried, link, compute, overlap)
    # Every other rank: the table is to be read.
    few = chosen[::2] if ranks is None else chosen
    one_sided = [strategies.one_sided(rank) for rank in few]
    exact, others = strategies.exact(), strategies.others(sync_every)
    named = [*exact, *two_sided, *in_buckets, *one_sided, *others]
    predictions = _predict(named, link, compute, overlap)
    assumptions += _conditions(constants, bool(in_buckets), gpu_kernels)
    baseline = min((p for p in predictions if not p.compressed), key=lambda p: p.step_time)
    recommended = _recommended(predictions, baseline)
    return Advice(
        values=count_values(params),
        workers=workers,
        bandwidth=link.bandwidth,
        latency=link.latency,
        compute_time=compute,
        predictions=predictions,
        baseline=baseline,
        recommended=recommended,
        reason=_reason(predictions, baseline, recommended, workers, compute),
        assumptions=tuple(assumptions),
    )


def _link(workers: int, bandwidth: Any, latency: Any, constants: Calibration) -> Link:
    if bandwidth is not None:
        return Link(
            workers,
            parse_bandwidth("bandwidth", bandwidth),
            parse_time("latency", 50e-6 if latency is None else latency),
        )
    if constants.devices == 1:
        raise ParameterError(
            "bandwidth",
            "is missing, and no all-reduce was measured. Give it (10Gbit), or measure where JAX "
            "sees several devices.",
        )
    # What was measured holds the link. More workers than were measured take more of a ring's steps.
    hop = constants.allreduce.overhead / (2 * (constants.devices - 1))
    steps = 2 * (workers - 1) - 2 * (constants.devices - 1)
    measured = max(0.0, steps * hop / (2 * (workers - 1))) if workers > 1 else 0.0
    return Link(workers, math.inf, measured if latency is None else parse_time("latency", latency))


def _worthwhile(
    one: Sequence[tuple[str, Traffic]],
    tried: Sequence[Sequence[tuple[str, Traffic]]],
    link: Link,
    compute: float,
    overlap: float,
) -> list[tuple[str, Traffic]]:
    """For each rank the best number of buckets, where it saves enough of the step with one."""

    def seconds(strategy: tuple[str, Traffic]) -> float:
        return modelled_step_time(strategy[1], link, compute, overlap)

    best = [(whole, min(cut, key=seconds)) for whole, cut in zip(one, tried, strict=True) if cut]
    return [cut for whole, cut in best if seconds(cut) <= (1 - _SAVING) * seconds(whole)]


def _conditions(constants: Calibration, in_buckets: bool, gpu_kernels: bool) -> list[str]:
    """What the predictions for GPUs rest on."""
    said = list[str]()
    if constants.platform == "gpu":
        form = "gpu_kernels=True" if gpu_kernels else "without gpu_kernels"
        said.append(
            f"kernels and memory traffic: of powersgd {form}, as compiled for H200s; none was run"
        )
    if in_buckets:
        said.append(
            "buckets: need start_step=0, layers that are not in a scan, and a scheduler that knows "
            "how slow the link is (JAX_ENABLE_PGLE=true)"
        )
    return said


def _predict(
    named: Sequence[tuple[str, Traffic]], link: Link, compute: float, overlap: float
) -> tuple[Prediction, ...]:
    exact = [traffic for _, traffic in named if traffic.overlaps]
    times = [modelled_step_time(traffic, link, compute, overlap) for _, traffic in named]
    best = min(t for t, (_, traffic) in zip(times, named, strict=True) if traffic.overlaps)
    return tuple(
        Prediction(
            name,
            compressed=not traffic.overlaps,
            step_time=time,
            communication=communication_time(traffic, link),
            compression=traffic.compression,
            bytes_per_step=traffic.payload,
            bytes_sent=traffic.sent,
            speedup=best / time,
            break_even=None
            if traffic.overlaps
            else break_even(traffic, exact, link, compute, overlap),
        )
        for (name, traffic), time in zip(named, times, strict=True)
    )


def _recommended(predictions: Sequence[Prediction], baseline: Prediction) -> Prediction:
    """The least lossy of the strategies that pay and are about as fast as the fastest of them."""
    paying = [p for p in predictions if p.compressed and p.speedup >= _WORTHWHILE]
    # Steps with one factor lose more than steps with two at equal bytes, and local SGD is another
    # algorithm: each only where what stands before it is clearly slower.
    local = [p for p in paying if p.name.startswith(LOCAL_SGD)]
    one_sided = [p for p in paying if p.name.startswith(ONE_SIDED)]
    first = [p for p in paying if p not in local and p not in one_sided]
    reducers = first + one_sided
    fastest = min((p.step_time for p in reducers or local), default=0.0)
    for group in (first, one_sided, local):
        near = [p for p in group if p.step_time <= _AS_FAST * fastest]
        if near:
            return max(near, key=lambda p: (p.bytes_per_step, -p.step_time))
    return baseline


def _reason(
    predictions: Sequence[Prediction],
    baseline: Prediction,
    recommended: Prediction,
    workers: int,
    compute: float,
) -> str:
    exposed = baseline.step_time - compute
    if recommended.compressed:
        return (
            f"The step is {recommended.speedup:.2f} times faster than with the {baseline.name}; of "
            "the strategies within 10% of the fastest this one sends most, to lose least."
        )
    if workers == 1:
        return "There is one worker, so nothing is sent."
    if exposed == 0:
        return (
            f"The {baseline.name} takes {format_time(baseline.communication)} and hides behind the "
            "backward pass, so there is nothing to win."
        )
    if baseline.step_time < _WORTHWHILE * compute:
        return (
            f"The {baseline.name} adds {format_time(exposed)} to {format_time(compute)} of "
            f"computation, so nothing can win more than {exposed / baseline.step_time:.1%}."
        )
    best = min((p for p in predictions if p.compressed), key=lambda p: p.step_time)
    return (
        f"The {baseline.name} adds {format_time(exposed)} to the step and the best alternative, "
        f"{best.name}, {format_time(best.step_time - compute)}: too little to win."
    )
