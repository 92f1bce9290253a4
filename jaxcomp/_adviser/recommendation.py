"""What `recommend` answers: as data, as a reducer, as text and as JSON."""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Any

from jaxcomp._adviser.advice import Prediction
from jaxcomp._base.typing import AxisName
from jaxcomp._reducers.allreduce import allreduce
from jaxcomp._reducers.contract import Transformation
from jaxcomp._reducers.error_feedback import error_feedback
from jaxcomp._reducers.powersgd import powersgd
from jaxcomp._reducers.quantized import quantized_allreduce

_WIDTH = 96
INT8_NAME = "int8"


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """A reducer for a loss budget, why, and how far the reason carries; `str` gives the text."""

    name: str  # as the adviser calls it: "powersgd rank 16 int6", "int8", "all-reduce float32"
    rank: int | None  # of the factors; None where gradients go as they are
    comm_dtype: str | None  # None for the gradients' own
    start_step: int | None  # None where no step differs from the others
    ratio: float  # times fewer bytes than the plain all-reduce of these parameters
    gap: float  # expected loss above the exact average of the same optimizer: 0.01 is 1%
    spread: float | None  # of that gap between seeds, their standard deviation; None: not known
    prediction: Prediction | None  # its step over the network given; None without one
    baseline: Prediction | None  # that of the fastest exact average
    reason: str  # one sentence
    validity: tuple[str, ...]  # what was measured, and in what these parameters differ from it

    @property
    def compress(self) -> bool:
        """Whether anything but an exact average is recommended."""
        return self.rank is not None or self.name == INT8_NAME

    def reducer(self, axis_name: AxisName) -> Transformation:
        """The recommended reducer itself, to stand before the optimizer in an `optax.chain`.

        Args:
          axis_name: The mapped axis (or axes) along which the replicas lie.

        Returns:
          A `powersgd`, an `error_feedback` around a `quantized_allreduce`, or an `allreduce`.

        Raises:
          ValueError: If the axis name is unusable.

        Example:
          >>> import jax.numpy as jnp, jaxcomp, optax
          >>> params = {"w": jnp.zeros((512, 512))}
          >>> exact = jaxcomp.recommend(params, workers=8, budget=0)
          >>> exact.reducer("data")
          allreduce(axis_name='data', comm_dtype=None, reduce_first=None)
          >>> tx = optax.chain(exact.reducer("data"), optax.adamw(1e-3))
        """
        if self.rank is not None:
            return powersgd(
                self.rank,
                axis_name=axis_name,
                start_step=self.start_step or 0,
                comm_dtype=self.comm_dtype,
            )
        if self.name == INT8_NAME:
            return error_feedback(quantized_allreduce(axis_name=axis_name))
        return allreduce(axis_name=axis_name, comm_dtype=self.comm_dtype)

    def __str__(self) -> str:
        wrapper = textwrap.TextWrapper(_WIDTH, break_on_hyphens=False)
        lines = wrapper.wrap(f"Use {self.name}. {self.reason}")
        wrapper.subsequent_indent = "  "
        for sentence in self.validity:
            lines += wrapper.wrap(f"- {sentence}")
        return "\n".join(lines)


def recommendation_dict(recommendation: Recommendation) -> dict[str, Any]:
    """The same for a program: times in seconds."""
    fields = dataclasses.asdict(recommendation)
    for name in ("prediction", "baseline"):
        found = fields.pop(name)
        if found is not None:
            fields[name] = {key: found[key] for key in ("name", "step_time", "speedup")}
    return fields | {"compress": recommendation.compress}
