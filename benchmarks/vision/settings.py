"""The strategies of the study, and what each sends."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxcomp
from benchmarks.convergence.training import AXIS
from benchmarks.vision.task import Tree
from benchmarks.vision.training import Config, Trainer

RATES = (0.025, 0.05, 0.1, 0.2)
# int8 factors of rank 4 and 8 send so many times fewer bytes than float32 gradients.
RATIOS = {"r4": 31.3, "r8": 9.3}


def reducer(name: str, config: Config, rate: float) -> Any:
    """The reducer of a strategy.

    Args:
      name: Of `STRATEGIES`.
      config: The setting.
      rate: The learning rate, of which ranks by spectrum take their momentum.
    """
    kind, _, rest = name.partition("-")
    if name == "allreduce":
        return jaxcomp.allreduce(axis_name=AXIS)
    if name == "int8":
        return jaxcomp.error_feedback(jaxcomp.quantized_allreduce(axis_name=AXIS))
    wire = jnp.int8 if rest.endswith("int8") else None
    if kind == "spectrum":
        rank: Any = _spectrum(config, rate, RATIOS[rest.split("-")[0]], "adaptive" in rest)
    else:
        rank = int(kind[1:])
    return jaxcomp.powersgd(rank, axis_name=AXIS, start_step=0, comm_dtype=wire)


STRATEGIES = {
    "allreduce": "exact average",
    "int8": "8-bit integers",
    "r8": "rank 8",
    "r4": "rank 4",
    "r2": "rank 2",
    "r1": "rank 1",
    "r8-int8": "rank 8, int8 factors",
    "spectrum-r8-int8": "its bytes, ranks by spectrum",
    "spectrum-r8-adaptive-int8": "the same, `adaptive=True`",
    "r4-int8": "rank 4, int8 factors",
    "spectrum-r4-int8": "its bytes, ranks by spectrum",
    "spectrum-r4-adaptive-int8": "the same, `adaptive=True`",
}


def bytes_sent(name: str, config: Config, rate: float) -> int:
    """By each replica, in a step."""
    counted = reducer(name, config, rate).bytes(config.params(), replicas=config.replicas)
    return counted.bytes_after


def _spectrum(config: Config, rate: float, ratio: float, adaptive: bool) -> Any:
    gradients = early_momentum(config, rate)
    return jaxcomp.ranks_by_spectrum(gradients, ratio=ratio, adaptive=adaptive, comm_dtype=jnp.int8)


@functools.cache
def early_momentum(config: Config, rate: float) -> Tree:
    """SGD's momentum after a quarter of an exact run, from a seed that no other run has."""
    seed = 7
    trainer = Trainer(config, jaxcomp.allreduce(axis_name=AXIS), rate)
    carry = trainer.start(seed)
    for first in range(0, config.steps // 4, config.eval_every):
        carry = trainer.advance(carry, seed, first)
    return jax.device_get(optax.tree.get(carry[1], "trace"))
