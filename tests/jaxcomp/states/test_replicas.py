"""One consolidated copy out, any number of replicas in; generic over state classes."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import jaxcomp
from tests.helpers.leaves import random_grads
from tests.helpers.reducers import powersgd
from tests.helpers.runners import AXIS, first, mesh_of, sharded, simulate

PARAMS = {"kernel": jnp.zeros((24, 16)), "bias": jnp.zeros(16)}


class Own(NamedTuple):
    """Holds a user's reducer state."""

    inner: Any
    memory: Any
    per_replica = ("memory",)


def test_a_users_own_state_takes_part_and_jaxcomp_states_inside_it_too():
    inner = powersgd(2).init(PARAMS)
    state = {"mine": Own(inner, {"m": jnp.ones((3, 2))}), "step": jnp.array(0)}
    specs = jaxcomp.state_specs(state, AXIS)
    assert specs["mine"].memory["m"] == jax.P(AXIS)
    assert specs["mine"].inner.residual["kernel"] == jax.P(AXIS)
    assert specs["mine"].inner.q["kernel"] == specs["step"] == jax.P()
    placed = jaxcomp.shard_state(state, mesh_of(4), AXIS)
    assert placed["mine"].memory["m"].shape == (4, 3, 2)

    stacked = jax.tree.map(lambda x: jnp.stack([x, 3 * x]), state)
    mean = jax.vmap(lambda s: jaxcomp.consolidate(s, AXIS), axis_name=AXIS)(stacked)
    np.testing.assert_allclose(mean["mine"].memory["m"], 2.0)


def test_accumulated_gradients_of_multisteps_are_per_replica():
    tx = optax.MultiSteps(powersgd(2), 4)
    axes = jaxcomp.state_axes(tx.init(PARAMS))
    assert axes.acc_grads["bias"] == axes.inner_opt_state.residual["kernel"] == 0
    assert axes.mini_step is None


def test_shard_state_keeps_a_sharding_over_other_axes():
    mesh = jax.make_mesh((2, 4), (AXIS, "fsdp"), axis_types=(AxisType.Auto,) * 2)
    params = jax.device_put(
        {"kernel": jnp.arange(24.0 * 16).reshape(24, 16)},
        jax.NamedSharding(mesh, jax.P("fsdp", None)),
    )
    state = jaxcomp.PowerSGDState(jnp.array(0, jnp.int32), params, params)
    placed = jaxcomp.shard_state(state, mesh, AXIS)
    residual = placed.residual["kernel"]
    q = placed.q["kernel"]
    assert residual.sharding.spec == jax.P(AXIS, "fsdp", None)
    assert q.sharding.spec == jax.P("fsdp", None)
    assert placed.count.sharding.is_fully_replicated
    np.testing.assert_array_equal(residual, jnp.stack([params["kernel"]] * 2))
    assert {shard.data.shape for shard in residual.addressable_shards} == {(1, 6, 16)}


def test_random_keys_and_python_numbers_are_placed_too():
    """Makes as many copies of one replica's own keys as the mesh has replicas."""
    keys = jax.random.split(jax.random.key(3, impl="rbg"), 3)
    state = {
        "own": Own(None, {"keys": keys[:2]}),
        "key": keys[2],
        "plain": np.float32(2),
        "count": 4,
    }
    placed = jaxcomp.shard_state(state, mesh_of(3), AXIS)
    assert placed["plain"].sharding.is_fully_replicated
    assert int(placed["count"]) == 4
    own = placed["own"].memory["keys"]
    assert own.sharding.spec == jax.P(AXIS, None)
    assert {shard.data.shape for shard in own.addressable_shards} == {(1, 2)}
    for found, expected in ((placed["key"], keys[2]), (own, jnp.stack([keys[:2]] * 3))):
        assert jax.random.key_impl(found) == "rbg"
        np.testing.assert_array_equal(*map(jax.random.key_data, (found, expected)))


def test_errors_name_the_leaf_or_the_axis():
    state = powersgd(2).init(PARAMS)
    with pytest.raises(ValueError, match=r"`mesh` must be a mesh, .* got a str"):
        jaxcomp.shard_state(state, AXIS, mesh_of(2))
    with pytest.raises(ValueError, match="no axis 'model'"):
        jaxcomp.shard_state(state, mesh_of(2), "model")
    with pytest.raises(ValueError, match="not bound"):
        jaxcomp.consolidate(state, AXIS)


def test_a_state_made_inside_the_mapped_function_can_be_scanned():
    tx = powersgd(2)
    grads = random_grads({"kernel": (24, 16)}, 2, 3)

    def run(g):
        def one(state, g):
            updates, state = tx.update(g, state)
            return state, updates

        return jax.lax.scan(one, tx.init({"kernel": jnp.zeros((24, 16))}), g)[1]

    mapped = sharded(2, lambda g: run(first(g)), (jax.P(AXIS),), jax.P())
    expected, _ = simulate("vmap", tx, grads)
    np.testing.assert_allclose(mapped(grads)["kernel"], expected["kernel"], atol=1e-5)
