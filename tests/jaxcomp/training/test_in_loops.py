"""What loops hand to jaxcomp.data_parallel: states inside others, metadata, functions."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding

import jaxcomp
from tests.helpers.classifier import (
    LENGTH,
    WIDTH,
    bare_loss,
    batch,
    close,
    grid,
    new_params,
    placed,
)
from tests.helpers.reducers import reducer
from tests.helpers.runners import MAPPINGS, over_replicas, start

P = jax.P
TX = reducer("powersgd")
PARAMS = new_params()
DATA = batch()


def mean_gradients(mesh=None):
    return jaxcomp.value_and_grad(bare_loss, TX, mesh=mesh)


@pytest.mark.parametrize(
    ("partitioning", "works"),
    [(nn.with_partitioning, False), (nn.with_logical_partitioning, True)],
)
def test_dense_general_with_metadata_inside_a_mesh_is_explained(partitioning, works):
    kernel_init = partitioning(nn.initializers.lecun_normal(), (None, None, "model"))
    dense = nn.DenseGeneral((4, 8), kernel_init=kernel_init)
    x = jnp.ones((8, 16))
    params = nn.unbox(dense.init(jax.random.key(0), x))
    run = jaxcomp.value_and_grad(
        lambda p, x: jnp.mean(dense.apply(p, x) ** 2), reducer("allreduce"), mesh=grid(2, model=2)
    )
    if works:
        assert jax.eval_shape(run, run.init(params), params, x)[0][0].shape == ()
        return
    with pytest.raises(ValueError, match="with_sharding_constraint") as error:
        jax.eval_shape(run, run.init(params), params, x)
    assert "nn.with_logical_partitioning" in error.value.__notes__[0]


def in_train_state(tx, params, state):
    return TrainState.create(apply_fn=None, params=params, tx=tx).replace(opt_state=(state, ()))


HOLDERS = {  # what holds the state
    "TrainState": in_train_state,
    "dict": lambda tx, params, state: {"of": [params, state]},
    "itself": lambda tx, params, state: state,
}


@functools.cache
def held_by_nothing(kind):
    """Returns outputs and state where the mesh is given."""
    given = mean_gradients(grid(4, kind))
    return jax.jit(given)(given.init(PARAMS), PARAMS, *DATA)


@pytest.mark.parametrize(
    ("holder", "kind"), [*((holder, "auto") for holder in HOLDERS), ("TrainState", "explicit")]
)
def test_a_state_is_found_in_what_holds_it_and_so_is_its_mesh(holder, kind):
    mesh = grid(4, kind)
    tx = optax.chain(jaxcomp.hold_state(TX), optax.identity())
    hold = functools.partial(HOLDERS[holder], tx, PARAMS)
    held = jaxcomp.shard_state(hold(TX.init(PARAMS)), mesh, "data")
    found = jax.jit(mean_gradients())(held, placed(mesh, PARAMS), *DATA)
    outputs, state = held_by_nothing(kind)
    jax.tree.map(np.testing.assert_array_equal, found, (outputs, hold(state)))


def test_what_cannot_be_found_again_is_not_held():
    with pytest.raises(ValueError, match=r"`reducer` must be a jaxcomp reducer, got Gradient"):
        jaxcomp.hold_state(optax.chain(TX))
    mesh = grid(2)
    run = mean_gradients(mesh)
    for around in (optax.MultiSteps, jaxcomp.accumulate):
        tx = around(optax.chain(jaxcomp.hold_state(TX)), 2)
        with pytest.raises(ValueError, match=r"State around jaxcomp\.hold_state .* Accumulate in"):
            run(jaxcomp.shard_state(tx.init(PARAMS), mesh, "data"), PARAMS, *DATA)


def test_a_reducer_without_a_state_takes_any_and_two_states_are_refused():
    mesh = grid(2)
    run = jaxcomp.value_and_grad(bare_loss, reducer("allreduce"), mesh=mesh)
    assert jax.jit(run)({"step": 3}, PARAMS, *DATA)[1] == {"step": 3}
    run = mean_gradients(mesh)
    state = run.init(PARAMS)
    for wrong, message in (((state, state), "has 2 that may be it"), (None, "has none")):
        with pytest.raises(ValueError, match=f"must be the reducer's state, .*{message}"):
            run(wrong, PARAMS, *DATA)


@pytest.mark.parametrize(
    ("shape", "spec"),
    [((1, 2), P()), ((1, 2), P(None, "model")), ((2, 2), P("model")), ((2, 2), P(None, "model"))],
)
def test_weights_keys_and_exact_steps_beside_an_automatic_axis(shape, spec):
    """Needs care, as XLA compiles no all-reduce of one replica of what lies over such an axis."""
    mesh = grid(shape[0], model=shape[1])
    x, y = DATA
    params = placed(mesh, PARAMS | {"down": np.ones((32, 4), np.float32)}, spec)

    def dropped(params, x, y, key):
        key = jax.random.fold_in(key, jax.lax.axis_index("data"))
        kept = jax.random.bernoulli(key, 0.9, (len(x), LENGTH, 32))
        hidden = jnp.where(kept, jnp.tanh(x @ params["up"]), 0)
        hidden = jax.lax.with_sharding_constraint(hidden, P(None, None, "model"))
        logits = hidden @ params["down"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, y % 4).mean()

    run = jaxcomp.value_and_grad(dropped, reducer("powersgd", 1), mesh=mesh)
    weight = np.arange(1.0, 17.0, dtype=np.float32)
    key = jax.random.key(0)
    step = jax.jit(lambda s, p: run(s, p, x, y, key, weight=weight))
    (value, grads), state = step(run.init(params), params)
    own = jax.tree.map(lambda a: a.reshape(shape[0], -1, *a.shape[1:]), (x, y, weight))
    replicas = jax.vmap(jax.value_and_grad(dropped), (None, 0, 0, None), axis_name="data")
    with jax.set_mesh(mesh):
        each = jax.jit(replicas)(jax.device_get(params), *own[:2], key)
    expected = jax.tree.map(lambda x: np.average(x, axis=0, weights=own[2].sum(1)), each)
    close((value, grads), expected, rtol=1e-4)
    assert int(step(state, params)[1].count) == 2
    assert state.residual["up"].shape == (shape[0], WIDTH, 32)


@pytest.mark.parametrize("told", [False, True])
def test_what_is_no_array_goes_where_the_function_wants_it(told):
    """Calls as MaxText does: parameters in the middle, with shardings and a configuration."""
    mesh = grid(2, model=2)
    x, y = DATA
    shardings = {"up": NamedSharding(mesh, P("data", "model")), "down": NamedSharding(mesh, P())}

    def gradients(scale, params, shardings, data):
        laid = jax.tree.map(jax.lax.with_sharding_constraint, params, shardings)

        def loss(p):
            return scale(bare_loss(p, *data))

        return jax.value_and_grad(loss)(laid)

    specs = {"batch_specs": (P(), P(), P("data"))} if told else {}
    run = jaxcomp.data_parallel(gradients, reducer("allreduce"), mesh=mesh, argnums=1, **specs)
    step = jax.jit(lambda s, p, data: run(s, jnp.negative, p, shardings, data))
    found, _ = step(run.init(PARAMS), PARAMS, (x, y))
    close(found, jax.value_and_grad(lambda p: -bare_loss(p, x, y))(PARAMS))


def test_a_model_may_hold_functions():
    mesh = grid(2)
    x, y = DATA
    model = {**PARAMS, "activation": jnp.tanh}
    arrays = {**PARAMS, "activation": None}

    def gradients(model, x, y):
        weights = {name: model[name] for name in ("up", "down")}
        value, grads = jax.value_and_grad(bare_loss)(weights, x, y)
        return value, {**grads, "activation": None}

    run = jaxcomp.data_parallel(gradients, TX, mesh=mesh)
    (_, grads), _ = jax.eval_shape(lambda x, y: run(run.init(model), model, x, y), x, y)
    assert jax.tree.structure(grads) == jax.tree.structure(arrays)


def frozen(held):
    """Makes optimizers that train a part, and hold the state for it."""
    labels = {"up": "trained", "down": "frozen"}
    parts = {"trained": optax.chain(held, optax.sgd(0.1)), "frozen": optax.set_to_zero()}
    return {
        "partition": optax.partition(parts, labels),
        "masked": optax.masked(held, {"up": True, "down": False}),
    }


@pytest.mark.parametrize("name", ["partition", "masked"])
def test_a_state_held_for_a_part_of_the_parameters_is_refused(name):
    mesh = grid(2)
    optimizer = frozen(jaxcomp.hold_state(TX))[name]
    run = mean_gradients(mesh)
    state = jaxcomp.shard_state(optimizer.init(PARAMS), mesh, "data")
    with pytest.raises(ValueError, match=r"of other parameters .* To freeze a part, pass it"):
        run(state, PARAMS, *DATA)


def test_hold_state_around_frozen_parts():
    """Freezes as the error says: within hold_state, or with what is frozen as an argument."""
    mesh = grid(2)
    inner = frozen(optax.identity())["partition"]
    optimizer = optax.chain(jaxcomp.hold_state(TX), inner)
    run = mean_gradients(mesh)
    state = jaxcomp.shard_state(optimizer.init(PARAMS), mesh, "data")
    (_, grads), state = jax.jit(run)(state, PARAMS, *DATA)
    updates, _ = optimizer.update(grads, state, PARAMS)
    assert not np.any(updates["down"])
    np.testing.assert_allclose(updates["up"], -0.1 * grads["up"], rtol=1e-6)

    def part(up, down, x, y):
        return bare_loss({"up": up, "down": down}, x, y)

    alone = jaxcomp.value_and_grad(part, TX, mesh=mesh, batch_specs=(P(), P("data"), P("data")))
    up = PARAMS["up"]
    down = PARAMS["down"]
    (_, grad), _ = jax.jit(alone)(alone.init(up), up, down, *DATA)
    assert grad.shape == grads["up"].shape


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_hold_state_averages_nothing_in_a_mapped_function_and_says_so(mapping):
    """Works where JAX knows that gradients are equal on all replicas, as behind value_and_grad."""
    chain = optax.chain(jaxcomp.hold_state(TX), optax.sgd(0.1))
    run = mean_gradients()
    rows = jax.tree.map(lambda a: a.reshape(4, 4, *a.shape[1:]), DATA)
    state, specs = start(mapping, chain.init(PARAMS), 4)

    def local(rows, state, params):
        _, grads = jaxcomp.local_value_and_grad(bare_loss, "data")(params, *rows)
        return chain.update(grads, state, params)

    def averaged(rows, state, params):
        (_, grads), state = run(state, params, *rows)
        return chain.update(grads, state, params)

    behind = over_replicas(mapping, averaged, 4, specs, shared=1)
    if mapping == "shard_map":
        updates, _ = behind(rows, state, PARAMS)
        assert np.abs(updates["up"]).max() > 0
    else:
        with pytest.raises(ValueError, match=r"only for jax\.shard_map with check_vma=True"):
            behind(rows, state, PARAMS)
    refused = over_replicas(mapping, local, 4, specs, shared=1)
    with pytest.raises(ValueError, match="hold_state averages nothing, and here"):
        refused(rows, state, PARAMS)


@pytest.mark.parametrize(
    ("shape", "fails"), [((2, 0), AssertionError), ((2, 2), NotImplementedError)]
)
def test_faults_of_jax_in_a_mapped_function_are_explained(shape, fails):
    def rotary(params, x, y):
        with jax.ensure_compile_time_eval():
            angles = jnp.arange(32.0) * 2.0
        return jnp.mean(jnp.cos(x @ params["up"] * angles) ** 2)

    mesh = grid(shape[0], model=shape[1])
    run = jaxcomp.value_and_grad(rotary, reducer("allreduce"), mesh=mesh)
    assert jax.eval_shape(run, run.init(PARAMS), PARAMS, *DATA)[0][0].shape == ()
    with jax.set_mesh(mesh), pytest.raises(fails) as error:
        jax.jit(run).lower(run.init(PARAMS), PARAMS, *DATA)
    assert "ensure_compile_time_eval" in error.value.__notes__[0]


def test_zeros_like_of_a_shape_beside_another_axis_is_explained():
    def gradients(params, x, y):
        shapes = jax.eval_shape(jax.value_and_grad(bare_loss), params, x, y)
        zeros = jax.tree.map(jnp.zeros_like, shapes)
        return jax.tree.map(jnp.add, zeros, jax.value_and_grad(bare_loss)(params, x, y))

    mesh = grid(2, model=1)
    make = functools.partial(jaxcomp.data_parallel, gradients, reducer("allreduce"), mesh=mesh)
    unchecked = make(check_vma=False)
    checked = make()
    with jax.set_mesh(mesh):
        arguments = unchecked.init(PARAMS), PARAMS, *DATA
        assert jax.eval_shape(unchecked, *arguments)[0][0].shape == ()
        with pytest.raises(AssertionError) as error:
            jax.eval_shape(checked, *arguments)
    assert "check_vma=False" in error.value.__notes__[0]


ACCUMULATORS = {
    "MultiSteps": optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(),
    "accumulate": jaxcomp.accumulate(optax.sgd(0.1), 2),
}


@pytest.mark.parametrize("kind", ACCUMULATORS)
@pytest.mark.parametrize("name", ["powersgd", "allreduce", "feedback-int8"])
def test_accumulation_behind_averaged_gradients(name, kind):
    """Holds the same on all replicas."""
    mesh = grid(2)
    tx = reducer(name)
    every_second = ACCUMULATORS[kind]
    optimizer = optax.chain(jaxcomp.hold_state(tx), every_second)
    run = jaxcomp.value_and_grad(bare_loss, tx, mesh=mesh)
    state = jaxcomp.shard_state(optimizer.init(PARAMS), mesh, "data")
    assert state[1].acc_grads["up"].shape == PARAMS["up"].shape

    @jax.jit
    def step(params, state, x, y):
        (_, grads), state = run(state, params, x, y)
        updates, state = optimizer.update(grads, state, params)
        return updates, grads, state

    with jax.numpy_dtype_promotion("standard"):  # MultiSteps divides by an integer
        first, one, state = step(PARAMS, state, *DATA)
        second, two, state = step(PARAMS, state, *batch(seed=2))
    assert not np.any(first["up"])
    np.testing.assert_allclose(second["up"], -0.05 * (one["up"] + two["up"]), rtol=1e-4, atol=1e-7)
    saved = jaxcomp.consolidate(state)
    assert saved[1].acc_grads["up"].shape == PARAMS["up"].shape


@pytest.mark.parametrize("name", ["powersgd", "feedback-int8"])
def test_accumulated_gradients_beside_a_reducers_state_have_no_axis_of_replicas(name):
    """Places a state as of a TrainState with the reducer's state beside the optimizer's."""
    mesh = grid(2)
    run = jaxcomp.value_and_grad(bare_loss, reducer(name), mesh=mesh)
    beside = {"reducer": run.init(PARAMS), "opt": ACCUMULATORS["MultiSteps"].init(PARAMS)}
    placed_beside = jaxcomp.shard_state(beside, mesh, "data")
    assert placed_beside["opt"].acc_grads["up"].shape == PARAMS["up"].shape
