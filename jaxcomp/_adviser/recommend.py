"""Rank, wire and start for a loss budget, from what a study of optimizers measured."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp._adviser import evidence
from jaxcomp._adviser.advice import Advice, Prediction
from jaxcomp._adviser.advise import advise
from jaxcomp._adviser.calibration import Calibration, assumed_constants
from jaxcomp._adviser.evidence import Curve, Measured
from jaxcomp._adviser.recommendation import INT8_NAME, Recommendation
from jaxcomp._adviser.shapes import assumed_params, count_values
from jaxcomp._adviser.units import format_time, parse_share
from jaxcomp._base.checks import ParameterError, check_int
from jaxcomp._base.stats import CompressionStats
from jaxcomp._base.typing import PyTree
from jaxcomp._bytes.stats import compression_stats, quantized_stats
from jaxcomp._lowrank.matricize import LeafPlan, plan_leaves

# Among choices whose steps are that close the one that loses least is to be preferred, as in
# `advise`. So a gain that is within the error of the model is none.
_AS_FAST = 1.1
# Ratios in the tables are rounded.
_EXACTLY = 1 + 1e-3
# Ratios that far apart differ in loss by less than seeds do.
_CLOSE = 1.1


@dataclasses.dataclass(frozen=True)
class _Choice:
    """A reducer within the budget, and what it is expected to lose."""

    name: str
    reason: str  # a sentence without its full stop
    rank: int | None = None
    comm_dtype: str | None = None
    start_step: int | None = None
    gap: float = 0.0
    spread: float | None = 0.0
    points: tuple[Measured, ...] = ()  # what the expectation stands on


def recommend(
    params: PyTree | int,
    *,
    workers: int,
    optimizer: str = "adamw",
    budget: str | float = 0.01,
    bandwidth: str | float | None = None,
    latency: str | float | None = None,
    step_time: str | float | None = None,
    device: str = "gpu",
    calibration: Calibration | None = None,
) -> Recommendation:
    """A reducer that sends as little as a loss budget allows, with rank, wire and start.

    A study trained one model with each optimizer over exact averages and over `powersgd` at
    falling bytes. Of its results the largest ratio of bytes is taken whose gap, the loss above the
    exact average of the same optimizer, is within the budget. Between two measured ratios the gap
    is linear in the logarithm of the ratio, beyond them nothing is assumed. The rank is the lowest
    at which the matrices of these parameters send no less of their bytes than those of the study
    did at that ratio, however many bytes the other leaves have; or one less, if that comes within
    10% of it and the next rank would leave whole matrices uncompressed.

    A budget below every gap that was measured gets the int8 all-reduce with a residual, as do
    parameters of which factors would send as many bytes; a budget below that one's gap, such as 0,
    the exact average. With a network, steps are predicted as by `advise`: of the exact average, the
    int8 all-reduce and `powersgd` the first is taken that is within 10% of the fastest.

    What it says holds for a small model and few steps. `validity` of the result names them, and
    where the parameters lie outside.

    Args:
      params: Arrays or shapes, of which only shape and dtype are read; or a number of parameters,
        for which a transformer's shapes are assumed.
      workers: Number of replicas.
      optimizer: Which one follows the reducer; the error for an unknown one lists those measured.
      budget: How much higher the held-out loss may end than with exact averages: 0.01 or "1%".
      bandwidth: Of each replica's link, as for `advise`. It needs `step_time`.
      latency: From one replica to the next, as for `advise`. It needs `step_time`.
      step_time: A step without any communication: ``"120ms"``, or seconds. None for a
        recommendation that looks at bytes only.
      device: ``"gpu"`` or ``"cpu"``: whose constants to assume without a `calibration`.
      calibration: The present device's constants, from `measure`.

    Returns:
      The recommendation, whose ``reducer(axis_name)`` is the reducer itself. ``print`` shows it.

    Raises:
      ValueError: If an argument is unusable.

    Example:
      >>> import jax.numpy as jnp, jaxcomp, optax
      >>> params = {"w": jnp.zeros((2048, 2048)), "b": jnp.zeros(2048)}
      >>> chosen = jaxcomp.recommend(params, workers=8, optimizer="adamw", budget="1%")
      >>> chosen.compress
      True
      >>> tx = optax.chain(chosen.reducer("data"), optax.adamw(1e-3))
      >>> jaxcomp.recommend(params, workers=8, budget=0).name
      'all-reduce float32'
    """
    workers = check_int("workers", workers, 1)
    allowed = parse_share("budget", budget)
    constants = assumed_constants(device, calibration)
    _check_optimizer(optimizer)
    if step_time is None:
        for name, value in (("bandwidth", bandwidth), ("latency", latency)):
            if value is not None:
                raise ParameterError(
                    "step_time", f"is missing: `{name}` alone says nothing. Give it (120ms)."
                )
    assumed = list[str]()
    if isinstance(params, (int, np.integer)):
        params, sentence = assumed_params(int(params))
        assumed.append(sentence)

    wrong = [type(x).__name__ for x in jax.tree.leaves(params) if not hasattr(x, "dtype")]
    if wrong:
        raise ParameterError(
            "params", f"must hold arrays or shapes, or be a number of parameters, got {wrong[0]}."
        )

    choices = _choices(params, workers, optimizer, allowed)
    choice, prediction, baseline = choices[-1], None, None
    if step_time is not None:
        advice = advise(
            params,
            workers=workers,
            step_time=step_time,
            bandwidth=bandwidth,
            latency=latency,
            ranks=[choice.rank for choice in choices if choice.rank is not None],
            comm_dtype=next((c.comm_dtype for c in choices if c.rank is not None), None),
            calibration=constants,
        )
        choice, prediction = _fastest(choices, advice, exact=allowed == 0)
        baseline = advice.baseline
        assumed += advice.assumptions

    found = Recommendation(
        name=choice.name,
        rank=choice.rank,
        comm_dtype=choice.comm_dtype,
        start_step=choice.start_step,
        ratio=1.0,  # until there is a reducer to ask
        gap=choice.gap,
        spread=choice.spread,
        prediction=prediction,
        baseline=baseline,
        reason=f"{choice.reason}.",
        validity=(*_validity(params, workers, optimizer, allowed, choice), *assumed),
    )
    sent = found.reducer("replicas").bytes(params, replicas=workers)
    return dataclasses.replace(found, ratio=sent.bytes_before / max(1, sent.bytes_after))


def _check_optimizer(optimizer: Any) -> None:
    known = tuple(evidence.EXACT)
    if optimizer not in known:
        raise ParameterError(
            "optimizer",
            f"must be one of {', '.join(known)}, which were measured, got {optimizer!r}.",
        )


def _choices(params: PyTree, workers: int, optimizer: str, budget: float) -> list[_Choice]:
    """What is within the budget, the exact average first and by falling bytes."""
    exact = _Choice("all-reduce float32", "There is one worker, so nothing is sent")
    if workers == 1:
        return [exact]
    if not count_values(params):
        reason = "There are no floating-point values, so nothing is sent"
        return [dataclasses.replace(exact, reason=reason)]
    int8 = evidence.INT8
    if budget == 0 or int8.gap > budget:
        reason = f"Nothing else that was measured keeps a budget of {_percent(budget)}"
        return [dataclasses.replace(exact, reason=reason)]
    factors, instead = _factors(params, workers, optimizer, budget)
    rounded = _Choice(
        INT8_NAME,
        f"{instead}; the int8 all-reduce with residual ended {_ended(int8.gap)} exact averages",
        comm_dtype="int8",
        gap=int8.gap,
        spread=int8.spread,
        points=(int8,),
    )
    return [exact, rounded, *([factors] if factors else [])]


def _factors(
    params: PyTree, workers: int, optimizer: str, budget: float
) -> tuple[_Choice | None, str]:
    """PowerSGD at the lowest rank within the budget; or None, and why."""
    params = jax.tree.map(_in_float32, params)
    curves = dict[str, Curve]()
    own = [m for m in evidence.MEASURED if m.optimizer == optimizer]
    for wire in dict.fromkeys(m.wire for m in own):
        curves[wire] = Curve.of(
            [m for m in own if m.wire == wire and m.steps == evidence.STUDY.steps]
        )
    reached = {w: r for w, c in curves.items() if (r := c.largest_ratio(budget)) is not None}
    if not reached:
        return None, f"No rank that was measured with {optimizer} keeps {_percent(budget)}"
    wire = max(reached, key=lambda w: reached[w])
    target, curve = reached[wire], curves[wire]
    matrices = _Matrices.of(params, workers, wire)
    if not matrices.bytes_before:
        return None, "None of these parameters is a matrix that factors would make smaller"
    rank = matrices.rank(target)
    sent, rounded = matrices.stats(rank), quantized_stats(params, replicas=workers)
    if sent.bytes_after >= rounded.bytes_after:
        return None, f"Rank {rank}, which the budget needs, sends no fewer bytes than int8 would"
    ratio = matrices.ratio(rank)
    low, high = curve.around(ratio)
    gap = curve.gap(ratio)
    spreads = [p.spread for p in (low, high)]
    reason = f"With {optimizer} the study ended {_at(low)}"
    if low != high:
        reason += f" and {_at(high)}, so {ratio:.1f} times are expected to cost {_percent(gap)}"
    choice = _Choice(
        f"powersgd rank {rank} {wire}",
        reason,
        rank=rank,
        comm_dtype=wire,
        start_step=0,
        gap=gap,
        spread=None if None in spreads else max(s for s in spreads if s is not None),
        points=tuple(dict.fromkeys((low, high))),
    )
    return choice, "The step is no slower than with factors"


@dataclasses.dataclass(frozen=True)
class _Matrices:
    """The leaves that factors can make smaller, by which parameters are compared with the study's.

    Of all bytes these may be a larger or a smaller share than in the study, which says nothing of
    how much their gradients bear.
    """

    params: PyTree  # in float32, as in the study
    workers: int
    wire: str
    paths: frozenset[str]
    bytes_before: int

    @classmethod
    def of(cls, params: PyTree, workers: int, wire: str) -> _Matrices:
        stats = compression_stats(params, rank=1, comm_dtype=wire, replicas=workers)
        leaves = [leaf for leaf in stats.leaves if leaf.compressed]
        paths = frozenset(leaf.path for leaf in leaves)
        return cls(params, workers, wire, paths, sum(leaf.bytes_before for leaf in leaves))

    def stats(self, rank: int) -> CompressionStats:
        return compression_stats(
            self.params, rank=rank, comm_dtype=self.wire, replicas=self.workers
        )

    def ratio(self, rank: int) -> float:
        """Times fewer bytes of the study's model, were its matrices compressed as much as these."""
        after = sum(x.bytes_after for x in self.stats(rank).leaves if x.path in self.paths)
        other = evidence.STUDY.uncompressed
        return 1 / ((1 - other) * after / self.bytes_before + other)

    def rank(self, target: float) -> int:
        """The lowest at which no less is sent than the ratio allows.

        One less where that one already leaves whole matrices uncompressed, and one less comes
        close.
        """
        low, high = 1, max(math.prod(x.shape) for x in jax.tree.leaves(self.params))
        while low < high:
            middle = (low + high) // 2
            if self.ratio(middle) <= target * _EXACTLY:
                high = middle
            else:
                low = middle + 1
        far = low > 1 and self.ratio(low) * _CLOSE < target
        if far and self.ratio(low - 1) <= target * _CLOSE:
            return low - 1
        return low


