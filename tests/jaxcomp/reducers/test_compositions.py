"""Beside what people already use: Optax wrappers, Flax train states, serialisation, orbax."""

import inspect

import flax.linen as nn
import flax.serialization
import hlo
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from leaves import SMALL, random_grads, zeros
from reducers import reducer
from runners import AXIS, MAPPINGS, mesh_of, simulate

import jaxcomp


@pytest.fixture(autouse=True)
def standard_promotion():
    """Optax and Flax themselves are not written for strict promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize("name", ["powersgd", "acp_sgd", "batched_powersgd"])
def test_inject_hyperparams_around_a_reducer_itself(name):
    function = getattr(jaxcomp, name)
    static = ("rank", "axis_name", "start_step", "min_compression_rate", "error_feedback")
    static += ("warm_start",)
    static = inspect.signature(function).parameters.keys() & set(static)
    make = optax.inject_hyperparams(function, static_args=static)
    grads = random_grads(SMALL, 2, 3)
    tx = make(rank=2, axis_name=AXIS, start_step=0, eps=0.5)
    outputs, state = simulate("vmap", tx, grads, tx.init(zeros(SMALL)))
    assert float(state.hyperparams["eps"]) == 0.5
    plain = function(2, axis_name=AXIS, start_step=0, eps=0.5)
    expected, _ = simulate("vmap", plain, grads, plain.init(zeros(SMALL)))
    np.testing.assert_allclose(outputs["dense"], expected["dense"], atol=1e-5)


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_multi_transform_and_masked(mapping):
    labels = {"dense": "matrix", "bias": "vector"}
    split = optax.multi_transform(
        {"matrix": reducer("powersgd"), "vector": reducer("allreduce")}, labels
    )
    masked = optax.chain(
        optax.masked(reducer("powersgd"), {"dense": True, "bias": False}),
        optax.masked(reducer("allreduce"), {"dense": False, "bias": True}),
    )
    grads = random_grads(SMALL, 2, 3)
    expected, _ = simulate("vmap", split, grads, split.init(zeros(SMALL)))
    for tx in (split, masked):
        outputs, _ = simulate(mapping, tx, grads, tx.init(zeros(SMALL)))
        np.testing.assert_allclose(outputs["bias"], grads["bias"].mean(0), rtol=1e-6)
        np.testing.assert_allclose(outputs["dense"], expected["dense"], atol=1e-5)


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(32)(nn.Embed(20, 16)(x)))
        return nn.Dense(20)(x)


TOKENS = jax.random.randint(jax.random.key(0), (8, 6), 0, 20)


def loss_fn(apply, params, tokens):
    logits = apply({"params": params}, tokens[:, :-1])
    labels = tokens[:, 1:]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def train_state():
    model = Model()
    params = model.init(jax.random.key(1), TOKENS[:, :-1])["params"]
    tx = optax.chain(
        jaxcomp.powersgd(2, axis_name=AXIS, start_step=1, min_compression_rate=1.0),
        optax.adam(3e-2),
    )
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def train_step(state, tokens):
    loss, grads = jaxcomp.local_value_and_grad(
        lambda params: loss_fn(state.apply_fn, params, tokens), AXIS
    )(state.params)
    return state.apply_gradients(grads=grads), jax.lax.pmean(loss, AXIS)


def trained(steps=12, n=4):
    """A TrainState after some steps under shard_map, its losses, and the compiled step."""
    state = train_state()
    specs = jaxcomp.state_specs(state, AXIS)
    mesh = mesh_of(n)
    step = jax.jit(
        jax.shard_map(
            train_step, mesh=mesh, in_specs=(specs, jax.P(AXIS)), out_specs=(specs, jax.P())
        )
    )
    state = jaxcomp.shard_state(state, mesh, AXIS)
    losses = []
    for _ in range(steps):
        state, loss = step(state, TOKENS)
        losses.append(float(loss))
    consolidate = jax.shard_map(
        lambda s: jaxcomp.consolidate(s, AXIS), mesh=mesh, in_specs=(specs,), out_specs=jax.P()
    )
    return jax.jit(consolidate)(state), losses, step


def test_linen_train_state_under_shard_map_with_replicated_parameters():
    state, losses, _ = trained()
    assert losses[-1] < 0.7 * losses[0]
    assert state.opt_state[0].residual["Dense_0"]["kernel"].shape == (16, 32)
    # The same under vmap, where nothing can be hidden in a sharding.
    other = train_state()
    stacked = jax.tree.map(lambda x: jnp.broadcast_to(x, (4, *jnp.shape(x))), other)
    step = jax.jit(jax.vmap(train_step, axis_name=AXIS))
    for expected in losses:
        stacked, loss = step(stacked, TOKENS.reshape(4, 2, 6))
        assert float(loss[0]) == pytest.approx(expected, rel=2e-3)


def test_serialization_and_orbax_bring_the_same_state_back(tmp_path):
    state, _, step = trained(steps=4)
    mesh = mesh_of(4)
    data = flax.serialization.to_bytes(state)
    by_bytes = flax.serialization.from_bytes(jax.tree.map(jnp.zeros_like, state), data)

    with ocp.StandardCheckpointer() as checkpointer:
        tree = {"params": state.params, "opt_state": state.opt_state, "step": state.step}
        checkpointer.save(tmp_path / "state", tree)
        checkpointer.wait_until_finished()
        like = jax.tree.map(np.asarray, tree)
        by_orbax = state.replace(**checkpointer.restore(tmp_path / "state", like))

    _, expected = step(jaxcomp.shard_state(state, mesh, AXIS), TOKENS)
    for restored in (by_bytes, by_orbax):
        assert jax.tree.structure(restored.opt_state) == jax.tree.structure(state.opt_state)
        jax.tree.map(np.testing.assert_array_equal, restored.opt_state, state.opt_state)
        _, loss = step(jaxcomp.shard_state(restored, mesh, AXIS), TOKENS)
        assert float(loss) == float(expected)


class NnxModel(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(20, 16, rngs=rngs)
        self.hidden = nnx.Linear(16, 32, rngs=rngs)
        self.head = nnx.Linear(32, 20, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.hidden(self.embed(x))))


def nnx_training():
    model = NnxModel(nnx.Rngs(0))
    tx = optax.chain(
        jaxcomp.powersgd(2, axis_name=AXIS, start_step=1, min_compression_rate=1.0),
        optax.adam(3e-2),
    )
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def test_nnx_optimizer_trains_on_several_replicas():
    model, optimizer = nnx_training()
    graph, state = nnx.split((model, optimizer))
    residual = optimizer.opt_state[0].residual
    # The embedding is found by its name although nnx wraps it: rows are the vocabulary.
    assert optimizer.opt_state[0].q["embed"]["embedding"][...].shape == (16, 2)
    assert residual["hidden"]["kernel"][...].shape == (16, 32)

    def step(state, tokens):
        model, optimizer = nnx.merge(graph, state)

        def loss(model):
            logits = model(tokens[:, :-1])
            labels = tokens[:, 1:]
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), jax.lax.pmean(value, AXIS)

    stacked = jax.tree.map(lambda x: jnp.broadcast_to(x, (4, *x.shape)), state)
    compiled = jax.jit(jax.vmap(step, axis_name=AXIS))
    losses = []
    for _ in range(12):
        stacked, loss = compiled(stacked, TOKENS.reshape(4, 2, 6))
        losses.append(float(loss[0]))
    assert losses[-1] < 0.7 * losses[0]
    kernel = nnx.merge(graph, stacked)[0].hidden.kernel[...]
    np.testing.assert_array_equal(kernel, jnp.broadcast_to(kernel[:1], kernel.shape))


def test_nnx_under_shard_map_with_the_functional_form():
    """nnx.split once, then plain pytrees: parameters leave through P(), the state through specs."""
    model, _ = nnx_training()
    graph, params = nnx.split(model)
    pure = nnx.to_pure_dict(params)
    tx = optax.chain(
        jaxcomp.powersgd(2, axis_name=AXIS, start_step=0, min_compression_rate=1.0),
        optax.adam(3e-2),
    )
    opt_state = tx.init(pure)
    assert opt_state[0].q["embed"]["embedding"].shape == (16, 2)

    def loss(pure, tokens):
        state = nnx.state(nnx.merge(graph, params))
        nnx.replace_by_pure_dict(state, pure)
        logits = nnx.merge(graph, state)(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def step(pure, opt_state, tokens):
        value, grads = jaxcomp.local_value_and_grad(loss, AXIS)(pure, tokens)
        updates, opt_state = tx.update(grads, opt_state, pure)
        return optax.apply_updates(pure, updates), opt_state, jax.lax.pmean(value, AXIS)

    specs = jaxcomp.state_specs(opt_state, AXIS)
    mapped = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh_of(4),
            in_specs=(jax.P(), specs, jax.P(AXIS)),
            out_specs=(jax.P(), specs, jax.P()),
        )
    )
    opt_state = jaxcomp.shard_state(opt_state, mesh_of(4), AXIS)
    losses = []
    for _ in range(12):
        pure, opt_state, value = mapped(pure, opt_state, TOKENS)
        losses.append(float(value))
    assert losses[-1] < 0.7 * losses[0]
    text = hlo.text(mapped, pure, opt_state, TOKENS)
    # Two for the gradients, one for the reported loss, which XLA may merge with neither.
    assert len(hlo.collectives(text)) <= 3


def nnx_loss(model, tokens):
    logits = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def test_nnx_optimizer_under_shard_map_as_a_module():
    """Modules are pytrees that keep the classes of their states, which nnx.split does not."""
    model, optimizer = nnx_training()
    mesh = mesh_of(4)
    specs = jaxcomp.state_specs(optimizer, AXIS)

    def step(model, optimizer, tokens):
        value, grads = jaxcomp.local_value_and_grad(nnx_loss, AXIS)(model, tokens)
        optimizer.update(model, grads)
        return model, optimizer, jax.lax.pmean(value, AXIS)

    compiled = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(jax.P(), specs, jax.P(AXIS)),
            out_specs=(jax.P(), specs, jax.P()),
        )
    )
    optimizer = jaxcomp.shard_state(optimizer, mesh, AXIS)
    losses = []
    for _ in range(12):
        model, optimizer, value = compiled(model, optimizer, TOKENS)
        losses.append(float(value))
    assert losses[-1] < 0.7 * losses[0]
    assert optimizer.opt_state[0].residual["hidden"]["kernel"][...].shape == (4, 16, 32)


@pytest.mark.parametrize("function", [jaxcomp.state_specs, jaxcomp.consolidate])
def test_a_state_that_lost_its_classes_is_refused(function):
    model, optimizer = nnx_training()
    for lost in (
        nnx.split((model, optimizer))[1],
        nnx.state(optimizer),
        flax.serialization.to_state_dict(train_state()),
    ):
        with pytest.raises(ValueError, match="lost its classes"):
            function(lost, AXIS)
