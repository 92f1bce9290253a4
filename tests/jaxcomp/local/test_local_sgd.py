"""Local SGD against NumPy, the equalities that must hold, and bad input."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from hypothesis import given
from hypothesis import strategies as st

import jaxcomp
from tests.helpers.classifier import close
from tests.helpers.leaves import random_grads
from tests.helpers.local_runs import NESTEROV, PARAMS, SHAPES, in_numpy, run, towards
from tests.helpers.reducers import powersgd
from tests.helpers.runners import AXIS, MAPPINGS, sharded

local_sgd = functools.partial(jaxcomp.local_sgd, axis_name=AXIS, sync_every=3)


@pytest.mark.parametrize(
    ("mapping", "momentum", "period", "outer", "reducer"),
    [
        *((mapping, 0.9, 3, None, None) for mapping in MAPPINGS),
        *((mapping, 0.0, 4, NESTEROV, None) for mapping in MAPPINGS),
        ("vmap", 0.0, 1, None, None),
        # Of pseudo-gradients, exact at full rank.
        ("shard_map", 0.0, 4, NESTEROV, powersgd(3, min_compression_rate=0.1)),
    ],
)
def test_equals_numpy(mapping, momentum, period, outer, reducer):
    targets = random_grads(SHAPES, 4, 8)
    inner = optax.sgd(0.1, momentum=momentum)
    tx = local_sgd(inner, sync_every=period, outer=outer, reducer=reducer)
    got, state = run(mapping, tx, PARAMS, targets)
    for name in SHAPES:
        found = in_numpy(0.5, targets[name], period, inner=momentum, outer=outer is not None)
        np.testing.assert_allclose(got[name], found[0], rtol=2e-5, atol=2e-6)
    assert int(np.ravel(state.count)[0]) == 8
    assert int(np.ravel(state.last_sync)[0]) == 8 - 8 % period
    assert np.all(state.synced) == (8 % period == 0)


def test_of_levels_that_are_due_together_the_widest_is_averaged():
    """With its reducer; what a level averages is compared with torch's (test_torch.py)."""
    both, params = ("device", "node"), {"w": jnp.zeros((32, 16))}
    reducer = jaxcomp.powersgd(1, axis_name=both, start_step=0)
    make = functools.partial(local_sgd, optax.sgd(0.1), axis_name=both, reducer=reducer)
    levels, flat = make(sync_every={both: 3, "device": 3}), make(sync_every=3)
    for step in range(6):
        assert levels.bytes(params, step=step) == flat.bytes(params, step=step)


@given(period=st.integers(1, 6), start=st.integers(0, 5), offset=st.integers(0, 9))
def test_averages_fall_where_the_docstring_says(period, start, offset):
    tx = local_sgd(optax.sgd(0.1), sync_every=period, start_step=start, offset=offset)
    due = [c for c in range(start + 1, 20) if tx.bytes(PARAMS, step=c - 1).bytes_after]
    assert due == [c for c in range(start + 1, 20) if (c - offset) % period == 0]


def test_average_inner_state():
    targets = random_grads({"w": (3,)}, 4, 3)
    params = {"w": jnp.zeros(3)}
    inner = optax.sgd(0.1, momentum=0.9)
    txs = [local_sgd(inner, average_inner_state=mode) for mode in (False, True, "reset")]
    states = [run("vmap", tx, params, targets)[1].inner for tx in txs]
    kept, averaged, reset = (optax.tree.get(state, "trace")["w"] for state in states)
    assert len(np.unique(kept, axis=0)) == 4
    np.testing.assert_allclose(averaged, np.broadcast_to(kept.mean(0), (4, 3)), rtol=1e-6)
    assert len(np.unique(averaged, axis=0)) == 1
    np.testing.assert_array_equal(reset, 0)


def test_reset_lets_schedules_go_on():
    schedule = optax.linear_schedule(1.0, 0.0, 10)
    inner = optax.inject_hyperparams(lambda momentum, rate: optax.chain(
        optax.trace(momentum), optax.scale_by_adam(), optax.scale_by_learning_rate(schedule),
        optax.scale(rate),
    ))(momentum=0.5, rate=0.3)  # fmt: skip
    targets = random_grads({"w": (3,)}, 2, 3)
    tx = local_sgd(inner, average_inner_state="reset")
    with jax.numpy_dtype_promotion("standard"):
        _, state = run("vmap", tx, {"w": jnp.zeros(3)}, targets)
    own = jax.tree.map(lambda x: x[0], state.inner)
    trace, adam, scheduled, _ = own.inner_state
    assert int(adam.count) == 0
    assert int(scheduled.count) == 3
    assert not trace.trace["w"].any()
    np.testing.assert_allclose(own.hyperparams["rate"], 0.3, rtol=1e-6)


