"""local_sgd_round(mesh=...) inside jit: the numbers of a round inside a shard_map by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from classifier import KINDS, grid, placed
from local_runs import rounds
from runners import types_of

import jaxcomp

N, EVERY, ROUNDS = 4, 3, 3
INNER = optax.apply_if_finite(optax.sgd(0.1, momentum=0.9), 2)  # flags and counts have no mean


def step(params, inner, batch):
    loss, grads = jax.value_and_grad(lambda p: jnp.mean((batch @ p["w"] - 1) ** 2))(params)
    updates, inner = INNER.update(grads, inner, params)
    return optax.apply_updates(params, updates), inner, loss


def arguments():
    return {
        "sync_every": EVERY,
        "axis_name": "data",
        "reducer": jaxcomp.powersgd(1, axis_name="data", start_step=1),
        "outer": optax.sgd(0.7, momentum=0.9, nesterov=True),
        "inner_init": INNER.init,
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_round_maps_itself_over_the_mesh(kind):
    rng = np.random.default_rng(0)
    start = {"w": (rng.normal(size=(16, 12)) / 4).astype(np.float32)}
    batches = rng.normal(size=(ROUNDS, EVERY, 2 * N, 16)).astype(np.float32)
    # The same in a shard_map by hand: of each replica its two rows of every batch.
    rows = batches.reshape(ROUNDS * EVERY, N, 2, 16).swapaxes(0, 1)
    expected, _, losses = rounds(jaxcomp.local_sgd_round(step, **arguments()), start, rows)

    mesh = grid(N, kind)
    run = jaxcomp.local_sgd_round(step, mesh=mesh, **arguments())
    params = placed(mesh, start)
    state, compiled = run.init(params), jax.jit(run)
    assert optax.tree.get(state.inner, "trace")["w"].shape == (N, 16, 12)
    for batch, loss in zip(batches, np.split(losses, ROUNDS, axis=1), strict=True):
        params, state, found = compiled(params, state, batch)
        np.testing.assert_allclose(found, loss, rtol=1e-6)
    np.testing.assert_allclose(params["w"], expected["w"][0], rtol=1e-6)
    assert params["w"].sharding.is_fully_replicated
    mean = jaxcomp.consolidate(state)
    momenta, averaged = (optax.tree.get(x.inner, "trace")["w"] for x in (state, mean))
    np.testing.assert_allclose(averaged, np.mean(momenta, 0), rtol=1e-5, atol=1e-7)
    # What was saved goes on on two replicas, with the mean of all momenta and residuals.
    params, mean = jax.device_get((params, mean))
    fewer = jaxcomp.local_sgd_round(step, mesh=grid(2, kind), **arguments())
    moved = jaxcomp.stack_replicas(mean, 2)
    assert types_of(moved) == types_of(fewer.init(params))
    new, moved, _ = jax.jit(fewer)(params, moved, batches[0][:, :4])
    assert np.isfinite(new["w"]).all()
    assert np.all(moved.reducer[0].count == ROUNDS + 1)


def test_what_does_not_fit_the_mesh_is_refused():
    run = jaxcomp.local_sgd_round(step, mesh=grid(N), **arguments())
    params = {"w": jnp.zeros((16, 12))}
    with pytest.raises(ValueError, match="no axis 'data'"):
        jaxcomp.local_sgd_round(step, mesh=jax.make_mesh((8,), ("x",)), **arguments())
    with pytest.raises(ValueError, match="cannot split between 4 replicas"):
        run(params, run.init(params), jnp.zeros((EVERY, 6, 16)))
    other = jaxcomp.local_sgd_round(step, mesh=grid(2), **arguments()).init(params)
    with pytest.raises(ValueError, match="4 replicas need a leading axis"):
        run(params, other, jnp.zeros((EVERY, 8, 16)))
