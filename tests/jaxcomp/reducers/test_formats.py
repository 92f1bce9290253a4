"""Number formats to their ends: gradients whose values are near the least and the largest."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from tests.helpers.leaves import SMALL, all_finite, all_zero, random_grads
from tests.helpers.reducers import (
    REDUCERS,
    allreduce,
    batched,
    feedback,
    powersgd,
    quantized,
    reducer,
)
from tests.helpers.runners import simulate

# For float16 on the wire, factors of gradients near its end are beyond it: no range of its own.
SIXTEEN_BITS = {"allreduce-fp16", "powersgd-fp16", "feedback-fp16", "own", "feedback-own"}
GRADS = random_grads(SMALL, 2, 3)
UNIT = {name: x / np.abs(x).max() for name, x in GRADS.items()}
# Exponents of two between which gradients lie, by their dtype; the last are those of the wire.
SCALES = {
    "float32": {-100, -24, 15, 100},
    "bfloat16": {-100, -24, 15, 100},
    "float16": {-24, -16, -8, 15},
    "wire": {-16, -8, 0, 8},
}
LEAST_HALF = 2.0**-24


def relative_error(found, expected):
    return np.linalg.norm(np.float64(found) - expected) / np.linalg.norm(expected)


FULL_RANK = {"comm_dtype": jnp.float16, "error_feedback": False}


@pytest.mark.parametrize(
    "tx",
    [
        allreduce(comm_dtype=jnp.float16),
        feedback(allreduce(comm_dtype=jnp.float16)),
        powersgd(32, min_compression_rate=0.0, **FULL_RANK),
        batched(32, **FULL_RANK),
    ],
    ids=["allreduce", "feedback", "powersgd", "batched"],
)
def test_a_float16_wire_loses_no_more_than_torchs(tx):
    """torch's fp16_compress_hook casts, divides and sums in half."""
    replicas = 8
    for scale in (1e-2, 1e-4, 1e-6):
        gradients = scale * (random_grads({"w": (32, 32)}, replicas, 1)["w"] + 1)
        outputs, _ = simulate("vmap", tx, {"w": gradients})
        torchs = np.float16(0)
        for gradient in gradients[:, 0]:
            torchs = torchs + np.float16(gradient) / np.float16(replicas)
        mean = np.float64(gradients[:, 0]).mean(0)
        assert relative_error(outputs["w"][0], mean) <= 3 * relative_error(torchs, mean)


def allowed(name, dtype, scale):
    """Returns how far a value may be off, in units of the largest gradient, which is `scale`.

    Two levels of an integer, or some roundings to the gradients' dtype or the wire's; and of
    float16 the least number there is, twice: an all-reduce is off by that number at most, because
    each of two replicas halves its values before the sum, and loses half of it.
    """
    units = {"int8": 2.0**-6, "int6": 2.0**-4, "bf16": 2.0**-7}
    unit = units.get(name.split("-")[-1], float(jnp.finfo(dtype).eps))
    if "int8" in name:
        unit = units["int8"]
    least = 0.0
    if name in SIXTEEN_BITS:
        unit = 2.0**-7
    if dtype == "float16" or name in SIXTEEN_BITS:
        least = LEAST_HALF
    return 4 * max(unit, 2.0**-20) + 2 * least / scale


# Every reducer at both ends of the narrowest range; of bfloat16, which ends where float32 does, one
# for each kind of arithmetic.
AT_ENDS = [(name, dtype) for dtype in ("float32", "float16") for name in REDUCERS]
AT_ENDS += [(name, "bfloat16") for name in ("allreduce", "powersgd", "powersgd-int8", "batched")]


