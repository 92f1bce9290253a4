"""Whose a residual is: one replica's in the place of all is refused, wherever it comes from."""

import functools
import operator
from typing import NamedTuple

import flax.jax_utils
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose

import jaxcomp
from tests.helpers.leaves import close, equal, random_grads, zeros_of_one
from tests.helpers.reducers import feedback, powersgd, quantized
from tests.helpers.runners import (
    AXIS,
    MAPPINGS,
    first,
    mesh_of,
    over_replicas,
    sharded,
    simulate,
    start,
    steps_of,
)

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
    over = {"axis_name": AXIS, "in_axes": (0, None), "out_axes": None}
    return jax.pmap(tx.update, devices=jax.devices()[:N], **over)


def without_checks(tx):
    """Maps by shard_map(check_vma=False) with specifications of a replicated state."""

    def update(grads, state):
        return tx.update(first(grads), state)

    return sharded(N, update, (P(AXIS), P()), P(), check_vma=False)


IN_NAME_ONLY = [(name, as_in_flax_imagenet) for name in REDUCERS]
IN_NAME_ONLY += [("powersgd", without_checks)]


@pytest.mark.parametrize(("name", "mapping"), IN_NAME_ONLY)
def test_a_residual_replicated_in_name_only_is_refused(name, mapping):
    tx = REDUCERS[name]
    step = mapping(tx)
    state = tx.init(zeros_of_one(GRADS))
    for grads in steps_of(GRADS):
        _, state = step(grads, state)
    residuals = [np.asarray(x.data) for x in state.residual["w"].addressable_shards]
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
    found = jaxcomp.consolidate(state)
    close(found, flax.jax_utils.unreplicate(inside(state)))
    equal(jaxcomp.consolidate(found), found)
    copy = flax.jax_utils.unreplicate(state)
    again = flax.jax_utils.replicate(copy, devices)
    # Inside, where the owners are traced, the result says so, and is refused where it is placed.
    poisoned = flax.jax_utils.unreplicate(inside(again))
    assert np.isnan(poisoned.owner)
    assert np.isnan(jax.jit(jaxcomp.consolidate)(again).owner)
    for wrong in (copy, again, poisoned):
        with pytest.raises(ValueError, match=ONE):
            jaxcomp.shard_state(wrong, mesh_of(N), AXIS)
    for wrong in (copy, again):
        with pytest.raises(ValueError, match=ONE):
            jaxcomp.consolidate(wrong)


@pytest.mark.parametrize("replicas", [1, 3])
def test_one_replicas_row_is_never_taken_for_everybodys(replicas):
    """Refuses also that of the middle one of an odd number."""
    grads = {"w": np.ones((replicas, STEPS, 16, 12), np.float32)}
    _, state = simulate("vmap", REDUCERS["powersgd"], grads)
    for i in range(replicas):
        residual, owner = jax.tree.map(operator.itemgetter(i), (state.residual, state.owner))
        with pytest.raises(ValueError, match=ONE):
            jaxcomp.stack_replicas(state._replace(residual=residual, owner=owner), 2)
    assert float(jaxcomp.consolidate(state).owner) == 0


class Bare(NamedTuple):
    """A state without a scalar, which would say that nothing else is stacked."""

    residual: jax.Array
    owner: jax.Array
    per_replica = ("residual", "owner")


def test_what_cannot_be_consolidated_outside_is_refused():
    params = {"w": jnp.zeros((3, 2)), "v": jnp.zeros((3, 2))}
    state = jaxcomp.stack_replicas(feedback(quantized()).init(params), N)
    odd = state._replace(residual={**state.residual, "v": params["v"]})
    # Of one replica, which nothing in a state of optax's tells, unless its axes differ in length.
    alone = optax.MultiSteps(optax.sgd(0.1), 2).init({"w": jnp.zeros((3, 2)), "v": jnp.zeros(2)})
    for lost in (odd, alone):
        with pytest.raises(ValueError, match="one leading axis of replicas"):
            jaxcomp.consolidate(lost)
    bare = Bare(state.residual["w"], state.owner)
    with pytest.raises(ValueError, match=r"leaf .*momentum.* differs between the r"):
        jaxcomp.consolidate((bare, {"momentum": jnp.arange(8.0).reshape(N, 2)}))


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_inside_a_mapped_function_consolidate_wants_the_axis(mapping):
    state, specs = start(mapping, REDUCERS["powersgd"].init({"w": jnp.zeros((16, 12))}), N)

    def step(own, state):
        return own, jaxcomp.consolidate(state)

    with pytest.raises(ValueError, match="needs the axis of the replicas"):
        over_replicas(mapping, step, N, specs)(np.zeros(N), state)


@pytest.mark.parametrize(
    ("name", "after"),
    [("powersgd", 1), ("powersgd", 8), ("now and then", 2), ("error_feedback", 2)],
)
def test_one_call_places_any_state_on_any_number_of_replicas(name, after):
    """Loses nothing, consolidated before or not: the next step accounts for all."""
    tx = REDUCERS[name]
    all_but_last = {"w": GRADS["w"][:, :STEPS]}
    _, state = simulate("vmap", tx, all_but_last)
    one = jaxcomp.consolidate(state)
    mesh = mesh_of(after)
    placed = jaxcomp.shard_state(state, mesh, AXIS)
    equal(placed, jaxcomp.shard_state(one, mesh, AXIS))
    assert placed.residual["w"].shape == (after, 16, 12)
    specs = jaxcomp.state_specs(one, AXIS)
    step = over_replicas("shard_map", tx.update, after, specs)
    mean = GRADS["w"][:, -1].mean(0)
    output, new = step({"w": np.stack([mean] * after)}, placed)
    assert new.owner.tolist() == list(range(-after, 0))
    accounted = output["w"] + new.residual["w"].mean(0)
    assert_allclose(accounted, mean + one.residual["w"], atol=1e-5)


def test_as_many_replicas_keep_each_its_own():
    tx = REDUCERS["powersgd"]
    _, state = simulate("vmap", tx, GRADS)
    place = functools.partial(jaxcomp.shard_state, state, mesh_of(N), AXIS)
    fresh = tx.init({"w": jnp.zeros((16, 12))})
    for placed in (place(), place(like=fresh), jaxcomp.stack_replicas(state, N)):
        equal(placed.residual["w"], state.residual["w"])
    with pytest.raises(ValueError, match=r"residual\['w'\]: expected \(16, 10\), got \(16, 12"):
        place(like=tx.init({"w": jnp.zeros((16, 10))}))


def test_accumulated_gradients_have_no_owner_and_are_placed_beside_one_that_has():
    tx = jaxcomp.accumulate(REDUCERS["powersgd"], 2)
    _, state = simulate("shard_map", tx, jax.tree.map(lambda g: g[:, :3], GRADS))
    assert state.acc_grads["w"].shape == (N, 16, 12)
    assert int(state.mini_step) == 1
    one = jaxcomp.consolidate(state)
    assert_allclose(one.acc_grads["w"], GRADS["w"][:, 2].mean(0), atol=1e-6)
    placed = jaxcomp.shard_state(one, mesh_of(2), AXIS)
    assert placed.acc_grads["w"].shape == (2, 16, 12)
