"""What XLA makes of an update for GPUs: kernels to launch and words to move, from counted programs.

Both grow with a few properties of the parameters. How much was fitted to programs that were
compiled for GPUs on a machine without one: nothing in here knows a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from jaxcomp._lowrank.matricize import LeafPlan


class Form(NamedTuple):
    """How kernels and words of one form of the update grow with the leaves and the rank.

    What each figure is multiplied with is in `gpu_program`, in the same order.
    """

    floor: float  # words for every compressed value below which no program goes
    kernels: tuple[float, ...]
    words: tuple[float, ...]  # above the floor


# python -m benchmarks.gpu_program.fit
FORMS: dict[str, Form] = {
    "powersgd": Form(
        7,
        (25.4, 15.4, 0, 5.97, 5.41, 1.05),
        (3.32, 1.7, 2.01, 0, 7.41),
    ),
    "powersgd, int8": Form(
        7,
        (52.4, 14.6, 4.31, 3.6, 5.09, 2.25),
        (3.67, 1.5, 3.98, 0, 7.73),
    ),
    "powersgd, gpu_kernels": Form(
        7,
        (36.7, 3.24, 9.77, 0, 0.028, 0.041),
        (0, 0, 18.2, 40.5, 0),
    ),
    "powersgd, gpu_kernels, int8": Form(
        7,
        (43.7, 5.22, 16.1, 0, 1.8, 0.597),
        (0, 0, 17.2, 47.9, 0.0526),
    ),
    "powersgd, alternating": Form(
        6,
        (37.2, 9.55, 0, 9.22, 1.8, 1.97),
        (3.04, 2.13, 5.44, 0, 5.53),
    ),
    "quantized_allreduce": Form(
        0,
        (78.5, 0, 0, 0, 0, 2.49),
        (0, 0, 2.59, 0, 0),
    ),
}
# end

_FLOOR_OTHER = 2  # words for every other value: read once and written once
# Above this rank products take the matrix unit, and the plain form writes residuals as a whole.
_FEW_COLUMNS = 8


class Program(NamedTuple):
    """One update."""

    kernels: float
    words: float  # of four bytes, read or written


def gpu_program(name: str, plans: Sequence[LeafPlan], buckets: int = 1) -> Program:
    """What an update is predicted to launch and to move.

    Args:
      name: Of `FORMS`.
      plans: Of all leaves.
      buckets: Each makes bases of its own, and so launches once more what an update launches once.
    """
    form = FORMS[name]
    compressed = [plan for plan in plans if plan.view is not None]
    other = [plan.size for plan in plans if plan.view is None]
    values = sum(plan.size for plan in compressed)
    factors = sum(plan.wire_size for plan in compressed)
    shapes = {(v.batch, v.n_rows, v.n_cols, v.cols_first) for p in plans if (v := p.view)}
    rank = max((plan.rank for plan in compressed), default=1)
    doublings = math.log2(rank)
    kernels = (
        buckets,
        buckets * doublings,
        len(shapes),
        len(compressed),
        len(compressed) if rank > 1 else 0,
        len(other),
    )
    words = (values, values if rank > _FEW_COLUMNS else 0, sum(other), factors, factors * doublings)
    floor = form.floor * values + _FLOOR_OTHER * sum(other)
    return Program(_total(form.kernels, kernels), floor + _total(form.words, words))


def _total(each: Sequence[float], numbers: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(each, numbers, strict=True))