def test_the_reducer_begins_anew_after_the_shared_steps():
    params = {"w": jnp.zeros((12, 10))}
    targets = random_grads({"w": (12, 10)}, 4, 8)
    reducer = powersgd(1)
    make = functools.partial(local_sgd, optax.sgd(0.1), sync_every=3, reducer=reducer)
    got, state = run("shard_map", make(start_step=2), params, targets)
    shared, _ = run("vmap", optax.chain(reducer, optax.sgd(0.1)), params, targets)
    close(got["w"][:, :2], shared["w"][:, :2], rtol=1e-5, atol=1e-6)
    rest, _ = run(
        "vmap", make(), {"w": shared["w"][0, 1]}, jax.tree.map(lambda x: x[:, 2:], targets)
    )
    close(got["w"][:, 2:], rest["w"], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(np.ravel(state.reducer.count), [2] * state.reducer.count.size)


def test_what_is_stored_in_bfloat16_is_averaged_in_float32():
    targets = jax.tree.map(lambda x: x.astype(jnp.bfloat16), random_grads({"w": (50,)}, 3, 1))
    params = {"w": jnp.zeros(50, jnp.bfloat16)}
    parameters, pseudo_gradients = (
        run("vmap", local_sgd(optax.sgd(1.0), sync_every=1, outer=outer), params, targets)[0]
        for outer in (None, optax.sgd(1.0))
    )
    assert parameters["w"].dtype == jnp.bfloat16
    exact = np.asarray(targets["w"][:, 0], np.float32).mean(0)
    found = np.asarray(parameters["w"][0, 0], np.float32)
    np.testing.assert_allclose(found, exact, rtol=2**-8)
    np.testing.assert_array_equal(pseudo_gradients["w"], parameters["w"])


@pytest.mark.parametrize(
    ("param", "grad"), [(jnp.float32, jnp.bfloat16), (jnp.bfloat16, jnp.float32)]
)
def test_gradients_in_another_dtype_than_the_parameters(param, grad):
    def gradient(params, target):
        return jax.tree.map(lambda g: g.astype(grad), towards(params, target))

    params = jax.tree.map(lambda x: x.astype(param), PARAMS)
    targets = jax.tree.map(lambda x: x.astype(param), random_grads(SHAPES, 2, 3))
    tx = local_sgd(optax.sgd(0.5), sync_every=2, outer=NESTEROV, start_step=1)
    with jax.numpy_dtype_promotion("standard"):  # optax.apply_updates adds the two
        got, _ = run("shard_map", tx, params, targets, gradient)
        wide, _ = run("vmap", tx, PARAMS, jax.tree.map(lambda x: x.astype(jnp.float32), targets))
    assert {x.dtype for x in jax.tree.leaves(got)} == {jnp.dtype(param)}
    close(jax.tree.map(lambda x: np.asarray(x, np.float32), got), wide, rtol=0, atol=0.05)


def test_extra_arguments_reach_the_inner_optimizer():
    def update(updates, state, params=None, *, scale, **extra):
        return jax.tree.map(lambda u: -scale * u, updates), state

    inner = optax.GradientTransformationExtraArgs(lambda p: optax.EmptyState(), update)
    tx = optax.chain(local_sgd(inner), optax.identity())
    params = jnp.zeros(3)
    updates, _ = jax.vmap(
        lambda g: tx.update(g, tx.init(params), params, scale=2.0), axis_name=AXIS
    )(jnp.ones((2, 3)))
    np.testing.assert_array_equal(updates, -2 * np.ones((2, 3)))


def test_a_run_continues_from_its_consolidated_state():
    # After an average, with an inner optimizer that keeps nothing, one copy is all there is.
    targets = random_grads(SHAPES, 2, 6)
    tx = local_sgd(optax.sgd(0.1), outer=optax.sgd(0.7, 0.9))
    whole, _ = run("vmap", tx, PARAMS, targets)
    head, tail = (jax.tree.map(lambda x, s=s: x[:, s], targets) for s in (slice(3), slice(3, 6)))
    half, state = run("vmap", tx, PARAMS, head)
    merged = jax.jit(jax.vmap(lambda s: jaxcomp.consolidate(s, AXIS), axis_name=AXIS))(state)
    one = jax.tree.map(lambda x: x[0], merged)
    resumed = optax.GradientTransformationExtraArgs(lambda params: one, tx.update)
    rest, _ = run("vmap", resumed, jax.tree.map(lambda x: x[0, -1], half), tail)
    close(jax.tree.map(lambda x: x[:, -1], rest), jax.tree.map(lambda x: x[:, -1], whole))


def test_a_train_state_can_be_donated():
    tx = local_sgd(optax.sgd(0.1), outer=optax.sgd(1.0))
    state = TrainState.create(apply_fn=None, params={"w": jnp.ones(3)}, tx=tx)
    # Anchor and parameters start equal; a step that donates its state needs a buffer for each.
    buffers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves((state.params, state.opt_state))]
    assert len(set(buffers)) == len(buffers)


