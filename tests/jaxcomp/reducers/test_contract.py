"""What a reducer promises beside the battery, in which is one of a user's own, too."""

import copy
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runners import AXIS, simulate

import jaxcomp


class Owned(NamedTuple):
    """Parameters that are called as the field of a state that says whose a residual is."""

    owner: jax.Array
    bias: jax.Array


@pytest.mark.parametrize("mapping", ["vmap", "shard_map"])
def test_parameters_may_be_called_owner(mapping):
    tx = jaxcomp.powersgd(2, axis_name=AXIS, start_step=0)
    grads = Owned(jax.random.normal(jax.random.key(0), (2, 2, 32, 24)), jnp.ones((2, 2, 24)))
    outputs, after = simulate(mapping, tx, grads)
    expected, _ = simulate(mapping, tx, {"a": grads.owner, "b": grads.bias})
    np.testing.assert_allclose(outputs.owner, expected["a"], atol=1e-6)
    assert jaxcomp.consolidate(after).residual.owner.shape == (32, 24)


def test_a_copy_weighs_once():
    tx = jaxcomp.allreduce(axis_name=AXIS, comm_dtype=jnp.bfloat16)
    grads = {"w": jax.random.normal(jax.random.key(0), (2, 64)).astype(jnp.bfloat16)}

    def program(tx):
        one = lambda g, w: tx.update(g, tx.init(g), weight=w)[0]  # noqa: E731
        return str(jax.make_jaxpr(jax.vmap(one, axis_name=AXIS))(grads, jnp.array([1.0, 3.0])))

    assert program(copy.copy(tx)) == program(tx)


def test_what_was_sent_of_float16_in_bfloat16_is_what_was_averaged():
    tx = jaxcomp.allreduce(axis_name=AXIS, comm_dtype=jnp.bfloat16)
    grads = (jnp.arange(64.0).reshape(2, 32) / 7).astype(jnp.float16)
    sent = jax.vmap(lambda g: tx.reduce(g, tx.init(g)).sent, axis_name=AXIS)(grads)
    np.testing.assert_array_equal(sent, grads.astype(jnp.bfloat16).astype(jnp.float16))


def test_a_state_of_narrower_parameters_than_gradients():
    with jax.enable_x64(True):
        tx = jaxcomp.acp_sgd(2, axis_name=AXIS, start_step=0)
        state = tx.init({"w": jnp.zeros((32, 24), jnp.float32)})
        grads = {"w": jax.random.normal(jax.random.key(0), (2, 3, 32, 24), jnp.float64)}
        outputs, _ = simulate("vmap", tx, grads, state)
        assert outputs["w"].dtype == np.float64
        assert np.isfinite(outputs["w"]).all()


def test_bytes_of_boxed_parameters_are_those_of_the_step():
    rank = lambda path, leaf: 2 if jax.tree_util.keystr(path) == "['w']" else 4  # noqa: E731
    tx = jaxcomp.powersgd(rank, axis_name=AXIS, start_step=0)
    params = {"w": jnp.zeros((64, 64))}
    boxed = jax.tree.map(lambda x: nn.Partitioned(x, ("in", "out")), params)
    assert tx.bytes(boxed).bytes_after == tx.bytes(params).bytes_after
