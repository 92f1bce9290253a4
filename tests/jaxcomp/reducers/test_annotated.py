"""Parameters as people annotate, stack, freeze and wrap them."""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding

import jaxcomp
from tests.helpers.leaves import random_grads
from tests.helpers.reducers import feedback, powersgd, quantized
from tests.helpers.runners import simulate

P = jax.P


INIT = nn.initializers.lecun_normal()
BOXES = {
    "partitioned": nn.with_partitioning(INIT, (None, "tensor")),
    "logical": nn.with_logical_partitioning(INIT, ("embed", "mlp")),
}


def dense(kernel_init):
    layer = nn.Dense(32, kernel_init=kernel_init)
    return layer.init(jax.random.key(0), jnp.ones((1, 16)))["params"]


def one_update(tx, params, n=4):
    """Returns averages and the new state for some gradients, the same for every box."""
    seeds = np.random.default_rng(0)
    grads = jax.tree.map(
        lambda p: jnp.asarray(seeds.normal(size=(n, *p.shape)), jnp.float32), params
    )
    state = tx.init(params)
    update = jax.vmap(tx.update, in_axes=(0, None), out_axes=(None, 0), axis_name="data")
    return jax.jit(update)(grads, state)


def of_kernels(path, leaf):
    return 2 if jax.tree_util.keystr(path) == "['kernel']" else None


@pytest.mark.parametrize("tx", [powersgd(of_kernels), feedback(quantized())], ids=["low", "int8"])
@pytest.mark.parametrize("box", BOXES)
def test_a_state_has_no_boxes_and_averages_have_those_of_the_gradients(box, tx):
    boxed, plain = dense(BOXES[box]), dense(INIT)
    means, state = one_update(tx, boxed)
    expected, plain_state = one_update(tx, plain)
    assert jax.tree.structure(state) == jax.tree.structure(plain_state)
    assert jax.tree.structure(means) == jax.tree.structure(boxed)
    jax.tree.map(np.testing.assert_array_equal, nn.meta.unbox(means), expected)
    assert tx.bytes(boxed, replicas=4).bytes_after == tx.bytes(plain, replicas=4).bytes_after
    # What lm1b takes shardings from: nothing in the state has the weight's.
    specs = jax.tree.leaves(nn.get_partition_spec(state), is_leaf=lambda x: isinstance(x, P))
    assert all(spec in (P(), None) for spec in specs)


def test_nnx_parameters_with_shardings_train_at_rank_1_under_nnx_optimizer():
    """Factors of rank 1 do not divide by the two devices of the weight's axis."""
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), devices=jax.devices()[:8])
    with jax.set_mesh(mesh), jax.numpy_dtype_promotion("standard"):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "tensor"))
        model = nnx.Linear(32, 32, kernel_init=init, use_bias=False, rngs=nnx.Rngs(0))
        assert model.kernel[...].sharding.spec == P(None, "tensor")
        tx = optax.chain(powersgd(1), optax.adam(1e-2))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        assert optimizer.opt_state[0].q["kernel"][...].shape == (32, 1)

        graph, params = nnx.split(model)
        loss = lambda p, x: jnp.mean((nnx.merge(graph, p)(x) - 1) ** 2)  # noqa: E731
        value_and_grad = jaxcomp.value_and_grad(loss, powersgd(1))
        state = value_and_grad.init(params)
        x = jax.device_put(np.ones((8, 32), np.float32), NamedSharding(mesh, P("data")))
        (before, grads), state = jax.jit(value_and_grad)(state, params, x)
        assert jax.tree.structure(grads) == jax.tree.structure(params)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        (after, _), _ = jax.jit(value_and_grad)(state, params, x)
        assert float(after) < float(before)


class Owned(NamedTuple):
    """Parameters that are called as the field of a state that says whose a residual is."""

    owner: jax.Array
    bias: jax.Array


@pytest.mark.parametrize("mapping", ["vmap", "shard_map"])
def test_parameters_may_be_called_owner(mapping):
    tx = powersgd(2)
    grads = random_grads({"a": (32, 24), "b": (24,)}, 2, 2)
    outputs, after = simulate(mapping, tx, Owned(*grads.values()))
    expected, _ = simulate(mapping, tx, grads)
    np.testing.assert_allclose(outputs.owner, expected["a"], atol=1e-6)
    assert jaxcomp.consolidate(after).residual.owner.shape == (32, 24)


def test_stacked_layers_are_compressed_one_by_one():
    layers = random_grads({"kernel": (16, 12), "bias": (12,)}, 3, 1)
    one = {name: x[0, 0] for name, x in layers.items()}
    stack = {"blocks": {n: x[:, 0] for n, x in layers.items()}, "head": {"kernel": one["kernel"]}}
    stacked = powersgd(2, matrix_dims=jaxcomp.stacked("blocks"))
    state = stacked.init(stack)
    assert state.q["blocks"]["kernel"].shape == (3, 16, 2)
    assert state.q["head"]["kernel"].shape == (16, 2)
    assert isinstance(state.q["blocks"]["bias"], optax.MaskedNode)  # a row for each layer

    def dims(path, leaf):
        """Takes other dims for the head, and the default for everything else."""
        if path[0].key == "head":
            return jaxcomp.MatrixDims(rows=(0,), cols=(1,))
        return jaxcomp.extend.default_matrix_dims(path, leaf)

    both = powersgd(2, matrix_dims=jaxcomp.stacked("blocks", matrix_dims=dims))
    state = both.init(stack)
    assert state.q["blocks"]["kernel"].shape == (3, 16, 2)
    assert state.q["head"]["kernel"].shape == (12, 2)
    means, _ = one_update(stacked, stack)
    ranks = [np.linalg.matrix_rank(x, tol=1e-4) for x in means["blocks"]["kernel"]]
    assert ranks == [2, 2, 2]
