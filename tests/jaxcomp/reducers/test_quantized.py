"""int8 on the wire: the bound on the error, the bytes, and values that are no numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxcomp
from jaxcomp.extend import BlockLayout
from tests.helpers.leaves import random_grads
from tests.helpers.runners import AXIS

SHAPES = {"bias": (5,), "dense": (24, 17), "scalar": ()}


def vmapped(tx, grads, state):
    return jax.jit(jax.vmap(tx.update, in_axes=(0, None), axis_name=AXIS))(grads, state)


@settings(max_examples=8)
@given(
    size=st.integers(0, 70),
    n=st.integers(1, 6),
    block_size=st.sampled_from([None, 1, 4, 16]),
    exponent=st.integers(-35, 35),
    dtype=st.sampled_from([jnp.float32, jnp.bfloat16]),
    seed=st.integers(0, 9),
)
def test_no_value_is_off_by_more_than_a_127th_of_its_block(
    size, n, block_size, exponent, dtype, seed
):
    grads = (random_grads({"w": (size,)}, n, 1, seed)["w"][:, 0] * 10.0**exponent).astype(dtype)
    tx = jaxcomp.quantized_allreduce(axis_name=AXIS, block_size=block_size)
    outputs, _ = vmapped(tx, grads, tx.init(grads[0]))
    assert outputs.dtype == dtype
    exact = np.asarray(grads, np.float64)
    if not size:
        return
    layout = BlockLayout.of(size, n, block_size)
    cut = lambda x: np.asarray(layout.cut(jnp.asarray(x, jnp.float32)))  # noqa: E731
    largest = np.mean([np.abs(cut(x)).max(-1) for x in exact], axis=0)[..., None]
    error = np.abs(cut(outputs[0]) - cut(exact.mean(0)))
    rounded = 1 / 256 if dtype == jnp.bfloat16 else 1e-5
    assert (error <= largest * (1 / 127 + rounded) + 1e-36).all(), layout


# Shapes at which jaxlib's CPU backend loses a NaN in a maximum, among others.
@pytest.mark.parametrize(
    ("size", "block_size"), [(8192, None), (8192, 128), (8192, 256), (200_000, 100), (40_000, 256)]
)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_no_bad_value_is_lost_in_a_large_leaf(size, block_size, bad):
    tx = jaxcomp.quantized_allreduce(axis_name=AXIS, block_size=block_size)
    x = np.random.default_rng(0).normal(size=(2, size)).astype(np.float32)
    x[1, size // 3] = bad
    outputs, _ = vmapped(tx, jnp.asarray(x), tx.init(x[0]))
    assert np.isnan(outputs).all()
