"""Every reducer of the package, every way in which one of them goes, and one of a user's own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from runners import AXIS

import jaxcomp
from jaxcomp import extend

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


def users_own(check: bool = True) -> jaxcomp.Reducer:
    """Sends gradients in float16 and counts, as a user would write it: with our blocks, or bare."""

    def reduce(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        assert "weight" not in extra_args  # which the door has multiplied in
        if not check:
            mean = jax.tree.map(lambda x: jax.lax.pmean(x, AXIS), updates)
            return jaxcomp.Reduction(mean, state, updates, jnp.array(True))
        reduced = extend.reduce_mean(extend.floating_leaves(updates), AXIS, jnp.float16)
        means = [jnp.where(reduced.finite, x, jnp.nan) for x in reduced.means]
        means, sent = (extend.with_leaves(updates, x) for x in (means, reduced.sent))
        return jaxcomp.Reduction(
            means, state + reduced.finite.astype(jnp.int32), sent, reduced.finite
        )

    return jaxcomp.Reducer(lambda params: jnp.zeros([], jnp.int32), reduce, AXIS)


# From the step at which those that begin with exact averages change over.
REDUCERS: dict[str, Callable[[int], jaxcomp.Reducer]] = {
    "allreduce": allreduce(),
    "allreduce-fp16": allreduce(comm_dtype="float16"),
    "allreduce-bf16": allreduce(comm_dtype=jnp.bfloat16),
    "powersgd": powersgd(),
    "powersgd-late": lambda start: powersgd()(max(start, 2)),
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
    "own": lambda _: users_own(),
    "feedback-own": lambda _: jaxcomp.error_feedback(users_own()),
}
# One that checks nothing itself: what all refuse is refused at the door.
BARE = {
    "bare": lambda _: users_own(check=False),
    "feedback-bare": lambda _: jaxcomp.error_feedback(users_own(check=False)),
}


@functools.cache
def reducer(name: str, start: int = 0) -> jaxcomp.Reducer:
    """Always the same one, so that tests of the same shapes share what is compiled for it."""
    return (REDUCERS | BARE)[name](start)
