"""What local SGD sends: where the collectives stand, how many bytes, and what its state may do."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from hlo import collectives, once, sent_bytes, text, unconditional
from leaves import random_grads
from local_runs import NESTEROV, compile_step, run, towards
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


def test_a_round_averages_once_after_its_scan():
    inner = optax.sgd(0.1)

    def step(params, state, target):
        updates, state = inner.update(towards(params, target), state, params)
        return optax.apply_updates(params, updates), state, ()

    round_ = jaxcomp.local_sgd_round(step, sync_every=8, axis_name=AXIS)
    batches = jax.tree.map(lambda x: jax.ShapeDtypeStruct((32, *x.shape), x.dtype), PARAMS)
    mapped = jax.shard_map(
        lambda p, b: round_(p, round_.init(p, inner.init(p)), b)[0],
        mesh=mesh_of(4),
        in_specs=(jax.P(), jax.P(AXIS)),
        out_specs=jax.P(),
    )
    hlo = text(mapped, PARAMS, batches)
    assert len(collectives(hlo)) == 1
    # After the loop and not in its body.
    assert sent_bytes(once(hlo)) == round_.bytes(PARAMS, step=7).bytes_after


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


class Normalised(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm(use_running_average=False, momentum=0.5)(x)


def test_batch_statistics_are_averaged_with_the_parameters():
    model = Normalised()
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, 8, 3)), jnp.float32)
    variables = model.init(jax.random.key(0), x[0, 0])
    tx = jaxcomp.local_sgd(optax.sgd(0.1), sync_every=2, axis_name=AXIS)

    def train(x):
        def one(carry, x):
            params, statistics, state = carry
            _, new = model.apply(
                {"params": params, "batch_stats": statistics}, x, mutable="batch_stats"
            )
            updates, state = tx.update(params, state, params)
            params = optax.apply_updates(params, updates)
            statistics = jaxcomp.average(new["batch_stats"], AXIS, when=state.synced)
            return (params, statistics, state), statistics

        carry = (variables["params"], variables["batch_stats"], tx.init(variables["params"]))
        return jax.lax.scan(one, carry, x)[1]

    statistics = jax.jit(jax.vmap(train, axis_name=AXIS))(x)
    for leaf in jax.tree.leaves(statistics):
        agree = [bool((leaf[0, t] == leaf[1, t]).all()) for t in range(4)]
        assert agree == [False, True, False, True]


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


def test_a_round_that_is_not_finite_is_dropped():
    # One replica diverges in the second of three rounds: every replica goes back to the anchor, and
    # the third round goes on from there, momenta and all.
    targets = {"w": np.ones((2, 6, 3), np.float32)}
    targets["w"][1, 2] = np.nan
    optimizer = optax.sgd(0.5, momentum=0.5)

    def step(params, state, target):
        updates, state = optimizer.update(towards(params, target), state, params)
        return optax.apply_updates(params, updates), state, None

    round_ = jaxcomp.local_sgd_round(
        step,
        sync_every=2,
        axis_name=AXIS,
        outer=optax.apply_if_finite(optax.sgd(1.0), 3),
        average_inner_state="reset",
        inner_init=optimizer.init,
    )

    def rounds(targets, count):
        params = {"w": jnp.zeros(3)}
        state = round_.init(params)
        for batches in targets["w"].reshape(3, 2, 3)[:count]:
            params, state, _ = round_(params, state, {"w": batches})
        return params["w"]

    after = [
        jax.vmap(functools.partial(rounds, count=count), axis_name=AXIS)(targets)
        for count in (1, 2, 3)
    ]
    np.testing.assert_array_equal(after[1], after[0])
    # From 0 two steps lead to 1; from 1, with fresh momentum, they stay there.
    np.testing.assert_array_equal(after[2], np.ones((2, 3)))


def test_a_replica_that_guards_its_own_steps_loses_those_only():
    targets = {"w": np.ones((2, 4, 3), np.float32)}
    targets["w"][1, 2] = np.nan
    inner = optax.apply_if_finite(optax.sgd(0.5), 3)
    guarded = jaxcomp.local_sgd(inner, sync_every=2, axis_name=AXIS)
    got, state = run("shard_map", guarded, {"w": jnp.zeros(3)}, jax.tree.map(jnp.asarray, targets))
    assert np.isfinite(got["w"]).all()
    assert state.inner.total_notfinite.tolist() == [0, 1]
