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
        finite = reduced.finite
        means = [jnp.where(finite, x, jnp.nan) for x in reduced.means]
        means = extend.with_leaves(updates, means)
        sent = extend.with_leaves(updates, reduced.sent)
        steps = state + finite.astype(jnp.int32)
        return jaxcomp.Reduction(means, steps, sent, finite)

    return jaxcomp.Reducer(lambda params: jnp.zeros([], jnp.int32), reduce, AXIS)


@functools.cache
def reducers_from(start):
    """Makes all reducers by name; those that can begin with exact averages compress from `start`.

    One call serves all tests of that start, so that they share compiled programs.
    """
    return {
        "allreduce": allreduce(),
        "allreduce-fp16": allreduce(comm_dtype="float16"),
        "allreduce-bf16": allreduce(comm_dtype=jnp.bfloat16),
        "powersgd": powersgd(2, start_step=start),
        "powersgd-late": powersgd(2, start_step=max(start, 2)),
        "powersgd-no-feedback": powersgd(2, start_step=start, error_feedback=False),
        "powersgd-fp16": powersgd(1, comm_dtype="float16", residual_dtype=jnp.bfloat16),
        "powersgd-int8": powersgd(2, start_step=start, comm_dtype=jnp.int8),
        "powersgd-int6": powersgd(2, start_step=start, comm_dtype="int6"),
        "batched": batched(2, start_step=start),
        "int8": quantized(),
        "int8-one-scale": quantized(block_size=None),
        "feedback-fp16": feedback(allreduce(comm_dtype="float16")),
        "feedback-int8": feedback(quantized()),
        "feedback-late": feedback(
            powersgd(2, start_step=start, error_feedback=False), every=2, decay=0.5
        ),
        "own": users_own(),
        "feedback-own": feedback(users_own()),
    }


@functools.cache
def bare_reducers():
    """Makes reducers that check nothing: `jaxcomp.Reducer` refuses what all reducers refuse."""
    return {
        "bare": users_own(check=False),
        "feedback-bare": feedback(users_own(check=False)),
    }


REDUCERS = [*reducers_from(0)]
BARE = [*bare_reducers()]


def reducer(name, start=0):
    """Returns a reducer by name; a call with equal arguments returns the same object."""
    if name in BARE:
        return bare_reducers()[name]
    return reducers_from(start)[name]
