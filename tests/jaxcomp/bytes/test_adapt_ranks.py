"""Ranks from a run's own momentum: nothing is lost, and the next step takes the state."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from leaves import random_grads
from runners import AXIS, MAPPINGS, first, mesh_of, steps_of, types_of

import jaxcomp

P = jax.P
N, RATIO = 4, 3.0
SHAPES = {"bias": (16,), "flat": (40, 32), "sharp": (32, 40)}
PARAMS = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}


@pytest.fixture(autouse=True)
def as_users_have_it():
    with jax.numpy_dtype_promotion("standard"):  # optax's optimizers need it
        yield


def gradients(steps, seed=0):
    """The mean of one leaf has a flat spectrum, that of the other one direction."""
    grads = random_grads(SHAPES, N, steps, seed)
    return grads | {"sharp": 0.01 * grads["sharp"] + 1}


def reducer(rank, **options):
    return jaxcomp.powersgd(rank, axis_name=AXIS, start_step=0, **options)


def make(rank):
    return optax.chain(reducer(rank), optax.adam(1e-2))


def loop(mapping, tx, state):
    """A training step's update under a mapping, and the state for its first call."""

    def update(grads, state):
        return tx.update(grads, state, PARAMS)

    axes, specs = jaxcomp.state_axes(state), jaxcomp.state_specs(state, AXIS)
    if mapping == "shard_map":
        mapped = jax.shard_map(
            lambda g, s: update(first(g), s),
            mesh=mesh_of(N),
            in_specs=(P(AXIS), specs),
            out_specs=(P(), specs),
        )
        return jax.jit(mapped), lambda: jaxcomp.shard_state(state, mesh_of(N), AXIS)
    kwargs = {"in_axes": (0, axes), "out_axes": (None, axes), "axis_name": AXIS}
    if mapping == "pmap":
        step = jax.pmap(update, devices=jax.devices()[:N], **kwargs)
    else:
        step = jax.jit(jax.vmap(update, **kwargs))
    return step, lambda: jaxcomp.stack_replicas(state, N)


def run(step, state, grads):
    outputs = None
    for g in steps_of(grads):
        outputs, state = step(g, state)
    return jax.device_get(outputs), state


def copies(state, mapping):
    """On the host, the copies of what each replica has of its own along a leading axis."""
    flags = jaxcomp.state_axes(state)
    rows = (N, -1) if mapping == "shard_map" else None

    def split(x, axis):
        x = np.asarray(x)
        return x.reshape(*rows, *x.shape[1:]) if rows and axis == 0 else x

    return jax.tree.map(split, state, flags)


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_one_call_in_the_middle_of_a_loop(mapping):
    tx = make(4)
    step, start = loop(mapping, tx, tx.init(PARAMS))
    _, state = run(step, start(), gradients(5))
    before = copies(state, mapping)
    tx, state, rank = jaxcomp.adapt_ranks(state, PARAMS, make, ratio=RATIO)
    after = copies(state, mapping)

    # Each replica keeps its own residual; momenta and counts are as they were.
    jax.tree.map(np.testing.assert_array_equal, after[1:], before[1:])
    for name in ("flat", "sharp"):
        np.testing.assert_array_equal(after[0].residual[name], before[0].residual[name])
        assert np.ptp(after[0].residual[name], axis=0).any()
    np.testing.assert_array_equal(after[0].mark, before[0].mark)
    assert int(after[0].count) == 5
    assert rank.by_leaf["['flat']"] > 4 > rank.by_leaf["['sharp']"]

    # As by hand.
    by_spectrum = jaxcomp.ranks_by_spectrum(optax.tree.get(state, "mu"), ratio=RATIO)
    assert rank.by_leaf == by_spectrum.by_leaf
    mean = jax.tree.map(lambda x, axis: x.mean(0) if axis == 0 else x, before,
                        jaxcomp.state_axes(before))  # fmt: skip
    by_hand = jaxcomp.adapt_state(mean, PARAMS, make(by_spectrum))
    jax.tree.map(np.testing.assert_array_equal, after[0].q, by_hand[0].q)
    wanted = jax.eval_shape(make(rank).init, PARAMS)
    assert jax.tree.structure(state) == jax.tree.structure(wanted)

    # It goes into the next step as it is, which changes no types, and does what the other does.
    step, start = loop(mapping, tx, by_hand)
    grads = gradients(2, seed=1)
    outputs, last = run(step, state, grads)
    assert types_of(last) == types_of(state)
    expected, _ = run(step, start(), grads)
    for name in SHAPES:
        np.testing.assert_allclose(outputs[name], expected[name], atol=1e-5)


