"""What loops hand to jaxcomp.data_parallel: states inside others, metadata, functions."""

import functools

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from numpy.testing import assert_allclose

import jaxcomp
from jaxcomp.extend import unboxed
from tests.helpers.classifier import WIDTH, bare_loss, batch, grid, new_params, placed, stepped
from tests.helpers.leaves import close, equal, normal
from tests.helpers.reducers import reducer
from tests.helpers.runners import MAPPINGS, over_replicas, start

P = jax.P
TX = reducer("powersgd")
PARAMS = new_params()
DATA = batch()


def mean_gradients(mesh=None):
    return jaxcomp.value_and_grad(bare_loss, TX, mesh=mesh)


def explained(error, call, *arguments):
    """Returns what is said beside an error of JAX."""
    with pytest.raises(error) as raised:
        jax.eval_shape(call, *arguments)
    return raised.value.__notes__[0]


def test_dense_general_with_metadata_inside_a_mesh_is_explained():
    x = jnp.ones((8, 16))

    def arguments(partitioning):
        kernel_init = partitioning(nn.initializers.lecun_normal(), (None, None, "model"))
        dense = nn.DenseGeneral((4, 8), kernel_init=kernel_init)
        params = nn.unbox(dense.init(jax.random.key(0), x))
        loss = lambda p, x: jnp.mean(dense.apply(p, x) ** 2)  # noqa: E731
        run = jaxcomp.value_and_grad(loss, reducer("allreduce"), mesh=grid(2, model=2))
        return run, run.init(params), params, x

    assert jax.eval_shape(*arguments(nn.with_logical_partitioning))[0][0].shape == ()
    note = explained(ValueError, *arguments(nn.with_partitioning))
    assert "nn.with_logical_partitioning" in note


HOLD = optax.chain(jaxcomp.hold_state(TX), optax.identity())


def in_train_state(state):
    train_state = TrainState.create(apply_fn=None, params=PARAMS, tx=HOLD)
    return train_state.replace(opt_state=(state, ()))


def in_a_dict(state):
    return {"of": [PARAMS, state]}


def itself(state):
    return state


@pytest.mark.parametrize(
    ("hold", "kind"),
    [(in_train_state, "auto"), (in_train_state, "explicit"), (in_a_dict, "auto"), (itself, "auto")],
)
def test_a_state_is_found_in_what_holds_it_and_so_is_its_mesh(hold, kind):
    mesh = grid(4, kind)
    given = mean_gradients(mesh)
    outputs, state = jax.jit(given)(given.init(PARAMS), PARAMS, *DATA)
    held = jaxcomp.shard_state(hold(TX.init(PARAMS)), mesh, "data")
    found = jax.jit(mean_gradients())(held, placed(mesh, PARAMS), *DATA)
    equal(found, (outputs, hold(state)))
    saved = jax.device_get(jaxcomp.consolidate(held))
    equal(given.restore(saved, PARAMS), held)


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
    for wrong, message in (((state, state), "holds 2 that may be it"), (None, "holds none")):
        with pytest.raises(ValueError, match=f"must be the reducer's state, .*{message}"):
            run(wrong, PARAMS, *DATA)


@pytest.mark.parametrize(
    ("replicas", "kind", "name"),
    [
        (2, "auto", "powersgd"),
        (1, "auto", "powersgd"),
        (1, "auto", "powersgd-int6"),
        (1, "explicit", "powersgd"),
        (1, "explicit", "powersgd-int6"),
    ],
)
def test_weights_keys_and_exact_steps_beside_another_axis(replicas, kind, name):
    """Needs care, as XLA compiles no all-reduce of one replica of what lies over such an axis."""
    mesh = grid(replicas, kind, model=2)
    params = placed(mesh, PARAMS, P("model") if kind == "auto" else P())

    def dropped(params, x, y, key):
        key = jax.random.fold_in(key, jax.lax.axis_index("data"))
        kept = jax.random.bernoulli(key, 0.9, x.shape)
        return bare_loss(params, jnp.where(kept, x, 0), y)

    run = jaxcomp.value_and_grad(dropped, reducer(name, 1), mesh=mesh)
    weight = np.arange(1.0, 17.0, dtype=np.float32)
    key = jax.random.key(0)

    @jax.jit
    def step(state, params):
        return run(state, params, *DATA, key, weight=weight)

    loss_and_grads, state = step(run.init(params), params)
    assert state.residual["up"].shape == (replicas, WIDTH, 32)

    def by_replica(array):
        return array.reshape(replicas, -1, *array.shape[1:])

    x, y = map(by_replica, DATA)
    of_replica = jax.vmap(jax.value_and_grad(dropped), (None, 0, 0, None), axis_name="data")
    several = of_replica(PARAMS, x, y, key)
    weights = by_replica(weight).sum(1)
    expected = jax.tree.map(lambda leaf: np.average(leaf, axis=0, weights=weights), several)
    close(loss_and_grads, expected, rtol=1e-4)


