"""A checkpoint continues under another rank, and with compression newly on or off."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from leaves import random_grads
from runners import AXIS, simulate

import jaxcomp

SHAPES = {"bias": (16,), "dense": (40, 30), "stack": (3, 20, 24)}
PARAMS = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}


def stacked(path, leaf):
    if leaf.ndim == 3:
        return jaxcomp.MatrixDims(batch=(0,), rows=(2,), cols=(1,))
    return jaxcomp.MatrixDims(rows=(1,), cols=(0,)) if leaf.ndim == 2 else None


def powersgd(rank, **arguments):
    return jaxcomp.powersgd(rank, axis_name=AXIS, start_step=0, matrix_dims=stacked, **arguments)


def trained(tx, steps=3):
    """A consolidated state with something in every field."""
    with jax.numpy_dtype_promotion("standard"):  # optax.adam needs it
        _, state = simulate("vmap", tx, random_grads(SHAPES, 2, steps), tx.init(PARAMS))
    return jaxcomp.consolidate(state)


@pytest.fixture(scope="module")
def saved():
    return trained(optax.chain(powersgd(3), optax.adam(1e-3)))


@pytest.mark.parametrize("rank", [1, 3, 5])
def test_another_rank(saved, rank):
    tx = optax.chain(powersgd(rank), optax.adam(1e-3))
    state = jaxcomp.adapt_state(saved, PARAMS, tx)
    jax.tree.map(lambda a, b: np.testing.assert_equal(a.shape, b.shape), state, tx.init(PARAMS))
    jax.tree.map(np.testing.assert_array_equal, state[1:], saved[1:])
    jax.tree.map(np.testing.assert_array_equal, state[0].residual, saved[0].residual)
    assert int(state[0].count) == 3
    for name in ("dense", "stack"):
        q, before = np.asarray(state[0].q[name]), np.asarray(saved[0].q[name])
        kept = min(rank, 3)
        np.testing.assert_array_equal(q[..., :kept], before[..., :kept])
        fresh = q[..., kept:]
        gram = np.swapaxes(fresh, -1, -2) @ fresh
        np.testing.assert_allclose(
            gram, np.broadcast_to(np.eye(rank - kept), gram.shape), atol=1e-5
        )
        np.testing.assert_allclose(np.swapaxes(before, -1, -2) @ fresh, 0, atol=1e-3)
    simulate("vmap", powersgd(rank), random_grads(SHAPES, 2, 1), state[0])


def test_compression_newly_on_off_and_for_other_leaves(saved):
    on = optax.chain(powersgd(2), optax.adam(1e-3))
    off = optax.chain(jaxcomp.allreduce(axis_name=AXIS), optax.adam(1e-3))
    bare = optax.adam(1e-3)  # not even a place in the chain
    some = optax.chain(powersgd(lambda path, leaf: 3 if leaf.ndim == 2 else None), optax.adam(1e-3))
    for tx in (off, bare, some, on):
        state = jaxcomp.adapt_state(saved, PARAMS, tx)
        again = jaxcomp.adapt_state(state, PARAMS, on)
        assert jax.tree.structure(state) == jax.tree.structure(tx.init(PARAMS))
        assert jax.tree.structure(again) == jax.tree.structure(on.init(PARAMS))
        jax.tree.map(np.testing.assert_array_equal, again[1:], saved[1:])
    partly = jaxcomp.adapt_state(saved, PARAMS, some)[0]
    np.testing.assert_array_equal(partly.residual["dense"], saved[0].residual["dense"])
    assert isinstance(partly.residual["stack"], optax.MaskedNode)


def test_inside_other_reducers():
    def tx(rank):
        inner = powersgd(rank, error_feedback=False)
        dtype = jnp.bfloat16 if rank > 1 else None
        return jaxcomp.error_feedback(inner, residual_dtype=dtype)

    old = trained(tx(1))
    new = jaxcomp.adapt_state(old, PARAMS, tx(2))
    assert jax.tree.structure(new) == jax.tree.structure(tx(2).init(PARAMS))
    np.testing.assert_allclose(new.residual["dense"], old.residual["dense"], rtol=0.01)
    np.testing.assert_array_equal(new.inner.q["dense"][:, :1], old.inner.q["dense"])
    assert new.residual["dense"].dtype == jnp.bfloat16
    assert int(new.count) == int(new.inner.count) == 3


def feedback(**arguments):
    return jaxcomp.error_feedback(jaxcomp.quantized_allreduce(axis_name=AXIS), **arguments)


def test_another_kind_of_reducer_takes_the_residual_over(saved):
    """Nothing is lost: output + new mean residual = mean gradient + residual of the old run."""
    tx = optax.chain(feedback(), optax.adam(1e-3))
    state = jaxcomp.adapt_state(saved, PARAMS, tx)
    assert jax.tree.structure(state) == jax.tree.structure(tx.init(PARAMS))
    assert int(state[0].count) == 0
    jax.tree.map(np.testing.assert_array_equal, state[1:], saved[1:])
    np.testing.assert_array_equal(state[0].residual["bias"], 0)  # powersgd had sent all of it
    before = {name: saved[0].residual[name] for name in ("dense", "stack")}
    assert all(np.any(x) for x in before.values())

    grads = random_grads(SHAPES, 2, 1, seed=5)
    outputs, after = simulate("vmap", feedback(), grads, state[0])
    for name, old in before.items():
        np.testing.assert_array_equal(state[0].residual[name], old)
        np.testing.assert_allclose(
            outputs[name][0] + after.residual[name].mean(0), grads[name].mean(0)[0] + old, atol=1e-5
        )

    # And back: the residual in the new one's dtype, its count and factors from the beginning.
    narrow = optax.chain(powersgd(2, residual_dtype=jnp.bfloat16), optax.adam(1e-3))
    back = jaxcomp.adapt_state(state, PARAMS, narrow)
    assert int(back[0].count) == 0
    jax.tree.map(np.testing.assert_array_equal, back[0].q, narrow.init(PARAMS)[0].q)
    for name, old in before.items():
        np.testing.assert_array_equal(back[0].residual[name], old.astype(jnp.bfloat16))
    assert isinstance(back[0].residual["bias"], optax.MaskedNode)


def test_reducers_go_with_their_like_before_any_other():
    first, second = trained(feedback()), trained(powersgd(2))
    state = jaxcomp.adapt_state((first, second), PARAMS, optax.chain(powersgd(3), feedback()))
    np.testing.assert_array_equal(state[0].residual["dense"], second.residual["dense"])
    np.testing.assert_array_equal(state[1].residual["bias"], first.residual["bias"])


@pytest.mark.parametrize("other", [powersgd(2), feedback()], ids=["powersgd", "feedback"])
def test_one_matrix_of_all_leaves_fits_its_like_only(other):
    batched = jaxcomp.batched_powersgd(2, axis_name=AXIS, start_step=0)
    old = trained(batched)
    jax.tree.map(np.testing.assert_array_equal, jaxcomp.adapt_state(old, PARAMS, batched), old)
    for tx, state in ((other, old), (batched, trained(other))):
        fresh = tx.init(PARAMS)
        jax.tree.map(np.testing.assert_array_equal, jaxcomp.adapt_state(state, PARAMS, tx), fresh)


def test_parameters_that_are_one_array():
    leaf = jnp.zeros((20, 20))
    tx = jaxcomp.powersgd(2, axis_name=AXIS, start_step=0)
    _, state = simulate("vmap", tx, random_grads({"x": (20, 20)}, 1, 2)["x"], tx.init(leaf))
    state = jaxcomp.consolidate(state)
    adapted = jaxcomp.adapt_state(state, leaf, feedback())
    np.testing.assert_array_equal(adapted.residual, state.residual)

    one_sided = jaxcomp.acp_sgd(2, axis_name=AXIS, start_step=0).init(leaf)
    narrow = jaxcomp.acp_sgd(1, axis_name=AXIS, start_step=0)
    narrow = jaxcomp.adapt_state(one_sided, leaf, narrow)
    np.testing.assert_array_equal(narrow.p, one_sided.p[:, :1])


def test_acp_sgd_and_powersgd_hand_over_residual_and_right_factors(saved):
    one_sided = jaxcomp.acp_sgd(2, axis_name=AXIS, start_step=0, matrix_dims=stacked)
    there = jaxcomp.adapt_state(saved[0], PARAMS, one_sided)
    assert jax.tree.structure(there) == jax.tree.structure(one_sided.init(PARAMS))
    back = jaxcomp.adapt_state(there, PARAMS, powersgd(saved[0].q["dense"].shape[-1]))
    for state in (there, back):
        jax.tree.map(np.testing.assert_array_equal, state.residual, saved[0].residual)
    np.testing.assert_array_equal(back.q["dense"][:, :1], saved[0].q["dense"][:, :1])


def test_what_does_not_fit_is_named(saved):
    with pytest.raises(ValueError, match=r"(?s)\.mu\['dense'\]: only in the state.*\.trace"):
        jaxcomp.adapt_state(saved, PARAMS, optax.chain(powersgd(2), optax.sgd(0.1, 0.9)))
    other = {**PARAMS, "dense": jnp.zeros((50, 30))}
    with pytest.raises(ValueError, match=r"\.mu\['dense'\]: \(40, 30\) in the state"):
        jaxcomp.adapt_state(saved, other, optax.chain(powersgd(2), optax.adam(1e-3)))
    with pytest.raises(
        ValueError, match=r"residual\['dense'\]: \(40, 30\) in the state, \(50, 30\)"
    ):
        jaxcomp.adapt_state(saved[0], other, powersgd(2))
