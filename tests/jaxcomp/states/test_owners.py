"""Whose a residual is: one replica's in the place of all is refused, wherever it comes from."""

from typing import NamedTuple

import flax.jax_utils
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomp
from tests.helpers.classifier import close
from tests.helpers.leaves import random_grads, zeros_of_one
from tests.helpers.reducers import feedback, powersgd, quantized
from tests.helpers.runners import AXIS, first, mesh_of, over_replicas, sharded, simulate, steps_of

P = jax.P
N = 4
STEPS = 5
GRADS = random_grads({"w": (16, 12)}, N, STEPS + 1)
REDUCERS = {
    "powersgd": powersgd(1, start_step=1),
    "now and then": feedback(powersgd(1, error_feedback=False), every=2),
    "error_feedback": feedback(quantized(block_size=None)),
}
ONE = "residual of one replica only"


def as_in_flax_imagenet(tx):
    """Maps by pmap with the state in and out as if it were replicated."""
    update = jax.pmap(
        tx.update, axis_name=AXIS, in_axes=(0, None), out_axes=None, devices=jax.devices()[:N]
    )
    return lambda grads, state: update(grads, state)[1]


def without_checks(tx):
    """Maps by shard_map(check_vma=False) with specifications of a replicated state."""

    def update(g, s):
        return tx.update(first(g), s)[1]

    return sharded(N, update, (P(AXIS), P()), P(), check_vma=False)


IN_NAME_ONLY = [(name, as_in_flax_imagenet) for name in REDUCERS]
IN_NAME_ONLY += [("powersgd", without_checks)]


@pytest.mark.parametrize(("name", "mapping"), IN_NAME_ONLY)
def test_a_residual_replicated_in_name_only_is_refused(name, mapping):
    tx = REDUCERS[name]
    step = mapping(tx)
    state = tx.init(zeros_of_one(GRADS))
    for grads in steps_of(GRADS):
        state = step(grads, state)
    residuals = [np.asarray(x.data) for x in state.residual["w"].addressable_shards]
    assert state.residual["w"].is_fully_replicated
    assert np.abs(residuals[0] - residuals[1]).max() > 1e-3
    with pytest.raises(ValueError, match=ONE):
        jaxcomp.consolidate(state)
    saved = jax.device_get(state)  # the first device's
    with pytest.raises(ValueError, match=ONE):
        jaxcomp.shard_state(saved, mesh_of(N), AXIS)
    with pytest.raises(ValueError, match=ONE):
        jaxcomp.stack_replicas(saved, N)


@pytest.mark.parametrize("name", REDUCERS)
def test_pmap_states_consolidate_outside_and_their_first_copy_does_not(name):
    tx = REDUCERS[name]
    devices = jax.devices()[:N]
    state = flax.jax_utils.replicate(tx.init(zeros_of_one(GRADS)), devices)
    update = jax.pmap(tx.update, axis_name=AXIS, devices=devices)
    for grads in steps_of(GRADS):
        _, state = update(grads, state)
    inside = jax.pmap(lambda s: jaxcomp.consolidate(s, AXIS), axis_name=AXIS, devices=devices)
    expected = flax.jax_utils.unreplicate(inside(state))
    found = jaxcomp.consolidate(state)
    close(found, expected)
    jax.tree.map(np.testing.assert_array_equal, jaxcomp.consolidate(found), found)
    first = flax.jax_utils.unreplicate(state)
    again = flax.jax_utils.replicate(first, devices)
    for wrong in (first, again):
        with pytest.raises(ValueError, match=ONE):
            jaxcomp.consolidate(wrong)
        with pytest.raises(ValueError, match=ONE):
            jaxcomp.shard_state(wrong, mesh_of(N), AXIS)
    # Inside, where the owners are traced, the result says so, and is refused where it is placed.
    poisoned = flax.jax_utils.unreplicate(inside(again))
    assert np.isnan(poisoned.owner)
    with pytest.raises(ValueError, match=ONE):
        jaxcomp.shard_state(poisoned, mesh_of(N), AXIS)
    assert np.isnan(jax.jit(jaxcomp.consolidate)(again).owner)


@pytest.mark.parametrize("replicas", [1, 3])
def test_one_replicas_row_is_never_taken_for_everybodys(replicas):
    """Refuses also that of the middle one of an odd number."""
    tx = REDUCERS["powersgd"]
    _, state = simulate("vmap", tx, {"w": np.ones((replicas, STEPS, 16, 12), np.float32)})
    axes = jaxcomp.state_axes(state)
    for i in range(replicas):
        row = jax.tree.map(lambda x, axis: x if axis is None else x[i], state, axes)  # noqa: B023
        with pytest.raises(ValueError, match=ONE):
            jaxcomp.stack_replicas(row, 2)
    assert float(jaxcomp.consolidate(state).owner) == 0