def _in_float32(leaf: Any) -> Any:
    wide = jnp.issubdtype(leaf.dtype, jnp.floating)
    return jax.ShapeDtypeStruct(leaf.shape, jnp.float32 if wide else leaf.dtype)


def _fastest(choices: list[_Choice], advice: Advice, *, exact: bool) -> tuple[_Choice, Prediction]:
    """The choice that loses least of those that are about as fast as the fastest."""
    by_name = {prediction.name: prediction for prediction in advice.predictions}
    steps = [by_name[choice.name] for choice in choices]
    if not exact:
        # A narrower average loses next to nothing: the fastest stands for all.
        narrow = advice.baseline.name.rpartition(" ")[2]
        name, wire = advice.baseline.name, None if narrow == "float32" else narrow
        choices = [dataclasses.replace(choices[0], name=name, comm_dtype=wire), *choices[1:]]
        steps[0] = advice.baseline
    fastest = min(step.step_time for step in steps)
    place = next(i for i, step in enumerate(steps) if step.step_time <= _AS_FAST * fastest)
    choice, step = choices[place], steps[place]
    if len(choices) == 1:
        return choice, step
    if not step.compressed:
        best = min(steps[1:], key=lambda s: s.step_time)
        reason = (
            f"Compression does not pay: with the {step.name} a step is predicted to take "
            f"{format_time(step.step_time)}, with {best.name} {format_time(best.step_time)}"
        )
        return dataclasses.replace(choice, reason=reason), step
    reason = (
        f"{choice.reason}; a step is predicted to take {format_time(step.step_time)}, with the "
        f"{advice.baseline.name} {format_time(advice.baseline.step_time)}"
    )
    return dataclasses.replace(choice, reason=reason), step


