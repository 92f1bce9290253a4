"""Beside what people already use: Optax's inject_hyperparams, accumulation, nnx, train states."""

import flax.serialization
import jax
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from numpy.testing import assert_allclose

import jaxcomp
from tests.helpers.leaves import SMALL, random_grads, zeros
from tests.helpers.reducers import allreduce, powersgd
from tests.helpers.runners import AXIS, mesh_of, sharded, simulate

MESH_SIZE = 4
STEPS = 12
TOKENS = np.random.default_rng(0).integers(0, 20, (8, 6))


@pytest.fixture(autouse=True)
def standard_promotion():
    """Promotes as Optax and Flax need it, which are not written for strict promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def optimizer():
    return optax.chain(powersgd(2, start_step=1), optax.adam(3e-2))


def test_inject_hyperparams_around_a_reducer_itself():
    static = ("rank", "axis_name", "start_step", "min_compression_rate", "error_feedback")
    make = optax.inject_hyperparams(jaxcomp.powersgd, static_args=(*static, "warm_start"))
    options = {"rank": 2, "axis_name": AXIS, "start_step": 0, "eps": 0.5}
    grads = random_grads(SMALL, 2, 3)
    outputs, state = simulate("vmap", make(**options), grads)
    assert float(state.hyperparams["eps"]) == 0.5
    expected, _ = simulate("vmap", jaxcomp.powersgd(**options), grads)
    assert_allclose(outputs["dense"], expected["dense"], atol=1e-5)


def test_two_micro_batches_are_averaged_without_the_parameters():
    """Neither an owner nor the parameters show that accumulated gradients have a replica axis."""
    grads = random_grads(SMALL, 2, 4)
    outputs, _ = simulate("shard_map", jaxcomp.accumulate(allreduce(), 2), grads)
    for name, output in outputs.items():
        pairs = grads[name].reshape(2, 2, 2, *SMALL[name])  # replica, pair, place in the pair
        assert_allclose(output[1::2], pairs.mean((0, 2)), rtol=1e-5, atol=1e-6)
        assert not output[::2].any()


def nnx_training():
    rngs = nnx.Rngs(0)
    layers = nnx.Linear(16, 32, rngs=rngs), nnx.relu, nnx.Linear(32, 20, rngs=rngs)
    model = nnx.Sequential(nnx.Embed(20, 16, rngs=rngs), *layers)
    return model, nnx.Optimizer(model, optimizer(), wrt=nnx.Param)


def test_nnx_optimizer_under_shard_map_as_a_module():
    """Modules are pytrees that keep the classes of their states, which nnx.split does not."""
    model, optimizer = nnx_training()
    # The embedding is found by its name although nnx wraps it: rows are the vocabulary.
    assert optimizer.opt_state[0].q["layers"][0]["embedding"][...].shape == (16, 2)
    specs = jaxcomp.state_specs(optimizer, AXIS)

    def loss(model, tokens):
        logits = model(tokens[:, :-1])
        labels = tokens[:, 1:]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def step(model, optimizer, tokens):
        value, grads = jaxcomp.local_value_and_grad(loss, AXIS)(model, tokens)
        optimizer.update(model, grads)
        return model, optimizer, jax.lax.pmean(value, AXIS)

    compiled = sharded(MESH_SIZE, step, (jax.P(), specs, jax.P(AXIS)), (jax.P(), specs, jax.P()))
    optimizer = jaxcomp.shard_state(optimizer, mesh_of(MESH_SIZE), AXIS)
    losses = []
    for _ in range(STEPS):
        model, optimizer, value = compiled(model, optimizer, TOKENS)
        losses.append(float(value))
    assert losses[-1] < 0.7 * losses[0]
    assert optimizer.opt_state[0].residual["layers"][1]["kernel"][...].shape == (4, 16, 32)


@pytest.mark.parametrize("function", [jaxcomp.state_specs, jaxcomp.consolidate])
def test_a_state_that_lost_its_classes_is_refused(function):
    model, own = nnx_training()
    train_state = TrainState.create(apply_fn=None, params=zeros(SMALL), tx=optimizer())
    for lost in (
        nnx.split((model, own))[1],
        nnx.state(own),
        flax.serialization.to_state_dict(train_state),
    ):
        with pytest.raises(ValueError, match="lost its classes"):
            function(lost, AXIS)