@pytest.mark.parametrize("specs", [None, (P(), P(), P("data"))])
def test_what_is_no_array_goes_where_the_function_wants_it(specs):
    """Calls as MaxText does: parameters in the middle, with shardings and a configuration."""
    mesh = grid(2, model=2)
    shardings = {"up": NamedSharding(mesh, P("data", "model")), "down": NamedSharding(mesh, P())}

    def gradients(scale, params, shardings, data):
        laid = jax.tree.map(jax.lax.with_sharding_constraint, params, shardings)
        return jax.value_and_grad(lambda p: scale(bare_loss(p, *data)))(laid)

    run = jaxcomp.data_parallel(
        gradients, reducer("allreduce"), mesh=mesh, argnums=1, batch_specs=specs
    )
    step = jax.jit(lambda s, p, data: run(s, jnp.negative, p, shardings, data))
    found, _ = step(run.init(PARAMS), PARAMS, DATA)
    close(found, jax.value_and_grad(lambda p: -bare_loss(p, *DATA))(PARAMS))


def test_a_model_may_hold_functions():
    model = {**PARAMS, "activation": jnp.tanh}

    def gradients(model, x, y):
        value, grads = jax.value_and_grad(bare_loss)({name: model[name] for name in PARAMS}, x, y)
        return value, {**grads, "activation": None}

    run = jaxcomp.data_parallel(gradients, TX, mesh=grid(2))
    (_, grads), _ = jax.eval_shape(lambda *data: run(run.init(model), model, *data), *DATA)
    assert jax.tree.structure(grads) == jax.tree.structure({**PARAMS, "activation": None})


LABELS = {"up": "trained", "down": "frozen"}


def frozen(trained):
    """Makes an optimizer of a part of the parameters."""
    return optax.partition({"trained": trained, "frozen": optax.set_to_zero()}, LABELS)


def held_by(optimizer, mesh):
    return jaxcomp.shard_state(optimizer.init(PARAMS), mesh, "data")


@pytest.mark.parametrize(
    "optimizer",
    [
        frozen(optax.chain(jaxcomp.hold_state(TX), optax.sgd(0.1))),
        optax.masked(jaxcomp.hold_state(TX), {"up": True, "down": False}),
    ],
    ids=["partition", "masked"],
)
def test_a_state_held_for_a_part_of_the_parameters_is_refused(optimizer):
    mesh = grid(2)
    with pytest.raises(ValueError, match=r"(?s)down'\]: expected .*, got none\n.* To freeze a p"):
        mean_gradients(mesh)(held_by(optimizer, mesh), PARAMS, *DATA)


def test_a_state_held_in_other_containers_than_the_parameters_is_refused():
    mesh = grid(2)
    state = optax.chain(jaxcomp.hold_state(TX)).init(flax.core.freeze(PARAMS))
    with pytest.raises(ValueError, match="in other containers, such as a dict and a Froz"):
        mean_gradients(mesh)(jaxcomp.shard_state(state, mesh, "data"), PARAMS, *DATA)


