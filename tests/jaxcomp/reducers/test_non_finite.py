"""Steps that must leave no trace, and gradients at the edges of the float range."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from leaves import SHAPES, random_grads, with_value, zeros
from reducers import shared_powersgd
from runners import AXIS, MAPPINGS, simulate

import jaxcomp


@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("start_step", [0, 2])
@pytest.mark.parametrize("leaf", ["dense", "bias"])
def test_one_bad_value_on_one_replica_poisons_the_output_and_nothing_else(
    mapping, start_step, leaf
):
    grads = random_grads(SHAPES, 3, 5)
    bad = dict(grads)
    bad[leaf] = with_value(grads[leaf], (1, 3, 0), np.inf if leaf == "bias" else np.nan)
    tx = shared_powersgd(2, axis_name=AXIS, start_step=start_step)
    bits = {"optimised": mapping == "shard_map"}
    outputs, state = simulate(mapping, tx, bad, **bits)
    for name in SHAPES:
        assert np.isfinite(outputs[name][:3]).all()
        assert np.isfinite(outputs[name][4]).all()
        # Every value, so that no part of the step can be applied by mistake.
        assert np.isnan(outputs[name][3]).all()

    skipped = jax.tree.map(lambda g: np.delete(g, 3, axis=1), grads)
    _, expected = simulate(mapping, tx, skipped, **bits)
    jax.tree.map(np.testing.assert_array_equal, state, expected)


def test_a_bad_step_before_start_step_counts_for_nothing():
    grads = random_grads(SHAPES, 2, 3)
    bad = dict(grads, bias=with_value(grads["bias"], (0, 1, 0), np.nan))
    tx = shared_powersgd(2, axis_name=AXIS, start_step=2)
    outputs, state = simulate("vmap", tx, bad, tx.init(zeros()))
    assert not np.isfinite(outputs["bias"][1]).all()
    assert int(state.count) == 2
    assert not np.any(state.residual["dense"])


def test_an_overflow_on_a_float16_wire_is_a_bad_step():
    tx = shared_powersgd(1, axis_name=AXIS, start_step=0, comm_dtype=jnp.float16)
    grads = random_grads(SHAPES, 2, 2)
    for x in grads.values():
        x[0, 1] *= 1e6
    outputs, state = simulate("vmap", tx, grads, tx.init(zeros()))
    assert np.isfinite(outputs["dense"][0]).all()
    assert np.isnan(outputs["dense"][1]).all()
    assert int(state.count) == 1


@pytest.mark.parametrize("mapping", ["vmap", "pmap"])
def test_apply_if_finite_behind_the_reducer_skips_the_step_everywhere(mapping):
    grads = random_grads(SHAPES, 2, 4)
    grads["dense"][1, 2, 0, 0] = np.inf
    tx = optax.chain(
        shared_powersgd(2, axis_name=AXIS, start_step=0),
        optax.apply_if_finite(optax.sgd(0.1, momentum=0.9), max_consecutive_errors=5),
    )
    outputs, state = simulate(mapping, tx, grads, tx.init(zeros()))
    for name in SHAPES:
        assert not np.any(outputs[name][2])
        assert np.any(outputs[name][3])
    assert int(state[1].total_notfinite) == 1


@pytest.mark.parametrize("scale", [1e-30, 1e30])
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_tiny_and_huge_gradients_give_finite_results_of_their_size(scale, rank):
    grads = jax.tree.map(lambda g: g * scale, random_grads(SHAPES, 3, 3))
    tx = shared_powersgd(rank, axis_name=AXIS, start_step=0)
    outputs, state = simulate("vmap", tx, grads, tx.init(zeros()))
    expected, _ = simulate("vmap", tx, random_grads(SHAPES, 3, 3), tx.init(zeros()))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))
    for name in SHAPES:
        np.testing.assert_allclose(outputs[name] / scale, expected[name], atol=1e-4)


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_zero_gradients_give_zeros_and_the_leaf_recovers(rank):
    grads = random_grads(SHAPES, 2, 6)
    grads["dense"][:, :3] = 0
    tx = shared_powersgd(rank, axis_name=AXIS, start_step=0)
    outputs, state = simulate("vmap", tx, grads, tx.init(zeros()))
    assert not np.any(outputs["dense"][:3])
    # Directions were not lost for ever: what goes in comes out or is kept, at full rank.
    assert np.linalg.matrix_rank(outputs["dense"][5]) == rank
    total = outputs["dense"].sum(0) + state.residual["dense"].mean(0)
    np.testing.assert_allclose(total, grads["dense"].mean(0).sum(0), atol=1e-4)


@pytest.mark.parametrize("rank", [2, 4])
def test_rank_deficient_gradients_are_transmitted_exactly(rank):
    u = jax.random.normal(jax.random.key(0), (24, 1))
    v = jax.random.normal(jax.random.key(1), (1, 16))
    grads = {"dense": jnp.broadcast_to(u @ v, (2, 4, 24, 16))}
    tx = shared_powersgd(rank, axis_name=AXIS, start_step=0)
    outputs, state = simulate("vmap", tx, grads, tx.init({"dense": jnp.zeros((24, 16))}))
    np.testing.assert_allclose(outputs["dense"][3], u @ v, atol=1e-5)
    assert np.isfinite(state.residual["dense"]).all()


@pytest.mark.parametrize("start_step", [0, 1])
def test_float16_gradients_whose_sum_overflows_have_a_mean(start_step):
    grads = {"dense": jnp.full((4, 1, 24, 16), 3e4, jnp.float16)}
    params = {"dense": jnp.zeros((24, 16), jnp.float16)}
    powersgd = shared_powersgd(2, axis_name=AXIS, start_step=start_step, comm_dtype="float16")
    # A low-rank factor of so large a matrix does not fit float16; its mean does.
    transformations = [jaxcomp.allreduce(axis_name=AXIS)]
    transformations += [jaxcomp.allreduce(axis_name=AXIS, comm_dtype="float16")]
    transformations += [powersgd] if start_step else []
    for tx in transformations:
        outputs, _ = simulate("vmap", tx, grads, tx.init(params))
        np.testing.assert_allclose(outputs["dense"][0].astype(jnp.float32), 3e4, rtol=1e-3)


def test_an_output_too_large_for_its_own_dtype_is_a_bad_step():
    """The factors are float32 and finite; only the cast of the output overflows."""
    tx = shared_powersgd(2, axis_name=AXIS, start_step=0)
    params = {"dense": jnp.zeros((24, 16), jnp.float16)}
    state = tx.init(params)._replace(residual={"dense": jnp.full((24, 16), 1e5)})
    grads = {"dense": jnp.ones((2, 1, 24, 16), jnp.float16)}
    outputs, after = simulate("vmap", tx, grads, state)
    assert np.isnan(outputs["dense"].astype(jnp.float32)).all()
    assert int(after.count) == 0
    np.testing.assert_array_equal(after.residual["dense"], jnp.full((2, 24, 16), 1e5))


@pytest.mark.parametrize("wire", [None, jnp.int8, "int6", jnp.bfloat16])
@pytest.mark.parametrize("pattern", ["all", "opposite", "one column", "one value"])
@pytest.mark.parametrize("make", [jaxcomp.powersgd, jaxcomp.acp_sgd])
def test_one_step_near_the_end_of_the_range_does_not_spoil_the_next(make, wire, pattern):
    """A finite gradient of 1.7e38 whose norm is not: refused, or it goes out in the end."""
    n, shape, large = 2, (24, 16), np.float32(1.7e38)
    tx = make(2, axis_name=AXIS, start_step=0, min_compression_rate=1.0, comm_dtype=wire)
    grads = random_grads({"w": shape}, n, 8)
    bad = np.zeros((n, *shape), np.float32)
    if pattern == "all":
        bad[:] = large * np.sign(grads["w"][:, 3])
    elif pattern == "opposite":  # of which the mean is zero, and only the residuals are large
        bad[0], bad[1] = large, -large
    elif pattern == "one column":
        bad[:, :, 5] = large
    else:
        bad[:, 7, 5] = large
    grads["w"][:, 3] = bad
    outputs, state = simulate("vmap", tx, grads, tx.init({"w": jnp.zeros(shape)}))
    assert np.isfinite(outputs["w"][:3]).all()
    assert np.isfinite(outputs["w"][4:]).all()
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in jax.tree.leaves(state))
    if pattern != "one value":
        assert np.isnan(outputs["w"][3]).all()
        assert np.abs(outputs["w"][4:]).max() < 100
