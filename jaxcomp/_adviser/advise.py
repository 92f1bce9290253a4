"""Whether to compress on a given network, and at which rank: one answer, or why there is none."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import jax
import numpy as np

from jaxcomp._adviser.model import (
    ASSUMED,
    Calibration,
    Link,
    ReducerCosts,
    break_even,
    shapes_of,
    typical_width,
)
from jaxcomp._base.checks import check_int
from jaxcomp._base.stats import CompressionStats
from jaxcomp._base.typing import AxisName, MatrixDimsFn, PyTree
from jaxcomp._bytes.gap import LAWS, Gap, Law, Momentum, ranks_of, read_momentum
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
# In six bits a leaf shrinks below a rate of 2, too.
_LEAST_RATE = 1.0
# An interval of more budgets than this leaves the question open.
_BUDGETS = 3
# Of the int8 all-reduce with a residual, three runs: python -m benchmarks.optimizers --law
_INT8 = Gap(gap=0.0, half_width=0.004, tail=0.0)
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
    gap: float | None  # how far above the exact run the loss is expected to end; None: not known
    half_width: float | None  # of its 95% interval

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
        limit = "-"
        loss = "-"
        if self.compressed:
            limit = _rate_or_word(self.break_even)
            loss = "not known"
            if self.gap is not None and self.half_width is not None:
                loss = f"+{self.gap:.1%} ± {100 * self.half_width:.1f}"
        return (
            self.name,
            with_unit(self.step_time, "s"),
            with_unit(self.bytes_per_step, "B"),
            f"{self.speedup:.2f}x",
            limit,
            loss,
        )


def _rate_or_word(bandwidth: float) -> str:
    if bandwidth == 0:
        return "never"
    if bandwidth == math.inf:
        return "always"
    return with_unit(8 * bandwidth, "bit/s")


@dataclasses.dataclass(frozen=True)
class Advice:
    """What to use, why, and what was expected of every candidate; `str` gives the table."""

    workers: int
    link: Link
    compute_time: float  # seconds
    device: Calibration
    predictions: tuple[Prediction, ...]
    baseline: Prediction  # the faster all-reduce
    # The baseline itself where compression does not pay; where the loss is not known, what to try.
    recommended: Prediction
    doubt: str  # why the loss is not known; empty where it is
    notes: tuple[str, ...]  # what was assumed, and how far it holds

    @property
    def compress(self) -> bool | None:
        """Whether anything but an all-reduce is recommended; None where it is not known."""
        if not self.recommended.compressed:
            return False
        return None if self.doubt else True

    def reducer(self, axis_name: AxisName) -> Transformation:
        """Makes what is recommended, or what to try, for the replicas along `axis_name`.

        Example:
          >>> import jax.numpy as jnp, jaxcomp
          >>> params = {"w": jnp.zeros((512, 2048)), "b": jnp.zeros(2048)}
          >>> link = {"workers": 4, "bandwidth": "100Mbit", "step_time": "20ms"}
          >>> advice = jaxcomp.advise(params, tokens=1024, **link)
          >>> tx = advice.reducer("data")
          >>> advice.recommended.name, tx.init(params).q["w"].shape
          ('powersgd rank 64 int6', (512, 64))
        """
        return self.recommended.reducer(axis_name)

    @property
    def verdict(self) -> str:
        """What to do, in a few words."""
        if self.compress is None:
            return "Not known: run both."
        return f"Use {self.recommended.name}." if self.compress else "Do not compress."

    @property
    def reason(self) -> str:
        """Why this one, in a sentence or two."""
        if self.recommended.compressed:
            return self._gain() + " " + self._price()
        if self.link.senders == 1:
            alone = "one worker" if self.workers == 1 else "one host"
            return f"There is {alone}, so nothing is sent."
        best = self.baseline
        for prediction in self.predictions:
            if prediction.compressed and (
                best is self.baseline or prediction.step_time < best.step_time
            ):
                best = prediction
        exact_adds = with_unit(self.baseline.step_time - self.compute_time, "s")
        best_adds = with_unit(best.step_time - self.compute_time, "s")
        return (
            f"The {self.baseline.name} adds {exact_adds} to {with_unit(self.compute_time, 's')} of "
            f"computation, and the best alternative, {best.name}, {best_adds}: no gain of "
            f"{_CLOSE - 1:.0%}, the error of the model."
        )

    def _gain(self) -> str:
        best = self.recommended
        ratio = self.predictions[0].bytes_per_step / best.bytes_per_step
        subject = f"With {best.name} the step is" if self.doubt else "The step is"
        return (
            f"{subject} {best.speedup:.2f} times faster than with the {self.baseline.name}, with "
            f"{ratio:.1f} times fewer bytes than float32 and {ratio / 2:.1f} than bfloat16."
        )

    def _price(self) -> str:
        if self.doubt:
            return (
                f"What it costs in loss is not known: {self.doubt}. The optimizer's state after a "
                "quarter of an exact run gives an estimate: jaxcomp.advise(..., opt_state=...)."
                + self._meanwhile()
            )
        best = self.recommended
        assert best.gap is not None
        assert best.half_width is not None
        low = max(0.0, best.gap - best.half_width)
        high = best.gap + best.half_width
        return (
            f"The loss is expected to end {best.gap:.1%} above the exact run (95%: {low:.1%} to "
            f"{high:.1%})."
        )

    def _meanwhile(self) -> str:
        """Returns a sentence about the int8 all-reduce, where that pays."""
        for prediction in self.predictions:
            if prediction.compressed and not prediction.rank and prediction.speedup >= _CLOSE:
                return (
                    f" The {prediction.name} lost nothing that could be seen, and is "
                    f"{prediction.speedup:.2f} times faster."
                )
        return ""

    def __str__(self) -> str:
        values = sum(leaf.size for leaf in self.recommended.sent.leaves)
        workers = f"{self.workers:,} workers"
        if self.link.senders < self.workers:
            workers += f" on {self.link.senders:,} hosts"
        lines = [
            f"{values:,} parameters, {workers}, "
            f"{with_unit(8 * self.link.bandwidth, 'bit/s')}, latency "
            f"{with_unit(self.link.latency, 's')}, "
            f"{with_unit(self.compute_time, 's')} of computation a step",
            "",
        ]
        rows: list[tuple[str, ...]] = [_HEADER]
        for prediction in self.predictions:
            rows.append(prediction.row)
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = [row[0].ljust(widths[0])]
            for cell, width in zip(row[1:], widths[1:], strict=True):
                cells.append(cell.rjust(width))
            lines.append("  ".join(cells))
        lines.append("")
        lines += textwrap.wrap(f"{self.verdict} {self.reason}", _WIDTH)
        for note in self.notes:
            lines += textwrap.wrap(f"- {note}", _WIDTH, subsequent_indent="  ")
        return "\n".join(lines)


def advise(
    params: PyTree,
    *,
    workers: int,
    bandwidth: str | float,
    step_time: str | float,
    latency: str | float = "50us",
    loss_budget: str | float = "0.5%",
    opt_state: PyTree | None = None,
    tokens: str | float | None = None,
    optimizer: str = "adamw",
    hosts: int | None = None,
    matrix_dims: MatrixDimsFn | None = None,
    device: str | Calibration = "gpu",
) -> Advice:
    """Says whether to compress on a network, and which reducer keeps the loss within a budget.

    The time of a step comes from that of a ring all-reduce, which docs/performance.md has. Exact
    averages overlap with the backward pass, for which two thirds of `step_time` are taken;
    compressed gradients are sent after it. The baseline is the faster of a 32-bit and a 16-bit
    all-reduce.

    What a rank costs in loss is read off `opt_state`, as `predict_gap` does. Without it a law in
    width and tokens guesses, where runs of that kind were made; elsewhere, and where its interval
    is wider than three budgets, the verdict is "not known". Both are of PowerSGD with
    ``comm_dtype="int6"`` from the first step on.

    Args:
      params: Arrays or shapes, of which only shape and dtype are read; or a number of parameters,
        124_000_000 or ``"124M"``, for which a transformer's shapes are assumed.
      workers: Number of replicas.
      bandwidth: Of each replica's link, in each direction: ``"10Gbit"``, ``"25Gbps"``, or bytes per
        second.
      step_time: A step without any communication: ``"120ms"``, or seconds.
      latency: From one replica to the next, one way: ``"50us"``, or seconds.
      loss_budget: How far above the exact run the held-out loss may be expected to end: ``"0.5%"``,
        or 0.005.
      opt_state: The optimizer's state from an exact run of this model, between a quarter and a half
        of its steps, as for `predict_gap`.
      tokens: In a step of all workers together: 8_192 or ``"512k"``; a larger batch loses more.
        None to estimate them from parameters, step time and device. Not read with `opt_state`.
      optimizer: ``"adamw"`` or ``"muon"``. Not read with `opt_state`.
      hosts: On how many hosts the workers lie, where those of a host share one link. They average
        among themselves first, and that time is not counted. None for a link each.
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
      >>> link = {"workers": 2, "bandwidth": "100Mbit", "step_time": "160ms", "device": "cpu"}
      >>> advice = jaxcomp.advise("12.9M", tokens=512, **link)
      >>> advice.compress, advice.recommended.name
      (True, 'powersgd rank 48 int6')
      >>> jaxcomp.advise("124M", workers=16, bandwidth="1Gbit", step_time="120ms").verdict
      'Not known: run both.'
      >>> jaxcomp.advise("124M", workers=8, bandwidth="3.2Tbit", step_time="120ms").verdict
      'Do not compress.'
    """
    workers = check_int("workers", workers, 1)
    senders = workers
    if hosts is not None:
        senders = check_int("hosts", hosts, 1)
        if workers % senders:
            raise ValueError(
                f"`hosts` must divide the workers, got hosts={hosts} for workers={workers}."
            )
    link = Link(senders, parse("bandwidth", bandwidth), parse("latency", latency))
    compute_time = parse("step_time", step_time)
    budget = parse("loss_budget", loss_budget)
    constants = device if isinstance(device, Calibration) else ASSUMED.get(device)
    if constants is None:
        raise ValueError(
            f"`device` must be one of {', '.join(ASSUMED)} or what measure returned, got "
            f"{device!r}."
        )
    params, assumption = shapes_of(params)
    notes = [assumption] if assumption else []
    notes.append(f"device: {constants.device}")
    if senders < workers:
        notes.append(
            f"{workers // senders} workers of each host average among themselves first "
            "(docs/meshes.md), which is not counted; what is sent goes from host to host"
        )
    if matrix_dims is None:
        notes += _unstacked(params)
    if opt_state is not None:
        evidence: _Evidence = _FromRun(read_momentum(opt_state, matrix_dims), budget, matrix_dims)
    else:
        evidence = _from_law(
            params, workers, compute_time, budget, tokens, optimizer, matrix_dims, constants
        )
    notes.append(f"loss: {evidence.note}")
    candidates = _candidates(evidence.ranks(), constants, matrix_dims)
    predictions = _predictions(candidates, params, link, compute_time, evidence)
    if not any(prediction.rank for prediction in predictions):
        notes.append(
            f"PowerSGD is left out: at rank {evidence.ranks()[0]}, the lowest that was looked at, "
            f"it sends no less than {constants.half}; lower ranks take a larger loss_budget"
        )
    exact = [prediction for prediction in predictions if not prediction.compressed]
    baseline = min(exact, key=lambda prediction: prediction.step_time)
    recommended = _recommended(predictions, baseline, evidence)
    doubt = ""
    if recommended.rank:
        doubt = evidence.doubt(recommended.rank)
    return Advice(
        workers,
        link,
        compute_time,
        constants,
        tuple(predictions),
        baseline,
        recommended,
        doubt,
        tuple(notes),
    )


def _unstacked(params: PyTree) -> list[str]:
    """Returns a note on leaves that may be stacks of layers, where there are any."""
    deep = sum(len(np.shape(leaf)) > 2 for leaf in jax.tree.leaves(params))
    if not deep:
        return []
    return [
        f"{deep} leaves have three axes or more and count as one matrix each: pass "
        "matrix_dims=jaxcomp.stacked(name) where the first axis counts layers"
    ]


@dataclasses.dataclass(frozen=True)
class _FromRun:
    """What a run's own momentum says of a rank."""

    momentum: Momentum
    budget: float
    matrix_dims: MatrixDimsFn | None

    @property
    def note(self) -> str:
        law = self.momentum.law
        return (
            f"read off the momentum in opt_state, by a law from {law.settings} settings of models "
            "of up to 12.9 million parameters; it holds for a state from an exact run, between a "
            "quarter and a half of its steps"
        )

    def ranks(self) -> list[int]:
        """Returns the lowest rank that keeps the budget, in multiples of 8, and two above it."""
        allowed = self.momentum.law.tail(self.budget)
        highest = max(len(energy) for energy in self.momentum.spectra.values())
        rank = 8
        while rank < highest and self._tail(rank) > allowed:
            rank += 8
        return [rank, 2 * rank, 4 * rank]

    def gap(self, rank: int) -> Gap | None:
        law = self.momentum.law
        tail = self._tail(rank)
        return Gap(law.gap(tail), law.half_width(tail), tail)

    def doubt(self, rank: int) -> str:
        """Returns why the loss is not known, or nothing."""
        law = self.momentum.law
        least, largest = law.tails
        tail = self._tail(rank)
        if tail > largest:
            return (
                f"{tail:.2f} of the momentum's energy lie beyond the rank, and runs with "
                f"{least:.2f} to {largest:.2f} were made"
            )
        return _too_wide(law.half_width(tail), self.budget)

    def _tail(self, rank: int) -> float:
        ranks = ranks_of(self.momentum.tree, rank, _LEAST_RATE, self.matrix_dims)
        return self.momentum.tail(ranks)


