"""Local SGD with replicas that do not count the same, and with one that went wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import jaxcomp
from tests.helpers.leaves import all_finite, equal, with_value
from tests.helpers.local_runs import rounds, step_of
from tests.helpers.runners import AXIS, WHOLE, mesh_of, sharded, updated

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


def stepwise(tx, weights, steps, targets=TARGETS):
    """Parameters of each replica after so many steps of half the way to its target."""

    def run(target, weight):
        params = jnp.zeros(8)
        state = tx.init(params)
        for _ in range(steps):
            updates, state = tx.update(params - target, state, params, weight=weight)
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
    assert_allclose(params, way * MEAN, rtol=rtol)


def make_round(optimizer, sync_every=2, **options):
    """Rounds of `step_of`; on a mesh a replica's batch is its one example."""
    step = step_of(optimizer)

    def reshaped(params, state, target):
        return step(params, state, target.reshape(8))

    return jaxcomp.local_sgd_round(
        reshaped, sync_every=sync_every, axis_name=AXIS, inner_init=optimizer.init, **options
    )


def twice(targets):
    """Repeats each replica's target in both steps."""
    return np.stack([targets, targets], axis=1)


@pytest.mark.parametrize("on_mesh", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_round_is_weighted(name, on_mesh):
    start = jnp.zeros(8)
    run = make_round(optax.sgd(0.5), mesh=mesh_of(4) if on_mesh else None, **OPTIONS[name])
    if on_mesh:
        batches = twice(TARGETS).swapaxes(0, 1)
        params = jax.jit(run)(start, run.init(start), batches, weight=WEIGHTS)[0]
    else:
        params = rounds(run, start, twice(TARGETS), mapping="vmap", weights=WEIGHTS)[0]
    way = 0.5 if name == "delayed" else 0.75  # sent after the first of the two steps
    assert_allclose(params, np.full(params.shape, way * MEAN), rtol=1e-6)


@pytest.mark.parametrize("weights", [None, np.array([3, 1, 5, 2], np.float32)])
@pytest.mark.parametrize("name", ["average", "outer", "reducer"])
def test_a_replica_that_is_not_finite_is_dropped_and_goes_on_with_the_others(name, weights):
    """In the first of two rounds."""
    run = make_round(optax.adam(0.1), drop_non_finite=True, **OPTIONS[name])
    targets = np.concatenate([twice(TARGETS), twice(np.nan_to_num(TARGETS))], axis=1)
    with jax.numpy_dtype_promotion("standard"):  # for Adam
        params, state, _ = rounds(run, jnp.zeros(8), targets, mapping="vmap", weights=weights)
    assert all_finite((params, state.inner))
    assert_array_equal(params, [params[0]] * 4)
    assert optax.tree.get(state.inner, "count").tolist() == [4, 4, 2, 4]


def test_nobody_is_dropped_unasked_and_a_round_must_know_how_to_begin_anew():
    tx = jaxcomp.local_sgd(optax.sgd(0.5), sync_every=2, axis_name=AXIS)
    assert np.isnan(stepwise(tx, None, 2)).all()
    with pytest.raises(ValueError, match="drop_non_finite=True needs `inner_init`"):
        jaxcomp.local_sgd_round(print, sync_every=2, axis_name=AXIS, drop_non_finite=True)
    with pytest.raises(ValueError, match="from one fragment to the others"):
        make_round(optax.sgd(0.5), fragments=2, drop_non_finite=True)
    run = make_round(optax.sgd(0.5), mesh=mesh_of(4))
    params = jnp.zeros(8)
    with pytest.raises(ValueError, match=r"`weight` must have shape \(4,\)"):
        run(params, run.init(params), np.zeros((2, 4, 8)), weight=np.ones(3))


@pytest.mark.parametrize("weights", [(1, 1, 0, 0), (0, 0, 0, 0)])
def test_a_group_in_which_nobody_counts_keeps_what_it_has(weights):
    """First the pairs synchronise, then all."""
    weights = np.array(weights, np.float32).reshape(2, 2)
    targets = FINITE.reshape(2, 2, -1)
    levels = {"fast": 1, ("slow", "fast"): 2}
    tx = jaxcomp.local_sgd(optax.sgd(0.5), sync_every=levels, axis_name=("slow", "fast"))

    def run(target, weight):
        params = jnp.zeros(8)
        updates, state = tx.update(params - target, tx.init(params), params, weight=weight)
        first = params + updates
        updates, _ = tx.update(first - target, state, first, weight=weight)
        return first, first + updates

    within = jax.vmap(run, axis_name="fast")
    paired, together = jax.vmap(within, axis_name="slow")(targets, weights)
    assert_allclose(paired[1], 0.5 * targets[1], rtol=1e-6)  # its target for each
    assert np.isfinite(together).all()
    if weights.any():
        assert_allclose(together - together[0, 0], 0, atol=1e-6)


def test_a_weighted_hierarchy_keeps_what_all_share_replicated():
    """Pairs synchronise; then all take one step of the outer optimizer."""
    axes = ("slow", "fast")
    targets = FINITE[:, 0].reshape(2, 2)
    weights = np.array([[3, 1], [1, 2]], np.float32)
    levels = {"fast": 1, axes: 2}
    outer = optax.sgd(1.0, momentum=0.5)
    tx = jaxcomp.local_sgd(optax.sgd(0.5), sync_every=levels, axis_name=axes, outer=outer)

    def run(target, weight):
        params = jnp.zeros(())
        state = tx.init(params)
        for _ in range(2):
            updates, state = tx.update(params - target[0, 0], state, params, weight=weight[0, 0])
            params = params + updates
        return params[None, None], state.outer

    kinds = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), axes, axis_types=kinds, devices=jax.devices()[:4])
    rows = jax.P(*axes)
    params, _ = sharded(mesh, run, (rows, rows), (rows, WHOLE))(targets, weights)
    paired = np.average(targets / 2, axis=1, weights=weights)[:, None]
    together = np.average((paired + targets) / 2, weights=weights)
    assert_allclose(params, np.full((2, 2), together), rtol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"outer": optax.sgd(1.0, momentum=0.5)},
        {"outer": optax.sgd(1.0), "average_inner_state": True},
    ],
)
def test_a_round_in_which_nobody_counts_changes_no_parameter(options):
    run = make_round(optax.sgd(0.5, momentum=0.5), **options)
    nobody = np.zeros(4, np.float32)
    params, state, _ = rounds(run, jnp.full(8, 3.0), twice(FINITE), mapping="vmap", weights=nobody)
    equal(params, 3)
    assert all_finite(state)


