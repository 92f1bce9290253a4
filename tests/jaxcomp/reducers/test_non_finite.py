"""Gradients at the edges of the float range, and steps that must leave no trace."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from leaves import SHAPES, random_grads, with_value, zeros
from reducers import shared_powersgd
from runners import AXIS, simulate

import jaxcomp


@pytest.mark.parametrize(
    ("mapping", "start_step", "leaf"),
    [("vmap", 0, "dense"), ("pmap", 2, "bias"), ("shard_map", 0, "bias"), ("shard_map", 2, "conv")],
)
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


@pytest.mark.parametrize("rank", [1, 4])
def test_tiny_and_huge_gradients_give_finite_results_of_their_size(rank):
    tx = shared_powersgd(rank, axis_name=AXIS, start_step=0)
    expected, _ = simulate("vmap", tx, random_grads(SHAPES, 3, 3), tx.init(zeros()))
    for scale in (1e-30, 1e30):
        grads = jax.tree.map(lambda g, s=scale: g * s, random_grads(SHAPES, 3, 3))
        outputs, state = simulate("vmap", tx, grads, tx.init(zeros()))
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))
        for name in SHAPES:
            np.testing.assert_allclose(outputs[name] / scale, expected[name], atol=1e-4)


@pytest.mark.parametrize("rank", [1, 4])
def test_zero_gradients_give_zeros_and_the_leaf_recovers(rank):
    grads = random_grads(SHAPES, 3, 6)
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
    u, v = np.random.default_rng(0).normal(size=(2, 24)).astype(np.float32)
    product = np.outer(u, v[:16])
    grads = {"dense": np.broadcast_to(product, (2, 4, 24, 16))}
    tx = shared_powersgd(rank, axis_name=AXIS, start_step=0)
    outputs, state = simulate("vmap", tx, grads, tx.init({"dense": jnp.zeros((24, 16))}))
    np.testing.assert_allclose(outputs["dense"][3], product, atol=1e-5)
    assert np.isfinite(state.residual["dense"]).all()


def test_float16_gradients_whose_sum_overflows_have_a_mean():
    grads = {"dense": jnp.full((4, 1, 24, 16), 3e4, jnp.float16)}
    params = {"dense": jnp.zeros((24, 16), jnp.float16)}
    for tx in (
        jaxcomp.allreduce(axis_name=AXIS),
        jaxcomp.allreduce(axis_name=AXIS, comm_dtype="float16"),
        # A low-rank factor of so large a matrix does not fit float16; its mean does.
        shared_powersgd(2, axis_name=AXIS, start_step=1, comm_dtype="float16"),
    ):
        outputs, _ = simulate("vmap", tx, grads, tx.init(params))
        np.testing.assert_allclose(outputs["dense"][0].astype(jnp.float32), 3e4, rtol=1e-3)


@pytest.mark.parametrize("wire", [None, jnp.int8, "int6", jnp.bfloat16])
@pytest.mark.parametrize("make", [jaxcomp.powersgd, jaxcomp.acp_sgd])
def test_one_step_near_the_end_of_the_range_does_not_spoil_the_next(make, wire):
    """A finite gradient of 1.7e38 whose norm is not: refused, or it goes out in the end."""
    n, shape, large = 2, (24, 16), np.float32(1.7e38)
    tx = make(2, axis_name=AXIS, start_step=0, min_compression_rate=1.0, comm_dtype=wire)
    usual = random_grads({"w": shape}, n, 8)["w"]
    everywhere = large * np.sign(usual[:, 3])
    # Of opposite values the mean is zero, and only the residuals are large.
    opposite = np.stack([np.full(shape, large), np.full(shape, -large)])
    none = np.zeros_like(everywhere)
    one_column = with_value(none, np.s_[:, :, 5], large)
    one_value = with_value(none, np.s_[:, 7, 5], large)
    for bad in (everywhere, opposite, one_column, one_value):
        grads = {"w": with_value(usual, np.s_[:, 3], bad)}
        outputs, state = simulate("vmap", tx, grads, tx.init({"w": jnp.zeros(shape)}))
        assert np.isfinite(outputs["w"][:3]).all()
        assert np.isfinite(outputs["w"][4:]).all()
        assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in jax.tree.leaves(state))
        if bad is not one_value:
            assert np.isnan(outputs["w"][3]).all()
            assert np.abs(outputs["w"][4:]).max() < 100
