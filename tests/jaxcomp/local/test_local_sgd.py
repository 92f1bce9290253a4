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
from tests.helpers import hlo
from tests.helpers.classifier import close
from tests.helpers.leaves import random_grads
from tests.helpers.local_runs import NESTEROV, PARAMS, SHAPES, in_numpy, run, towards
from tests.helpers.reducers import powersgd
from tests.helpers.runners import AXIS, first, sharded

local_sgd = functools.partial(jaxcomp.local_sgd, axis_name=AXIS, sync_every=3)

EXACT_AT_FULL_RANK = powersgd(3, min_compression_rate=0.1)  # the reducer of pseudo-gradients
RUNS = [
    ("vmap", 0.9, 3, None, None),
    ("pmap", 0.9, 3, None, None),
    ("shard_map", 0.9, 3, None, None),
    ("vmap", 0.0, 4, NESTEROV, None),
    ("shard_map", 0.0, 4, NESTEROV, EXACT_AT_FULL_RANK),
    ("vmap", 0.0, 1, None, None),
]


@pytest.mark.parametrize(("mapping", "momentum", "period", "outer", "reducer"), RUNS)
def test_equals_numpy(mapping, momentum, period, outer, reducer):
    targets = random_grads(SHAPES, 4, 8)
    inner = optax.sgd(0.1, momentum=momentum)
    tx = local_sgd(inner, sync_every=period, outer=outer, reducer=reducer)
    params, state = run(mapping, tx, PARAMS, targets)
    for name in SHAPES:
        expected, _ = in_numpy(0.5, targets[name], period, inner=momentum, outer=outer is not None)
        np.testing.assert_allclose(params[name], expected, rtol=2e-5, atol=2e-6)
    assert int(np.ravel(state.count)[0]) == 8
    assert int(np.ravel(state.last_sync)[0]) == 8 - 8 % period
    assert np.all(state.synced) == (8 % period == 0)


def test_the_widest_of_the_levels_that_are_due_is_averaged():
    """With its reducer; what a level averages is compared with torch's (test_torch.py)."""
    both = ("device", "node")
    params = {"w": jnp.zeros((32, 16))}
    reducer = jaxcomp.powersgd(1, axis_name=both, start_step=0)
    inner = optax.sgd(0.1)
    levels = local_sgd(inner, axis_name=both, reducer=reducer, sync_every={both: 3, "device": 3})
    flat = local_sgd(inner, axis_name=both, reducer=reducer, sync_every=3)
    for step in range(6):
        assert levels.bytes(params, step=step) == flat.bytes(params, step=step)


@given(period=st.integers(1, 6), start=st.integers(0, 5), offset=st.integers(0, 9))
def test_averages_fall_where_the_docstring_says(period, start, offset):
    tx = local_sgd(optax.sgd(0.1), sync_every=period, start_step=start, offset=offset)
    for count in range(start + 1, 20):
        sends = tx.bytes(PARAMS, step=count - 1).bytes_after > 0
        assert sends == ((count - offset) % period == 0)


def growing(step):
    """Rounds of one step (from 0.2), then of three (2.9), from the sixth step on of four."""
    return jnp.where(step < 3, 0.2, jnp.where(step < 6, 2.9, 4.0))


SCHEDULED = [
    ({"sync_every": growing}, [1, 2, 3, 6, 10]),
    ({"sync_every": growing, "start_step": 2}, [1, 2, 3, 6, 10]),
    ({"sync_every": growing, "start_step": 4}, [1, 2, 3, 4, 7, 11]),
    ({"sync_every": 3, "start_step": 2}, [1, 2, 5, 8, 11]),
    ({"sync_every": 3, "start_step": 2, "offset": 3}, [1, 2, 3, 6, 9]),
    ({"sync_every": 5, "offset": 2}, [2, 7]),
    ({"sync_every": 4, "start_step": 2, "outer": NESTEROV}, [1, 2, 6, 10]),
]


