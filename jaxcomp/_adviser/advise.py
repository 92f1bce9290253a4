"""Recommends for a network whether to compress and at which rank, or says why it cannot.

`advise` puts three predictions together: the bytes, which `Reducer.bytes` counts exactly; the time
of a step, by the model in `measure`; the loss, by the laws of `jaxcomp._bytes.gap`. It tries the
exact averages, the int8 all-reduce and PowerSGD at three ranks. The loss is the least certain of
the three, so a recommendation is made only where runs were made, and "not known" is an answer.

An `Advice` holds the predictions for programs, and orders them into a table and sentences for
people. Its reason always names what the recommended reducer was compared with.
"""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from jaxcomp._adviser.measure import (
    ASSUMED,
    Calibration,
    Link,
    ReducerCosts,
    break_even,
    shapes_of,
    typical_width,
)
from jaxcomp._base.checks import answers_other_names, check_int
from jaxcomp._base.leaves import leaf_name
from jaxcomp._base.stats import CompressionStats, aligned
from jaxcomp._base.typing import AxisName, MatrixDimsFn, PyTree
from jaxcomp._bytes.gap import LAWS, Gap, Measured, Momentum, ranks_of, read_momentum
from jaxcomp._bytes.units import parse, with_unit
from jaxcomp._reducers.allreduce import allreduce
from jaxcomp._reducers.error_feedback import error_feedback
from jaxcomp._reducers.powersgd import powersgd
from jaxcomp._reducers.quantized import quantized_allreduce
from jaxcomp._reducers.transformation import Transformation

# Two step times whose ratio is below this are equal within the model's error. So small a gain is
# not worth the loss of compression, nor of a lower rank than necessary.
_CLOSE = 1.1
_HEADER = ("reducer", "step", "bytes a step", "speedup", "pays below", "loss")
_WIDTH = 96  # of the text, in characters
# With six-bit factors a leaf shrinks even at a compression rate below 2.
_LEAST_RATE = 1.0
# If an interval is wider than this number of budgets, the loss counts as not known.
_BUDGETS = 3


class Loss(NamedTuple):
    """Holds the expected loss with a reducer."""

    gap: float | None  # expected excess over the exact run's loss; None: not known
    half_width: float | None  # half-width of the gap's 95% interval
    doubt: str = ""  # why the gap is not known well enough; empty if it is


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Predicts one reducer's step. Times are in seconds, gaps are fractions: 0.01 is 1%."""

    name: str
    make: Callable[..., Transformation] = dataclasses.field(repr=False)  # takes ``axis_name=``
    compressed: bool  # False for the exact averages, which are the baselines
    rank: int  # rank of PowerSGD, else 0
    sent: CompressionStats  # bytes in one step, for each leaf
    step_time: float
    speedup: float  # step time of the faster baseline / step time
    break_even: float  # bytes/s below which it beats both baselines; 0 never, inf always
    gap: float | None  # expected excess over the exact run's loss; None: not known
    half_width: float | None  # half-width of the gap's 95% interval
    doubt: str  # why the gap is not known well enough; empty if it is

    def reducer(self, axis_name: AxisName) -> Transformation:
        """Makes the reducer, for the replicas along `axis_name`."""
        return self.make(axis_name=axis_name)

    @property
    def bytes_per_step(self) -> int:
        """Returns the bytes that each replica hands to the collectives in a step."""
        return self.sent.bytes_after

    @property
    def row(self) -> tuple[str, ...]:
        """Returns the cells of this prediction's row in the table."""
        limit = "-"
        loss = "-"
        if self.compressed:
            words = {0.0: "never", math.inf: "always"}
            limit = words.get(self.break_even, with_unit(8 * self.break_even, "bit/s"))
            loss = "not known"
            if self.gap is not None and self.half_width is not None:
                loss = f"+{self.gap:.1%} ± {100 * self.half_width:.1f}"
        step_time = with_unit(self.step_time, "s")
        sent = with_unit(self.bytes_per_step, "B")
        return (self.name, step_time, sent, f"{self.speedup:.2f}x", limit, loss)


