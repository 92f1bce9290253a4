"""local_sgd_round(mesh=...) inside jit: the numbers of a round inside a shard_map by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose

import jaxcomp
from tests.helpers.classifier import KINDS, grid, placed
from tests.helpers.leaves import close, normal
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


INT6 = jaxcomp.powersgd(4, axis_name="data", start_step=0, comm_dtype="int6")


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


def new_params():
    return {"w": normal(16, 12) / 4, "steps": np.int32(0)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPTIONS)
def test_a_round_maps_itself_over_the_mesh(name, kind):
    """Has the numbers of a shard_map by hand; saved, its state is one for two replicas."""
    start = new_params()
    batches = normal(ROUNDS, EVERY, 2 * N, 16, seed=1)
    # By hand each replica takes its two rows of every batch.
    rows = batches.reshape(ROUNDS * EVERY, N, 2, 16).swapaxes(0, 1)
    expected, by_hand, losses = rounds(make(name), start, rows)

    run = make(name, grid(N, kind))
    params = placed(grid(N, kind), start)
    state = run.init(params)
    compiled = jax.jit(run)
    found = []
    for batch in batches:
        params, state, values = compiled(params, state, batch)
        found.append(values)
    assert_allclose(np.concatenate(found, axis=1), losses, rtol=1e-6)
    assert_allclose(params["w"], expected["w"][0], rtol=1e-6)
    assert int(params["steps"]) == ROUNDS * EVERY
    assert params["w"].sharding.is_fully_replicated
    if name == "delayed":
        assert isinstance(state.local["steps"], optax.MaskedNode)
        assert_allclose(state.local["w"], by_hand.local["w"], rtol=1e-5, atol=1e-6)

    momenta = optax.tree.get(state.inner, "trace")
    assert momenta.shape == (N, 16, 12)
    saved = jaxcomp.consolidate(state)
    close(optax.tree.get(saved.inner, "trace"), np.mean(momenta, 0))
    fresh = make(name, grid(2, kind)).init(params)
    assert types_of(jaxcomp.stack_replicas(saved, 2)) == types_of(fresh)


def test_what_does_not_fit_the_mesh_is_refused():
    run = make("at once", grid(N))
    params = {"w": jnp.zeros((16, 12)), "steps": 0}
    with pytest.raises(ValueError, match="no axis 'data'"):
        make("at once", jax.make_mesh((8,), ("x",)))
    with pytest.raises(ValueError, match=r"\['batches'\] is a ndarray of <U4 and not an array"):
        run(params, run.init(params), np.full((EVERY, 8), "text"))
    with pytest.raises(ValueError, match="`weight` must hold real numbers, got a str"):
        run(params, run.init(params), jnp.zeros((EVERY, 8, 16)), weight="equal")
    with pytest.raises(ValueError, match="cannot split between 4 replicas"):
        run(params, run.init(params), jnp.zeros((EVERY, 6, 16)))
    spread = {"w": placed(grid(N), jnp.zeros((16, 12)), jax.P("data")), "steps": 0}
    with pytest.raises(ValueError, match=r"\['w'\] .* is sharded over \['data'\]"):
        run.init(spread)
    other = make("at once", grid(2)).init(params)
    with pytest.raises(ValueError, match="4 replicas need a leading axis"):
        run(params, other, jnp.zeros((EVERY, 8, 16)))


def test_a_round_takes_the_mesh_of_the_context():
    run = make("at once")
    params = new_params()
    batch = normal(EVERY, 2 * N, 16)
    state = make("at once", grid(N)).init(params)
    expected = jax.jit(make("at once", grid(N)))(params, state, batch)
    with jax.set_mesh(grid(N)):
        close(jax.jit(run)(params, state, batch), expected)


@pytest.mark.parametrize("replicas", [2, N])
def test_keys_in_a_batch_are_not_split(replicas):
    """With raw keys each replica gets the whole key of a step, as with typed ones."""

    def drawn(params, inner, batch):
        key, x = batch
        return params + jax.random.normal(key, x.shape[1:]) + x.mean(0), inner, None

    run = jaxcomp.local_sgd_round(drawn, sync_every=EVERY, axis_name="data", mesh=grid(replicas))
    params = jnp.zeros(16)
    state = run.init(params, ())
    x = normal(EVERY, 2 * replicas, 16)
    raw = jax.vmap(jax.random.PRNGKey)(jnp.arange(EVERY))
    ends = [run(params, state, (keys, x))[0] for keys in (raw, jax.random.wrap_key_data(raw))]
    close(*ends)
    if replicas == 2:
        with pytest.raises(ValueError, match=r"\[0\] of the batches .*PRNGKey, or \d+ examples"):
            run(params, state, (raw, x[:, :2]))


@pytest.mark.parametrize("tx", [optax.clip(1.0), optax.masked(INT6, {"w": False, "b": True})])
def test_what_averages_only_a_part_is_no_reducer(tx):
    def still(params, inner, batch):
        return params, inner, None

    params = {"w": jnp.zeros((16, 12)), "b": jnp.zeros(12)}
    run = jaxcomp.local_sgd_round(still, sync_every=1, axis_name="data", mesh=grid(2), reducer=tx)
    local = jaxcomp.local_sgd(optax.sgd(0.1), sync_every=1, axis_name="data", reducer=tx)
    specs = jaxcomp.state_specs(local.init(params), "data")
    state = jaxcomp.shard_state(local.init(params), grid(2), "data")

    def updates(state, x):
        params = {"w": x[:16, :12], "b": x[0, :12]}
        return local.update(params, state, params)[1]

    mapped = jax.shard_map(updates, mesh=grid(2), in_specs=(specs, jax.P("data")), out_specs=specs)
    with pytest.raises(ValueError, match=r"different on every replica .* not a reducer"):
        run(params, run.init(params, ()), jnp.zeros((1, 2)))
    with pytest.raises(ValueError, match=r"different on every replica .* not a reducer"):
        jax.eval_shape(mapped, state, jnp.zeros((32, 16)))


# Beside weights that are sharded over another axis.

LAYOUT = {"up": jax.P(None, "model"), "down": jax.P("model", None)}
MOMENTUM = optax.sgd(0.5, momentum=0.9)
BETWEEN_HOSTS = {
    "local SGD": {},
    "DiLoCo": {"outer": NESTEROV},
    "six bits": {"outer": NESTEROV, "reducer": INT6},
    "streaming": {"outer": NESTEROV, "fragments": ["up", "down"], "fragment_sync_delay": 1},
}


def tensor_parallel_step(params, inner, batch):
    """Takes a step of Megatron's two matrices; beside Explicit axes the product must be whole."""

    def loss(params):
        sharding = jax.typeof(params["up"]).sharding
        whole = jax.P(None, None) if sharding.spec[1] else None
        hidden = jnp.tanh(batch @ params["up"])
        outputs = jnp.dot(hidden, params["down"], out_sharding=whole)
        return jnp.mean((outputs - batch) ** 2)

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
    return params, state, losses, program, run


