"""Whether to compress on a given network, and at which rank: one answer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxcomp._adviser.advice import Advice, Prediction
from jaxcomp._adviser.calibration import Calibration, assumed_constants
from jaxcomp._adviser.law import LAWS, WIDTHS, Law
from jaxcomp._adviser.model import Link, Traffic, break_even, communication_time
from jaxcomp._adviser.model import step_time as modelled_step_time
from jaxcomp._adviser.shapes import assumed_params, count_values, typical_width
from jaxcomp._adviser.units import format_time, parse_bandwidth, parse_share, parse_time
from jaxcomp._base.checks import ParameterError, check_int, check_number
from jaxcomp._base.typing import MatrixDimsFn, PyTree

# A gain below this is within the error of the model, and not worth what compression costs in loss.
_WORTHWHILE = 1.1
# Among strategies whose steps are that close the one that sends most is to be preferred.
_AS_FAST = 1.1
_RANKS = 3  # that are predicted: the law's, and its doubles


def advise(
    params: PyTree | int,
    *,
    workers: int,
    step_time: str | float,
    bandwidth: str | float | None = None,
    latency: str | float | None = None,
    loss_budget: str | float = "0.5%",
    optimizer: str = "adamw",
    matrix_dims: MatrixDimsFn | None = None,
    backward_overlap: float | None = None,
    device: str = "gpu",
    calibration: Calibration | None = None,
) -> Advice:
    r"""Says whether to compress on a network, and which reducer keeps the loss within a budget.

    The time of a step comes from a ring all-reduce of :math:`b` bytes among :math:`W` workers,

    .. math::
        T(b) = o + 2 (W - 1)\, \alpha + \frac{2 (W - 1)}{W} \cdot \frac{b}{\min(B, S)}

    with the latency :math:`\alpha` and the bandwidth :math:`B` of the link, and :math:`o` and
    :math:`S` of the software. Exact averages overlap with `backward_overlap` of the backward pass,
    for which two thirds of `step_time` are taken. Compressed gradients are sent after it. The
    baseline is the faster of a 32-bit and a 16-bit all-reduce.

    The rank comes from a law for PowerSGD with ``comm_dtype="int6"`` from the first step on:

    .. math::
        \mathrm{gap} = \max\bigl(0,\; a\, (w / 128)^{b} / r - c\bigr) \%

    with rank :math:`r` and width :math:`w`, and :math:`a = 41.1, b = -0.15, c = 0.77` behind AdamW,
    :math:`106, 0.28, 1.32` behind Muon. It was fitted to 25 and 19 runs of small language models of
    widths 128 and 512: ranks 5 to 84, 480 to 1,920 steps, 2 and 4 replicas. The answer has the
    interval that 95% of single runs are expected in. It is wide: behind AdamW 0.7 points to both
    sides at width 128 and 1.9 at width 512, behind Muon 2.4, more at widths that no run had.

    Args:
      params: Arrays or shapes, of which only shape and dtype are read; or a number of parameters,
        for which a transformer's shapes are assumed.
      workers: Number of replicas.
      step_time: A step without any communication: ``"120ms"``, or seconds.
      bandwidth: Of each replica's link, in each direction: ``"10Gbit"``, or bytes per second. None
        for what `calibration` measured.
      latency: From one replica to the next, one way: ``"50us"``, or seconds. None for 50 us, or
        with no `bandwidth` for what `calibration` measured.
      loss_budget: How far above the exact run the held-out loss may be expected to end: ``"0.5%"``,
        or 0.005.
      optimizer: ``"adamw"`` or ``"muon"``.
      matrix_dims: As for `powersgd`; needed where layers are stacked along a leading axis.
      backward_overlap: The share of the backward pass with which an exact average can overlap; None
        for 0.7, or 0 on CPU, where nothing overlaps.
      device: ``"gpu"`` or ``"cpu"``: whose constants to assume without a `calibration`.
      calibration: The present device's constants, from `measure`.

    Returns:
      One recommendation with its interval, its reason, what it rests on, and the predictions
      beside it. ``print`` shows them; ``advice.reducer("data")`` makes what is recommended.

    Raises:
      ValueError: If an argument is unusable.

    Example:
      >>> import jaxcomp
      >>> advice = jaxcomp.advise(124_000_000, workers=16, bandwidth="1Gbit", step_time="120ms")
      >>> advice.compress, advice.recommended.name
      (True, 'powersgd rank 32 int6')
      >>> jaxcomp.advise(124_000_000, workers=8, bandwidth="3.2Tbit", step_time="120ms").compress
      False
    """
    workers = check_int("workers", workers, 1)
    compute = parse_time("step_time", step_time, positive=True)
    budget = parse_share("loss_budget", loss_budget)
    if optimizer not in LAWS:
        raise ParameterError(
            "optimizer",
            f"must be one of {', '.join(LAWS)}, got {optimizer!r}. SGD with momentum, Lion and "
            "Adafactor lost less than adamw in every run of the study; pass adamw for them.",
        )
    law = LAWS[optimizer]
    constants = assumed_constants(device, calibration)
    if backward_overlap is None:
        backward_overlap = 0.0 if constants.platform == "cpu" else 0.7
    overlap = check_number("backward_overlap", backward_overlap, 0, 1)
    link = _link(workers, bandwidth, latency, constants)
    notes = [f"device: {constants.device}"]
    if isinstance(params, (int, np.integer)):
        params, sentence = assumed_params(int(params))
        notes.insert(0, sentence)

    deep = sum(len(np.shape(leaf)) > 2 for leaf in jax.tree.leaves(params))
    if deep and matrix_dims is None:
        notes.append(
            f"{deep} leaves have three axes or more and count as one matrix each: pass matrix_dims "
            "where the first axis counts layers"
        )

    width = typical_width(params, matrix_dims)
    strategies = _strategies(params, workers, constants, law, budget, width, matrix_dims)
    predictions = _predict(strategies, link, compute, overlap)
    baseline = min((p for p in predictions if not p.compressed), key=lambda p: p.step_time)
    recommended = _recommended(predictions, baseline, budget)
    if recommended.rank:
        notes += _range(law, optimizer, recommended, width)
    return Advice(
        values=count_values(params),
        workers=workers,
        bandwidth=link.bandwidth,
        latency=link.latency,
        compute_time=compute,
        loss_budget=budget,
        predictions=predictions,
        baseline=baseline,
        recommended=recommended,
        reason=_reason(predictions, baseline, recommended, workers, compute),
        notes=tuple(notes),
    )


def _link(workers: int, bandwidth: Any, latency: Any, constants: Calibration) -> Link:
    if bandwidth is not None:
        speed = parse_bandwidth("bandwidth", bandwidth)
        return Link(workers, speed, parse_time("latency", 50e-6 if latency is None else latency))
    if constants.devices == 1:
        raise ParameterError(
            "bandwidth",
            "is missing, and no all-reduce was measured. Give it (10Gbit), or measure where JAX "
            "sees several devices.",
        )
    if latency is not None:
        return Link(workers, math.inf, parse_time("latency", latency))
    # What was measured holds the link. More workers than were measured take more of a ring's steps.
    hop = constants.allreduce.overhead / (2 * (constants.devices - 1))
    more = max(0, workers - constants.devices)
    return Link(workers, math.inf, hop * more / (workers - 1) if more else 0.0)


def _strategies(
    params: PyTree,
    workers: int,
    constants: Calibration,
    law: Law,
    budget: float,
    width: float,
    matrix_dims: MatrixDimsFn | None,
) -> list[tuple[Prediction, Traffic]]:
    """The exact averages, the int8 all-reduce, and PowerSGD at the law's rank and above."""
    # XLA's CPU backend sends bfloat16 as float32.
    narrow = "float16" if constants.platform == "cpu" else "bfloat16"
    values = count_values(params)
    named = [
        Prediction("all-reduce float32", compressed=False),
        Prediction(f"all-reduce {narrow}", compressed=False, comm_dtype=narrow),
        Prediction("int8 all-reduce", compressed=True, half_width=law.half_width(0, width)),
    ]
    least = law.rank(budget, width)
    for rank in (least << k for k in range(_RANKS)):
        gap, half = law.gap(rank, width), law.half_width(rank, width)
        name = f"powersgd rank {rank} int6"
        named.append(Prediction(name, True, rank, "int6", gap, half, matrix_dims))
    found = list[tuple[Prediction, Traffic]]()
    for prediction in named:
        sent = prediction.reducer("replicas").bytes(params, replicas=workers)
        payload, software = sent.bytes_after, constants.exchange
        if not prediction.compressed:
            software = constants.allreduce_16 if prediction.comm_dtype else constants.allreduce
            found.append((prediction, Traffic(payload, 1, software, overlaps=True)))
        elif not prediction.rank:
            found.append((prediction, Traffic(payload, 1, software, constants.int8_time(values))))
        elif any(leaf.compressed for leaf in sent.leaves) and payload < 2 * values:
            seconds = constants.powersgd_time(sent)
            found.append((prediction, Traffic(payload, 2, software, seconds)))
    return found


