"""`powersgd(comm_dtype=jnp.int8)` and "int6": factors as integers, everything else as it is."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose

import jaxcomp
from tests.helpers.leaves import SMALL, close, random_grads, zeros
from tests.helpers.reducers import powersgd
from tests.helpers.runners import AXIS, first, simulate, updated


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(jaxcomp.quantized_allreduce, block_size=16),
        functools.partial(jaxcomp.powersgd, 2, start_step=0, comm_dtype="int8"),
    ],
    ids=["values", "factors"],
)
def test_several_axes_are_one_axis_of_as_many_replicas(make):
    """Also where one of them has a single replica, whose gradients are no mapped operand."""
    grads = jax.tree.map(lambda x: x[:, 0], random_grads(SMALL, 6, 1))
    outputs = updated(make(axis_name=AXIS), grads)
    expected = jax.tree.map(first, outputs)
    tx = make(axis_name=("a", "b"))

    def update(grads):
        updates, _ = tx.update(grads, tx.init(zeros(SMALL)))
        return updates

    over_b = jax.vmap(update, axis_name="b")
    over_both = jax.jit(jax.vmap(over_b, axis_name="a"))
    folded = jax.tree.map(lambda x: x.reshape(2, 3, *x.shape[1:]), grads)
    nested = over_both(folded)
    close(jax.tree.map(lambda x: x[1, 2], nested), expected, atol=1e-5)
    over_one = jax.jit(jax.vmap(over_b, in_axes=None, axis_name="a", axis_size=1))
    single = over_one(grads)
    close(jax.tree.map(lambda x: x[0, 0], single), expected, atol=1e-5)


def test_float64_gradients_keep_their_digits():
    with jax.enable_x64(True):
        params = {"w": jnp.zeros((3, 24, 16)), "bias": jnp.zeros((3, 16))}
        grads = optax.tree.random_like(jax.random.key(0), params)
        tx = powersgd(2, comm_dtype=jnp.int8)
        step = jax.vmap(lambda g: tx.update(g, tx.init(g)), axis_name=AXIS)
        outputs, state = jax.jit(step)(grads)
        assert outputs["w"].dtype == state.residual["w"].dtype == jnp.float64
        total = outputs["w"][0] + state.residual["w"].mean(0)
        assert_allclose(total, grads["w"].mean(0), atol=1e-14)
        assert_allclose(outputs["bias"][0], grads["bias"].mean(0), rtol=1e-14)


def test_columns_of_zeros_and_of_subnormals_stay_what_they_are():
    grads = random_grads({"w": (24, 16)}, 2, 3)
    grads["w"][..., 8:] = 0
    grads["w"][..., 4:8] *= np.float32(1e-40)
    outputs, state = simulate("vmap", powersgd(8, comm_dtype=jnp.int8), grads)
    assert not np.any(outputs["w"][..., 8:])
    assert np.abs(outputs["w"][..., 4:8]).max() < 1e-38
    assert np.isfinite(state.residual["w"]).all()
