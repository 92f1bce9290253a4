"""Number formats to their ends: gradients whose values are near the least and the largest."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers.leaves import SMALL, all_finite, random_grads
from tests.helpers.reducers import REDUCERS, allreduce, batched, feedback, powersgd, quantized
from tests.helpers.reducers import reducer as reducer_named
from tests.helpers.runners import simulate

# For float16 on the wire, factors of gradients near its end are beyond it: no range of its own.
SIXTEEN_BITS = {"allreduce-fp16", "powersgd-fp16", "feedback-fp16", "own", "feedback-own"}
GRADS = random_grads(SMALL, 2, 3)
UNIT = {name: x / np.abs(x).max() for name, x in GRADS.items()}
# Powers of two between which gradients lie, by their dtype; the last are those of float16's wire.
SCALES = {
    "float32": (2.0**-100, 2.0**-24, 2.0**15, 2.0**100),
    "bfloat16": (2.0**-100, 2.0**-24, 2.0**15, 2.0**100),
    "float16": (2.0**-24, 2.0**-16, 2.0**-8, 2.0**15),
    "wire": (2.0**-16, 2.0**-8, 1.0, 2.0**8),
}
LEAST_HALF = 2.0**-24


def relative_error(found, expected):
    found, expected = np.float64(found), np.float64(expected)
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


def halves_summed(gradients):
    """Takes the mean as torch's fp16_compress_hook does: cast, divide, sum in half."""
    total = np.float16(0)
    for gradient in gradients:
        total = total + np.float16(gradient) / np.float16(len(gradients))
    return total


@pytest.mark.parametrize("scale", [1e-2, 1e-3, 1e-4, 1e-5, 1e-6])
@pytest.mark.parametrize("name", ["allreduce", "feedback", "powersgd", "batched"])
def test_a_float16_wire_loses_no_more_than_torchs(name, scale):
    """Gradients of eight replicas, at full rank where they are compressed."""
    full = {"comm_dtype": jnp.float16, "error_feedback": False}
    tx = {
        "allreduce": allreduce(comm_dtype=jnp.float16),
        "feedback": feedback(allreduce(comm_dtype=jnp.float16)),
        "powersgd": powersgd(32, min_compression_rate=0.0, **full),
        "batched": batched(32, **full),
    }[name]
    gradients = scale * (random_grads({"w": (32, 32)}, 8, 1)["w"] + 1)
    outputs, _ = simulate("vmap", tx, {"w": gradients})
    mean = np.float64(gradients[:, 0]).mean(0)
    torchs = relative_error(halves_summed(gradients[:, 0]), mean)
    assert relative_error(outputs["w"][0], mean) <= 3 * torchs


def test_what_float16_rounds_away_goes_out_later():
    """Sends gradients below its least number: nothing goes out at once, with feedback all does."""
    gradients = np.full((2, 32, 8), LEAST_HALF / 4, np.float32)
    outputs, _ = simulate("vmap", feedback(allreduce(comm_dtype=jnp.float16)), {"w": gradients})
    assert not np.any(outputs["w"][0])
    np.testing.assert_allclose(outputs["w"].sum(0), 8 * LEAST_HALF, rtol=0.3)


def allowed(name, dtype, scale):
    """Returns how far a value may be off, in units of the largest gradient, which is `scale`.

    Two levels of an integer, or some roundings to the gradients' dtype or the wire's; and of
    float16 the least number there is.
    """
    units = [2.0**-20, float(jnp.finfo(dtype).eps)]
    if "int8" in name:
        units.append(2.0**-6)
    if "int6" in name:
        units.append(2.0**-4)
    if "bf16" in name or name in SIXTEEN_BITS:
        units.append(2.0**-7)
    tolerance = 4 * max(units)
    if dtype == "float16" or name in SIXTEEN_BITS:
        tolerance += 2 * LEAST_HALF / scale
    return tolerance


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", REDUCERS)
def test_the_result_is_the_same_at_every_size(name, dtype):
    """Compares with the gradients of size 1, which are exactly as much larger, in float32."""
    tx = reducer_named(name)
    scales = set(SCALES[dtype])
    if name in SIXTEEN_BITS:
        scales &= set(SCALES["wire"])
    for scale in scales:
        grads = {leaf: (x * scale).astype(dtype) for leaf, x in UNIT.items()}
        large = {leaf: x.astype(np.float32) / np.float32(scale) for leaf, x in grads.items()}
        expected, _ = simulate("vmap", tx, large)
        outputs, state = simulate("vmap", tx, grads)
        assert all_finite(state)
        for leaf, x in outputs.items():
            assert x.dtype == dtype
            atol = allowed(name, dtype, scale)
            np.testing.assert_allclose(np.float64(x) / scale, expected[leaf], rtol=0, atol=atol)


