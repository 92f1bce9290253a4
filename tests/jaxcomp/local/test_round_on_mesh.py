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

N = 4
EVERY = 3
ROUNDS = 3
INNER = optax.apply_if_finite(optax.sgd(0.1, momentum=0.9), 2)  # flags and counts have no mean
OPTIONS = {
    "at once": {"reducer": jaxcomp.powersgd(1, axis_name="data", start_step=1)},
    "delayed": {"fragments": ["w"], "fragment_sync_delay": 1, "fragment_update_alpha": 0.25},
}


def step(params, inner, batch):
    def loss(w):
        return jnp.mean((batch @ w - 1) ** 2)

    value, grads = jax.value_and_grad(loss)(params["w"])
    updates, inner = INNER.update(grads, inner, params["w"])
    w = optax.apply_updates(params["w"], updates)
    return {"w": w, "steps": params["steps"] + 1}, inner, value


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


def new_params(rng):
    w = (rng.normal(size=(16, 12)) / 4).astype(np.float32)
    return {"w": w, "steps": np.int32(0)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPTIONS)
def test_a_round_maps_itself_over_the_mesh(name, kind):
    rng = np.random.default_rng(0)
    start = new_params(rng)
    batches = rng.normal(size=(ROUNDS, EVERY, 2 * N, 16)).astype(np.float32)
    # The same in a shard_map by hand: each replica takes its two rows of every batch.
    rows = batches.reshape(ROUNDS * EVERY, N, 2, 16).swapaxes(0, 1)
    expected, by_hand, losses = rounds(make(name), start, rows)
    losses = losses.reshape(N, ROUNDS, EVERY)

    mesh = grid(N, kind)
    run = make(name, mesh)
    params = placed(mesh, start)
    state = run.init(params)
    compiled = jax.jit(run)
    for number, batch in enumerate(batches):
        params, state, values = compiled(params, state, batch)
        np.testing.assert_allclose(values, losses[:, number], rtol=1e-6)
    np.testing.assert_allclose(params["w"], expected["w"][0], rtol=1e-6)
    assert int(params["steps"]) == ROUNDS * EVERY
    assert params["w"].sharding.is_fully_replicated
    if name == "delayed":
        assert isinstance(state.local["steps"], optax.MaskedNode)
        np.testing.assert_allclose(state.local["w"], by_hand.local["w"], rtol=1e-5, atol=1e-6)

    momenta = optax.tree.get(state.inner, "trace")
    assert momenta.shape == (N, 16, 12)
    mean = jaxcomp.consolidate(state)
    averaged = optax.tree.get(mean.inner, "trace")
    np.testing.assert_allclose(averaged, np.mean(momenta, 0), rtol=1e-5, atol=1e-7)
    # What was saved goes on on two replicas, with the mean of what each had by itself.
    params, mean = jax.device_get((params, mean))
    fewer = make(name, grid(2, kind))
    moved = jaxcomp.stack_replicas(mean, 2)
    assert types_of(moved) == types_of(fewer.init(params))
    new, moved, _ = jax.jit(fewer)(params, moved, batches[0][:, :4])
    assert np.isfinite(new["w"]).all()
    assert np.all(moved.count == (ROUNDS + 1) * EVERY)


@pytest.mark.parametrize("name", OPTIONS)
def test_within_a_mapped_function_a_mesh_changes_nothing(name):
    rng = np.random.default_rng(0)
    start = new_params(rng)
    batches = rng.normal(size=(N, EVERY, 2, 16)).astype(np.float32)

    def trained(mesh):
        run = make(name, mesh)

        def train(batches):
            params, state, _ = run(start, run.init(start), batches)
            return params, state

        return jax.jit(jax.vmap(train, axis_name="data"))(batches)

    jax.tree.map(np.testing.assert_array_equal, trained(grid(N)), trained(None))


def test_what_does_not_fit_the_mesh_is_refused():
    run = make("at once", grid(N))
    params = {"w": jnp.zeros((16, 12)), "steps": 0}
    with pytest.raises(ValueError, match="no axis 'data'"):
        make("at once", jax.make_mesh((8,), ("x",)))
    with pytest.raises(ValueError, match="cannot split between 4 replicas"):
        run(params, run.init(params), jnp.zeros((EVERY, 6, 16)))
    spread = {"w": placed(grid(N), jnp.zeros((16, 12)), jax.P("data")), "steps": 0}
    with pytest.raises(ValueError, match=r"\['w'\] .* is sharded over \['data'\]"):
        run.init(spread)
    other = make("at once", grid(2)).init(params)
    with pytest.raises(ValueError, match="4 replicas need a leading axis"):
        run(params, other, jnp.zeros((EVERY, 8, 16)))