@dataclasses.dataclass(frozen=True)
class Advice:
    """Recommends a reducer, with its reason and predictions of all candidates; `str` is a table."""

    workers: int
    link: Link
    compute_time: float  # seconds
    device: Calibration
    predictions: tuple[Prediction, ...]
    baseline: Prediction  # the faster all-reduce
    # The baseline if compression does not pay; a candidate to try if its loss is not known.
    recommended: Prediction
    notes: tuple[str, ...]  # the assumptions and their limits

    @property
    def compress(self) -> bool | None:
        """Returns whether compression is recommended; None if this is not known."""
        if not self.recommended.compressed:
            return False
        if self.recommended.doubt:
            return None
        return True

    def reducer(self, axis_name: AxisName) -> Transformation:
        """Makes the recommended reducer, or the one to try, for the replicas along `axis_name`.

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
        """Returns the recommendation in a few words."""
        if self.compress is None:
            return "Not known: run both."
        if not self.compress:
            return "Do not compress."
        return f"Use {self.recommended.name}."

    @property
    def reason(self) -> str:
        """Returns the reason for the recommendation, in a few sentences."""
        best = self.recommended
        if best is self.baseline:
            if self.link.senders == 1:
                return "There is one sender, so nothing is sent."
            others = [each for each in self.predictions if each.compressed]
            nearest = min(others, key=lambda each: each.step_time)
            return (
                f"With the {self.baseline.name} a step takes {with_unit(best.step_time, 's')}, and "
                f"with the best alternative, {nearest.name}, "
                f"{with_unit(nearest.step_time, 's')}: no gain of {_CLOSE - 1:.0%}, the error of "
                "the model."
            )
        # The candidates are in the order of `_predictions` in `advise`: float32 first, int8 third.
        ratio = self.predictions[0].bytes_per_step / best.bytes_per_step
        subject = "With it"
        if best.doubt:
            subject = f"With {best.name}"
        sentences = [
            f"{subject} the step is {best.speedup:.2f} times faster than with the "
            f"{self.baseline.name}, with {ratio:.1f} times fewer bytes than float32 and "
            f"{ratio / 2:.1f} than bfloat16."
        ]
        if best.doubt or best.gap is None or best.half_width is None:
            sentences.append(
                f"What it costs in loss is not known: {best.doubt}. Run both for three quarters of "
                "the steps, and pass the exact run's state and the gap between their losses: "
                f"jaxcomp.advise(..., opt_state=opt_state, measured=({best.rank}, '1.2%'))."
            )
            int8 = self.predictions[2]
            if int8.speedup >= _CLOSE:
                sentences.append(
                    f"The {int8.name} lost nothing that could be seen, and is {int8.speedup:.2f} "
                    "times faster."
                )
        else:
            low = max(0.0, best.gap - best.half_width)
            sentences.append(
                f"The loss is expected to end {best.gap:.1%} above the exact run (95%: {low:.1%} "
                f"to {best.gap + best.half_width:.1%})."
            )
        return " ".join(sentences)

    def __str__(self) -> str:
        values = sum(leaf.size for leaf in self.recommended.sent.leaves)
        senders = f"{self.workers:,} workers"
        if self.link.senders < self.workers:
            senders += f" on {self.link.senders:,} hosts"
        bandwidth = with_unit(8 * self.link.bandwidth, "bit/s")
        latency = with_unit(self.link.latency, "s")
        compute_time = with_unit(self.compute_time, "s")
        lines = [
            f"{values:,} parameters, {senders}, {bandwidth}, latency {latency}, {compute_time} of "
            "computation a step",
            "",
        ]
        rows = [_HEADER, *(prediction.row for prediction in self.predictions)]
        lines.append(aligned("<" + ">" * (len(_HEADER) - 1), rows))
        lines += ["", *textwrap.wrap(f"{self.verdict} {self.reason}", _WIDTH)]
        for note in self.notes:
            lines += textwrap.wrap(f"- {note}", _WIDTH, subsequent_indent="  ")
        return "\n".join(lines)


_EXACT = Loss(0.0, 0.0)
# Seventeen runs of the int8 all-reduce with a residual: python -m benchmarks.optimizers --law
_INT8 = Loss(gap=0.0, half_width=0.0019)


@answers_other_names
def advise(
    params: PyTree,
    *,
    workers: int,
    bandwidth: str | float,
    step_time: str | float,
    latency: str | float = "50us",
    loss_budget: str | float = "0.5%",
    opt_state: PyTree | None = None,
    measured: Measured | None = None,
    tokens: str | float | None = None,
    optimizer: str = "adamw",
    hosts: int | None = None,
    matrix_dims: MatrixDimsFn | None = None,
    device: str | Calibration = "gpu",
) -> Advice:
    """Recommends whether to compress on a network, and with which reducer, within a loss budget.

    The time of a step is computed with a model of ring all-reduces (docs/performance.md). Exact
    averages overlap with the backward pass, which is assumed to take two thirds of `step_time`;
    compressed gradients are sent after it. The baseline is the faster of a 32-bit and a 16-bit
    all-reduce.

    The loss that a rank costs is predicted from `opt_state` and what was `measured`, as in
    `predict_gap`. Without `opt_state` it is predicted from the model's width and the tokens of a
    step. The verdict is "not known" if no runs of that width and batch were made, or the
    prediction's interval is wider than three budgets. All predictions are for PowerSGD with
    ``comm_dtype="int6"`` from the first step on.

    Args:
      params: The parameters, as arrays or shapes; or their number, such as 124_000_000 or
        ``"124M"``, for which a transformer's shapes are assumed.
      workers: Number of replicas.
      bandwidth: The bandwidth of each replica's link, in each direction: ``"10Gbit"``,
        ``"25Gbps"``, or bytes per second.
      step_time: The time of a step without communication: ``"120ms"``, or seconds.
      latency: The one-way time from one replica to the next: ``"50us"``, or seconds.
      loss_budget: How far above the exact run's held-out loss the expected loss may end:
        ``"0.5%"``, or 0.005.
      opt_state: The optimizer's state from an exact run of this model, after a quarter to a half of
        its steps, as for `predict_gap`.
      measured: With `opt_state`: a rank that was run with ``min_compression_rate=1.0``, as
        ``advice.reducer`` has it, and its gap, as for `predict_gap`.
      tokens: The tokens in a step of all workers together: 8_192 or ``"512k"``; a larger batch
        loses more. None estimates them from parameters, step time and device. Ignored with
        `opt_state`.
      optimizer: ``"adamw"`` or ``"muon"``. Ignored with `opt_state`.
      hosts: The number of hosts, if the workers of a host share one link. These workers average
        among themselves first, and that time is not counted. None: each worker has a link.
      matrix_dims: As for `powersgd`: ``jaxcomp.stacked("blocks")`` if layers are stacked along a
        leading axis.
      device: The result of `measure`; or ``"gpu"`` or ``"cpu"`` for assumed constants.

    Returns:
      One recommendation with its interval, its reason and its assumptions, and the predictions for
      all candidates. ``print`` shows them; ``advice.reducer("data")`` makes the recommended
      reducer.

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
    senders = workers  # those that share the network: replicas, or whole hosts
    if hosts is not None:
        senders = check_int("hosts", hosts, 1)
        if workers % senders:
            raise ValueError(
                f"`hosts` must divide the workers, got hosts={hosts} for workers={workers}."
            )
    link = Link(senders, parse("bandwidth", bandwidth), parse("latency", latency))
    compute_time = parse("step_time", step_time)
    budget = parse("loss_budget", loss_budget)
    if isinstance(device, Calibration):
        constants = device
    elif isinstance(device, str) and device in ASSUMED:
        constants = ASSUMED[device]
    else:
        raise ValueError(
            f"`device` must be one of {', '.join(ASSUMED)} or what measure returned, got "
            f"{device!r}."
        )
    params, assumption = shapes_of(params)
    notes = [f"device: {constants.device}"]
    if assumption:
        notes.insert(0, assumption)
    if senders < workers:
        notes.append(
            f"{workers // senders} workers of each host average among themselves first "
            "(docs/meshes.md), which is not counted; bytes are those from host to host"
        )
    leaves = jax.tree.leaves(params)
    values = sum(map(np.size, leaves))
    deep = sum(np.ndim(leaf) > 2 for leaf in leaves)
    if deep and matrix_dims is None:
        notes.append(
            f"leaves of three axes or more, {deep} here, count as one matrix each: pass "
            "matrix_dims=jaxcomp.stacked(name) where the first axis counts layers"
        )

    if opt_state is not None:
        lowest, loss, evidence, momentum = _losses_of_run(opt_state, measured, budget, matrix_dims)
        if not assumption:
            _check_same_model(momentum.tree, params)
    elif measured is not None:
        raise ValueError("`measured` needs `opt_state`, the optimizer's state of the exact run.")
    else:
        guess = ""
        if tokens is None:
            # Forward and backward pass take six operations for each parameter and token.
            estimate = workers * compute_time * constants.training_flops / (6 * values)
            # Two digits, because the text shows it, and more would look like a measurement.
            tokens = float(f"{max(1.0, estimate):.2g}")
            guess = " (estimated from parameters, step time and device: pass tokens=)"
        width = typical_width(params, matrix_dims)
        lowest, loss, evidence = _losses_by_law(optimizer, width, parse("tokens", tokens), budget)
        evidence += guess
    notes.append(f"loss: {evidence}")
    # Higher ranks lose less; if they cost no time, they are better.
    losses = {}
    for rank in (lowest, 2 * lowest, 4 * lowest):
        losses[rank] = loss(rank)

    predictions = _predictions(params, link, compute_time, constants, losses, matrix_dims)
    if not any(prediction.rank for prediction in predictions):
        notes.append(
            f"PowerSGD is left out: at rank {min(losses)}, the lowest rank that was tried, it "
            f"sends no fewer bytes than {constants.half}; lower ranks need a larger loss_budget"
        )
    baseline = min(predictions[:2], key=lambda prediction: prediction.step_time)
    recommended = _recommended(predictions, baseline)
    return Advice(
        workers,
        link,
        compute_time,
        constants,
        tuple(predictions),
        baseline,
        recommended,
        tuple(notes),
    )


