"""int8 on the wire: the bound on the error, the bytes, and values that are no numbers."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxcomp.extend import BlockLayout
from tests.helpers.leaves import normal, random_grads
from tests.helpers.reducers import quantized
from tests.helpers.runners import updated


@settings(max_examples=8)
@given(
    size=st.integers(1, 70),
    n=st.integers(1, 6),
    block_size=st.sampled_from([None, 1, 4, 16]),
    exponent=st.integers(-35, 35),
    dtype=st.sampled_from([jnp.float32, jnp.bfloat16]),
)
def test_no_value_is_off_by_more_than_a_127th_of_its_block(size, n, block_size, exponent, dtype):
    drawn = random_grads({"w": (size,)}, n, 1)["w"][:, 0]
    grads = (drawn * 10.0**exponent).astype(dtype)
    outputs = updated(quantized(block_size=block_size), grads)
    assert outputs.dtype == dtype
    layout = BlockLayout.of(size, n, block_size)

    def blocks(x):
        return np.asarray(layout.cut(jnp.asarray(x, jnp.float32)))

    largest = [np.abs(blocks(gradient)).max(-1) for gradient in grads]
    scale = np.mean(largest, axis=0)[..., None]
    mean = np.float64(grads).mean(0)
    error = np.abs(blocks(outputs[0]) - blocks(mean))
    # A level of the block, and the rounding of the output to its dtype.
    rounded = 1 / 256 if dtype == jnp.bfloat16 else 1e-5
    assert (error <= scale * (1 / 127 + rounded) + 1e-36).all(), layout


# Shapes at which jaxlib's CPU backend loses a NaN in a maximum, among others.
@pytest.mark.parametrize(
    ("size", "block_size"), [(8192, None), (8192, 128), (8192, 256), (200_000, 100), (40_000, 256)]
)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_no_bad_value_is_lost_in_a_large_leaf(size, block_size, bad):
    x = normal(2, size)
    x[1, size // 3] = bad
    assert np.isnan(updated(quantized(block_size=block_size), x)).all()