def test_a_saved_state_stays_consolidated():
    tx = make(4)
    step, start = loop("vmap", tx, tx.init(PARAMS))
    saved = jax.device_get(jaxcomp.consolidate(run(step, start(), gradients(3))[1]))
    tx, state, rank = jaxcomp.adapt_ranks(saved, PARAMS, make, ratio=RATIO)
    jax.tree.map(np.testing.assert_array_equal, state, jaxcomp.adapt_state(saved, PARAMS, tx))
    assert state[0].residual["flat"].shape == SHAPES["flat"]
    # A restart makes the same transformation from what was saved beside the checkpoint.
    same = jaxcomp.Ranks(json.loads(json.dumps(rank.by_leaf)))
    assert types_of(make(same).init(PARAMS)) == types_of(state)
    options = {"comm_dtype": jnp.int8, "replicas": N}
    stats = jaxcomp.compression_stats(PARAMS, rank=same, **options)
    assert stats == reducer(rank, comm_dtype=jnp.int8).bytes(PARAMS, replicas=N)


def test_what_is_sent_whole_from_now_on_is_dropped_and_new_residuals_are_zero():
    first_tx = lambda rank: optax.chain(  # noqa: E731
        reducer(lambda path, leaf: 4 if "flat" in str(path) else None), optax.adam(1e-2)
    )
    tx = first_tx(None)
    step, start = loop("shard_map", tx, tx.init(PARAMS))
    _, state = run(step, start(), gradients(3))
    other = lambda rank: optax.chain(  # noqa: E731
        reducer(lambda path, leaf: None if "flat" in str(path) else rank(path, leaf)),
        optax.adam(1e-2),
    )
    tx, new, _ = jaxcomp.adapt_ranks(state, PARAMS, other, ratio=RATIO)
    assert isinstance(new[0].residual["flat"], optax.MaskedNode)
    assert new[0].residual["sharp"].shape == (N * 32, 40)
    assert not np.any(new[0].residual["sharp"])
    assert new[0].residual["sharp"].sharding.spec[0] == AXIS
    step, _ = loop("shard_map", tx, jax.eval_shape(tx.init, PARAMS))
    _, last = run(step, new, gradients(1))
    assert np.any(last[0].residual["sharp"])


