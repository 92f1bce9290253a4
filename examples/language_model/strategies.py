"""The communication strategies of the examples, in one table, and the optimizer they precede.

To add a strategy, add one entry to `STRATEGIES`; the training script and its `--help` pick it up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxcomp

Tree = Any

COMM_DTYPES = ("float32", "bfloat16", "float16", "int8")


@dataclass(frozen=True)
class Options:
    """What the command line says about communication.

    Attributes:
      rank: Rank of the compressed gradients.
      start_step: Steps before compression begins, averaged exactly.
      comm_dtype: How the factors of compressed gradients travel.
    """

    rank: int = 4
    start_step: int = 0
    comm_dtype: str = "float32"


@dataclass(frozen=True)
class Strategy:
    """How replicas agree on an update, and what that costs.

    Attributes:
      summary: One line for `--help`.
      transformation: (options, optimizer, axis name) -> the whole Optax transformation. Most put a
        reducer in front of the optimizer; one that wraps the optimizer (local SGD) can as well.
      bytes_at: (options, parameters, replicas) -> a function from the number of steps that the
        strategy has done to the bytes that each replica hands to the network in its next one.
    """

    summary: str
    transformation: Callable[
        [Options, optax.GradientTransformation, str], optax.GradientTransformation
    ]
    bytes_at: Callable[[Options, Tree, int], Callable[[int], float]]


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


def dense_bytes(params: Tree, dtype: Any = jnp.float32) -> int:
    """Bytes of one uncompressed gradient, in `dtype` on the wire."""
    return sum(leaf.size for leaf in jax.tree.leaves(params)) * jnp.dtype(dtype).itemsize


def _allreduce(comm_dtype: Any = None) -> Strategy:
    name = "float32" if comm_dtype is None else jnp.dtype(comm_dtype).name
    return Strategy(
        summary=f"exact average of the gradients, {name} on the wire",
        transformation=lambda options, optimizer, axis: optax.chain(
            jaxcomp.allreduce(axis_name=axis, comm_dtype=comm_dtype), optimizer
        ),
        bytes_at=lambda options, params, replicas: (
            lambda step: dense_bytes(params, comm_dtype or jnp.float32)
        ),
    )


def _powersgd(
    options: Options, optimizer: optax.GradientTransformation, axis: str
) -> optax.GradientTransformation:
    reducer = jaxcomp.powersgd(
        options.rank,
        axis_name=axis,
        start_step=options.start_step,
        comm_dtype=options.comm_dtype,
    )
    return optax.chain(reducer, optimizer)


def _powersgd_bytes(options: Options, params: Tree, replicas: int) -> Callable[[int], float]:
    stats = jaxcomp.compression_stats(
        params, rank=options.rank, comm_dtype=options.comm_dtype, replicas=replicas
    )
    # Exact steps send bfloat16 and float16 as such, but no integers.
    narrow = options.comm_dtype != "int8"
    dense = dense_bytes(params, options.comm_dtype if narrow else jnp.float32)
    return lambda step: dense if step < options.start_step else stats.bytes_after


def _int8_bytes(options: Options, params: Tree, replicas: int) -> Callable[[int], float]:
    del options  # it has none
    size = jaxcomp.quantized_stats(params, replicas=replicas).bytes_after
    return lambda step: size


STRATEGIES: dict[str, Strategy] = {
    "allreduce": _allreduce(),
    "allreduce-bf16": _allreduce(jnp.bfloat16),
    "powersgd": Strategy(
        summary="low-rank gradients with error feedback (--rank, --start-step, --comm-dtype)",
        transformation=_powersgd,
        bytes_at=_powersgd_bytes,
    ),
    "int8": Strategy(
        summary="8-bit integers on the wire, with error feedback",
        transformation=lambda options, optimizer, axis: optax.chain(
            jaxcomp.error_feedback(jaxcomp.quantized_allreduce(axis_name=axis)), optimizer
        ),
        bytes_at=_int8_bytes,
    ),
}
