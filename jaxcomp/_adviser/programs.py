"""What XLA makes of an update for GPUs: kernels to launch and words to move, from counted programs.

Both grow with a few properties of the parameters. How much was fitted to programs that were
compiled for GPUs on a machine without one: nothing in here knows a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from jaxcomp._lowrank.matricize import LeafPlan
from jaxcomp._lowrank.stacks import Stacks


class Form(NamedTuple):
    """How kernels and words of one form of the update grow with the leaves and the rank.

    What each figure is multiplied with is in `ProgramTerms`, in the same order.
    """

    floor: float  # words for every compressed value below which no program goes
    kernels: tuple[float, ...]
    words: tuple[float, ...]  # above the floor


# python -m benchmarks.gpu_program.fit
FORMS: dict[str, Form] = {
    "powersgd": Form(
        7,
        (51.8, 15, 0, 6.31, 5, 1.84, 1.15),
        (2.85, 2.33, 3.09, 26.1, 3.8, 1.09),
    ),
    "powersgd, int8": Form(
        7,
        (36.2, 13.6, 0, 2.66, 4.13, 6.37, 3.07),
        (2.86, 2.17, 4.82, 43.6, 1.53, 0.978),
    ),
    "powersgd, gpu_kernels": Form(
        7,
        (42.9, 3.22, 9.02, 0, 0.0737, 0, 0.0244),
        (0, 0, 17.9, 40.2, 0.243, 0),
    ),
    "powersgd, gpu_kernels, int8": Form(
        7,
        (55, 5.39, 16, 0, 0.173, 0, 0.6),
        (0, 0, 17.3, 46.7, 0.508, 0),
    ),
    "powersgd, alternating": Form(
        6,
        (31.9, 11.3, 0, 8.5, 2.71, 1.96, 2.15),
        (2.49, 2.63, 8, 21.5, 2.8, 1.66),
    ),
    "quantized_allreduce": Form(
        0,
        (78.5, 0, 0, 0, 0, 0, 2.49),
        (0, 0, 2.59, 0, 0, 0),
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


class ProgramTerms(NamedTuple):
    """What kernels and words of one update grow with: numbers to fit counted programs to."""

    # Updates (buckets), the same times the doublings of the rank from 1, shapes, arrays once small
    # leaves are stacked, the same above rank 1, leaves copied into stacks, leaves not compressed.
    kernels: tuple[float, ...]
    # Above the floor: values compressed, the same above rank 8, values that are not, values of the
    # factors, the same times the doublings, values in stacks.
    words: tuple[float, ...]
    values: int  # compressed
    other: int  # values that are not

    def floor(self, words_a_value: float) -> float:
        """Words that an update moves at least, `words_a_value` for every compressed value."""
        return words_a_value * self.values + _FLOOR_OTHER * self.other


def program_terms(plans: Sequence[LeafPlan], buckets: int = 1) -> ProgramTerms:
    """What the adviser multiplies with factors that were fitted to programs compiled for GPUs.

    For those who count programs of other NVIDIA GPUs, as `benchmarks/gpu_program` does.

    Args:
      plans: Of all leaves, from `plan_leaves`.
      buckets: Each makes bases of its own, and so launches once more what an update launches once.

    Returns:
      Numbers to multiply with a factor each: their sums are kernels, and words above the floor.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomp import extend
      >>> plans = extend.plan_leaves({"w": jnp.zeros((64, 32)), "b": jnp.zeros(64)}, 4, 2.0)
      >>> terms = extend.program_terms(plans)
      >>> terms.values, terms.other, terms.floor(7)
      (2048, 64, 14464)
    """
    compressed = [plan for plan in plans if plan.view is not None]
    other = [plan.size for plan in plans if plan.view is None]
    values = sum(plan.size for plan in compressed)
    factors = sum(plan.wire_size for plan in compressed)
    shapes = {(v.batch, v.n_rows, v.n_cols, v.cols_first) for p in plans if (v := p.view)}
    rank = max((plan.rank for plan in compressed), default=1)
    doublings = math.log2(rank)
    stacks = Stacks.of(plans, [range(len(plans))], [None] * len(plans))
    copied = sum(len(members) - 1 for members in stacks.members.values())
    stacked = sum(len(x) * plans[first].size for first, x in stacks.members.items())
    arrays = len(compressed) - copied
    kernels = (
        buckets,
        buckets * doublings,
        len(shapes),
        arrays,
        arrays if rank > 1 else 0,
        copied,
        len(other),
    )
    words = (
        values,
        values if rank > _FEW_COLUMNS else 0,
        sum(other),
        factors,
        factors * doublings,
        stacked,
    )
    return ProgramTerms(kernels, words, values, sum(other))


def gpu_program(name: str, plans: Sequence[LeafPlan], buckets: int = 1) -> Program:
    """What an update is predicted to launch and to move; `name` is one of `FORMS`."""
    form, terms = FORMS[name], program_terms(plans, buckets)
    words = terms.floor(form.floor) + _total(form.words, terms.words)
    return Program(_total(form.kernels, terms.kernels), words)


def _total(each: Sequence[float], numbers: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(each, numbers, strict=True))