@pytest.mark.parametrize("name", ["average", "outer", "reducer"])
def test_momenta_that_are_to_be_averaged_must_be_finite_too(name):
    def step(params, inner, batch):
        return params, inner + batch, None

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
    assert all_finite(state.inner)
    others = np.delete(state.inner, 1, axis=0)
    assert_allclose(others, [np.delete(FINITE, 1, axis=0).mean(0)] * 3, rtol=1e-5)


def test_a_misspelt_weight_of_local_steps_is_refused_with_the_right_name():
    sgd = optax.sgd(0.1)
    local = jaxcomp.local_sgd(sgd, sync_every=2, axis_name=AXIS)
    steps = jaxcomp.accumulate(sgd, 2)  # a reducer in it would refuse the name itself
    for tx in (local, steps):
        with pytest.raises(ValueError, match="no argument `weights`"):
            updated(tx, jnp.ones((2, 4)), jnp.ones(4), weights=2.0)


def test_a_chain_of_two_levels_is_weighted_over_both():
    weights = np.arange(1.0, 9.0, dtype=np.float32).reshape(2, 4)
    targets = np.arange(8.0, dtype=np.float32).reshape(2, 4)
    fast = jaxcomp.allreduce(axis_name="fast")
    chain = optax.chain(fast, jaxcomp.allreduce(axis_name="slow"))
    axes = ("slow", "fast")
    tx = jaxcomp.local_sgd(optax.sgd(1.0), sync_every=1, axis_name=axes, reducer=chain)

    def step(target, weight):
        params = jnp.zeros(())
        return tx.update(params - target, tx.init(params), params, weight=weight)[0]

    along_fast = jax.vmap(step, axis_name="fast")
    updates = jax.jit(jax.vmap(along_fast, axis_name="slow"))(targets, weights)
    assert_allclose(updates, np.average(targets, weights=weights), rtol=1e-6)