@pytest.mark.parametrize(("kind", "sharded"), [("Auto", False), ("Auto", True), ("Explicit", True)])
def test_a_jit_loop_with_the_reducer_apart(kind, sharded):
    """value_and_grad beside weights that are sharded over another axis; nothing is lost."""
    mesh = jax.make_mesh(
        (2, 2), (AXIS, "model"), axis_types=2 * (AxisType[kind],), devices=jax.devices()[:4]
    )
    spec = {"flat": P("model"), "sharp": P(None, "model")} if sharded else {}
    place = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))  # noqa: E731
    params = {name: place(x, *spec.get(name, P())) for name, x in PARAMS.items()}
    optimizer = optax.adam(0.0)

    def loss(params, rows):
        # The gradient of each leaf is the replica's mean of its rows.
        return sum(jnp.mean(jnp.tensordot(rows[k], x, x.ndim)) for k, x in params.items())

    def training_step(value_and_grad):
        @jax.jit
        def step(params, opt_state, state, rows):
            (_, grads), state = value_and_grad(state, params, rows)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, state, grads

        return step

    value_and_grad = jaxcomp.value_and_grad(loss, reducer(4), mesh=mesh)
    step = training_step(value_and_grad)
    state, opt_state = value_and_grad.init(params), optimizer.init(params)
    given = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    sent = dict(given)
    for number, rows in enumerate(steps_of(gradients(7))):
        if number == 4:
            tx, state, rank = jaxcomp.adapt_ranks(
                state, params, reducer, ratio=RATIO, momentum=opt_state
            )
            value_and_grad = jaxcomp.value_and_grad(loss, tx, mesh=mesh)
            step = training_step(value_and_grad)
            fresh = value_and_grad.init(params)
            assert types_of(state) == types_of(fresh)
            for leaf, like in zip(jax.tree.leaves(state), jax.tree.leaves(fresh), strict=True):
                assert leaf.sharding.is_equivalent_to(like.sharding, leaf.ndim)
        rows = {name: place(x, AXIS) for name, x in rows.items()}
        params, opt_state, state, grads = step(params, opt_state, state, rows)
        given = {name: given[name] + np.mean(x, 0) for name, x in jax.device_get(rows).items()}
        sent = {name: sent[name] + np.asarray(x) for name, x in grads.items()}
    assert rank.by_leaf["['flat']"] > 4 > rank.by_leaf["['sharp']"]
    for name in ("flat", "sharp"):
        total = sent[name] + np.asarray(state.residual[name]).mean(0)
        np.testing.assert_allclose(total, given[name], atol=2e-4)