@pytest.mark.parametrize(("name", "dtype"), AT_ENDS)
def test_the_result_is_the_same_at_every_size(name, dtype):
    """Compares with the gradients of size 1, which are exactly as much larger, in float32."""
    tx = reducer(name)
    exponents = SCALES[dtype]
    if name in SIXTEEN_BITS:
        exponents = exponents & SCALES["wire"]
    for exponent in exponents:
        scale = 2.0**exponent
        grads = {leaf: (x * scale).astype(dtype) for leaf, x in UNIT.items()}
        large = {leaf: x.astype(np.float32) / np.float32(scale) for leaf, x in grads.items()}
        expected, _ = simulate("vmap", tx, large)
        outputs, state = simulate("vmap", tx, grads)
        assert all_finite(state)
        for leaf, x in outputs.items():
            assert x.dtype == dtype
            atol = allowed(name, dtype, scale)
            assert_allclose(np.float64(x) / scale, expected[leaf], rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
@pytest.mark.parametrize("name", ["allreduce", "powersgd-int6", "feedback-int8"])
def test_gradients_may_have_eight_bits(name, dtype):
    """Compares with the same numbers in float32, also of a leaf that travels as it is."""
    grads = {leaf: x.astype(dtype) for leaf, x in UNIT.items()}
    wide = {leaf: x.astype(np.float32) for leaf, x in grads.items()}
    outputs, _ = simulate("vmap", reducer(name), grads)
    expected, _ = simulate("vmap", reducer(name), wide)
    for leaf, x in outputs.items():
        assert x.dtype == dtype
        atol = float(jnp.finfo(dtype).eps)
        assert_allclose(x.astype(np.float32), expected[leaf], rtol=0, atol=atol)


NEAR_THE_END = {
    "powersgd": powersgd(1),
    "powersgd start": powersgd(1, start_step=2),
    "powersgd int8": powersgd(1, comm_dtype=jnp.int8),
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
    """Makes twelve steps of 2e4 to 6e4, of which rank 1 misses much, and eight of 1."""
    rng = np.random.default_rng(0)
    signs = np.sign(rng.normal(size=24))[:, None] * np.sign(rng.normal(size=16))
    steps = []
    for step in range(12):
        common = 4e4 if step % 2 == 0 else 0.0
        steps.append([common + 2e4 * signs, common + 1.9e4 * signs])
    steps.extend(rng.normal(size=(8, 2, 24, 16)))
    return np.stack(steps, axis=1).astype(np.float16)


@pytest.mark.parametrize("name", NEAR_THE_END)
def test_finite_steps_near_the_end_of_float16_are_taken(name):
    """And what an output, or the wire, cannot hold goes out later, in every leaf by itself."""
    half = steps_near_the_end()
    outputs, state = simulate("vmap", NEAR_THE_END[name], {"half": half, "wide": np.float32(half)})
    assert all_finite(outputs)
    assert all_finite(state)
    if name == "int8":  # which keeps nothing
        return
    residual = state.residual
    if name.startswith("batched"):
        half_kept, wide_kept = np.split(residual.reshape(2, -1)[:, : 2 * 24 * 16], 2, axis=1)
        residual = {"half": half_kept, "wide": wide_kept}
    # Twenty roundings of an output to float16, or of a residual to bfloat16.
    unit = 2.0**-8 if name == "powersgd bf16" else 2.0**-11
    went_in = np.float64(half).mean(0).sum(0)
    for leaf, output in outputs.items():
        kept = np.float64(residual[leaf]).mean(0).reshape(24, 16)
        came_out = np.float64(output).sum(0)
        assert_allclose(came_out + kept, went_in, rtol=0, atol=20 * unit * 2.0**17)


IN_FACTORS = ["powersgd", "powersgd int8", "powersgd bf16", "batched", "feedback"]


@pytest.mark.parametrize("name", IN_FACTORS)
def test_a_huge_value_that_the_factors_miss_does_not_stop_the_steps_after_it(name):
    """Leaves factors after the first step that see nothing of the second one's only value."""
    grads = np.zeros((2, 6, 24, 16), np.float32)
    grads[:, 0, 0, 0] = 1
    grads[0, 1, 5, 5] = 2e37
    grads[:, 2:] = np.random.default_rng(0).normal(size=(2, 4, 24, 16))
    outputs, state = simulate("vmap", NEAR_THE_END[name], {"w": grads})
    assert all_finite((outputs, state))


def test_a_residual_that_carries_a_bfloat16_output_beyond_its_range_keeps_the_rest():
    end = float(jnp.finfo(jnp.bfloat16).max)
    grads = np.zeros((3, 8), jnp.bfloat16)
    grads[0, :2] = end, 0.3 * end / 127  # the second one is sent as 0
    grads[1, 1] = end
    outputs, state = simulate("vmap", feedback(quantized()), {"w": np.stack([grads, grads])})
    assert all_finite((outputs, state))
    came_out = np.float64(outputs["w"]).sum(0) + np.float64(state.residual["w"][0])
    assert_allclose(came_out, np.float64(grads).sum(0), rtol=2.0**-8)


@pytest.mark.parametrize("name", REDUCERS)
def test_a_tree_without_values_is_averaged(name):
    outputs, _ = simulate("vmap", reducer(name), {"w": np.zeros((2, 1, 0, 3), np.float32)})
    assert outputs["w"].shape == (1, 0, 3)


@pytest.mark.parametrize("name", REDUCERS)
def test_zeros_give_zeros(name):
    outputs, state = simulate("vmap", reducer(name), jax.tree.map(np.zeros_like, GRADS))
    assert all_zero(outputs)
    assert all_finite(state)
