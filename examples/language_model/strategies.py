"""The communication strategies of the examples, in one table, and the optimizer they precede.

To add a strategy, add one entry to `STRATEGIES`; the training script and its `--help` pick it up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import optax

import jaxcomp

Tree = Any

COMM_DTYPES = ("float32", "bfloat16", "float16", "int8", "int6")


@dataclass(frozen=True)
class Options:
    """What the command line says about communication.

    Attributes:
      rank: Rank of the compressed gradients, or a function of path and leaf.
      start_step: Steps before compression begins, averaged exactly.
      comm_dtype: How the factors of compressed gradients travel.
    """

    rank: Any = 4
    start_step: int = 0
    comm_dtype: str = "float32"


@dataclass(frozen=True)
class Strategy:
    """How replicas agree on an update, and what that costs.

    Attributes:
      summary: One line for `--help`.
      reducer: (options, axis name) -> what stands before the optimizer.
    """

    summary: str
    reducer: Callable[[Options, str], jaxcomp.Transformation]

    def transformation(
        self, options: Options, optimizer: optax.GradientTransformation, axis: str
    ) -> optax.GradientTransformation:
        """The reducer and then the optimizer."""
        return optax.chain(self.reducer(options, axis), optimizer)

    def bytes_at(self, options: Options, params: Tree, replicas: int) -> Callable[[int], int]:
        """A function from the number of a step to the bytes that each replica sends in it."""
        reducer = self.reducer(options, "data")
        return lambda step: reducer.bytes(params, replicas=replicas, step=step).bytes_after


def adamw(learning_rate: float, steps: int) -> optax.GradientTransformation:
    """AdamW with clipping, 10% linear warm-up and a cosine decay to 5%.

    It stands after the reducer: clipping then sees the averaged gradient, equal on all replicas.

    Args:
      learning_rate: The highest learning rate.
      steps: Length of the whole run; the schedule depends on it.
    """
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=learning_rate,
        warmup_steps=max(1, steps // 10),
        decay_steps=max(2, steps),
        end_value=0.05 * learning_rate,
    )
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01))


def _allreduce(comm_dtype: Any = None) -> Strategy:
    name = "float32" if comm_dtype is None else jnp.dtype(comm_dtype).name
    return Strategy(
        f"exact average of the gradients, {name} on the wire",
        lambda options, axis: jaxcomp.allreduce(axis_name=axis, comm_dtype=comm_dtype),
    )


STRATEGIES: dict[str, Strategy] = {
    "allreduce": _allreduce(),
    "allreduce-bf16": _allreduce(jnp.bfloat16),
    "powersgd": Strategy(
        "low-rank gradients with error feedback (--rank, --start-step, --comm-dtype)",
        lambda options, axis: jaxcomp.powersgd(
            options.rank,
            axis_name=axis,
            start_step=options.start_step,
            comm_dtype=options.comm_dtype,
        ),
    ),
    "int8": Strategy(
        "8-bit integers on the wire, with error feedback",
        lambda options, axis: jaxcomp.error_feedback(jaxcomp.quantized_allreduce(axis_name=axis)),
    ),
}
