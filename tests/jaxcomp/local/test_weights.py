"""Local SGD with replicas that do not count the same, and with one that went wrong."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomp
from tests.helpers.leaves import with_value
from tests.helpers.local_runs import rounds, step_of
from tests.helpers.runners import AXIS, mesh_of

WEIGHTS = np.array([3, 1, 0, 2], np.float32)
TARGETS = np.array([0.0, 6.0, np.nan, 3.0], np.float32)[:, None] * np.ones(8, np.float32)
FINITE = np.nan_to_num(TARGETS, nan=64)
MEAN = np.average([0.0, 6.0, 3.0], weights=[3, 1, 2])  # of the replicas that count
OPTIONS = {
    "average": {},
    "outer": {"outer": optax.sgd(1.0)},
    "reducer": {"reducer": jaxcomp.allreduce(axis_name=AXIS)},
    "delayed": {"fragment_sync_delay": 1},
}


def assert_finite(tree):
    for leaf in jax.tree.leaves(jax.device_get(tree)):
        assert np.isfinite(leaf).all()


def stepwise(tx, weights, steps, targets=TARGETS):
    """Parameters of each replica after so many steps of half the way to its target."""

    def run(target, weight):
        params = jnp.zeros(8)
        state = tx.init(params)
        extra = {} if weight is None else {"weight": weight}
        for _ in range(steps):
            updates, state = tx.update(params - target, state, params, **extra)
            params = optax.apply_updates(params, updates)
        return params

    return jax.jit(jax.vmap(run, axis_name=AXIS))(targets, weights)


CASES = [
    # Finite, because no update of Optax's makes NaN into anything else.
    (OPTIONS["average"], 2, FINITE, 0.75, 1e-5),
    (OPTIONS["outer"], 2, FINITE, 0.75, 1e-5),
    (OPTIONS["reducer"], 2, FINITE, 0.75, 1e-5),
    ({"start_step": 2}, 1, TARGETS, 0.5, 1e-6),  # gradients, before the local steps
]


@pytest.mark.parametrize(("options", "steps", "targets", "way", "rtol"), CASES)
def test_an_average_is_weighted_and_who_sits_out_takes_it_too(options, steps, targets, way, rtol):
    tx = jaxcomp.local_sgd(optax.sgd(0.5), sync_every=2, axis_name=AXIS, **options)
    params = stepwise(tx, WEIGHTS, steps, targets)
    np.testing.assert_allclose(params, way * MEAN, rtol=rtol)


def make_round(optimizer, sync_every=2, **options):
    """Rounds of `step_of`; on a mesh a replica's batch is its one example."""
    step = step_of(optimizer)

    def reshaped(params, state, target):
        return step(params, state, target.reshape(8))

    return jaxcomp.local_sgd_round(
        reshaped, sync_every=sync_every, axis_name=AXIS, inner_init=optimizer.init, **options
    )


def twice(targets):
    """Each replica's target in both steps."""
    return np.stack([targets, targets], axis=1)