def _losses_of_run(
    opt_state: PyTree,
    measured: Measured | None,
    budget: float,
    matrix_dims: MatrixDimsFn | None,
) -> tuple[int, Callable[[int], Loss], str, Momentum]:
    """Finds the lowest rank that keeps the budget, from the momentum of a run.

    Returns:
      The lowest such rank, a function from rank to expected loss, a note on the evidence, and the
      momentum.
    """
    momentum = read_momentum(opt_state, matrix_dims, measured, _LEAST_RATE)
    law = momentum.law
    least, largest = law.tails
    if measured is None:
        evidence = (
            f"read off the momentum in opt_state, by a law from {law.ranks} ranks in models of up "
            "to 12.9 million parameters; it holds for a state from an exact run, between a "
            "quarter and a half of its steps"
        )
    else:
        evidence = "the gap that was measured, scaled to other ranks by the momentum in opt_state"

    def gap(rank: int) -> Gap:
        return momentum.gap(ranks_of(momentum.tree, rank, _LEAST_RATE, matrix_dims))

    def loss(rank: int) -> Loss:
        expected = gap(rank)
        doubt = _too_wide(expected.half_width, budget)
        if expected.tail > largest:
            doubt = (
                f"{expected.tail:.2f} of the momentum's energy lie beyond the rank, and runs with "
                f"{least:.2f} to {largest:.2f} were made"
            )
        return Loss(expected.gap, expected.half_width, doubt)

    evidence += f"; the loss budget is {budget:.1%}"
    highest = max(map(len, momentum.spectra.values()))
    lowest = 8  # multiples of 8, as in the law for runs that were not made yet
    while lowest < highest and gap(lowest).gap > budget:
        lowest += 8
    return lowest, loss, evidence, momentum