@pytest.mark.parametrize(("options", "expected"), SCHEDULED)
def test_replicas_are_equal_after_the_steps_that_send_something(options, expected):
    """Leaves them different after all others; `synced` and `last_sync` say so."""
    tx = local_sgd(optax.sgd(0.1), **options)
    targets = random_grads({"w": (3,)}, 2, 11)["w"]

    def train(targets):
        params = jnp.zeros(3)
        state = tx.init(params)
        trajectory = []
        for target in targets:
            updates, state = tx.update(params - target, state, params)
            params = optax.apply_updates(params, updates)
            trajectory.append((params, state.synced, state.last_sync))
        return trajectory

    latest = 0
    trajectory = jax.jit(jax.vmap(train, axis_name=AXIS))(jnp.asarray(targets))
    for count, (params, synced, last_sync) in enumerate(trajectory, start=1):
        sends = count in expected
        if sends:
            latest = count
        assert np.allclose(params[0], params[1], rtol=0, atol=1e-6) == sends
        assert bool(synced[0]) == sends
        assert int(last_sync[0]) == latest
        assert bool(tx.bytes({"w": params[0]}, step=count - 1).bytes_after) == sends


def test_the_start_of_a_reducer_counts_averages_of_its_level():
    reducer = jaxcomp.powersgd(1, axis_name=("node", "device"), start_step=1)
    tx = local_sgd(
        optax.sgd(0.1),
        axis_name=("node", "device"),
        sync_every={"device": 2, ("node", "device"): 4},
        reducer=reducer,
    )
    params = {"w": jnp.zeros((32, 16))}
    sent = [tx.bytes(params, step=step).bytes_after for step in range(12)]
    dense = 4 * 32 * 16
    factors = 4 * (32 + 16)
    assert sent == [0, dense, 0, dense, 0, dense, 0, factors, 0, dense, 0, factors]
    assert tx.bytes(params).bytes_after == (dense + factors) // 4


def test_an_inner_optimizer_that_sends_something_is_not_counted_as_nothing():
    chain = optax.chain(jaxcomp.allreduce(axis_name=AXIS), optax.sgd(0.1))
    with pytest.raises(ValueError, match="`inner` sends something in every step"):
        local_sgd(chain).bytes(PARAMS, step=0)
    adam = optax.chain(jaxcomp.scale_by_local_adam(axis_name=AXIS), optax.scale(-0.1))
    assert local_sgd(adam).bytes(PARAMS, step=0).bytes_after == 0
    within = optax.chain(jaxcomp.allreduce(axis_name="within"), optax.sgd(0.1))
    assert local_sgd(within).bytes(PARAMS, step=0).bytes_after == 0


def test_weights_of_compressed_pseudo_gradients_cross_once():
    """With no momenta to average there is no second all-reduce of weights."""
    reducer = jaxcomp.powersgd(1, axis_name=AXIS, start_step=0)
    tx = local_sgd(optax.sgd(0.1), sync_every=1, reducer=reducer)
    params = {"w": jnp.zeros((32, 16))}
    state = tx.init(params)

    def update(grads, weight):
        updates, _ = tx.update(grads, state, params, weight=weight[0])
        return updates

    whole = jax.P()
    mapped = sharded(2, update, (whole, jax.P(AXIS)), whole, check_vma=False)
    program = hlo.program(mapped, params, jnp.ones(2))
    scalars = [one for one in hlo.collectives(program.as_text()) if one[2] == 1]
    assert len(scalars) == 1


def momenta_after_an_average(mode):
    inner = optax.sgd(0.1, momentum=0.9)
    tx = local_sgd(inner, average_inner_state=mode)
    targets = random_grads({"w": (3,)}, 4, 3)
    _, state = run("vmap", tx, {"w": jnp.zeros(3)}, targets)
    return optax.tree.get(state.inner, "trace")["w"]


def test_average_inner_state():
    kept = momenta_after_an_average(False)
    averaged = momenta_after_an_average(True)
    assert len(np.unique(kept, axis=0)) == 4
    assert len(np.unique(averaged, axis=0)) == 1
    np.testing.assert_allclose(averaged[0], kept.mean(0), rtol=1e-6)
    np.testing.assert_array_equal(momenta_after_an_average("reset"), 0)


