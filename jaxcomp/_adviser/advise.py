"""Whether to compress on a given network, and at which rank: one answer."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeAlias

import jax
import numpy as np

from jaxcomp._adviser.law import LAWS, USUAL_TOKENS, Law
from jaxcomp._adviser.model import ASSUMED, Calibration, Link, ReducerCosts, break_even
from jaxcomp._adviser.shapes import shapes_of, typical_width
from jaxcomp._base.checks import check_int
from jaxcomp._base.stats import CompressionStats
from jaxcomp._base.typing import AxisName, MatrixDimsFn, PyTree
from jaxcomp._bytes.units import parse, with_unit
from jaxcomp._reducers.allreduce import allreduce
from jaxcomp._reducers.error_feedback import error_feedback
from jaxcomp._reducers.powersgd import powersgd
from jaxcomp._reducers.quantized import quantized_allreduce
from jaxcomp._reducers.transformation import Transformation

# Steps that differ by less are within the error of the model: so little is not worth what
# compression costs in loss, nor, among reducers, a lower rank than is possible.
_CLOSE = 1.1
_HEADER = ("reducer", "step", "bytes a step", "speedup", "pays below", "loss")
_WIDTH = 96
_Make: TypeAlias = Callable[..., Transformation]  # takes ``axis_name=``


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What is expected of one reducer. Times in seconds, gaps as shares: 0.01 is 1%."""

    name: str
    make: _Make = dataclasses.field(repr=False)
    compressed: bool  # False for the exact averages, which are the baselines
    rank: int  # of PowerSGD, else 0
    sent: CompressionStats  # leaf by leaf
    step_time: float
    speedup: float  # over the faster baseline
    break_even: float  # bytes per second below which it is faster than both; 0 never, inf always
    gap: float  # how far above the exact run the loss is expected to end
    half_width: float  # of its 95% interval

    def reducer(self, axis_name: AxisName) -> Transformation:
        """Makes it, for the replicas along `axis_name`."""
        return self.make(axis_name=axis_name)

    @property
    def bytes_per_step(self) -> int:
        """Bytes handed to the collectives by each replica."""
        return self.sent.bytes_after

    @property
    def row(self) -> tuple[str, ...]:
        """Its line in the table of all."""
        limit = {0: "never", math.inf: "always"}.get(
            self.break_even, with_unit(8 * self.break_even, "bit/s")
        )
        loss = f"+{self.gap:.1%} ± {100 * self.half_width:.1f}"
        return (
            self.name,
            with_unit(self.step_time, "s"),
            with_unit(self.bytes_per_step, "B"),
            f"{self.speedup:.2f}x",
            *((limit, loss) if self.compressed else ("-", "-")),
        )


@dataclasses.dataclass(frozen=True)
class Advice:
    """What to use, why, and what was expected of every candidate; `str` gives the table."""

    link: Link
    compute_time: float  # seconds
    device: Calibration
    law: Law  # of what a rank costs in loss
    predictions: tuple[Prediction, ...]
    baseline: Prediction  # the faster all-reduce
    recommended: Prediction  # the baseline itself where compression does not pay
    notes: tuple[str, ...]  # what was assumed, and how far it holds

    @property
    def compress(self) -> bool:
        """Whether anything but an all-reduce is recommended."""
        return self.recommended.compressed

    def reducer(self, axis_name: AxisName) -> Transformation:
        """Makes what is recommended, for the replicas along `axis_name`.

        Example:
          >>> import jax.numpy as jnp, jaxcomp
          >>> params = {"w": jnp.zeros((512, 2048)), "b": jnp.zeros(2048)}
          >>> advice = jaxcomp.advise(params, workers=4, bandwidth="100Mbit", step_time="20ms")
          >>> tx = advice.reducer("data")
          >>> advice.recommended.name, tx.init(params).q["w"].shape
          ('powersgd rank 64 int6', (512, 64))
        """
        return self.recommended.reducer(axis_name)

    @property
    def reason(self) -> str:
        """Why this one, in a sentence or two."""
        best = self.recommended
        if best.compressed:
            low, high = best.gap - best.half_width, best.gap + best.half_width
            ratio = self.predictions[0].bytes_per_step / best.bytes_per_step
            return (
                f"The step is {best.speedup:.2f} times faster than with the {self.baseline.name}, "
                f"with {ratio:.1f} times fewer bytes than float32 and {ratio / 2:.1f} than "
                f"bfloat16. The loss is expected to end {best.gap:.1%} above the exact run "
                f"(95% of runs: {low:.1%} to {high:.1%})."
            )
        if self.link.workers == 1:
            return "There is one worker, so nothing is sent."
        best = min((p for p in self.predictions if p.compressed), key=lambda p: p.step_time)
        own, other = (
            with_unit(p.step_time - self.compute_time, "s") for p in (self.baseline, best)
        )
        return (
            f"The {self.baseline.name} adds {own} to {with_unit(self.compute_time, 's')} of "
            f"computation, and the best alternative, {best.name}, {other}: no "
            f"gain of {_CLOSE - 1:.0%}, the error of the model."
        )

    def __str__(self) -> str:
        values = sum(leaf.size for leaf in self.recommended.sent.leaves)
        rows = [_HEADER, *(prediction.row for prediction in self.predictions)]
        first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
        verdict = f"Use {self.recommended.name}." if self.compress else "Do not compress."
        lines = [
            f"{values:,} parameters, {self.link.workers} workers, "
            f"{with_unit(8 * self.link.bandwidth, 'bit/s')}, latency "
            f"{with_unit(self.link.latency, 's')}, "
            f"{with_unit(self.compute_time, 's')} of computation a step",
            "",
            *("  ".join([name.ljust(first), *map(str.rjust, x, others)]) for name, *x in rows),
        ]
        lines += ["", *textwrap.wrap(f"{verdict} {self.reason}", _WIDTH)]
        for note in self.notes:
            lines += textwrap.wrap(f"- {note}", _WIDTH, subsequent_indent="  ")
        return "\n".join(lines)


