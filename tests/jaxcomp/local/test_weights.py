"""Local SGD with replicas that do not count the same, and with one that went wrong."""

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
            given = {} if weight is None else {"weight": weight}
            updates, state = tx.update(params - target, state, params, **given)
            params = optax.apply_updates(params, updates)
        return params

    return jax.jit(jax.vmap(run, axis_name=AXIS))(targets, weights)


FINITE = np.nan_to_num(TARGETS, nan=64)
CASES = [
    # Finite, because no update of Optax's makes NaN into anything else.
    *((OPTIONS[name], 2, FINITE, 0.75, 1e-5) for name in ("average", "outer", "reducer")),
    ({"start_step": 2}, 1, TARGETS, 0.5, 1e-6),  # gradients, before the local steps
]


@pytest.mark.parametrize(("options", "steps", "targets", "way", "rtol"), CASES)
def test_an_average_is_weighted_and_who_sits_out_takes_it_too(options, steps, targets, way, rtol):
    tx = jaxcomp.local_sgd(optax.sgd(0.5), sync_every=2, axis_name=AXIS, **options)
    np.testing.assert_allclose(stepwise(tx, WEIGHTS, steps, targets), way * MEAN, rtol=rtol)


def make_round(optimizer, sync_every=2, **options):
    """Rounds of `step_of`; on a mesh a replica's batch is its one example."""
    step = step_of(optimizer)
    return jaxcomp.local_sgd_round(
        lambda params, state, target: step(params, state, target.reshape(8)),
        sync_every=sync_every,
        axis_name=AXIS,
        inner_init=optimizer.init,
        **options,
    )


def twice(targets):
    """Of each replica the same target in both steps."""
    return np.stack([targets, targets], axis=1)


@pytest.mark.parametrize("on_mesh", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_round_is_weighted(name, on_mesh):
    params, targets = jnp.zeros(8), twice(TARGETS)
    if on_mesh:
        run = make_round(optax.sgd(0.5), mesh=mesh_of(4), **OPTIONS[name])
        call = jax.jit(lambda p, s: run(p, s, targets.swapaxes(0, 1), weight=WEIGHTS))
        params, _, _ = call(params, run.init(params))
    else:
        run = make_round(optax.sgd(0.5), **OPTIONS[name])
        params = rounds(run, params, targets, mapping="vmap", weights=WEIGHTS)[0][0]
    way = 0.5 if name == "delayed" else 0.75  # sent after the first of the two steps
    np.testing.assert_allclose(params, way * MEAN, rtol=1e-6)


@pytest.mark.parametrize("weights", [None, np.array([3, 1, 5, 2], np.float32)])
@pytest.mark.parametrize("name", ["average", "outer", "reducer"])
def test_a_replica_that_is_not_finite_is_dropped_and_goes_on_with_the_others(name, weights):
    """In the first of two rounds."""
    run = make_round(optax.adam(0.1), drop_non_finite=True, **OPTIONS[name])
    targets = np.concatenate([twice(TARGETS), twice(np.nan_to_num(TARGETS))], axis=1)
    with jax.numpy_dtype_promotion("standard"):  # for Adam
        params, state, _ = rounds(run, jnp.zeros(8), targets, mapping="vmap", weights=weights)
    assert np.isfinite(params).all()
    np.testing.assert_array_equal(params, np.broadcast_to(params[:1], params.shape))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(jax.device_get(state.inner)))
    assert optax.tree.get(state.inner, "count").reshape(4).tolist() == [4, 4, 2, 4]


def test_nobody_is_dropped_unasked_and_a_round_must_know_how_to_begin_anew():
    params = stepwise(jaxcomp.local_sgd(optax.sgd(0.5), sync_every=2, axis_name=AXIS), None, 2)
    assert np.isnan(params).all()
    with pytest.raises(ValueError, match="drop_non_finite=True needs `inner_init`"):
        jaxcomp.local_sgd_round(print, sync_every=2, axis_name=AXIS, drop_non_finite=True)
    with pytest.raises(ValueError, match="spreads to the others"):
        make_round(optax.sgd(0.5), fragments=2, drop_non_finite=True)
    run = make_round(optax.sgd(0.5), mesh=mesh_of(4))
    with pytest.raises(ValueError, match=r"`weight` must have shape \(4,\)"):
        run(jnp.zeros(8), run.init(jnp.zeros(8)), np.zeros((2, 4, 8)), weight=np.ones(3))


@pytest.mark.parametrize("weights", [(1, 1, 0, 0), (0, 0, 0, 0)])
def test_a_group_in_which_nobody_counts_keeps_what_it_has(weights):
    """First the pairs synchronise, then all; ``local_axis_name`` and levels are the same means."""
    weights = np.array(weights, np.float32).reshape(2, 2)
    tx = jaxcomp.local_sgd(
        optax.sgd(0.5), sync_every={"fast": 1, ("slow", "fast"): 2}, axis_name=("slow", "fast")
    )
    targets = FINITE.reshape(2, 2, -1)

    def run(target, weight):
        params = jnp.zeros_like(target)
        state, seen = tx.init(params), []
        for _ in range(2):
            updates, state = tx.update(params - target, state, params, weight=weight)
            params = optax.apply_updates(params, updates)
            seen.append(params)
        return seen

    mapped = jax.vmap(jax.vmap(run, axis_name="fast"), axis_name="slow")
    paired, together = mapped(targets, weights)
    np.testing.assert_allclose(paired[1], 0.5 * targets[1], rtol=1e-6)  # each its own
    assert np.isfinite(together).all()
    if weights.any():
        np.testing.assert_allclose(together - together[0, 0], 0, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"outer": optax.sgd(1.0, momentum=0.5)}])
@pytest.mark.parametrize("average_inner_state", [False, True])
def test_a_round_in_which_nobody_counts_changes_no_parameter(options, average_inner_state):
    run = make_round(
        optax.sgd(0.5, momentum=0.5), average_inner_state=average_inner_state, **options
    )
    given = {"mapping": "vmap", "weights": np.zeros(4, np.float32)}
    params, state, _ = rounds(run, jnp.full(8, 3.0), twice(FINITE), **given)
    np.testing.assert_array_equal(params, 3)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(jax.device_get(state)))


@pytest.mark.parametrize("name", ["average", "outer", "reducer"])
def test_momenta_that_are_to_be_averaged_must_be_finite_too(name):
    def step(params, inner, batch):
        return params - 0.5 * (params - 1), inner + batch, None

    options = {"average_inner_state": True, "drop_non_finite": True, "inner_init": jnp.zeros_like}
    run = jaxcomp.local_sgd_round(step, sync_every=1, axis_name=AXIS, **options, **OPTIONS[name])
    batches = with_value(FINITE[:, None], 1, np.nan)
    _, state, _ = rounds(run, jnp.zeros(8), batches, mapping="vmap")
    expected = np.delete(FINITE, 1, axis=0).mean(0)
    inner = np.asarray(jax.tree.leaves(state.inner)[0]).reshape(4, 8)
    np.testing.assert_allclose(np.delete(inner, 1, axis=0), np.stack(3 * [expected]), rtol=1e-5)
    assert np.isfinite(inner).all()
