"""A residual that claims to be replicated and is one replica's: seen, and without effect."""

import flax.jax_utils
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from leaves import random_grads
from runners import AXIS, mesh_of

import jaxcomp

P = jax.P
N, STEPS = 4, 5
GRADS = random_grads({"w": (16, 12)}, N, STEPS + 1)
REDUCERS = {
    "powersgd": lambda: jaxcomp.powersgd(1, axis_name=AXIS, start_step=1),
    "now and then": lambda: jaxcomp.powersgd(1, axis_name=AXIS, start_step=0, feedback_every=2),
    "error_feedback": lambda: jaxcomp.error_feedback(
        jaxcomp.quantized_allreduce(axis_name=AXIS, block_size=None)
    ),
}


def at(step):
    return jax.tree.map(lambda g: g[:, step], GRADS)


def as_in_flax_imagenet(tx):
    """pmap with the state in and out as if it were replicated."""
    update = jax.pmap(
        tx.update, axis_name=AXIS, in_axes=(0, None), out_axes=None, devices=jax.devices()[:N]
    )
    return lambda grads, state: update(grads, state)[1]


def without_checks(tx):
    """shard_map(check_vma=False) whose specifications say that the state is replicated."""
    update = jax.shard_map(
        lambda g, s: tx.update(jax.tree.map(lambda x: x[0], g), s)[1],
        mesh=mesh_of(N),
        in_specs=(P(AXIS), P()),
        out_specs=P(),
        check_vma=False,
    )
    return jax.jit(update)


def means(tx, grads, state):
    """What every replica gets, from states with an axis of replicas where they differ."""
    axes = jaxcomp.state_axes(state)
    update = jax.vmap(tx.update, in_axes=(0, axes), out_axes=(None, axes), axis_name=AXIS)
    return update(grads, state)[0]["w"]


def copies(state):
    """One state for each replica, as it comes from a checkpoint."""
    axes = jaxcomp.state_axes(state)
    return jax.tree.map(
        lambda x, axis: x if axis is None else jnp.stack([x] * N),
        state,
        axes,
        is_leaf=lambda x: x is None,
    )


@pytest.mark.parametrize("mapping", [as_in_flax_imagenet, without_checks])
@pytest.mark.parametrize("name", REDUCERS)
def test_a_residual_replicated_in_name_only_is_refused_and_harmless(name, mapping):
    tx = REDUCERS[name]()
    step, state = mapping(tx), tx.init(jax.tree.map(lambda g: g[0, 0], GRADS))
    for i in range(STEPS):
        state = step(at(i), state)
    residuals = [np.asarray(x.data) for x in state.residual["w"].addressable_shards]
    assert state.residual["w"].is_fully_replicated
    assert np.abs(residuals[0] - residuals[1]).max() > 1e-3
    with pytest.raises(ValueError, match="residual of one replica only"):
        jaxcomp.consolidate(state)

    saved = jax.device_get(state)  # the first device's
    np.testing.assert_array_equal(saved.residual["w"], residuals[0])
    restored = copies(jax.tree.map(jnp.asarray, saved))
    only_first = restored._replace(
        residual={"w": restored.residual["w"].at[1:].set(0.0)},
        mark=jnp.zeros_like(restored.mark),
    )
    found, expected = means(tx, at(STEPS), restored), means(tx, at(STEPS), only_first)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    everywhere = means(tx, at(STEPS), restored._replace(mark=jnp.zeros_like(restored.mark)))
    if name != "now and then":
        assert np.abs(everywhere - expected).max() > 1e-4  # the gradient nobody computed


@pytest.mark.parametrize("name", REDUCERS)
def test_pmap_states_consolidate_outside_and_their_first_copy_does_not(name):
    tx = REDUCERS[name]()
    devices = jax.devices()[:N]
    state = flax.jax_utils.replicate(tx.init(jax.tree.map(lambda g: g[0, 0], GRADS)), devices)
    update = jax.pmap(tx.update, axis_name=AXIS, devices=devices)
    for i in range(STEPS):
        _, state = update(at(i), state)
    inside = jax.pmap(lambda s: jaxcomp.consolidate(s, AXIS), axis_name=AXIS, devices=devices)
    expected = flax.jax_utils.unreplicate(inside(state))
    found = jaxcomp.consolidate(state)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, expected)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, jaxcomp.consolidate(found), found)
    with pytest.raises(ValueError, match="residual of one replica only"):
        jaxcomp.consolidate(flax.jax_utils.unreplicate(state))


def test_state_axes_map_what_is_shared_once():
    tx = REDUCERS["powersgd"]()
    params = jax.tree.map(lambda g: g[0, 0], GRADS)
    state = copies(tx.init(params))
    axes = jaxcomp.state_axes(state)
    update = jax.pmap(
        tx.update,
        axis_name=AXIS,
        in_axes=(0, axes),
        out_axes=(None, axes),
        devices=jax.devices()[:N],
    )
    for i in range(3):
        _, state = update(at(i), state)
    assert state.residual["w"].shape == (N, 16, 12)
    assert state.q["w"].shape == tx.init(params).q["w"].shape
    one = jaxcomp.consolidate(state)
    np.testing.assert_allclose(one.residual["w"], np.mean(state.residual["w"], 0), atol=1e-6)


def test_what_cannot_be_consolidated_outside_is_refused():
    tx = jaxcomp.error_feedback(jaxcomp.allreduce(axis_name=AXIS))
    state = copies(tx.init({"w": jnp.zeros((3, 2)), "v": jnp.zeros((3, 2))}))
    odd = state._replace(residual={**state.residual, "v": jnp.zeros((3, 2))})
    with pytest.raises(ValueError, match="one leading axis of replicas"):
        jaxcomp.consolidate(odd)
    differing = (state, {"momentum": jnp.arange(8.0).reshape(N, 2)})
    with pytest.raises(ValueError, match=r"leaf .*momentum.* differs between them"):
        jaxcomp.consolidate(differing)