def advise(
    params: PyTree | int | str,
    *,
    workers: int,
    bandwidth: str | float,
    step_time: str | float,
    latency: str | float = "50us",
    loss_budget: str | float = "0.5%",
    tokens: str | float | None = None,
    optimizer: str = "adamw",
    matrix_dims: MatrixDimsFn | None = None,
    device: str | Calibration = "gpu",
) -> Advice:
    """Says whether to compress on a network, and which reducer keeps the loss within a budget.

    The time of a step comes from that of a ring all-reduce, which docs/performance.md has. Exact
    averages overlap with the backward pass, for which two thirds of `step_time` are taken;
    compressed gradients are sent after it. The baseline is the faster of a 32-bit and a 16-bit
    all-reduce. The rank comes from a `Law` for PowerSGD with ``comm_dtype="int6"`` from the first
    step on, with the interval that 95% of single runs are expected in.

    Args:
      params: Arrays or shapes, of which only shape and dtype are read; or a number of parameters,
        124_000_000 or ``"124M"``, for which a transformer's shapes are assumed.
      workers: Number of replicas.
      bandwidth: Of each replica's link, in each direction: ``"10Gbit"``, or bytes per second.
      step_time: A step without any communication: ``"120ms"``, or seconds.
      latency: From one replica to the next, one way: ``"50us"``, or seconds.
      loss_budget: How far above the exact run the held-out loss may be expected to end: ``"0.5%"``,
        or 0.005.
      tokens: In a step of all workers together: 8_192 or ``"512k"``. None for 1,024, as in most
        runs of the law; a larger batch loses more.
      optimizer: ``"adamw"`` or ``"muon"``.
      matrix_dims: As for `powersgd`: ``jaxcomp.stacked("blocks")`` where layers are stacked along
        a leading axis.
      device: What `measure` returned; or ``"gpu"`` or ``"cpu"``, whose constants are assumed.

    Returns:
      One recommendation with its interval, its reason, what it rests on, and the predictions
      beside it. ``print`` shows them; ``advice.reducer("data")`` makes what is recommended.

    Raises:
      ValueError: If an argument is unusable.

    Example:
      >>> import jaxcomp
      >>> advice = jaxcomp.advise(124_000_000, workers=16, bandwidth="1Gbit", step_time="120ms")
      >>> advice.compress, advice.recommended.name
      (True, 'powersgd rank 64 int6')
      >>> jaxcomp.advise(124_000_000, workers=8, bandwidth="3.2Tbit", step_time="120ms").compress
      False
    """
    workers = check_int("workers", workers, 1)
    link = Link(workers, parse("bandwidth", bandwidth), parse("latency", latency))
    compute, budget = parse("step_time", step_time), parse("loss_budget", loss_budget)
    batch = USUAL_TOKENS if tokens is None else parse("tokens", tokens)
    if optimizer not in LAWS:
        raise ValueError(
            f"`optimizer` must be one of {', '.join(LAWS)}, got {optimizer!r}. SGD with momentum, "
            "Lion and Adafactor lost less than adamw in every run of the study; pass adamw."
        )
    constants = device if isinstance(device, Calibration) else ASSUMED.get(device)
    if constants is None:
        raise ValueError(
            f"`device` must be one of {', '.join(ASSUMED)} or what measure returned, got "
            f"{device!r}."
        )
    params, notes = shapes_of(params)
    notes.append(f"device: {constants.device}")
    deep = sum(len(np.shape(leaf)) > 2 for leaf in jax.tree.leaves(params))
    if deep and matrix_dims is None:
        notes.append(
            f"{deep} leaves have three axes or more and count as one matrix each: pass "
            "matrix_dims=jaxcomp.stacked(name) where the first axis counts layers"
        )
    law, width = LAWS[optimizer], typical_width(params, matrix_dims)
    assumed = " (assumed: pass tokens=)" if tokens is None else ""
    (narrow, wide), (few, many) = law.widths, law.tokens
    notes.append(
        f"loss: a law from {law.runs} runs with {optimizer}, of language models of widths {narrow} "
        f"to {wide} with {few} to {many:,} tokens a step. Yours has width {width:,} and "
        f"{batch:,.0f} tokens{assumed}; compare with an exact run of your own"
    )
    at = width, batch
    predictions = tuple(
        _predictions(params, link, compute, constants, law, at, budget, matrix_dims)
    )
    if not any(prediction.rank for prediction in predictions):
        notes.append(
            f"PowerSGD is left out: at rank {law.rank(budget, *at)}, the lowest that keeps the "
            f"budget, it sends no less than {constants.half}; lower ranks take a larger loss_budget"
        )
    baseline = min((p for p in predictions if not p.compressed), key=lambda p: p.step_time)
    # The one that sends most among those that pay and are about as fast as the fastest: from the
    # law's rank on all of them keep the budget.
    paying = [p for p in predictions if p.compressed and p.speedup >= _CLOSE]
    fastest = min((p.step_time for p in paying), default=0.0)
    near = [p for p in paying if p.step_time <= _CLOSE * fastest]
    recommended = max(near, key=lambda p: (p.bytes_per_step, -p.step_time), default=baseline)
    return Advice(link, compute, constants, law, predictions, baseline, recommended, tuple(notes))


