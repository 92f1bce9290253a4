"""`error_feedback`: what a reducer does not send is kept."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from leaves import as_matrix, random_grads
from reference import Reference
from runners import AXIS, simulate

import jaxcomp

SHAPES = {"bias": (16,), "dense": (24, 16)}


def int8():
    return jaxcomp.quantized_allreduce(axis_name=AXIS)


def low_rank(**options):
    return jaxcomp.error_feedback(
        jaxcomp.powersgd(1, axis_name=AXIS, start_step=0, error_feedback=False), **options
    )


def test_decay_scales_the_residual_and_may_be_a_schedule():
    grads = random_grads({"dense": (24, 16)}, 2, 4)
    schedule = optax.linear_schedule(1.0, 0.25, 3)
    tx = low_rank(decay=schedule)
    state = tx.init({"dense": jnp.zeros((24, 16))})
    outputs, _ = simulate("vmap", tx, grads, state)
    matrices = as_matrix("dense", np.asarray(grads["dense"], np.float64))
    reference = Reference(2, 16, 24, state.inner.q["dense"])
    for t in range(4):
        expected = reference.step(matrices[:, t], decay=float(schedule(t)))
        np.testing.assert_allclose(as_matrix("dense", outputs["dense"][t]), expected, atol=2e-5)


@pytest.mark.parametrize(
    "kind",
    [
        lambda: jaxcomp.powersgd(2, axis_name=AXIS),
        lambda: jaxcomp.batched_powersgd(2, axis_name=AXIS),
        lambda: jaxcomp.error_feedback(int8()),
    ],
    ids=["powersgd", "batched", "error_feedback"],
)
def test_a_second_residual_is_refused(kind):
    with pytest.raises(ValueError, match=r"keeps a residual of its own.*error_feedback=False"):
        jaxcomp.error_feedback(kind()).init({"w": jnp.zeros((16, 12))})
