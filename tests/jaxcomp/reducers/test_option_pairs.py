"""Every two options of `powersgd` beside each other: traced, which costs no compilation."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from runners import AXIS

import jaxcomp

LEAVES = {
    "half": jnp.zeros((12, 8), jnp.float16),
    "blocks": jnp.zeros((2, 12, 8)),
    "b": jnp.zeros(5),
}
OPTIONS = {
    "start_step": 3,
    "min_compression_rate": 1.0,
    "error_feedback": False,
    "warm_start": False,
    "eps": 1e-8,
    "seed": 1,
    "comm_dtype": jnp.bfloat16,
    "comm_dtype ": "int8",
    "residual_dtype": jnp.bfloat16,
    "matrix_dims": jaxcomp.stacked("blocks"),
    "weight": 2.0,  # of the update
}
PAIRS = [x for x in itertools.combinations(OPTIONS, 2) if x[0].strip() != x[1].strip()]


@pytest.mark.parametrize("pair", PAIRS, ids=" and ".join)
def test_two_options_work_together(pair):
    options = {"start_step": 0} | {name.strip(): OPTIONS[name] for name in pair}
    extra = {"weight": weight} if (weight := options.pop("weight", None)) else {}
    tx = jaxcomp.powersgd(2, axis_name=AXIS, **options)
    state = tx.init(LEAVES)

    def step(grads):
        found = tx.reduce(grads, state, **extra)
        return found.updates, found.state, found.sent

    many = jax.tree.map(lambda x: jax.ShapeDtypeStruct((2, *x.shape), x.dtype), LEAVES)
    updates, after, sent = jax.eval_shape(jax.vmap(step, axis_name=AXIS), many)

    def kinds(tree, mapped=0):
        return jax.tree.map(lambda x: (x.shape[mapped:], x.dtype), tree)

    expected = kinds(LEAVES)
    assert kinds(updates, 1) == kinds(sent, 1) == expected
    assert kinds(after, 1) == kinds(state)