def _predict(
    strategies: Sequence[tuple[Prediction, Traffic]], link: Link, compute: float, overlap: float
) -> tuple[Prediction, ...]:
    exact = [traffic for prediction, traffic in strategies if not prediction.compressed]
    best = min(modelled_step_time(traffic, link, compute, overlap) for traffic in exact)
    plain = exact[0].payload
    found = list[Prediction]()
    for prediction, traffic in strategies:
        seconds = modelled_step_time(traffic, link, compute, overlap)
        limit = None
        if prediction.compressed:
            limit = break_even(traffic, exact, link, compute, overlap) if link.workers > 1 else 0.0
        found.append(
            dataclasses.replace(
                prediction,
                step_time=seconds,
                communication=communication_time(traffic, link),
                compression=traffic.compression,
                bytes_per_step=traffic.payload,
                ratio=plain / traffic.payload if traffic.payload else 1.0,
                speedup=best / seconds,
                break_even=limit,
            )
        )
    return tuple(found)


def _recommended(
    predictions: Sequence[Prediction], baseline: Prediction, budget: float
) -> Prediction:
    """The one that sends most among those that pay and are about as fast as the fastest."""
    paying = [
        p for p in predictions if p.compressed and p.gap <= budget and p.speedup >= _WORTHWHILE
    ]
    fastest = min((p.step_time for p in paying), default=0.0)
    near = [p for p in paying if p.step_time <= _AS_FAST * fastest]
    return max(near, key=lambda p: (p.bytes_per_step, -p.step_time), default=baseline)


