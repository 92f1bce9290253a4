"""Outputs of every set of options, as they were before the step was written anew (d55f995)."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers.leaves import by_layer
from tests.helpers.paths import ROOT
from tests.helpers.reducers import allreduce, batched, feedback, powersgd, quantized
from tests.helpers.runners import simulate

RECORDED = np.load(ROOT / "tests/jaxcomp/reducers/data/recorded.npz")
REPLICAS = 4
STEPS = 10
SHOWN, EVERY = [0, 4, 9], 8  # which of the steps, and which values of their outputs
SHAPES = {
    "bias": (16,),
    "conv": (3, 3, 4, 12),
    "dense": (24, 16),
    "embedding": (40, 10),
    "same": (24, 16),
    "stack": (3, 12, 10),
}
CASES = {
    "default": powersgd(4),
    "rank 1 eps": powersgd(1, eps=0.1),
    "start 3": powersgd(4, start_step=3),
    "cold": powersgd(4, warm_start=False),
    "no feedback": powersgd(4, error_feedback=False),
    "bfloat16": powersgd(4, comm_dtype=jnp.bfloat16),
    "float16": powersgd(4, comm_dtype=jnp.float16),
    "int8": powersgd(4, comm_dtype=jnp.int8),
    "int6": powersgd(4, comm_dtype="int6"),
    "int6 cold": powersgd(4, comm_dtype="int6", warm_start=False, error_feedback=False),
    "residual bfloat16": powersgd(4, residual_dtype=jnp.bfloat16),
    "rank by leaf": powersgd(lambda path, leaf: 2 if len(leaf.shape) == 2 else None),
    "by layer": powersgd(3, matrix_dims=by_layer),
    "rate 4": powersgd(1, min_compression_rate=4.0),
    "seed 7": powersgd(3, seed=7),
    "full rank": powersgd(64, min_compression_rate=0.1),
    "allreduce": allreduce(),
    "allreduce bfloat16": allreduce(comm_dtype=jnp.bfloat16),
    "quantized one scale": quantized(block_size=None),
    "feedback quantized": feedback(quantized()),
    "feedback float16": feedback(allreduce(comm_dtype=jnp.float16)),
    "batched start 2": batched(4, start_step=2),
    "decay": feedback(powersgd(4, error_feedback=False), decay=0.9),
    "every 2": feedback(powersgd(4, error_feedback=False), every=2),
}


@pytest.fixture(scope="module")
def gradients():
    """Draws a tree of ``(replicas, steps, *shape)``, in float32, step after step."""
    rng = np.random.default_rng(3)
    common = {name: rng.normal(size=shape) for name, shape in SHAPES.items()}
    steps = {name: [] for name in SHAPES}
    for _ in range(STEPS):
        for name, x in common.items():
            steps[name].append(np.float32(x + rng.normal(size=(REPLICAS, *x.shape))))
    return {name: np.stack(drawn, axis=1) for name, drawn in steps.items()}


# By step a share of the largest value, for what the end of a case's name says is on its wire.
ROUNDED = {"int6": 1 / 31, "int8": 1 / 127, "bfloat16": 2**-8, "float16": 2**-11}
ROUNDED |= {"quantized": 1 / 127, "quantized one scale": 1 / 127, "int6 cold": 1 / 31}


def allowed(name):
    """Returns what may be off in a step: processors sum in other orders.

    A value on the wire may then be rounded the other way, in each of the steps so far.
    """
    unit = ROUNDED.get(name) or ROUNDED.get(name.split()[-1])
    if unit:
        return (1 + np.array(SHOWN)) * unit
    return np.full(len(SHOWN), 1e-4)


@pytest.mark.parametrize("name", CASES)
def test_outputs_are_those_that_were_recorded(name, gradients):
    outputs, _ = simulate("vmap", CASES[name], gradients)
    values = np.concatenate([outputs[k].reshape(STEPS, -1) for k in SHAPES], axis=1)
    expected = RECORDED[name]
    found = values[SHOWN, ::EVERY]
    off = np.abs(found - expected).max(axis=1) / np.abs(expected).max()
    assert np.all(off <= allowed(name)), (off, allowed(name))
