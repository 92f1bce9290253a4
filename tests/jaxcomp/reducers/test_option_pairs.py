"""Every two options of `powersgd` beside each other: traced, which costs no compilation."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from runners import AXIS

import jaxcomp
from jaxcomp.extend import default_matrix_dims

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
    "matrix_dims": default_matrix_dims,
    "stacked": "blocks",
    "error_decay": 0.9,
    "error_decay ": lambda count: 1 / (1 + count),
    "feedback_every": 2,
    "reduce_first": "fast",
    "alternating": True,
    "buckets": 2,
    "gpu_kernels": True,
    "weight": 2.0,  # of the update
}
REFUSED = {("warm_start", "alternating")}  # at once, with a message
PAIRS = [
    pair
    for pair in itertools.combinations(OPTIONS, 2)
    if pair[0].strip() != pair[1].strip() and pair not in REFUSED
]


@pytest.mark.parametrize("pair", PAIRS, ids=" and ".join)
def test_two_options_work_together(pair):
    options = {"start_step": 0} | {name.strip(): OPTIONS[name] for name in pair}
    extra = {"weight": weight} if (weight := options.pop("weight", None)) else {}
    tx = jaxcomp.powersgd(2, axis_name=AXIS, **options)
    state = tx.init(LEAVES)

    def step(grads):
        found = tx.reduce(grads, state, **extra)
        return found.updates, found.state, found.sent

    axes = (AXIS, "fast") if "reduce_first" in options else (AXIS,)
    mapped, replicas = step, (2,) * len(axes)
    for axis in axes:
        mapped = jax.vmap(mapped, axis_name=axis)
    many = jax.tree.map(lambda x: jax.ShapeDtypeStruct((*replicas, *x.shape), x.dtype), LEAVES)
    updates, after, sent = jax.eval_shape(mapped, many)

    def kinds(tree, mapped=0):
        return jax.tree.map(lambda x: (x.shape[mapped:], x.dtype), tree)

    expected = kinds(LEAVES)
    assert kinds(updates, len(axes)) == kinds(sent, len(axes)) == expected
    assert kinds(after, len(axes)) == kinds(state)
