"""What local SGD sends: where the collectives stand, how many bytes, and what its state may do."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from hlo import collectives, sent_bytes, unconditional
from leaves import random_grads
from local_runs import NESTEROV, compile_step, run
from runners import AXIS, mesh_of

import jaxcomp

SHAPES = {"w": (48, 32), "v": (24, 16), "b": (32,)}
PARAMS = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}

RANK_2 = jaxcomp.powersgd(2, axis_name=AXIS, start_step=0)
CASES = [
    {},
    {"outer": NESTEROV},
    {"reducer": RANK_2},
    {"reducer": jaxcomp.allreduce(axis_name=AXIS, comm_dtype=jnp.float16)},
]


@pytest.mark.parametrize("options", CASES)
def test_collectives_stand_in_branches_only_and_their_bytes_are_told(options):
    tx = jaxcomp.local_sgd(optax.sgd(0.1), sync_every=8, axis_name=AXIS, **options)
    hlo = compile_step(tx, PARAMS, n=4)
    assert unconditional(hlo) == []
    steps = [tx.bytes(PARAMS, step=step).bytes_after for step in range(8)]
    assert sent_bytes(collectives(hlo)) == sum(steps)
    assert tx.bytes(PARAMS).bytes_after == round(sum(steps) / 8)
    assert tx.bytes(PARAMS).bytes_before == 4 * sum(np.prod(shape) for shape in SHAPES.values())
    if "reducer" not in options:
        assert tx.bytes(PARAMS).ratio == 8  # N / H


def test_a_run_continues_from_its_consolidated_state():
    # After an average, with an inner optimizer that keeps nothing, one copy is all there is.
    targets = random_grads(SHAPES, 2, 6)
    tx = jaxcomp.local_sgd(optax.sgd(0.1), sync_every=3, axis_name=AXIS, outer=optax.sgd(0.7, 0.9))
    whole, _ = run("vmap", tx, PARAMS, targets)
    head = jax.tree.map(lambda x: x[:, :3], targets)
    tail = jax.tree.map(lambda x: x[:, 3:], targets)
    half, state = run("vmap", tx, PARAMS, head)
    merged = jax.jit(jax.vmap(lambda s: jaxcomp.consolidate(s, AXIS), axis_name=AXIS))(state)
    one = jax.tree.map(lambda x: x[0], merged)
    resumed = optax.GradientTransformationExtraArgs(lambda params: one, tx.update)
    rest, _ = run("vmap", resumed, jax.tree.map(lambda x: x[0, -1], half), tail)
    for name in SHAPES:
        np.testing.assert_allclose(rest[name][:, -1], whole[name][:, -1], rtol=1e-5, atol=1e-6)


def test_a_train_state_can_be_donated():
    tx = jaxcomp.local_sgd(optax.sgd(0.1), sync_every=2, axis_name=AXIS, outer=optax.sgd(1.0))
    state = TrainState.create(apply_fn=None, params={"w": jnp.ones(3)}, tx=tx)
    # Anchor and parameters start equal; a step that donates its state needs a buffer for each.
    buffers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves((state.params, state.opt_state))]
    assert len(set(buffers)) == len(buffers)


def test_average_keeps_what_has_no_mean():
    tree = {"n": jnp.arange(2), "key": jax.random.split(jax.random.key(0), 2), "x": jnp.arange(2.0)}
    got = jax.vmap(lambda t: jaxcomp.average(t, AXIS), axis_name=AXIS)(tree)
    assert got["n"].tolist() == [0, 1]
    assert got["x"].tolist() == [0.5, 0.5]
    mapped = jax.shard_map(
        lambda x, when: jaxcomp.average(x, AXIS, when=when),
        mesh=mesh_of(2),
        in_specs=(jax.P(AXIS), jax.P()),
        out_specs=jax.P(AXIS),
    )
    for when, expected in ((True, [0.5, 0.5]), (False, [0.0, 1.0])):
        assert jax.jit(mapped)(jnp.arange(2.0), jnp.array(when)).tolist() == expected
    with pytest.raises(ValueError, match="is not bound here"):
        jaxcomp.average({}, "unbound")


def test_a_replica_that_guards_its_own_steps_loses_those_only():
    targets = {"w": np.ones((2, 4, 3), np.float32)}
    targets["w"][1, 2] = np.nan
    inner = optax.apply_if_finite(optax.sgd(0.5), 3)
    guarded = jaxcomp.local_sgd(inner, sync_every=2, axis_name=AXIS)
    got, state = run("shard_map", guarded, {"w": jnp.zeros(3)}, jax.tree.map(jnp.asarray, targets))
    assert np.isfinite(got["w"]).all()
    assert state.inner.total_notfinite.tolist() == [0, 1]