NEAR_THE_END = {
    "powersgd": powersgd(1),
    "powersgd start": powersgd(1, start_step=2),
    "powersgd int8": powersgd(1, comm_dtype=jnp.int8),
    "powersgd int6": powersgd(1, comm_dtype="int6"),
    "powersgd bf16": powersgd(1, residual_dtype=jnp.bfloat16),
    "powersgd fp16": powersgd(1, comm_dtype=jnp.float16),
    "batched": batched(1),
    "batched fp16": batched(1, comm_dtype=jnp.float16),
    "feedback": feedback(powersgd(1, error_feedback=False)),
    "feedback of fp16 factors": feedback(powersgd(1, error_feedback=False, comm_dtype=jnp.float16)),
    "feedback int8": feedback(quantized()),
    "feedback fp16": feedback(allreduce(comm_dtype=jnp.float16)),
    "int8": quantized(),
}


def steps_near_the_end():
    """Twelve steps of 2e4 to 6e4 on two replicas, of which rank 1 misses much; and eight of 1."""
    rng = np.random.default_rng(0)
    signs = np.sign(rng.normal(size=24))[:, None] * np.sign(rng.normal(size=16))
    steps = []
    for step in range(12):
        common = 4e4 if step % 2 == 0 else 0.0
        steps.append([common + 2e4 * signs, common + 1.9e4 * signs])
    for _ in range(8):
        steps.append(rng.normal(size=(2, 24, 16)))
    return np.stack(steps, axis=1).astype(np.float16)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", NEAR_THE_END)
def test_finite_steps_near_the_end_of_float16_are_taken(name, dtype):
    """And what an output, or the wire, cannot hold goes out later."""
    gradients = steps_near_the_end().astype(dtype)
    outputs, state = simulate("vmap", NEAR_THE_END[name], {"w": gradients})
    assert all_finite(outputs)
    assert all_finite(state)
    if name == "int8":  # which keeps nothing
        return
    residual = jax.tree.leaves(state.residual)[0].astype(np.float64).mean(0)
    if name.startswith("batched"):
        residual = residual.ravel()[: 24 * 16].reshape(24, 16)
    came_out = outputs["w"].astype(np.float64).sum(0)
    went_in = gradients.astype(np.float64).mean(0).sum(0)
    # Twenty roundings of an output to float16, or of a residual to bfloat16.
    unit = 2.0**-8 if name == "powersgd bf16" else 2.0**-11
    np.testing.assert_allclose(came_out + residual, went_in, rtol=0, atol=20 * unit * 2.0**17)


def test_what_one_leaf_of_a_common_matrix_cannot_hold_goes_out_later():
    """Of float16 beside float32, which has room for the same average."""
    wide = steps_near_the_end().astype(np.float32)
    gradients = {"half": wide.astype(np.float16), "wide": 4 * wide}
    outputs, state = simulate("vmap", batched(1), gradients)
    residual = state.residual.astype(np.float64).mean(0).ravel()
    for leaf, kept in zip(gradients, residual[: 2 * 24 * 16].reshape(2, 24, 16), strict=True):
        came_out = outputs[leaf].astype(np.float64).sum(0)
        went_in = gradients[leaf].astype(np.float64).mean(0).sum(0)
        atol = 20 * 2.0**-11 * 2.0**17
        np.testing.assert_allclose(came_out + kept, went_in, rtol=0, atol=atol)


@pytest.mark.parametrize("name", REDUCERS)
def test_zeros_give_zeros(name):
    outputs, state = simulate("vmap", reducer_named(name), jax.tree.map(np.zeros_like, GRADS))
    assert not any(np.any(x) for x in outputs.values())
    assert all_finite(state)