@dataclasses.dataclass(frozen=True)
class _FromLaw:
    """What the law says of a model of some width and a batch of some tokens."""

    law: Law
    optimizer: str
    budget: float
    width: int
    tokens: float
    estimated: bool  # whether the tokens are

    @property
    def note(self) -> str:
        tokens = f"{self.tokens:,.0f} tokens a step"
        if self.estimated:
            tokens += " (estimated from parameters, step time and device: pass tokens=)"
        return (
            f"a law from {self.law.runs} runs with {self.optimizer}, of language models, for width "
            f"{self.width:,} and {tokens}"
        )

    def ranks(self) -> list[int]:
        """Returns the lowest rank that keeps the budget and two above, or shares of the width."""
        rank = self.law.rank(self.budget, self.width, self.tokens)
        if not self._covered():
            rank = 8 * math.ceil(self.width / 16 / 8)
        return [rank, 2 * rank, 4 * rank]

    def gap(self, rank: int) -> Gap | None:
        """Returns what the law says, where it was tried."""
        if not self._covered():
            return None
        at = (rank, self.width, self.tokens)
        return Gap(self.law.gap(*at), self.law.half_width(*at), math.nan)

    def doubt(self, rank: int) -> str:
        """Returns why the loss is not known, or nothing."""
        gap = self.gap(rank)
        if gap is None:
            narrow, wide = self.law.widths
            few, many = self.law.tokens
            return (
                f"runs were made of widths {narrow} to {wide} with {few} to {many:,} tokens a "
                f"step, and yours has width {self.width:,} and {self.tokens:,.0f} tokens"
            )
        return _too_wide(gap.half_width, self.budget)

    def _covered(self) -> bool:
        return self.law.covers(self.width, self.tokens)