BESIDE = [("auto", name) for name in BETWEEN_HOSTS]
BESIDE += [("explicit", "streaming")]


@pytest.mark.parametrize(("kind", "name"), BESIDE)
def test_rounds_between_hosts_leave_weights_sharded_within(kind, name):
    options = BETWEEN_HOSTS[name]
    batches = normal(3, 4, 16, 64)
    start = {
        "up": normal(64, 128, seed=1) / 8,
        "down": normal(128, 64, seed=2) / 11,
    }
    mesh = grid(2, kind, model=4)
    sharded = {leaf: placed(mesh, value, LAYOUT[leaf]) for leaf, value in start.items()}
    params, state, losses, program, run = train_rounds(mesh, sharded, batches, options)
    hosts = grid(2, kind)
    start = placed(hosts, start)
    whole, _, expected, _, _ = train_rounds(hosts, start, batches, options)

    assert_allclose(losses, expected, rtol=1e-5)
    close(jax.device_get(params), jax.device_get(whole), atol=2e-6)
    momenta = optax.tree.get(state.inner, "trace")
    for leaf, spec in LAYOUT.items():
        assert params[leaf].sharding.spec == spec
        momentum = momenta[leaf]
        assert momentum.shape == (2, *start[leaf].shape)
        assert momentum.addressable_shards[0].data.size == start[leaf].size // 4

    sent = 0
    for collective in jaxcomp.collectives(program):
        if "data" in collective.axes:
            assert not collective.in_loop
            sent += collective.as_all_reduce
        else:  # nothing as large as a weight moves within a host
            assert max(values for _, values in collective.arrays) < 64 * 128 // 4
    promised = 4 * run.bytes(start, replicas=2).bytes_after
    # Exact averages go as a shard from each device, integers whole.
    assert sent == (promised if name == "six bits" else promised / 4)


def test_a_round_of_one_replica_beside_an_automatic_axis():
    """XLA compiles no all-reduce of one replica of what lies over such an axis."""
    start = new_params()
    batch = normal(EVERY, 2, 16, seed=1)

    def first_round(mesh, spec):
        run = make("at once", mesh)
        params = start | {"w": placed(mesh, start["w"], spec)}
        params, *_ = jax.jit(run)(params, run.init(params), batch)
        return jax.device_get(params)

    alone = first_round(grid(1), jax.P())
    close(first_round(grid(1, model=2), jax.P(None, "model")), alone)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_round_of_numpys_arrays_gets_its_devices_from_the_mesh(replicas):
    """As from a checkpoint; nothing lies on the mesh yet."""
    params = new_params()
    batch = normal(EVERY, 2, 16, seed=1)
    found = []
    for kind in KINDS:
        run = make("at once", grid(replicas, kind, model=2))
        state = jax.tree.map(np.asarray, run.init(params))
        found.append(jax.device_get(jax.jit(run)(params, state, batch)))
    close(*found)