def _validity(
    params: PyTree, workers: int, optimizer: str, budget: float, choice: _Choice
) -> list[str]:
    """What was measured, and in what these parameters differ from it."""
    if not choice.points:
        return []
    study = evidence.STUDY
    with_what = choice.points[0].optimizer
    tuned = f" at {evidence.EXACT[optimizer]}" if choice.rank is not None else ""
    said = [
        f"measured: a byte-level transformer of width {study.width} and {study.parameters:,} "
        f"parameters, {study.steps} steps of {study.replicas} replicas with {study.batch_size} "
        f"sequences of {study.context} bytes each; {with_what}{tuned}"
    ]
    seeds = min(point.seeds for point in choice.points)
    if choice.spread is None:
        said.append("seeds: one, so how far others lie from it is not known")
    else:
        said.append(f"seeds: {seeds}, whose gaps have a standard deviation of {choice.spread:.2%}")
    said += _longer(choice)
    plans = plan_leaves(params, 1, 2.0)
    said += _wider(plans, optimizer, budget)
    if optimizer != with_what:
        said.append(f"optimizer: this was measured with {with_what}, not with {optimizer}")
    if choice.rank is not None:
        said += _outside(params, plans)
    if workers != study.replicas:
        said.append(f"replicas: yours are {workers}, the study's {study.replicas}")
    return said