@pytest.mark.parametrize("on_mesh", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_round_is_weighted(name, on_mesh):
    params = jnp.zeros(8)
    batches = twice(TARGETS)
    if on_mesh:
        run = make_round(optax.sgd(0.5), mesh=mesh_of(4), **OPTIONS[name])
        call = jax.jit(functools.partial(run, weight=WEIGHTS))
        params, _, _ = call(params, run.init(params), batches.swapaxes(0, 1))
    else:
        run = make_round(optax.sgd(0.5), **OPTIONS[name])
        params, _, _ = rounds(run, params, batches, mapping="vmap", weights=WEIGHTS)
    way = 0.5 if name == "delayed" else 0.75  # sent after the first of the two steps
    np.testing.assert_allclose(params, np.broadcast_to(way * MEAN, params.shape), rtol=1e-6)


@pytest.mark.parametrize("weights", [None, np.array([3, 1, 5, 2], np.float32)])
@pytest.mark.parametrize("name", ["average", "outer", "reducer"])
def test_a_replica_that_is_not_finite_is_dropped_and_goes_on_with_the_others(name, weights):
    """In the first of two rounds."""
    run = make_round(optax.adam(0.1), drop_non_finite=True, **OPTIONS[name])
    second = np.nan_to_num(TARGETS)
    targets = np.concatenate([twice(TARGETS), twice(second)], axis=1)
    with jax.numpy_dtype_promotion("standard"):  # for Adam
        params, state, _ = rounds(run, jnp.zeros(8), targets, mapping="vmap", weights=weights)
    assert_finite((params, state.inner))
    np.testing.assert_array_equal(params, np.broadcast_to(params[:1], params.shape))
    assert optax.tree.get(state.inner, "count").reshape(4).tolist() == [4, 4, 2, 4]


def test_nobody_is_dropped_unasked_and_a_round_must_know_how_to_begin_anew():
    tx = jaxcomp.local_sgd(optax.sgd(0.5), sync_every=2, axis_name=AXIS)
    assert np.isnan(stepwise(tx, None, 2)).all()
    with pytest.raises(ValueError, match="drop_non_finite=True needs `inner_init`"):
        jaxcomp.local_sgd_round(print, sync_every=2, axis_name=AXIS, drop_non_finite=True)
    with pytest.raises(ValueError, match="spreads to the others"):
        make_round(optax.sgd(0.5), fragments=2, drop_non_finite=True)
    run = make_round(optax.sgd(0.5), mesh=mesh_of(4))
    params = jnp.zeros(8)
    with pytest.raises(ValueError, match=r"`weight` must have shape \(4,\)"):
        run(params, run.init(params), np.zeros((2, 4, 8)), weight=np.ones(3))


@pytest.mark.parametrize("weights", [(1, 1, 0, 0), (0, 0, 0, 0)])
def test_a_group_in_which_nobody_counts_keeps_what_it_has(weights):
    """First the pairs synchronise, then all; ``local_axis_name`` and levels are the same means."""
    weights = np.array(weights, np.float32).reshape(2, 2)
    targets = FINITE.reshape(2, 2, -1)
    tx = jaxcomp.local_sgd(
        optax.sgd(0.5), sync_every={"fast": 1, ("slow", "fast"): 2}, axis_name=("slow", "fast")
    )

    def run(target, weight):
        params = jnp.zeros_like(target)
        state = tx.init(params)
        trajectory = []
        for _ in range(2):
            updates, state = tx.update(params - target, state, params, weight=weight)
            params = optax.apply_updates(params, updates)
            trajectory.append(params)
        return trajectory

    within = jax.vmap(run, axis_name="fast")
    paired, together = jax.vmap(within, axis_name="slow")(targets, weights)
    np.testing.assert_allclose(paired[1], 0.5 * targets[1], rtol=1e-6)  # its target for each
    assert np.isfinite(together).all()
    if weights.any():
        np.testing.assert_allclose(together - together[0, 0], 0, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"outer": optax.sgd(1.0, momentum=0.5)}])
@pytest.mark.parametrize("average_inner_state", [False, True])
def test_a_round_in_which_nobody_counts_changes_no_parameter(options, average_inner_state):
    run = make_round(
        optax.sgd(0.5, momentum=0.5), average_inner_state=average_inner_state, **options
    )
    nobody = np.zeros(4, np.float32)
    start = jnp.full(8, 3.0)
    params, state, _ = rounds(run, start, twice(FINITE), mapping="vmap", weights=nobody)
    np.testing.assert_array_equal(params, 3)
    assert_finite(state)


@pytest.mark.parametrize("name", ["average", "outer", "reducer"])
def test_momenta_that_are_to_be_averaged_must_be_finite_too(name):
    def step(params, inner, batch):
        return params - 0.5 * (params - 1), inner + batch, None

    run = jaxcomp.local_sgd_round(
        step,
        sync_every=1,
        axis_name=AXIS,
        average_inner_state=True,
        drop_non_finite=True,
        inner_init=jnp.zeros_like,
        **OPTIONS[name],
    )
    batches = with_value(FINITE[:, None], 1, np.nan)
    _, state, _ = rounds(run, jnp.zeros(8), batches, mapping="vmap")
    inner = np.asarray(jax.tree.leaves(state.inner)[0]).reshape(4, 8)
    expected = np.delete(FINITE, 1, axis=0).mean(0)
    others = np.delete(inner, 1, axis=0)
    np.testing.assert_allclose(others, np.broadcast_to(expected, (3, 8)), rtol=1e-5)
    assert np.isfinite(inner).all()


@pytest.mark.parametrize("misspelt", ["weights", "weigths"])
def test_a_misspelt_weight_of_local_steps_is_refused_with_the_right_name(misspelt):
    local = jaxcomp.local_sgd(optax.sgd(0.1), sync_every=2, axis_name="data")
    steps = jaxcomp.accumulate(optax.chain(jaxcomp.allreduce(axis_name="data"), optax.sgd(0.1)), 2)
    params = {"w": np.ones((4, 3), np.float32)}
    for tx in (local, steps):
        step = functools.partial(tx.update, state=tx.init(params), params=params, **{misspelt: 2.0})
        with pytest.raises(ValueError, match=f"no argument `{misspelt}`: it is `weight`"):
            jax.vmap(step, axis_name="data")({"w": np.ones((2, 4, 3), np.float32)})
