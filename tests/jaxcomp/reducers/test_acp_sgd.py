"""`acp_sgd`: one factor and one all-reduce a step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hlo import collectives
from leaves import COMPRESSED, SHAPES, as_matrix, random_grads, zeros
from reference import Alternating
from runners import AXIS, MAPPINGS, consolidated, lower_update, simulate

import jaxcomp

# Always the same one for the same arguments, so that tests share what is compiled for it.
shared = functools.cache(jaxcomp.acp_sgd)


def reducer(rank=2, start_step=0, **kwargs):
    return shared(rank, axis_name=AXIS, start_step=start_step, **kwargs)


@pytest.mark.parametrize(("mapping", "rank"), [("vmap", 1), *((m, 4) for m in MAPPINGS)])
def test_equals_the_numpy_reference(mapping, rank):
    n, steps = 3, 7
    grads = random_grads(SHAPES, n, steps)
    tx = reducer(rank, min_compression_rate=1.0)
    state = tx.init(zeros())
    outputs, final = simulate(mapping, tx, grads, state)
    for name in COMPRESSED:
        matrices = as_matrix(name, grads[name])
        reference = Alternating(n, *matrices.shape[2:], state.q[name])
        for t in range(steps):
            expected = reference.step(matrices[:, t])
            np.testing.assert_allclose(as_matrix(name, outputs[name][t]), expected, atol=3e-5)
        residual = as_matrix(name, final.residual[name])
        np.testing.assert_allclose(residual, reference.residual, atol=3e-5)
        for factor, expected in ((final.p[name], reference.p), (final.q[name], reference.q)):
            np.testing.assert_allclose(np.abs(factor), np.abs(expected), atol=2e-4)
    np.testing.assert_allclose(outputs["bias"], grads["bias"].mean(0), rtol=1e-6)
    assert isinstance(final.p["bias"], optax.MaskedNode)
    assert int(final.count) == steps


@pytest.mark.parametrize("start_step", [0, 3])
def test_the_first_compressed_step_sends_left_factors(start_step):
    grads = random_grads(SHAPES, 2, start_step + 1)
    tx = reducer(start_step=start_step)
    state = tx.init(zeros())
    outputs, final = simulate("vmap", tx, grads, state)
    for t in range(start_step):
        np.testing.assert_allclose(outputs["dense"][t], grads["dense"][:, t].mean(0), rtol=1e-5)
    np.testing.assert_array_equal(final.q["dense"], state.q["dense"])
    assert not np.array_equal(final.p["dense"], state.p["dense"])
    assert np.linalg.matrix_rank(outputs["dense"][start_step]) == 2


@pytest.mark.parametrize("wire", [None, jnp.float16, "int8", "int6"])
def test_output_plus_mean_residual_is_the_mean_of_what_went_in(wire):
    grads = random_grads(SHAPES, 4, 2)
    tx = reducer(comm_dtype=wire)
    state = tx.init(zeros())
    for t in range(2):  # one step of each side
        now = jax.tree.map(lambda g, t=t: g[:, t : t + 1], grads)
        old = state.residual
        outputs, new = simulate("vmap", tx, now, state)
        for name in COMPRESSED:
            went_in = now[name][:, 0].mean(0) + old[name]
            came_out = outputs[name][0] + new.residual[name].mean(0)
            atol = 2e-3 if wire == jnp.float16 else 2e-5
            np.testing.assert_allclose(came_out, went_in, atol=atol)
        state = consolidated(new)


def test_each_side_takes_one_all_reduce():
    params = {f"layer_{i}": jnp.zeros((64, 32)) for i in range(5)} | {"bias": jnp.zeros(8)}
    tx = reducer()
    # One in each branch of the conditional, of which a step takes one.
    assert sorted(collectives(lower_update(tx, params, 4).compile().as_text())) == [
        ("all-reduce", "f32", 5 * 2 * 32 + 8),
        ("all-reduce", "f32", 5 * 2 * 64 + 8),
    ]
    two_sided = jaxcomp.powersgd(2, axis_name=AXIS).bytes(params)
    assert tx.bytes(params).bytes_after - 32 == (two_sided.bytes_after - 32) // 2


def test_a_single_array_is_a_tree_too():
    tx = reducer(2)
    grads = random_grads({"w": (24, 16)}, 2, 3)["w"]
    outputs, state = simulate("vmap", tx, grads, tx.init(jnp.zeros((24, 16))))
    assert np.linalg.matrix_rank(outputs[-1]) == 2
    assert state.p.shape == (16, 2)


def test_a_constant_low_rank_gradient_is_found():
    """Two half steps are one power iteration: what is of rank 2 is soon sent exactly."""
    u, v = np.random.default_rng(0).normal(size=(2, 24, 2))
    grads = {"w": jnp.broadcast_to(jnp.asarray(u @ v.T, jnp.float32), (2, 4, 24, 24))}
    tx = reducer(2, error_feedback=False)
    outputs, _ = simulate("vmap", tx, grads, tx.init({"w": jnp.zeros((24, 24))}))
    np.testing.assert_allclose(outputs["w"][-1], grads["w"][0, 0], atol=1e-4)


def test_wrong_use_says_what_to_do():
    two_sided = jaxcomp.powersgd(2, axis_name=AXIS, start_step=0)
    grads = random_grads(SHAPES, 2, 1)
    with pytest.raises(ValueError, match=r"its own ACPSGDState, got PowerSGDState.*adapt_state"):
        simulate("vmap", reducer(), grads, two_sided.init(zeros()))
    with pytest.raises(ValueError, match=r"its own PowerSGDState, got ACPSGDState.*adapt_state"):
        simulate("vmap", two_sided, grads, reducer().init(zeros()))
    with pytest.raises(TypeError, match=r"acp_sgd has no argument warm_start"):
        reducer(warm_start=False)