def test_what_cannot_be_consolidated_outside_is_refused():
    fresh = feedback(quantized()).init({"w": jnp.zeros((3, 2)), "v": jnp.zeros((3, 2))})
    state = jaxcomp.stack_replicas(fresh, N)
    odd = state._replace(residual={**state.residual, "v": jnp.zeros((3, 2))})
    with pytest.raises(ValueError, match="one leading axis of replicas"):
        jaxcomp.consolidate(odd)

    class Bare(NamedTuple):  # without a scalar, which would say that nothing else is stacked
        residual: jax.Array
        owner: jax.Array
        per_replica = ("residual", "owner")

    bare = Bare(state.residual["w"], state.owner)
    differing = (bare, {"momentum": jnp.arange(8.0).reshape(N, 2)})
    with pytest.raises(ValueError, match=r"leaf .*momentum.* differs between them"):
        jaxcomp.consolidate(differing)


@pytest.mark.parametrize("mapping", ["vmap", "pmap", "shard_map"])
def test_inside_a_mapped_function_consolidate_wants_the_axis(mapping):
    fresh = REDUCERS["powersgd"].init({"w": jnp.zeros((16, 12))})
    state = jaxcomp.stack_replicas(fresh, N)
    axes = jaxcomp.state_axes(fresh)
    specs = jaxcomp.state_specs(fresh, AXIS)
    if mapping == "vmap":
        mapped = jax.vmap(jaxcomp.consolidate, in_axes=(axes,), axis_name=AXIS)
    elif mapping == "pmap":
        mapped = jax.pmap(jaxcomp.consolidate, AXIS, in_axes=(axes,), devices=jax.devices()[:N])
    else:
        mapped = sharded(N, jaxcomp.consolidate, (specs,), specs)
    with pytest.raises(ValueError, match="needs the axis of the replicas"):
        mapped(state)


@pytest.mark.parametrize("name", REDUCERS)
@pytest.mark.parametrize("after", [1, 2, 8])
def test_one_call_places_any_state_on_any_number_of_replicas(name, after):
    """Loses nothing, consolidated before or not: the next step accounts for all."""
    tx = REDUCERS[name]
    _, state = simulate("vmap", tx, jax.tree.map(lambda g: g[:, :STEPS], GRADS))
    one = jaxcomp.consolidate(state)
    mesh = mesh_of(after)
    mean = jax.tree.map(lambda g: jnp.stack([g[:, -1].mean(0)] * after), GRADS)
    placed = jaxcomp.shard_state(state, mesh, AXIS)
    jax.tree.map(np.testing.assert_array_equal, placed, jaxcomp.shard_state(one, mesh, AXIS))
    assert placed.residual["w"].shape == (after, 16, 12)
    step = over_replicas("shard_map", tx.update, after, jaxcomp.state_specs(one, AXIS))
    output, new = step(mean, placed)
    assert new.owner.tolist() == [i - after for i in range(after)]
    accounted = output["w"] + new.residual["w"].mean(0)
    np.testing.assert_allclose(accounted, mean["w"][0] + one.residual["w"], atol=1e-5)


def test_as_many_replicas_keep_each_its_own():
    tx = REDUCERS["powersgd"]
    _, state = simulate("vmap", tx, GRADS)
    fresh = tx.init({"w": jnp.zeros((16, 12))})
    for placed in (
        jaxcomp.shard_state(state, mesh_of(N), AXIS),
        jaxcomp.shard_state(state, mesh_of(N), AXIS, like=fresh),
        jaxcomp.stack_replicas(state, N),
    ):
        np.testing.assert_array_equal(placed.residual["w"], state.residual["w"])
    with pytest.raises(ValueError, match=r"residual\['w'\]: expected \(16, 10\) or \(replicas"):
        jaxcomp.shard_state(state, mesh_of(N), AXIS, like=tx.init({"w": jnp.zeros((16, 10))}))


def test_accumulated_gradients_have_no_owner_and_are_placed_beside_one_that_has():
    tx = jaxcomp.accumulate(REDUCERS["powersgd"], 2)
    _, state = simulate("shard_map", tx, jax.tree.map(lambda g: g[:, :3], GRADS))
    assert state.acc_grads["w"].shape == (N, 16, 12)
    assert int(state.mini_step) == 1
    one = jaxcomp.consolidate(state)
    np.testing.assert_allclose(one.acc_grads["w"], GRADS["w"][:, 2].mean(0), atol=1e-6)
    placed = jaxcomp.shard_state(one, mesh_of(2), AXIS)
    assert placed.acc_grads["w"].shape == (2, 16, 12)