def _too_wide(half_width: float, budget: float) -> str:
    """Returns why an interval leaves the question open, or nothing."""
    if 2 * half_width <= _BUDGETS * budget:
        return ""
    return f"its interval is {200 * half_width:.1f} points wide, for a budget of {budget:.1%}"


_Evidence: TypeAlias = _FromRun | _FromLaw


def _from_law(
    params: PyTree,
    workers: int,
    compute_time: float,
    budget: float,
    tokens: str | float | None,
    optimizer: str,
    matrix_dims: MatrixDimsFn | None,
    constants: Calibration,
) -> _FromLaw:
    if optimizer not in LAWS:
        raise ValueError(
            f"`optimizer` must be one of {', '.join(LAWS)}, got {optimizer!r}. SGD with momentum, "
            "Lion and Adafactor lost less than adamw in every run of the study; pass adamw."
        )
    if tokens is None:
        values = sum(math.prod(np.shape(leaf)) for leaf in jax.tree.leaves(params))
        # Forward and backward pass take six operations for each parameter and token.
        per_worker = compute_time * constants.training_flops / (6 * values)
        batch = float(f"{max(1.0, workers * per_worker):.2g}")
    else:
        batch = parse("tokens", tokens)
    width = typical_width(params, matrix_dims)
    return _FromLaw(LAWS[optimizer], optimizer, budget, width, batch, estimated=tokens is None)