# Beside weights that are sharded over another axis.

LAYOUT = {"up": jax.P(None, "model"), "down": jax.P("model", None)}
MOMENTUM = optax.sgd(0.5, momentum=0.9)
INT6 = jaxcomp.powersgd(4, axis_name="data", start_step=0, comm_dtype="int6")
BETWEEN_HOSTS = {
    "local SGD": {},
    "DiLoCo": {"outer": NESTEROV},
    "six bits": {"outer": NESTEROV, "reducer": INT6},
    "streaming": {"outer": NESTEROV, "fragments": ["up", "down"], "fragment_sync_delay": 1},
}


def tensor_parallel_step(params, inner, batch):
    """Two matrices of Megatron's, whose product must be said to be whole beside Explicit axes."""

    def loss(params):
        hidden = jnp.tanh(batch @ params["up"])
        whole = jax.P(None, None) if jax.typeof(params["up"]).sharding.spec[1] else None
        return jnp.mean((jnp.dot(hidden, params["down"], out_sharding=whole) - batch) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    updates, inner = MOMENTUM.update(grads, inner, params)
    return optax.apply_updates(params, updates), inner, value


def train_rounds(mesh, params, batches, options):
    run = jaxcomp.local_sgd_round(
        tensor_parallel_step, sync_every=4, axis_name="data", mesh=mesh, **options
    )
    state = run.init(params, MOMENTUM.init(params))
    # What comes out lies as what goes in, so that one program serves every round.
    shardings = jax.tree.map(lambda leaf: leaf.sharding, (params, state))
    step = jax.jit(run, out_shardings=(*shardings, None))
    program = step.lower(params, state, batches[0]).compile()
    losses = []
    for batch in batches:
        params, state, values = program(params, state, batch)
        losses.append(values)
    return params, state, np.stack(losses), program, run


BESIDE = [("auto", name) for name in BETWEEN_HOSTS]
BESIDE += [("explicit", "DiLoCo"), ("explicit", "streaming")]


@pytest.mark.parametrize(("kind", "name"), BESIDE)
def test_rounds_between_hosts_leave_weights_sharded_within(kind, name):
    rng = np.random.default_rng(0)
    options = BETWEEN_HOSTS[name]
    batches = rng.normal(size=(3, 4, 16, 64)).astype(np.float32)
    start = {
        "up": (rng.normal(size=(64, 128)) / 8).astype(np.float32),
        "down": (rng.normal(size=(128, 64)) / 11).astype(np.float32),
    }
    mesh = grid(2, kind, model=4)
    sharded = {leaf: placed(mesh, value, LAYOUT[leaf]) for leaf, value in start.items()}
    params, state, losses, program, run = train_rounds(mesh, sharded, batches, options)
    start = placed(grid(2, kind), start)
    whole, _, expected, _, _ = train_rounds(grid(2, kind), start, batches, options)

    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for leaf, spec in LAYOUT.items():
        np.testing.assert_allclose(params[leaf], whole[leaf], rtol=1e-5, atol=2e-6)
        assert params[leaf].sharding.spec == spec
        momentum = state.inner[0].trace[leaf]
        assert momentum.shape == (2, *start[leaf].shape)
        assert momentum.addressable_shards[0].data.size == start[leaf].size // 4

    crossing = []
    for collective in jaxcomp.collectives(program):
        if "data" in collective.axes:
            crossing.append(collective)
        else:  # nothing as large as a weight moves within a host
            assert max(values for _, values in collective.arrays) < 64 * 128 // 4
    assert not any(collective.in_loop for collective in crossing)
    sent = sum(collective.as_all_reduce for collective in crossing)
    promised = 4 * run.bytes(start, replicas=2).bytes_after
    # Exact averages go as a shard from each device, integers whole.
    assert sent == (promised if name == "six bits" else promised / 4)


def test_a_round_of_one_replica_beside_an_automatic_axis():
    """XLA compiles no all-reduce of one replica of what lies over such an axis."""
    rng = np.random.default_rng(0)
    start = new_params(rng)
    batch = rng.normal(size=(EVERY, 2, 16)).astype(np.float32)
    results = []
    for mesh, spec in ((grid(1), jax.P()), (grid(1, model=2), jax.P(None, "model"))):
        run = make("at once", mesh)
        params = start | {"w": placed(mesh, start["w"], spec)}
        results.append(jax.jit(run)(params, run.init(params), batch))
    for result in results:
        np.testing.assert_allclose(result[0]["w"], results[0][0]["w"], rtol=1e-5, atol=1e-6)