def _check_same_model(momentum: PyTree, params: PyTree) -> None:
    """Refuses the momentum of another model than that of the parameters.

    Raises:
      ValueError: If a shape occurs more often in the momentum; the message names the leaf.
    """
    # Not by names, which differ between a module of nnx and its state.
    shapes = list(map(np.shape, jax.tree.leaves(params)))
    for path, leaf in jax.tree.leaves_with_path(momentum):
        if np.shape(leaf) not in shapes:
            raise ValueError(
                f"`opt_state` has a momentum of shape {np.shape(leaf)} for {leaf_name(path)}, but "
                "`params` has no leaf of that shape left. Pass the parameters and the optimizer's "
                "state of one model."
            )
        shapes.remove(np.shape(leaf))


def _losses_by_law(
    optimizer: str, width: int, tokens: float, budget: float
) -> tuple[int, Callable[[int], Loss], str]:
    """Finds the lowest rank that keeps the budget, from width and tokens.

    Returns:
      The lowest such rank, a function from rank to expected loss, and a note on the evidence.
    """
    if not isinstance(optimizer, str) or optimizer not in LAWS:
        raise ValueError(
            f"`optimizer` must be one of {', '.join(LAWS)}, got {optimizer!r}. SGD with momentum "
            "and Lion lost less than adamw on average, Adafactor about as much; pass adamw."
        )
    law = LAWS[optimizer]
    covered = law.covers(width, tokens)

    def loss(rank: int) -> Loss:
        if not covered:
            doubt = (
                f"runs were made of widths {law.widths[0]} to {law.widths[1]} with {law.tokens[0]} "
                f"to {law.tokens[1]:,} tokens a step, and yours has width {width:,} and "
                f"{tokens:,.0f} tokens"
            )
            return Loss(None, None, doubt)
        half_width = law.half_width(rank, width, tokens)
        return Loss(law.gap(rank, width, tokens), half_width, _too_wide(half_width, budget))

    if covered:
        lowest = law.rank(budget, width, tokens)
        evidence = f"a law from {law.runs} runs with {optimizer}, of language models,"
    else:
        lowest = 8 * math.ceil(width / 16 / 8)
        evidence = "not predicted; ranks from a sixteenth of the width on are tried,"
    evidence += (
        f" for a loss budget of {budget:.1%}, width {width:,} and {tokens:,.0f} tokens a step"
    )
    return lowest, loss, evidence