def test_reset_lets_schedules_go_on():
    schedule = optax.linear_schedule(1.0, 0.0, 10)

    def chain(momentum, rate):
        return optax.chain(
            optax.trace(momentum),
            optax.scale_by_adam(),
            optax.scale_by_learning_rate(schedule),
            optax.scale(rate),
        )

    inner = optax.inject_hyperparams(chain)(momentum=0.5, rate=0.3)
    tx = local_sgd(inner, average_inner_state="reset")
    targets = random_grads({"w": (3,)}, 2, 3)
    with jax.numpy_dtype_promotion("standard"):
        _, state = run("vmap", tx, {"w": jnp.zeros(3)}, targets)
    inner = first(state.inner)
    trace, adam, scheduled, _ = inner.inner_state
    assert int(adam.count) == 0
    assert int(scheduled.count) == 3
    assert not trace.trace["w"].any()
    np.testing.assert_allclose(inner.hyperparams["rate"], 0.3, rtol=1e-6)


def test_the_reducer_begins_anew_after_the_shared_steps():
    params = {"w": jnp.zeros((12, 10))}
    targets = random_grads({"w": (12, 10)}, 4, 8)
    reducer = powersgd(1)
    inner = optax.sgd(0.1)
    tx = local_sgd(inner, reducer=reducer, start_step=2)
    trajectory, state = run("shard_map", tx, params, targets)
    shared, _ = run("vmap", optax.chain(reducer, inner), params, targets)
    close(trajectory["w"][:, :2], shared["w"][:, :2], rtol=1e-5, atol=1e-6)

    after_two = {"w": shared["w"][0, 1]}
    later = jax.tree.map(lambda leaf: leaf[:, 2:], targets)
    rest, _ = run("vmap", local_sgd(inner, reducer=reducer), after_two, later)
    close(trajectory["w"][:, 2:], rest["w"], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(np.ravel(state.reducer.count), [2] * state.reducer.count.size)


def test_what_is_stored_in_bfloat16_is_averaged_in_float32():
    targets = random_grads({"w": (50,)}, 3, 1)
    targets = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), targets)
    params = {"w": jnp.zeros(50, jnp.bfloat16)}
    exact = np.asarray(targets["w"][:, 0], np.float32).mean(0)
    for outer in (None, optax.sgd(1.0)):  # parameters, and pseudo-gradients
        tx = local_sgd(optax.sgd(1.0), sync_every=1, outer=outer)
        trajectory, _ = run("vmap", tx, params, targets)
        averaged = trajectory["w"][0, 0]
        assert averaged.dtype == jnp.bfloat16
        np.testing.assert_allclose(averaged.astype(np.float32), exact, rtol=2**-8)


def cast(tree, dtype):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf).astype(dtype), tree)


MIXED = [(jnp.float32, jnp.bfloat16), (jnp.bfloat16, jnp.float32)]


@pytest.mark.parametrize(("param", "grad"), MIXED)
def test_gradients_in_another_dtype_than_the_parameters(param, grad):
    def gradient(params, target):
        return cast(towards(params, target), grad)

    targets = cast(random_grads(SHAPES, 2, 3), param)
    tx = local_sgd(optax.sgd(0.5), sync_every=2, outer=NESTEROV, start_step=1)
    with jax.numpy_dtype_promotion("standard"):  # optax.apply_updates adds the two
        narrow, _ = run("shard_map", tx, cast(PARAMS, param), targets, gradient)
        wide, _ = run("vmap", tx, PARAMS, cast(targets, jnp.float32))
    for leaf in jax.tree.leaves(narrow):
        assert leaf.dtype == param
    close(cast(narrow, np.float32), wide, rtol=0, atol=0.05)


def test_extra_arguments_reach_the_inner_optimizer():
    def update(updates, state, params=None, *, scale, **extra):
        return jax.tree.map(lambda leaf: -scale * leaf, updates), state

    inner = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    tx = optax.chain(local_sgd(inner), optax.identity())
    params = jnp.zeros(3)

    def step(grad):
        return tx.update(grad, tx.init(params), params, scale=2.0)

    updates, _ = jax.vmap(step, axis_name=AXIS)(jnp.ones((2, 3)))
    np.testing.assert_array_equal(updates, -2 * np.ones((2, 3)))