OPTIMIZERS = {
    "adamw": optax.adamw(1e-2),
    "nadam": optax.nadam(1e-2),
    "lion": optax.lion(1e-2),
    "sgd": optax.sgd(1e-2, momentum=0.9),
    "muon": optax.contrib.muon(1e-2),
    "narrow": optax.adam(1e-2, mu_dtype=jnp.bfloat16),
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)),
    "injected": optax.inject_hyperparams(optax.adam)(1e-2),
    "multi_transform": optax.multi_transform(
        {"a": optax.adam(1e-2), "b": optax.sgd(1e-2, momentum=0.9)},
        {"bias": "b", "flat": "a", "sharp": "b"},
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_momentum_is_found(name):
    optimizer = OPTIMIZERS[name]
    grads = jax.tree.map(lambda g: jnp.asarray(g.mean((0, 1))), gradients(1))
    opt_state = jax.jit(optimizer.update)(grads, optimizer.init(PARAMS), PARAMS)[1]
    state = (reducer(4).init(PARAMS), opt_state)
    make = lambda rank: optax.chain(reducer(rank), optimizer)  # noqa: E731
    _, after, rank = jaxcomp.adapt_ranks(state, PARAMS, make, ratio=RATIO)
    jax.tree.map(np.testing.assert_array_equal, after[1], opt_state)
    # Whatever the optimizer multiplies gradients by: the first momentum is in their direction.
    assert rank.by_leaf == jaxcomp.ranks_by_spectrum(grads, ratio=RATIO).by_leaf
    assert rank.by_leaf["['flat']"] > 4 > rank.by_leaf["['sharp']"]


def test_gradients_that_are_being_accumulated_stay():
    def make(rank):
        return optax.MultiSteps(optax.chain(reducer(rank), optax.adam(1e-2)), 2)

    tx = make(4).gradient_transformation()
    step, start = loop("vmap", tx, tx.init(PARAMS))
    _, state = run(step, start(), gradients(3))  # an update, and a half
    transformation = lambda rank: make(rank).gradient_transformation()  # noqa: E731
    _, after, rank = jaxcomp.adapt_ranks(state, PARAMS, transformation, ratio=RATIO)
    jax.tree.map(np.testing.assert_array_equal, after.acc_grads, state.acc_grads)
    assert np.any(after.acc_grads["flat"])
    # After one update the momentum has no more directions than the factors that it came through.
    assert rank.by_leaf == {"['bias']": None, "['flat']": 4, "['sharp']": 4}


def test_leaves_that_have_no_momentum():
    """They have no gradients to send; where they have, ranks for them are missing."""

    def partly(rank):
        groups = {"trained": make(rank), "frozen": optax.set_to_zero()}
        return optax.partition(groups, {"bias": "trained", "flat": "trained", "sharp": "frozen"})

    grads = {"bias": jnp.ones(16), "flat": jnp.eye(40, 32), "sharp": jnp.eye(32, 40)}
    opt_state = optax.tree.set(partly(4).init(PARAMS), mu={**grads, "sharp": optax.MaskedNode()})
    tx, state, rank = jaxcomp.adapt_ranks(opt_state, PARAMS, partly, ratio=RATIO)
    assert set(rank.by_leaf) == {"['bias']", "['flat']"}
    assert types_of(state) == types_of(tx.init(PARAMS))
    without = {**grads, "sharp": optax.MaskedNode()}
    with pytest.raises(ValueError, match=r"saw no gradient of the leaf \['sharp'\]"):
        jaxcomp.adapt_ranks(make(4).init(PARAMS), PARAMS, make, ratio=RATIO, momentum=without)


def test_parameters_in_boxes():
    model = nnx.Linear(32, 40, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    grads = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
    optimizer.update(model, grads)
    params = nnx.state(model, nnx.Param)
    state, momentum = reducer(4).init(params), optimizer.opt_state
    tx, state, rank = jaxcomp.adapt_ranks(state, params, reducer, ratio=RATIO, momentum=momentum)
    assert types_of(state) == types_of(tx.init(params))
    assert sorted(rank.by_leaf.values(), key=str) == [1, None]


def test_errors():
    tx = make(4)
    state = tx.init(PARAMS)
    mean = {name: jnp.ones(shape) for name, shape in SHAPES.items()}

    def refused(match, state=state, params=PARAMS, make=make, **options):
        with pytest.raises(ValueError, match=match):
            jaxcomp.adapt_ranks(state, params, make, ratio=RATIO, **options)

    refused("The momentum is zero everywhere: no step was taken yet")
    refused(
        r"There is no momentum in `state`.*pass its state as momentum=", reducer(4).init(PARAMS)
    )
    refused("There is no momentum in `momentum`", momentum=optax.sgd(1.0).init(PARAMS))
    two = (state[0], optax.adam(1.0).init(PARAMS), optax.sgd(1.0, 0.9).init(PARAMS))
    refused(r"The leaf \['bias'\] has two momenta in `state`, \[1\]\[0\].mu and \[2\]\[0\]", two)
    refused(r"\['new'\]: no such parameter", momentum=optax.adam(1.0).init({"new": 1.0}))
    refused("no reducer: replicas would no longer", momentum=mean, make=lambda _: optax.adam(1.0))
    refused("must return an Optax transformation, got None", momentum=mean, make=lambda _: None)
    wide = mean | {"flat": jnp.ones((2, 40, 32))}
    refused(r"\['flat'\]: \(2, 40, 32\), and the parameter is \(40, 32\)", momentum=wide)
    refused(r"the same leaves|does not fit `tx`", momentum=mean, make=lambda rank: reducer(rank))
    refused("`make` must be a function", make=4)
    local = jaxcomp.local_sgd(optax.adam(1e-2), sync_every=2, axis_name=AXIS)
    refused("one of jaxcomp.local_sgd", local.init(PARAMS))
    whole = jax.tree.map(lambda x: jnp.stack([x] * N), state)
    refused("The whole state has an axis of replicas", whole)
    one = (state[0]._replace(mark=jnp.array([-0.5])), *state[1:])
    refused("the residual of one replica only", one, momentum=mean)
    mixed = (reducer(4).init(PARAMS), jaxcomp.stack_replicas(reducer(4).init(PARAMS), 2))
    refused("come from different mappings", mixed, momentum=mean)
    with pytest.raises(ValueError, match="The state is traced"):
        jax.jit(lambda s: jaxcomp.adapt_ranks(s, PARAMS, make, ratio=RATIO)[1])(state)