def test_average_keeps_what_has_no_mean():
    tree = {"n": jnp.arange(2), "key": jax.random.split(jax.random.key(0), 2), "x": jnp.arange(2.0)}
    got = jax.vmap(lambda t: jaxcomp.average(t, AXIS), axis_name=AXIS)(tree)
    assert got["n"].tolist() == [0, 1]
    assert got["x"].tolist() == [0.5, 0.5]
    average = lambda x, when: jaxcomp.average(x, AXIS, when=when)  # noqa: E731
    mapped = sharded(2, average, (jax.P(AXIS), jax.P()), jax.P(AXIS))
    for when, expected in ((True, [0.5, 0.5]), (False, [0.0, 1.0])):
        assert mapped(jnp.arange(2.0), jnp.array(when)).tolist() == expected
    with pytest.raises(ValueError, match="is not bound here"):
        jaxcomp.average({}, "unbound")


def test_a_replica_that_guards_its_own_steps_loses_those_only():
    targets = {"w": np.ones((2, 4, 3), np.float32)}
    targets["w"][1, 2] = np.nan
    inner = optax.apply_if_finite(optax.sgd(0.5), 3)
    guarded = local_sgd(inner, sync_every=2)
    got, state = run("shard_map", guarded, {"w": jnp.zeros(3)}, jax.tree.map(jnp.asarray, targets))
    assert np.isfinite(got["w"]).all()
    assert state.inner.total_notfinite.tolist() == [0, 1]


BAD = [
    ({"sync_every": 0}, "sync_every=0"),
    ({"sync_every": 2.0}, "positive integer"),
    ({"sync_every": {}}, "Give a period"),
    ({"sync_every": {"rack": 2, AXIS: 4}}, "'rack', which is not in axis_name"),
    ({"sync_every": {"x": 4, ("x", "y"): 6}, "axis_name": ("x", "y")}, "must divide"),
    ({"sync_every": {"x": 4}, "axis_name": ("x", "y")}, "would never synchronise"),
    ({"sync_every": {"x": 4, "y": 8}, "axis_name": ("x", "y")}, "contain the axes"),
    ({"sync_every": {"x": 0, ("x", "y"): 6}, "axis_name": ("x", "y")}, r"sync_every\['x'\]"),
    ({"average_inner_state": "mean"}, "must be True, False or 'reset'"),
    ({"start_step": -1}, "start_step=-1"),
    ({"offset": -1}, "offset=-1"),
    ({"offset": 1, "sync_every": lambda step: 3}, "fixed period"),
    ({"axis_name": ""}, "axis_name"),
    ({"reducer": "powersgd"}, "`reducer` must be"),
    ({"outer": 0.7}, "`outer` must be"),
    ({"reducer": jaxcomp.allreduce(axis_name="other")}, "averages over 'other'"),
    ({"local_axis_name": "other"}, "'other', which is not in"),
]


@pytest.mark.parametrize(("kwargs", "message"), BAD)
def test_bad_input_is_refused_when_built(kwargs, message):
    with pytest.raises(ValueError, match=message):
        local_sgd(optax.sgd(0.1), **kwargs)


def test_bad_input_is_refused_when_used():
    with pytest.raises(ValueError, match="`inner` must be"):
        local_sgd(0.1)
    with pytest.raises(ValueError, match="complex64"):
        local_sgd(optax.sgd(0.1)).init({"z": jnp.zeros(2, jnp.complex64)})
    tx = local_sgd(optax.sgd(0.1))
    with pytest.raises(ValueError, match="update needs them"):
        tx.update(PARAMS, tx.init(PARAMS))
    with pytest.raises(ValueError, match="is not bound here"):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS)
