"""Local SGD: when replicas are equal, of what an average is made, and bad input."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

import jaxcomp
from tests.helpers import hlo
from tests.helpers.leaves import close, equal, random_grads
from tests.helpers.local_runs import NESTEROV, PARAMS, SHAPES, run, towards
from tests.helpers.reducers import powersgd
from tests.helpers.rounding import rounding
from tests.helpers.runners import AXIS, sharded, updated

local_sgd = functools.partial(jaxcomp.local_sgd, axis_name=AXIS, sync_every=3)


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

    def train(targets):
        params = jnp.zeros(3)
        state = tx.init(params)
        trajectory = []
        for target in targets:
            updates, state = tx.update(params - target, state, params)
            params = optax.apply_updates(params, updates)
            trajectory.append((params, state.synced, state.last_sync))
        return trajectory

    targets = random_grads({"w": (3,)}, 2, 11)["w"]
    trajectory = jax.jit(jax.vmap(train, axis_name=AXIS))(jnp.asarray(targets))
    latest = 0
    for count, (params, synced, last_sync) in enumerate(trajectory, start=1):
        sends = count in expected
        latest = count if sends else latest
        assert np.allclose(params[0], params[1], rtol=0, atol=1e-6) == sends
        assert synced.tolist() == [sends] * 2
        assert last_sync.tolist() == [latest] * 2
        assert bool(tx.bytes({"w": params[0]}, step=count - 1).bytes_after) == sends


@settings(max_examples=10)
@given(period=st.integers(1, 6), start=st.integers(0, 5), offset=st.integers(0, 9))
def test_averages_fall_where_the_docstring_says(period, start, offset):
    tx = local_sgd(optax.sgd(0.1), sync_every=period, start_step=start, offset=offset)
    for count in range(start + 1, 20):
        sends = tx.bytes(PARAMS, step=count - 1).bytes_after > 0
        assert sends == ((count - offset) % period == 0)


def test_weights_of_compressed_pseudo_gradients_cross_once():
    """With no momenta to average there is no second all-reduce of weights."""
    reducer = jaxcomp.powersgd(1, axis_name=AXIS, start_step=0)
    tx = local_sgd(optax.sgd(0.1), sync_every=1, reducer=reducer)
    params = {"w": jnp.zeros((32, 16))}
    state = tx.init(params)

    def update(grads, weight):
        updates, _ = tx.update(grads, state, params, weight=weight[0])
        return updates

    mapped = sharded(2, update, (jax.P(), jax.P(AXIS)), jax.P(), check_vma=False)
    program = hlo.program(mapped, params, jnp.ones(2))
    arrays = []
    for use in jaxcomp.collectives(program):
        arrays += use.arrays
    assert [values for _, values in arrays].count(1) == 1


def test_the_start_of_a_reducer_counts_averages_of_its_level():
    both = ("node", "device")
    reducer = jaxcomp.powersgd(1, axis_name=both, start_step=1)
    levels = {"device": 2, both: 4}
    tx = local_sgd(optax.sgd(0.1), axis_name=both, sync_every=levels, reducer=reducer)
    params = {"w": jnp.zeros((32, 16))}
    sent = [tx.bytes(params, step=step).bytes_after for step in range(1, 12, 2)]
    dense = 4 * 32 * 16
    factors = 4 * (32 + 16)
    assert sent == [dense, dense, dense, factors, dense, factors]
    assert tx.bytes(params).bytes_after == (dense + factors) // 4


def test_an_inner_optimizer_that_sends_something_is_not_counted_as_nothing():
    chain = optax.chain(jaxcomp.allreduce(axis_name=AXIS), optax.sgd(0.1))
    with pytest.raises(ValueError, match="`inner` sends something in every step"):
        local_sgd(chain).bytes(PARAMS, step=0)
    adam = optax.chain(jaxcomp.scale_by_local_adam(axis_name=AXIS), optax.scale(-0.1))
    within = optax.chain(jaxcomp.allreduce(axis_name="within"), optax.sgd(0.1))
    for inner in (adam, within):
        assert local_sgd(inner).bytes(PARAMS, step=0).bytes_after == 0


def largest(axis):
    """Scales by the largest gradient of all replicas: neither a sum nor a gather."""
    return optax.stateless(lambda g, _: jax.tree.map(lambda x: x / jax.lax.pmax(x, axis), g))


@pytest.mark.parametrize(
    ("link", "sends"),
    [
        (largest(AXIS), True),
        (largest("within"), False),
        (optax.chain(largest("within"), jaxcomp.allreduce(axis_name=AXIS)), True),
    ],
    ids=["maximum", "another axis", "both"],
)
def test_the_axes_of_an_inner_collective_are_read(link, sends):
    tx = local_sgd(optax.chain(link, optax.sgd(0.1)))
    if not sends:
        assert tx.bytes(PARAMS, step=0).bytes_after == 0
        return
    with pytest.raises(ValueError, match="`inner` sends something in every step"):
        tx.bytes(PARAMS, step=0)


def test_an_inner_optimizer_that_needs_more_than_gradients_is_not_counted_as_nothing():
    inner = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau())
    with pytest.raises(ValueError, match=r"what `inner` sends, because.*value"):
        local_sgd(inner).bytes(PARAMS, step=0)


def test_average_inner_state():
    def momenta(mode):
        tx = local_sgd(optax.sgd(0.1, momentum=0.9), average_inner_state=mode)
        _, state = run("vmap", tx, {"w": jnp.zeros(3)}, random_grads({"w": (3,)}, 4, 3))
        return optax.tree.get(state.inner, "trace")["w"]

    kept = momenta(False)
    assert len(np.unique(kept, axis=0)) == 4
    allowed = rounding(4, largest=np.abs(kept).max())  # a mean may be much smaller
    assert_allclose(momenta(True), [kept.mean(0)] * 4, rtol=0, atol=allowed)
    equal(momenta("reset"), 0)


def test_reset_lets_schedules_go_on():
    def chain(momentum, rate):
        return optax.chain(
            optax.trace(momentum),
            optax.scale_by_adam(),
            optax.scale_by_learning_rate(optax.linear_schedule(1.0, 0.0, 10)),
            optax.scale(rate),
        )

    inner = optax.inject_hyperparams(chain)(momentum=0.5, rate=0.3)
    tx = local_sgd(inner, average_inner_state="reset")
    with jax.numpy_dtype_promotion("standard"):
        _, state = run("vmap", tx, {"w": jnp.zeros(3)}, random_grads({"w": (3,)}, 2, 3))
    trace, adam, scheduled, _ = state.inner.inner_state
    assert not adam.count.any()
    assert scheduled.count.tolist() == [3, 3]
    assert not trace.trace["w"].any()
    assert_allclose(state.inner.hyperparams["rate"], 0.3, rtol=1e-6)


def test_the_reducer_begins_anew_after_the_shared_steps():
    targets = random_grads({"w": (12, 10)}, 4, 8)["w"]
    params = jnp.zeros((12, 10))
    reducer = powersgd(1)
    inner = optax.sgd(0.1)
    found, state = run(
        "shard_map", local_sgd(inner, reducer=reducer, start_step=2), params, targets
    )
    shared, _ = run("vmap", optax.chain(reducer, inner), params, targets[:, :2])
    rest, _ = run("vmap", local_sgd(inner, reducer=reducer), shared[0, 1], targets[:, 2:])
    close(found, np.concatenate([shared, rest], axis=1), atol=1e-5)
    assert np.unique(state.reducer.count).tolist() == [2]


@pytest.mark.parametrize("outer", [None, optax.sgd(1.0)])  # parameters, and pseudo-gradients
def test_what_is_stored_in_bfloat16_is_averaged_in_float32(outer):
    targets = random_grads({"w": (50,)}, 3, 1)["w"].astype(jnp.bfloat16)
    tx = local_sgd(optax.sgd(1.0), sync_every=1, outer=outer)
    trajectory, _ = run("vmap", tx, jnp.zeros(50, jnp.bfloat16), targets)
    assert trajectory.dtype == jnp.bfloat16
    mean = np.float32(targets[:, 0]).mean(0)  # the sum is exact
    equal(trajectory[0, 0], jnp.bfloat16(mean))


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
    assert {leaf.dtype for leaf in jax.tree.leaves(narrow)} == {jnp.dtype(param)}
    close(cast(narrow, np.float32), wide, rtol=0, atol=0.05)


def test_extra_arguments_reach_the_inner_optimizer():
    def update(updates, state, params=None, *, scale, **extra):
        return -scale * updates, state

    inner = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    tx = optax.chain(local_sgd(inner), optax.identity())
    found = updated(tx, jnp.ones((2, 3)), params=jnp.zeros(3), scale=2.0)
    equal(found, -2 * np.ones((2, 3)))


def test_a_run_continues_from_its_consolidated_state():
    """After an average, with an inner optimizer that keeps nothing, one copy is all there is."""
    targets = random_grads({"w": (4, 3)}, 2, 6)["w"]
    tx = local_sgd(optax.sgd(0.1), outer=optax.sgd(0.7, 0.9))
    start = jnp.zeros((4, 3))
    whole, _ = run("vmap", tx, start, targets)
    half, state = run("vmap", tx, start, targets[:, :3])
    one = jaxcomp.consolidate(state)
    resumed = optax.GradientTransformationExtraArgs(lambda params: one, tx.update)
    rest, _ = run("vmap", resumed, half[0, -1], targets[:, 3:])
    close(rest, whole[:, 3:])


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
    for axis_name in (None, {}, [AXIS]):
        with pytest.raises(ValueError, match="`axis_name` must be a string"):
            jaxcomp.average({}, axis_name)
    with pytest.raises(ValueError, match=r"The leaf \['z'\] has dtype complex64"):
        jax.vmap(average, (0, None), axis_name=AXIS)({"z": jnp.zeros(2, jnp.complex64)}, True)


BAD = [
    ({"sync_every": 0}, "sync_every=0"),
    ({"sync_every": 2.0}, "positive integer"),
    ({"sync_every": {}}, "must have all axes of axis_name"),
    ({"sync_every": {"rack": 2, AXIS: 4}}, "'rack', which is not in axis_name"),
    ({"sync_every": {"x": 4, ("x", "y"): 6}, "axis_name": ("x", "y")}, "a multiple of its period"),
    ({"sync_every": {"x": 4}, "axis_name": ("x", "y")}, "would never synchronise"),
    ({"sync_every": {"x": 4, "y": 8}, "axis_name": ("x", "y")}, "the axes of the level before"),
    ({"sync_every": {"x": 0, ("x", "y"): 6}, "axis_name": ("x", "y")}, r"sync_every\['x'\]"),
    ({"average_inner_state": "mean"}, "must be True, False or 'reset'"),
    ({"start_step": -1}, "start_step=-1"),
    ({"offset": -1}, "offset=-1"),
    ({"offset": 1, "sync_every": lambda step: 3}, "fixed period"),
    ({"axis_name": ""}, "axis_name"),
    ({"reducer": "powersgd"}, "`reducer` must be"),
    ({"outer": 0.7}, "`outer` must be"),
    ({"outer": [NESTEROV]}, r"`outer` must be an Optax .* or None, got \["),
    ({"reducer": jaxcomp.allreduce(axis_name="other")}, "averages along 'other'"),
    ({"local_axis_name": "other"}, "'other', which is not in"),
]


@pytest.mark.parametrize("optimizer", [optax.sgd(0.1), optax.adam(1e-3), optax.contrib.muon(0.1)])
def test_a_reducer_with_an_optimizer_behind_it_is_no_average(optimizer):
    w = jnp.ones((8, 8))
    reducer = jaxcomp.allreduce(axis_name=AXIS)
    for axis_name in (AXIS, ("node", AXIS)):
        options = {"axis_name": axis_name, "sync_every": 2}
        for link in (optax.clip(1.0), jaxcomp.powersgd(1, axis_name="node", start_step=0)):
            jax.eval_shape(
                local_sgd(optimizer, reducer=optax.chain(reducer, link), **options).init, w
            )
        tx = local_sgd(optimizer, reducer=optax.chain(reducer, optimizer), **options)
        for init in (tx.init, jax.jit(tx.init), jax.vmap(tx.init, axis_name=AXIS)):
            with pytest.raises(ValueError, match="`reducer` ends with an optimizer"):
                init(w)
    masked = optax.masked(reducer, {"w": True})  # for other parameters than those of the trial
    local_sgd(optimizer, sync_every=2, reducer=masked).init({"w": w})


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
    with pytest.raises(ValueError, match="update needs its own LocalSGDState, got EmptyState"):
        tx.update(PARAMS, optax.EmptyState(), PARAMS)
    with pytest.raises(ValueError, match="is not bound here"):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS)


def test_numbers_among_the_parameters_are_taken_as_arrays():
    tx = jaxcomp.local_sgd(optax.sgd(0.5), sync_every=1, axis_name=AXIS)
    params = {"w": jnp.zeros(2), "x": 0.5}

    def step(x):
        grads = {"w": jnp.zeros(2), "x": x}
        return tx.update(grads, tx.init(params), params)[0]["x"]

    assert_allclose(jax.vmap(step, axis_name=AXIS)(jnp.array([1.0, 3.0])), [-1, -1])
