"""Parameters as people annotate, stack, freeze and wrap them."""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from numpy.testing import assert_allclose

import jaxcomp
from jaxcomp.extend import default_matrix_dims
from tests.helpers.leaves import equal, normal, random_grads
from tests.helpers.reducers import feedback, powersgd, quantized
from tests.helpers.runners import simulate, updated

P = jax.P
INIT = nn.initializers.lecun_normal()
PARTITIONED = nn.with_partitioning(INIT, (None, "tensor"))
LOGICAL = nn.with_logical_partitioning(INIT, ("embed", "mlp"))


def dense(kernel_init):
    layer = nn.Dense(32, kernel_init=kernel_init)
    return layer.init(jax.random.key(0), jnp.ones((1, 16)))["params"]


def of_kernels(path, leaf):
    return 2 if jax.tree_util.keystr(path) == "['kernel']" else None


@pytest.mark.parametrize(
    ("box", "tx"), [(PARTITIONED, powersgd(of_kernels)), (LOGICAL, feedback(quantized()))]
)
def test_a_state_has_no_boxes_and_averages_have_those_of_the_gradients(box, tx):
    boxed = dense(box)
    plain = dense(INIT)
    state = tx.init(boxed)
    assert jax.tree.structure(state) == jax.tree.structure(tx.init(plain))
    grads = jax.tree.map(lambda p: jnp.stack([p, -3 * p]), boxed)
    means = updated(tx, grads)
    assert jax.tree.structure(means) == jax.tree.structure(boxed)
    equal(nn.meta.unbox(means), updated(tx, nn.meta.unbox(grads)))
    assert tx.bytes(boxed, replicas=4).bytes_after == tx.bytes(plain, replicas=4).bytes_after
    # What lm1b takes shardings from: nothing in the state has the weight's.
    specs = jax.tree.leaves(nn.get_partition_spec(state), is_leaf=lambda x: isinstance(x, P))
    assert set(specs) <= {P(), None}


def test_factors_of_rank_1_do_not_divide_by_the_devices_of_a_sharded_nnx_weights_axis():
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), devices=jax.devices()[:8])
    with jax.set_mesh(mesh), jax.numpy_dtype_promotion("standard"):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "tensor"))
        model = nnx.Linear(32, 32, kernel_init=init, use_bias=False, rngs=nnx.Rngs(0))
        tx = optax.chain(powersgd(1), optax.adam(1e-2))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    assert optimizer.opt_state[0].q["kernel"][...].shape == (32, 1)


class Owned(NamedTuple):
    """Parameters that are called as the field of a state that says whose a residual is."""

    owner: jax.Array
    bias: jax.Array


def test_parameters_may_be_called_owner():
    tx = powersgd(2)
    grads = random_grads({"a": (32, 24), "b": (24,)}, 2, 2)
    outputs, after = simulate("shard_map", tx, Owned(*grads.values()))
    expected, _ = simulate("shard_map", tx, grads)
    assert_allclose(outputs.owner, expected["a"], atol=1e-6)
    assert jaxcomp.consolidate(after).residual.owner.shape == (32, 24)


def turned(path, leaf):
    """Takes other dims for the head, and the default for everything else."""
    if path[0].key == "head":
        return jaxcomp.MatrixDims(rows=(0,), cols=(1,))
    return default_matrix_dims(path, leaf)


def test_stacked_layers_are_compressed_one_by_one():
    """Beside vectors, other stacks and other leaves, which have the dims of a rule of the user."""
    shapes = {
        "encoder": {"blocks": {"w": (3, 16, 12), "bias": (3, 12), "scale": (3,)}},
        "decoder": {"blocks": {"w": (5, 16, 12)}},
        "head": (16, 12),
    }
    params = jax.tree.map(np.zeros, shapes, is_leaf=lambda x: isinstance(x, tuple))
    grads = jax.tree.map(lambda x: normal(2, *x.shape), params)
    for dims, length in ((None, 16), (turned, 12)):
        tx = powersgd(2, matrix_dims=jaxcomp.stacked("blocks", matrix_dims=dims))
        factors = [q.shape for q in jax.tree.leaves(tx.init(params).q)]
        assert factors == [(5, 16, 2), (3, 16, 2), (length, 2)]
        means = updated(tx, grads)["decoder"]["blocks"]["w"][0]
        assert np.linalg.matrix_rank(means, tol=1e-4).tolist() == [2] * 5