def _too_wide(half_width: float, budget: float) -> str:
    """Returns why the interval is too wide, or an empty text if it is not."""
    if 2 * half_width <= _BUDGETS * budget:
        return ""
    return f"its interval is {200 * half_width:.1f} points wide, for a budget of {budget:.1%}"


def _predictions(
    params: PyTree,
    link: Link,
    compute_time: float,
    constants: Calibration,
    losses: dict[int, Loss],
    matrix_dims: MatrixDimsFn | None,
) -> list[Prediction]:
    """Predicts the two exact averages, the int8 all-reduce, and PowerSGD at some ranks.

    A rank is left out if it sends no fewer bytes than the 16-bit all-reduce.
    """
    half = partial(allreduce, comm_dtype=constants.half)
    # For each: its factory, its costs, its rank and its loss.
    candidates: dict[str, tuple[Callable[..., Transformation], ReducerCosts, int, Loss]] = {
        "all-reduce float32": (allreduce, constants.allreduce, 0, _EXACT),
        f"all-reduce {constants.half}": (half, constants.allreduce_16, 0, _EXACT),
        "int8 all-reduce": (_int8_allreduce, constants.int8, 0, _INT8),
    }
    for rank, loss in losses.items():
        make = partial(
            powersgd,
            rank,
            start_step=0,
            comm_dtype="int6",
            min_compression_rate=_LEAST_RATE,
            matrix_dims=matrix_dims,
        )
        candidates[f"powersgd rank {rank} int6"] = (make, constants.powersgd, rank, loss)

    sent = {}
    step_times = {}
    for name, (make, costs, _, _) in candidates.items():
        sent[name] = make(axis_name="replicas").bytes(params, replicas=link.senders)
        step_times[name] = partial(costs.step_time, sent[name], compute_time)
    baselines = list(step_times.values())[:2]  # the two exact averages
    fastest = min(step_time(link) for step_time in baselines)
    narrow = sent[f"all-reduce {constants.half}"].bytes_after
    predictions = []
    for name, (make, _, rank, loss) in candidates.items():
        if rank and sent[name].bytes_after >= narrow:
            continue
        step_time = step_times[name](link)
        predictions.append(
            Prediction(
                name,
                make,
                loss is not _EXACT,
                rank,
                sent[name],
                step_time,
                speedup=fastest / step_time,
                break_even=break_even(step_times[name], baselines, link),
                **loss._asdict(),
            )
        )
    return predictions


def _int8_allreduce(axis_name: AxisName) -> Transformation:
    return error_feedback(quantized_allreduce(axis_name=axis_name))


def _recommended(predictions: list[Prediction], baseline: Prediction) -> Prediction:
    """Returns the prediction that sends most bytes among those about as fast as the fastest.

    Only reducers that pay are considered, or the baseline if none does. All of them are expected to
    keep the budget, or their gap is not known. If some rank is certain to keep it, those that are
    not are left out.
    """
    paying = []
    sure = []
    for each in predictions:
        if each.compressed and each.speedup >= _CLOSE:
            paying.append(each)
            if not each.doubt:
                sure.append(each)
    if any(each.rank for each in sure):
        paying = sure
    if not paying:
        return baseline
    fastest = min(each.step_time for each in paying)
    near = filter(lambda each: each.step_time <= _CLOSE * fastest, paying)
    return max(near, key=lambda each: (each.bytes_per_step, -each.step_time))