@pytest.mark.parametrize("whole", [False, True])
def test_an_optimizer_of_nnx_holds_the_state(whole):
    """Puts every array of it into a box, which no reducer has."""
    mesh = grid(2)
    model = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
    held = optax.chain(jaxcomp.hold_state(TX), optax.sgd(0.1))
    optimizer = nnx.Optimizer(model, held, wrt=nnx.Param)
    graphdef, params = nnx.split(model)
    x = jnp.asarray(normal(8, WIDTH))
    run = jaxcomp.value_and_grad(
        lambda params, x: jnp.mean((nnx.merge(graphdef, params)(x) - x) ** 2), TX, mesh=mesh
    )
    optimizer = jaxcomp.shard_state(optimizer, mesh, "data")

    @nnx.jit
    def step(model, optimizer, x):
        state = optimizer if whole else optimizer.opt_state
        (_, grads), state = run(state, nnx.state(model, nnx.Param), x)
        optimizer.opt_state = state.opt_state if whole else state
        optimizer.update(model, grads)
        return grads

    (_, expected), alone = jax.jit(run)(run.init(params), params, x)
    close(step(model, optimizer, x), expected)
    close(unboxed(optimizer.opt_state[0]), alone)
    optimizer.opt_state = run.restore(jaxcomp.consolidate(optimizer.opt_state), params)
    held = jaxcomp.consolidate(unboxed(optimizer.opt_state[0]))
    close(held, jaxcomp.consolidate(alone))


def test_parts_freeze_as_the_error_says():
    """Within hold_state, or with what is frozen as an argument."""
    mesh = grid(2)
    optimizer = optax.chain(jaxcomp.hold_state(TX), frozen(optax.sgd(0.1)))
    run = jax.jit(mean_gradients(mesh))
    (_, grads), state = run(held_by(optimizer, mesh), PARAMS, *DATA)
    updates, _ = optimizer.update(grads, state, PARAMS)
    assert not np.any(updates["down"])
    assert_allclose(updates["up"], -0.1 * grads["up"], rtol=1e-6)

    def part(up, down, x, y):
        return bare_loss({"up": up, "down": down}, x, y)

    alone = jaxcomp.value_and_grad(part, TX, mesh=mesh, batch_specs=(P(), P("data"), P("data")))
    _, grad = stepped(alone, PARAMS["up"], PARAMS["down"], *DATA)
    assert grad.shape == grads["up"].shape


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_hold_state_averages_nothing_in_a_mapped_function_and_says_so(mapping):
    """Works where JAX knows that gradients are equal on all replicas, as behind value_and_grad."""
    chain = optax.chain(jaxcomp.hold_state(TX), optax.sgd(0.1))
    run = mean_gradients()
    rows = jax.tree.map(lambda a: a.reshape(4, 4, *a.shape[1:]), DATA)
    state, specs = start(mapping, chain.init(PARAMS), 4)

    def local(rows, state):
        _, grads = jaxcomp.local_value_and_grad(bare_loss, "data")(PARAMS, *rows)
        return chain.update(grads, state)

    def averaged(rows, state):
        (_, grads), state = run(state, PARAMS, *rows)
        return chain.update(grads, state)

    with pytest.raises(ValueError, match="hold_state does not average gradients"):
        over_replicas(mapping, local, 4, specs)(rows, state)
    behind = over_replicas(mapping, averaged, 4, specs)
    if mapping == "shard_map":
        updates, _ = behind(rows, state)
        assert np.any(updates["up"])
        return
    with pytest.raises(ValueError, match=r"only under jax\.shard_map with check_vma=True"):
        behind(rows, state)


@pytest.mark.parametrize(("model", "error"), [(0, AssertionError), (2, NotImplementedError)])
def test_faults_of_jax_in_a_mapped_function_are_explained(model, error):
    def rotary(params, x, y):
        with jax.ensure_compile_time_eval():
            angles = jnp.arange(32.0) * 2.0
        return jnp.mean(jnp.cos(x @ params["up"] * angles) ** 2)

    mesh = grid(2, model=model)
    run = jaxcomp.value_and_grad(rotary, reducer("allreduce"), mesh=mesh)
    arguments = run.init(PARAMS), PARAMS, *DATA
    assert jax.eval_shape(run, *arguments)[0][0].shape == ()
    with jax.set_mesh(mesh):
        assert "ensure_compile_time_eval" in explained(error, jax.jit(run), *arguments)


def test_zeros_like_of_a_shape_beside_another_axis_is_explained():
    def gradients(params, x, y):
        found = jax.value_and_grad(bare_loss)
        zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(found, params, x, y))
        return jax.tree.map(jnp.add, zeros, found(params, x, y))

    mesh = grid(2, model=1)
    make = functools.partial(jaxcomp.data_parallel, gradients, reducer("allreduce"), mesh=mesh)
    with jax.set_mesh(mesh):
        arguments = make().init(PARAMS), PARAMS, *DATA
        assert jax.eval_shape(make(check_vma=False), *arguments)[0][0].shape == ()
        assert "check_vma=False" in explained(AssertionError, make(), *arguments)