@dataclasses.dataclass(frozen=True)
class _Candidate:
    """A reducer, and what its step takes beside the computation."""

    name: str
    make: _Make
    costs: ReducerCosts
    compressed: bool = True
    rank: int = 0


def _candidates(
    ranks: list[int], constants: Calibration, matrix_dims: MatrixDimsFn | None
) -> list[_Candidate]:
    """Returns the two exact averages first, then the int8 all-reduce, then PowerSGD."""
    half = partial(allreduce, comm_dtype=constants.half)
    candidates = [
        _Candidate("all-reduce float32", allreduce, constants.allreduce, compressed=False),
        _Candidate(f"all-reduce {constants.half}", half, constants.allreduce_16, compressed=False),
        _Candidate("int8 all-reduce", _int8_allreduce, constants.int8),
    ]
    for rank in ranks:
        make = partial(
            powersgd,
            rank,
            start_step=0,
            comm_dtype="int6",
            min_compression_rate=_LEAST_RATE,
            matrix_dims=matrix_dims,
        )
        name = f"powersgd rank {rank} int6"
        candidates.append(_Candidate(name, make, constants.powersgd, rank=rank))
    return candidates


def _int8_allreduce(axis_name: AxisName) -> Transformation:
    return error_feedback(quantized_allreduce(axis_name=axis_name))


