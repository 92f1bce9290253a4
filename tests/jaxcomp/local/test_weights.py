"""Local SGD with replicas that do not count the same, and with one that went wrong."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from runners import AXIS, mesh_of

import jaxcomp

WEIGHTS = np.array([3, 1, 0, 2], np.float32)
TARGETS = np.array([0.0, 6.0, np.nan, 3.0], np.float32)[:, None] * np.ones(8, np.float32)
OPTIONS = {
    "average": {},
    "outer": {"outer": optax.sgd(1.0)},
    "reducer": {"reducer": jaxcomp.allreduce(axis_name=AXIS)},
    "delayed": {"fragment_sync_delay": 1},
}


def mean(values, weights):
    """Over the replicas that count."""
    kept = weights > 0
    return np.average(values[kept], axis=0, weights=weights[kept])


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
    expected = np.broadcast_to(mean(way * TARGETS, WEIGHTS), (4, 8))
    np.testing.assert_allclose(stepwise(tx, WEIGHTS, steps, targets), expected, rtol=rtol)


def sgd_step(optimizer):
    def step(params, opt_state, target):
        grads = params - target.reshape(-1, 8)[0]  # the one example of a batch, or bare
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, None

    return step


@pytest.mark.parametrize("on_mesh", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_round_is_weighted(name, on_mesh):
    optimizer = optax.sgd(0.5)
    mesh = mesh_of(4) if on_mesh else None
    run = jaxcomp.local_sgd_round(
        sgd_step(optimizer), sync_every=2, axis_name=AXIS, mesh=mesh, **OPTIONS[name]
    )
    params = jnp.zeros(8)
    state = run.init(params, optimizer.init(params))
    batches = np.stack([TARGETS, TARGETS], axis=1)  # (replicas, steps, 8)
    call = lambda p, s, b, w: run(p, s, b, weight=w)  # noqa: E731
    if on_mesh:
        call, batches = jax.jit(call), batches.swapaxes(0, 1)
        params, _, _ = call(params, state, batches, WEIGHTS)
    else:
        mapped = jax.vmap(call, in_axes=(None, None, 0, 0), axis_name=AXIS)
        params = mapped(params, state, batches, WEIGHTS)[0][0]
    way = 0.5 if name == "delayed" else 0.75  # sent after the first of the two steps
    np.testing.assert_allclose(params, mean(way * TARGETS, WEIGHTS), rtol=1e-6)


@pytest.mark.parametrize("weights", [None, np.array([3, 1, 5, 2], np.float32)])
@pytest.mark.parametrize("name", ["average", "outer", "reducer"])
def test_a_replica_that_is_not_finite_is_dropped_and_goes_on_with_the_others(name, weights):
    optimizer = optax.adam(0.1)
    run = jaxcomp.local_sgd_round(
        sgd_step(optimizer),
        sync_every=2,
        axis_name=AXIS,
        drop_non_finite=True,
        inner_init=optimizer.init,
        **OPTIONS[name],
    )

    def two_rounds(target, weight):
        params = jnp.zeros(8)
        state = run.init(params)
        for now in (target, jnp.nan_to_num(target)):
            params, state, _ = run(params, state, jnp.stack([now, now]), weight=weight)
        return params, state.inner

    mapped = jax.vmap(two_rounds, in_axes=(0, None if weights is None else 0), axis_name=AXIS)
    with jax.numpy_dtype_promotion("standard"):  # for Adam
        params, inner = jax.jit(mapped)(TARGETS, weights)
    assert np.isfinite(params).all()
    np.testing.assert_array_equal(params, np.broadcast_to(params[:1], params.shape))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(jax.device_get(inner)))
    assert optax.tree.get(inner, "count").reshape(4).tolist() == [4, 4, 2, 4]


def test_nobody_is_dropped_unasked_and_a_round_must_know_how_to_begin_anew():
    params = stepwise(jaxcomp.local_sgd(optax.sgd(0.5), sync_every=2, axis_name=AXIS), None, 2)
    assert np.isnan(params).all()
    inner = optax.sgd(0.5)
    make = functools.partial(jaxcomp.local_sgd_round, sgd_step(inner), sync_every=2, axis_name=AXIS)
    with pytest.raises(ValueError, match="drop_non_finite=True needs `inner_init`"):
        make(drop_non_finite=True)
    with pytest.raises(ValueError, match="spreads to the others"):
        make(fragments=2, drop_non_finite=True, inner_init=inner.init)
    run = make(mesh=mesh_of(4))
    state = run.init(jnp.zeros(8), ())
    with pytest.raises(ValueError, match=r"`weight` must have shape \(4,\)"):
        run(jnp.zeros(8), state, np.zeros((2, 4, 8)), weight=np.ones(3))


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
    optimizer = optax.sgd(0.5, momentum=0.5)
    run = jaxcomp.local_sgd_round(
        sgd_step(optimizer),
        sync_every=2,
        axis_name=AXIS,
        average_inner_state=average_inner_state,
        **options,
    )
    params = jnp.full(8, 3.0)
    state = run.init(params, optimizer.init(params))
    call = lambda p, s, b, w: run(p, s, b, weight=w)  # noqa: E731
    mapped = jax.vmap(call, in_axes=(None, None, 0, 0), axis_name=AXIS)
    batches = np.stack([FINITE, FINITE], axis=1)
    params, state, _ = mapped(params, state, batches, np.zeros(4, np.float32))
    np.testing.assert_array_equal(params, 3)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(jax.device_get(state)))


def test_momenta_that_are_to_be_averaged_must_be_finite_too():
    def step(params, inner, batch):
        return params - 0.5 * (params - 1), inner + batch, None

    run = jaxcomp.local_sgd_round(
        step,
        sync_every=1,
        axis_name=AXIS,
        average_inner_state=True,
        drop_non_finite=True,
        inner_init=jnp.zeros_like,
    )
    params = jnp.zeros(8)
    state = run.init(params, jnp.zeros(8))
    batches = FINITE[:, None].copy()
    batches[1] = np.nan
    mapped = jax.vmap(run, in_axes=(None, None, 0), axis_name=AXIS)
    _, state, _ = mapped(params, state, batches)
    expected = np.delete(FINITE, 1, axis=0).mean(0)
    inner = np.asarray(jax.tree.leaves(state.inner)[0]).reshape(4, 8)
    np.testing.assert_allclose(np.delete(inner, 1, axis=0), np.stack(3 * [expected]), rtol=1e-5)
    assert np.isfinite(inner).all()
