"""scale_by_local_adam: Adam, but for squares that count by 1/W from a step on, as NumPy has it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

import jaxcomp
from tests.helpers.leaves import equal

REPLICAS = 4


@pytest.mark.parametrize("start_step", [0, 2, 9])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_squares_count_by_the_number_of_replicas_from_the_start_on(start_step, dtype):
    grads = np.random.default_rng(0).normal(size=(6, REPLICAS, 5)).astype(dtype)
    tx = jaxcomp.scale_by_local_adam(
        axis_name="data", start_step=start_step, b1=0.8, b2=0.9, eps=1e-6
    )
    state = jax.vmap(tx.init)(grads[0])
    rounding = 20 * float(jnp.finfo(dtype).eps)
    mu = nu = 0.0
    for number, grad in enumerate(grads, 1):
        with jax.numpy_dtype_promotion("standard"):  # optax's Adam is not written for strict
            update, state = jax.vmap(tx.update, axis_name="data")(grad, state)
        divisor = 1 if number <= start_step else REPLICAS
        mu = 0.8 * mu + 0.2 * np.float64(grad)
        nu = 0.9 * nu + 0.1 * np.float64(grad) ** 2 / divisor
        second = nu / (1 - 0.9**number)
        expected = mu / (1 - 0.8**number) / (np.sqrt(second) + 1e-6)
        assert_allclose(np.float64(update), expected, rounding, rounding)
    assert update.dtype == state[1].mu.dtype == dtype


def test_where_momenta_begin_anew_the_start_does_not():
    adam = jaxcomp.scale_by_local_adam(axis_name="data", start_step=2)
    tx = jaxcomp.local_sgd(
        adam, sync_every=2, start_step=2, axis_name="data", average_inner_state="reset"
    )
    grads = np.ones((REPLICAS, 5, 3), np.float32)
    step = jax.vmap(tx.update, axis_name="data")
    state = jax.vmap(tx.init)(grads[:, 0])
    moments = []
    with jax.numpy_dtype_promotion("standard"):
        for grad in grads.swapaxes(0, 1):
            _, state = step(grad, state, grad)
            moments.append(state.inner[1].nu)
    equal(moments[3], 0)  # begun anew at the average
    assert_allclose(moments[4], 0.001 / REPLICAS, rtol=1e-5)


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="start_step"):
        jaxcomp.scale_by_local_adam(axis_name="data", start_step=-1)
    tx = jaxcomp.scale_by_local_adam(axis_name="data")
    with pytest.raises(ValueError, match="data"):
        tx.update(jnp.ones(3), tx.init(jnp.ones(3)))