def _predictions(
    params: PyTree,
    link: Link,
    compute: float,
    constants: Calibration,
    law: Law,
    at: tuple[int, float],  # width of the model, tokens in a step
    budget: float,
    matrix_dims: MatrixDimsFn | None,
) -> Iterator[Prediction]:
    """Of the exact averages, the int8 all-reduce, and PowerSGD at the law's rank and above."""
    half = f"all-reduce {constants.half}"
    low_rank = partial(
        powersgd,
        start_step=0,
        comm_dtype="int6",
        min_compression_rate=1.0,  # in six bits leaves shrink below 2, too
        matrix_dims=matrix_dims,
    )
    lowest = law.rank(budget, *at)
    ranks = {f"powersgd rank {rank} int6": rank for rank in (lowest, 2 * lowest, 4 * lowest)}
    reducers: dict[str, tuple[_Make, ReducerCosts]] = {
        "all-reduce float32": (allreduce, constants.allreduce),
        half: (partial(allreduce, comm_dtype=constants.half), constants.allreduce_16),
        "int8 all-reduce": (
            lambda axis_name: error_feedback(quantized_allreduce(axis_name=axis_name)),
            constants.int8,
        ),
        **{name: (partial(low_rank, rank), constants.powersgd) for name, rank in ranks.items()},
    }
    sent: dict[str, CompressionStats] = {}
    step_times: dict[str, Callable[[Link], float]] = {}
    for name, (make, costs) in reducers.items():
        sent[name] = make(axis_name="replicas").bytes(params, replicas=link.workers)
        step_times[name] = partial(costs.step_time, sent[name], compute)
    baselines = {name: step_times[name] for name in ("all-reduce float32", half)}
    fastest = min(step_time(link) for step_time in baselines.values())
    for name, (make, _) in reducers.items():
        rank, compressed = ranks.get(name, 0), name not in baselines
        if rank and sent[name].bytes_after >= sent[half].bytes_after:
            continue  # hardly any leaf is compressed, or none
        yield Prediction(
            name=name,
            make=make,
            compressed=compressed,
            rank=rank,
            sent=sent[name],
            step_time=step_times[name](link),
            speedup=fastest / step_times[name](link),
            break_even=break_even(step_times[name], baselines.values(), link),
            gap=law.gap(rank, *at),
            half_width=law.half_width(rank, *at) if compressed else 0.0,
        )
