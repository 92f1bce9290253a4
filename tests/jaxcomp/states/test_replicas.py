"""One consolidated copy out, any number of replicas in; generic over state classes."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import jaxcomp
from tests.helpers.classifier import grid, placed
from tests.helpers.leaves import close, equal, random_grads
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
    assert specs["mine"].memory["m"] == specs["mine"].inner.residual["kernel"] == jax.P(AXIS)
    assert specs["mine"].inner.q["kernel"] == specs["step"] == jax.P()
    placed = jaxcomp.shard_state(state, mesh_of(4), AXIS)
    assert placed["mine"].memory["m"].shape == (4, 3, 2)
    stacked = jax.tree.map(lambda x: jnp.stack([x, 3 * x]), state)
    mean = jax.vmap(lambda s: jaxcomp.consolidate(s, AXIS), axis_name=AXIS)(stacked)
    assert_allclose(mean["mine"].memory["m"], 2.0)


def test_accumulated_gradients_of_multisteps_are_per_replica():
    axes = jaxcomp.state_axes(optax.MultiSteps(powersgd(2), 4).init(PARAMS))
    assert axes.acc_grads["bias"] == axes.inner_opt_state.residual["kernel"] == 0
    assert axes.mini_step is None


def test_shard_state_keeps_a_sharding_over_other_axes():
    mesh = grid(2, model=4)
    kernel = placed(mesh, np.arange(24.0 * 16).reshape(24, 16), jax.P("model", None))
    state = jaxcomp.PowerSGDState(jnp.array(0, jnp.int32), kernel, kernel)
    found = jaxcomp.shard_state(state, mesh, AXIS)
    assert found.residual.sharding.spec == jax.P(AXIS, "model", None)
    assert found.q.sharding.spec == jax.P("model", None)
    again = jaxcomp.shard_state(found, mesh, AXIS)
    assert again.residual.sharding.spec == found.residual.sharding.spec
    assert found.count.sharding.is_fully_replicated
    assert_array_equal(found.residual, np.stack([kernel] * 2))
    assert {shard.data.shape for shard in found.residual.addressable_shards} == {(1, 6, 16)}


def test_a_state_on_a_device_outside_of_the_mesh_is_placed():
    """As one that was restored on the first device, for a mesh of others."""
    devices = jax.devices()
    state = jax.device_put(powersgd(2).init(PARAMS), devices[0])
    mesh = jax.make_mesh((2,), (AXIS,), devices=devices[2:4])
    found = jaxcomp.shard_state(state, mesh, AXIS)
    assert found.residual["kernel"].sharding.device_set == set(devices[2:4])
    assert found.residual["kernel"].shape == (2, 24, 16)


def test_random_keys_and_python_numbers_are_placed_too():
    """Makes as many copies of one replica's own keys as the mesh has replicas."""
    keys = jax.random.split(jax.random.key(3, impl="rbg"), 2)
    found = jaxcomp.shard_state({"own": Own(None, keys), "count": 4}, mesh_of(3), AXIS)
    assert int(found["count"]) == 4
    own = found["own"].memory
    assert own.sharding.spec == jax.P(AXIS, None)
    assert own.dtype == keys.dtype
    equal(jax.random.key_data(own), jax.random.key_data(jnp.stack([keys] * 3)))


def test_states_in_a_closure_of_a_compiled_function_are_read():
    """Inside `jax.jit` whatever is computed is traced, even from values that are known."""
    fresh = powersgd(2, start_step=0).init(PARAMS)
    rows = jaxcomp.stack_replicas(fresh, 2)
    copies = jax.tree.map(lambda x: jnp.stack([x, x]), fresh)

    @jax.jit
    def read(x):
        share = jaxcomp.diagnostics(rows).share
        placed = jaxcomp.shard_state(rows, mesh_of(4), AXIS)
        return x * share, jaxcomp.consolidate(rows), jaxcomp.consolidate(copies), placed

    share, of_rows, of_copies, placed = read(1.0)
    assert share == 1
    assert placed.residual["kernel"].shape == (4, 24, 16)
    equal(of_rows, fresh)
    equal(of_copies, fresh)


def test_errors_name_the_leaf_or_the_axis():
    state = powersgd(2).init(PARAMS)
    with pytest.raises(ValueError, match=r"`mesh` must be a mesh, .* got a str"):
        jaxcomp.shard_state(state, AXIS, mesh_of(2))
    with pytest.raises(ValueError, match="no axis 'model'"):
        jaxcomp.shard_state(state, mesh_of(2), "model")
    with pytest.raises(ValueError, match=rf"no axis \['{AXIS}'\]"):
        jaxcomp.shard_state(state, mesh_of(2), [AXIS])
    with pytest.raises(ValueError, match=r"The leaf \[1\] is a builtin.* and not an array"):
        jaxcomp.shard_state([state, len], mesh_of(2), AXIS)
    with pytest.raises(ValueError, match=r"`state` has only a shape at \.count"):
        jaxcomp.shard_state(jax.eval_shape(powersgd(2).init, PARAMS), mesh_of(2), AXIS)
    with pytest.raises(ValueError, match="not bound"):
        jaxcomp.consolidate(state, AXIS)


def test_a_state_made_inside_the_mapped_function_can_be_scanned():
    tx = powersgd(2)
    grads = random_grads({"kernel": (24, 16)}, 2, 3)

    def one(state, grads):
        updates, state = tx.update(grads, state)
        return state, updates

    def run(grads):
        return jax.lax.scan(one, tx.init({"kernel": jnp.zeros((24, 16))}), first(grads))[1]

    expected, _ = simulate("vmap", tx, grads)
    close(sharded(2, run, jax.P(AXIS), jax.P())(grads), expected, atol=1e-5)