def test_a_run_continues_from_its_consolidated_state():
    # After an average, with an inner optimizer that keeps nothing, one copy is all there is.
    targets = random_grads(SHAPES, 2, 6)
    tx = local_sgd(optax.sgd(0.1), outer=optax.sgd(0.7, 0.9))
    whole, _ = run("vmap", tx, PARAMS, targets)
    head = jax.tree.map(lambda leaf: leaf[:, :3], targets)
    tail = jax.tree.map(lambda leaf: leaf[:, 3:], targets)
    half, state = run("vmap", tx, PARAMS, head)

    consolidate = functools.partial(jaxcomp.consolidate, axis_name=AXIS)
    one = first(jax.jit(jax.vmap(consolidate, axis_name=AXIS))(state))
    resumed = optax.GradientTransformationExtraArgs(lambda params: one, tx.update)
    params = jax.tree.map(lambda leaf: leaf[0, -1], half)
    rest, _ = run("vmap", resumed, params, tail)
    close(rest, jax.tree.map(lambda leaf: leaf[:, 3:], whole))


def test_a_train_state_can_be_donated():
    tx = local_sgd(optax.sgd(0.1), outer=optax.sgd(1.0))
    state = TrainState.create(apply_fn=None, params={"w": jnp.ones(3)}, tx=tx)
    # Anchor and parameters start equal; a step that donates its state needs a buffer for each.
    leaves = jax.tree.leaves((state.params, state.opt_state))
    buffers = {leaf.unsafe_buffer_pointer() for leaf in leaves}
    assert len(buffers) == len(leaves)


def test_average_keeps_what_has_no_mean():
    keys = jax.random.split(jax.random.key(0), 2)
    tree = {"n": jnp.arange(2), "key": keys, "x": jnp.arange(2.0)}
    means = jax.vmap(lambda tree: jaxcomp.average(tree, AXIS), axis_name=AXIS)(tree)
    assert means["n"].tolist() == [0, 1]
    assert means["x"].tolist() == [0.5, 0.5]

    def average(x, when):
        return jaxcomp.average(x, AXIS, when=when)

    mapped = sharded(2, average, (jax.P(AXIS), jax.P()), jax.P(AXIS))
    assert mapped(jnp.arange(2.0), jnp.array(True)).tolist() == [0.5, 0.5]
    assert mapped(jnp.arange(2.0), jnp.array(False)).tolist() == [0.0, 1.0]
    with pytest.raises(ValueError, match="is not bound here"):
        jaxcomp.average({}, "unbound")


def test_average_refuses_a_complex_leaf():
    tree = {"z": jnp.zeros(2, jnp.complex64)}
    with pytest.raises(ValueError, match=r"The leaf \['z'\] has dtype complex64"):
        jax.vmap(lambda tree: jaxcomp.average(tree, AXIS), axis_name=AXIS)(tree)


def test_a_replica_that_guards_its_steps_loses_those_only():
    targets = {"w": np.ones((2, 4, 3), np.float32)}
    targets["w"][1, 2] = np.nan
    inner = optax.apply_if_finite(optax.sgd(0.5), 3)
    guarded = local_sgd(inner, sync_every=2)
    params, state = run("shard_map", guarded, {"w": jnp.zeros(3)}, cast(targets, jnp.float32))
    assert np.isfinite(params["w"]).all()
    assert state.inner.total_notfinite.tolist() == [0, 1]


BAD = [
    ({"sync_every": 0}, "sync_every=0"),
    ({"sync_every": 2.0}, "positive integer"),
    ({"sync_every": {}}, "Give levels"),
    ({"sync_every": {"rack": 2, AXIS: 4}}, "'rack', which is not in axis_name"),
    ({"sync_every": {"x": 4, ("x", "y"): 6}, "axis_name": ("x", "y")}, "a multiple of its period"),
    ({"sync_every": {"x": 4}, "axis_name": ("x", "y")}, "would never synchronise"),
    ({"sync_every": {"x": 4, "y": 8}, "axis_name": ("x", "y")}, "has the axes of the one before"),
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
    tx = local_sgd(optax.sgd(0.1))
    with pytest.raises(ValueError, match="complex64"):
        tx.init({"z": jnp.zeros(2, jnp.complex64)})
    with pytest.raises(ValueError, match="update needs them"):
        tx.update(PARAMS, tx.init(PARAMS))
    with pytest.raises(ValueError, match="is not bound here"):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS)
