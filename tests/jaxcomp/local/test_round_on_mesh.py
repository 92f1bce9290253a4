"""local_sgd_round(mesh=...) inside jit: the numbers of a round inside a shard_map by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomp
from tests.helpers.classifier import KINDS, grid, placed
from tests.helpers.local_runs import NESTEROV, rounds
from tests.helpers.runners import types_of

N, EVERY, ROUNDS = 4, 3, 3
INNER = optax.apply_if_finite(optax.sgd(0.1, momentum=0.9), 2)  # flags and counts have no mean
OPTIONS = {
    "at once": {"reducer": jaxcomp.powersgd(1, axis_name="data", start_step=1)},
    "delayed": {"fragments": ["w"], "fragment_sync_delay": 1, "fragment_update_alpha": 0.25},
}


def step(params, inner, batch):
    loss, grads = jax.value_and_grad(lambda w: jnp.mean((batch @ w - 1) ** 2))(params["w"])
    updates, inner = INNER.update(grads, inner, params["w"])
    w = optax.apply_updates(params["w"], updates)
    return {"w": w, "steps": params["steps"] + 1}, inner, loss


def make(name, mesh=None):
    return jaxcomp.local_sgd_round(
        step,
        sync_every=EVERY,
        axis_name="data",
        outer=NESTEROV,
        inner_init=lambda params: INNER.init(params["w"]),
        mesh=mesh,
        **OPTIONS[name],
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPTIONS)
def test_a_round_maps_itself_over_the_mesh(name, kind):
    rng = np.random.default_rng(0)
    start = {"w": (rng.normal(size=(16, 12)) / 4).astype(np.float32), "steps": np.int32(0)}
    batches = rng.normal(size=(ROUNDS, EVERY, 2 * N, 16)).astype(np.float32)
    # The same in a shard_map by hand: of each replica its two rows of every batch.
    rows = batches.reshape(ROUNDS * EVERY, N, 2, 16).swapaxes(0, 1)
    expected, by_hand, losses = rounds(make(name), start, rows)

    mesh = grid(N, kind)
    run, params = make(name, mesh), placed(mesh, start)
    state, compiled = run.init(params), jax.jit(run)
    for batch, loss in zip(batches, np.split(losses, ROUNDS, axis=1), strict=True):
        params, state, found = compiled(params, state, batch)
        np.testing.assert_allclose(found, loss, rtol=1e-6)
    np.testing.assert_allclose(params["w"], expected["w"][0], rtol=1e-6)
    assert int(params["steps"]) == ROUNDS * EVERY
    assert params["w"].sharding.is_fully_replicated
    momenta = optax.tree.get(state.inner, "trace")
    assert momenta.shape == (N, 16, 12)
    if name == "delayed":
        assert isinstance(state.local["steps"], optax.MaskedNode)
        np.testing.assert_allclose(state.local["w"], by_hand.local["w"], rtol=1e-5, atol=1e-6)
    mean = jaxcomp.consolidate(state)
    averaged = optax.tree.get(mean.inner, "trace")
    np.testing.assert_allclose(averaged, np.mean(momenta, 0), rtol=1e-5, atol=1e-7)
    # What was saved goes on on two replicas, with the mean of all that each had of its own.
    params, mean = jax.device_get((params, mean))
    fewer = make(name, grid(2, kind))
    moved = jaxcomp.stack_replicas(mean, 2)
    assert types_of(moved) == types_of(fewer.init(params))
    new, moved, _ = jax.jit(fewer)(params, moved, batches[0][:, :4])
    assert np.isfinite(new["w"]).all()
    assert np.all(moved.count == (ROUNDS + 1) * EVERY)


def test_what_does_not_fit_the_mesh_is_refused():
    run, params = make("at once", grid(N)), {"w": jnp.zeros((16, 12)), "steps": 0}
    with pytest.raises(ValueError, match="no axis 'data'"):
        make("at once", jax.make_mesh((8,), ("x",)))
    with pytest.raises(ValueError, match="cannot split between 4 replicas"):
        run(params, run.init(params), jnp.zeros((EVERY, 6, 16)))
    other = make("at once", grid(2)).init(params)
    with pytest.raises(ValueError, match="4 replicas need a leading axis"):
        run(params, other, jnp.zeros((EVERY, 8, 16)))