def _reason(
    predictions: Sequence[Prediction],
    baseline: Prediction,
    recommended: Prediction,
    workers: int,
    compute: float,
) -> str:
    if recommended.compressed:
        return (
            f"The step is {recommended.speedup:.2f} times faster than with the {baseline.name}, "
            f"with {recommended.ratio:.1f} times fewer bytes than float32 and "
            f"{recommended.ratio / 2:.1f} than bfloat16. The loss is expected to end "
            f"{recommended.gap_text()} above the exact run."
        )
    if workers == 1:
        return "There is one worker, so nothing is sent."
    exposed = baseline.step_time - compute
    if exposed == 0:
        return (
            f"The {baseline.name} takes {format_time(baseline.communication)} and overlaps with "
            "the backward pass, so there is nothing to win."
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


def _range(law: Law, optimizer: str, chosen: Prediction, width: float) -> list[str]:
    """What the expected loss rests on, and where that ends."""
    low, high = WIDTHS
    said = (
        f"loss: a law from {law.runs} runs with {optimizer}, of language models of widths {low} "
        f"and {high} with 2 or 4 replicas"
    )
    notes = [said]
    if not low <= width <= high:
        notes.append(
            f"width: yours is {width:,.0f}, which no run had; compare with an exact run of your own"
        )
    return notes