ACCUMULATORS = {
    "MultiSteps": optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(),
    "accumulate": jaxcomp.accumulate(optax.sgd(0.1), 2),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [("powersgd", "MultiSteps"), ("allreduce", "accumulate"), ("int8", "MultiSteps")],
)
def test_accumulation_behind_averaged_gradients(name, kind):
    """Holds the same on all replicas, in the optimizer's state and beside the reducer's."""
    mesh = grid(2)
    tx = reducer(name)
    optimizer = optax.chain(jaxcomp.hold_state(tx), ACCUMULATORS[kind])
    run = jaxcomp.value_and_grad(bare_loss, tx, mesh=mesh)
    state = jaxcomp.shard_state(optimizer.init(PARAMS), mesh, "data")

    @jax.jit
    def step(state, x, y):
        (_, grads), state = run(state, PARAMS, x, y)
        updates, state = optimizer.update(grads, state, PARAMS)
        return updates["up"], grads["up"], state

    with jax.numpy_dtype_promotion("standard"):  # MultiSteps divides by an integer
        first, one, state = step(state, *DATA)
        second, two, state = step(state, *batch(seed=2))
    assert not np.any(first)
    assert_allclose(second, -0.05 * (one + two), rtol=1e-4, atol=1e-7)
    for accumulated in (state[1], jaxcomp.consolidate(state)[1]):
        assert accumulated.acc_grads["up"].shape == PARAMS["up"].shape


def averaging(learning_rate=0.1):
    return jaxcomp.accumulate(optax.sgd(learning_rate), 2)


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.chain(optax.clip(1.0), averaging()),
        optax.inject_hyperparams(averaging)(learning_rate=0.1),
        optax.partition({"all": averaging()}, "all"),
    ],
    ids=["chain", "inject_hyperparams", "partition"],
)
def test_accumulation_deeper_behind_averaged_gradients_has_no_axis_of_replicas(optimizer):
    tx = optax.chain(jaxcomp.hold_state(TX), optimizer)
    state = tx.init(PARAMS)
    found = jaxcomp.shard_state(state, grid(2), "data")
    assert jax.tree.map(np.shape, found[1]) == jax.tree.map(np.shape, state[1])


HELD = ("hold", jaxcomp.hold_state(TX))
UNCERTAIN = {
    "named": optax.named_chain(HELD, ("later", averaging())),
    "within": optax.chain(optax.chain(HELD[1], optax.clip(1.0)), averaging()),
}


@pytest.mark.parametrize("name", UNCERTAIN)
def test_a_chain_that_does_not_show_that_gradients_are_averaged_is_refused(name):
    """Two networks beside each other have states like these."""
    optimizer = UNCERTAIN[name]
    state = jaxcomp.shard_state(optimizer.init(PARAMS), grid(2), "data")
    message = (
        r"already averaged, put jaxcomp.hold_state.* same optax\.chain: .* an optax.named_chain"
    )
    with pytest.raises(ValueError, match=message):
        optimizer.update(PARAMS, state, PARAMS)


@pytest.mark.parametrize("name", ["powersgd", "feedback-int8"])
def test_accumulated_gradients_beside_a_reducers_state_have_no_axis_of_replicas(name):
    """Places a state as of a TrainState with the reducer's state beside the optimizer's."""
    opt_state = ACCUMULATORS["MultiSteps"].init(PARAMS)
    beside = {"reducer": reducer(name).init(PARAMS), "opt": opt_state}
    found = jaxcomp.shard_state(beside, grid(2), "data")
    assert found["opt"].acc_grads["up"].shape == PARAMS["up"].shape


def test_accumulated_gradients_without_a_reducers_state_are_refused():
    """Each of them would get an axis of replicas, and so would the parameters in the next step."""
    state = ACCUMULATORS["MultiSteps"].init(PARAMS)
    with pytest.raises(ValueError, match=r"^Nothing shows whether .* put jaxcomp.hold_state"):
        jaxcomp.shard_state({"params": PARAMS, "opt": state}, grid(2), "data")