def _longer(choice: _Choice) -> list[str]:
    """What the same ranks cost in longer runs, where that was measured."""
    same = [
        m
        for m in evidence.MEASURED
        if any(
            (m.optimizer, m.wire, m.rank) == (p.optimizer, p.wire, p.rank) and m.steps > p.steps
            for p in choice.points
        )
    ]
    return [
        f"length: over {m.steps:,} steps runs at {m.ratio:.1f} times fewer bytes ended "
        f"{_ended(m.gap)} exact averages"
        for m in same
    ]


def _wider(plans: Sequence[LeafPlan], optimizer: str, budget: float) -> list[str]:
    """What was measured in a wider model than the study's, where the matrices are wider too.

    In every step, and in rounds: the fewest bytes within the budget, or else the smallest gap.
    """
    if not any(width > evidence.STUDY.width for width in _widths(plans)):
        return []
    measured = [m for m in evidence.WIDE if m.optimizer == optimizer]
    said = list[str]()
    for every in sorted({m.every for m in measured}):
        alike = [m for m in measured if m.every == every]
        within = [m for m in alike if m.gap <= budget]
        one = max(within, key=lambda m: m.ratio) if within else min(alike, key=lambda m: m.gap)
        rounds = f" in rounds of {every} steps (local_sgd_round)" if every > 1 else ""
        seeds = "seed" if one.seeds == 1 else "seeds"
        spread = "" if one.spread is None else f", standard deviation {one.spread:.2%}"
        said.append(
            f"width: in a model of width {evidence.WIDTH} with {evidence.WIDE_REPLICAS} replicas "
            f"powersgd rank {one.rank} {one.wire}{rounds} sent {one.ratio:.1f} times fewer bytes "
            f"and ended {_ended(one.gap)} exact averages ({one.seeds} {seeds}{spread})"
        )
    return said


def _widths(plans: Sequence[LeafPlan]) -> list[int]:
    """Of the matrices that can be compressed; ascending."""
    return sorted({min(v.n_rows, v.n_cols) for plan in plans if (v := plan.view) is not None})


def _outside(params: PyTree, plans: Sequence[LeafPlan]) -> list[str]:
    """Where the shapes lie outside of the study's."""
    study, values, widths = evidence.STUDY, count_values(params), _widths(plans)
    said = list[str]()
    if (widths[0], widths[-1]) != (study.width, study.width) or values > 2 * study.parameters:
        across = f"{widths[0]:,}" + (f" to {widths[-1]:,}" if len(widths) > 1 else "")
        said.append(
            f"size: you have {values:,} parameters, in matrices {across} wide; the rank is the one "
            "that sends the same share of their bytes, which was not measured there"
        )
    left = 1 - sum(plan.size for plan in plans if plan.view) / values
    if left > 2 * study.uncompressed:
        said.append(
            f"other leaves: {left:.1%} of your values are in leaves that are not compressed, "
            f"{study.uncompressed:.1%} of the study's; your matrices are compressed as much as "
            "those of the study, so that fewer bytes are saved in all"
        )
    return said


def _percent(share: float) -> str:
    return f"{100 * share:.2f}".rstrip("0").rstrip(".") + "%"


def _at(point: Measured) -> str:
    # Of a curve, whose gaps may be those of more bytes.
    bound = "" if point in evidence.MEASURED else "no worse than "
    return f"{bound}{_ended(point.gap)} exact averages at {point.ratio:.1f} times fewer bytes"


def _ended(gap: float) -> str:
    return f"{_percent(abs(gap))} {'above' if gap >= 0 else 'below'}"