def _predictions(
    candidates: list[_Candidate],
    params: PyTree,
    link: Link,
    compute_time: float,
    evidence: _Evidence,
) -> list[Prediction]:
    """Returns what is expected of each, without the ranks at which hardly a leaf is compressed."""
    sent = {}
    step_times = {}
    for candidate in candidates:
        stats = candidate.make(axis_name="replicas").bytes(params, replicas=link.senders)
        sent[candidate.name] = stats
        step_times[candidate.name] = partial(candidate.costs.step_time, stats, compute_time)
    exact = [candidate.name for candidate in candidates if not candidate.compressed]
    half = exact[-1]
    baselines = [step_times[name] for name in exact]
    fastest = min(step_time(link) for step_time in baselines)
    predictions = []
    for candidate in candidates:
        name = candidate.name
        if candidate.rank and sent[name].bytes_after >= sent[half].bytes_after:
            continue
        gap: Gap | None = Gap(0.0, 0.0, 0.0)
        if candidate.rank:
            gap = evidence.gap(candidate.rank)
        elif candidate.compressed:
            gap = _INT8
        step_time = step_times[name](link)
        predictions.append(
            Prediction(
                name=name,
                make=candidate.make,
                compressed=candidate.compressed,
                rank=candidate.rank,
                sent=sent[name],
                step_time=step_time,
                speedup=fastest / step_time,
                break_even=break_even(step_times[name], baselines, link),
                gap=None if gap is None else gap.gap,
                half_width=None if gap is None else gap.half_width,
            )
        )
    return predictions


def _recommended(
    predictions: list[Prediction], baseline: Prediction, evidence: _Evidence
) -> Prediction:
    """Returns what sends most among those that pay and are about as fast as the fastest.

    All of them are expected to keep the budget. Where it is known of some ranks that they do, the
    others are left out.
    """
    paying = []
    doubtful = []
    for prediction in predictions:
        if not prediction.compressed or prediction.speedup < _CLOSE:
            continue
        if prediction.rank and evidence.doubt(prediction.rank):
            doubtful.append(prediction)
        else:
            paying.append(prediction)
    if not any(prediction.rank for prediction in paying):
        paying += doubtful
    if not paying:
        return baseline
    fastest = min(prediction.step_time for prediction in paying)
    near = [prediction for prediction in paying if prediction.step_time <= _CLOSE * fastest]
    return max(near, key=lambda prediction: (prediction.bytes_per_step, -prediction.step_time))
