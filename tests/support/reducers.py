"""Every reducer of the package, and every way in which one of them goes."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax.numpy as jnp
from runners import AXIS

import jaxcomp

# Always the same one for the same arguments, so that tests of the same shapes share what is
# compiled for it.
shared_powersgd = functools.cache(jaxcomp.powersgd)


def powersgd(rank: int = 2, **options: object) -> Callable[[int], jaxcomp.Reducer]:
    arguments = {"axis_name": AXIS, "min_compression_rate": 1.0, **options}
    return lambda start: jaxcomp.powersgd(rank, start_step=start, **arguments)


def allreduce(**options: object) -> Callable[[int], jaxcomp.Reducer]:
    return lambda start: jaxcomp.allreduce(axis_name=AXIS, **options)


def quantized(**options: object) -> Callable[[int], jaxcomp.Reducer]:
    return lambda start: jaxcomp.quantized_allreduce(axis_name=AXIS, **options)


def batched(**options: object) -> Callable[[int], jaxcomp.Reducer]:
    return lambda start: jaxcomp.batched_powersgd(2, axis_name=AXIS, start_step=start, **options)


# From the step at which those that begin with exact averages change over.
REDUCERS: dict[str, Callable[[int], jaxcomp.Reducer]] = {
    "allreduce": allreduce(),
    "allreduce-fp16": allreduce(comm_dtype="float16"),
    "allreduce-bf16": allreduce(comm_dtype=jnp.bfloat16),
    "powersgd": powersgd(),
    "powersgd-late": lambda start: powersgd()(max(start, 2)),
    "acp-sgd": lambda start: jaxcomp.acp_sgd(
        2, axis_name=AXIS, start_step=start, min_compression_rate=1.0
    ),
    "powersgd-no-feedback": powersgd(error_feedback=False),
    "powersgd-fp16": lambda _: powersgd(1, comm_dtype="float16", residual_dtype=jnp.bfloat16)(0),
    "powersgd-int8": powersgd(comm_dtype=jnp.int8),
    "powersgd-int6": powersgd(comm_dtype="int6"),
    "batched": batched(),
    "int8": quantized(),
    "int8-one-scale": quantized(block_size=None),
    "feedback-fp16": lambda start: jaxcomp.error_feedback(allreduce(comm_dtype="float16")(start)),
    "feedback-int8": lambda start: jaxcomp.error_feedback(quantized()(start)),
    "feedback-late": lambda start: jaxcomp.error_feedback(
        powersgd(error_feedback=False)(start), every=2, decay=0.5
    ),
}


@functools.cache
def reducer(name: str, start: int = 0) -> jaxcomp.Reducer:
    """Always the same one, so that tests of the same shapes share what is compiled for it."""
    return REDUCERS[name](start)
