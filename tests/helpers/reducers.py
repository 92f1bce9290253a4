"""All reducers of the package with their main options, and a reducer that a user wrote."""

import functools

import jax
import jax.numpy as jnp

import jaxcomp
from jaxcomp import extend
from tests.helpers.runners import AXIS

# Equal arguments return the same reducer, so that tests with equal shapes share compiled programs.
allreduce = functools.cache(functools.partial(jaxcomp.allreduce, axis_name=AXIS))
batched = functools.cache(functools.partial(jaxcomp.batched_powersgd, axis_name=AXIS, start_step=0))
powersgd = functools.cache(
    functools.partial(jaxcomp.powersgd, axis_name=AXIS, start_step=0, min_compression_rate=1.0)
)
quantized = functools.cache(functools.partial(jaxcomp.quantized_allreduce, axis_name=AXIS))
feedback = jaxcomp.error_feedback


def users_own(check=True):
    """Makes a user's reducer, which sends float16 and counts, or without `check` a plain mean."""

    def reduce(updates, state, params=None, **extra_args):
        assert "weight" not in extra_args  # jaxcomp.Reducer has multiplied the gradients by it
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


# Name -> function of the step at which a reducer that begins with exact averages compresses.
REDUCERS = {
    "allreduce": lambda _: allreduce(),
    "allreduce-fp16": lambda _: allreduce(comm_dtype="float16"),
    "allreduce-bf16": lambda _: allreduce(comm_dtype=jnp.bfloat16),
    "powersgd": lambda start: powersgd(2, start_step=start),
    "powersgd-late": lambda start: powersgd(2, start_step=max(start, 2)),
    "powersgd-no-feedback": lambda start: powersgd(2, start_step=start, error_feedback=False),
    "powersgd-fp16": lambda _: powersgd(1, comm_dtype="float16", residual_dtype=jnp.bfloat16),
    "powersgd-int8": lambda start: powersgd(2, start_step=start, comm_dtype=jnp.int8),
    "powersgd-int6": lambda start: powersgd(2, start_step=start, comm_dtype="int6"),
    "batched": lambda start: batched(2, start_step=start),
    "int8": lambda _: quantized(),
    "int8-one-scale": lambda _: quantized(block_size=None),
    "feedback-fp16": lambda _: feedback(allreduce(comm_dtype="float16")),
    "feedback-int8": lambda _: feedback(quantized()),
    "feedback-late": lambda start: feedback(
        powersgd(2, start_step=start, error_feedback=False), every=2, decay=0.5
    ),
    "own": lambda _: users_own(),
    "feedback-own": lambda _: feedback(users_own()),
}
# A reducer that checks nothing itself: jaxcomp.Reducer refuses what all reducers refuse.
BARE = {
    "bare": lambda _: users_own(check=False),
    "feedback-bare": lambda _: feedback(users_own(check=False)),
}


@functools.cache
def reducer(name, start=0):
    """Returns a reducer by name; a call with equal arguments returns the same object."""
    return (REDUCERS | BARE)[name](start)
