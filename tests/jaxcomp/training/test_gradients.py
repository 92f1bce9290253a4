"""local_value_and_grad: the gradient of this replica under every mapping."""

import functools

import jax
import jax.numpy as jnp
import pytest
from numpy.testing import assert_allclose

import jaxcomp
from tests.helpers.leaves import close
from tests.helpers.runners import AXIS, sharded


def loss(params, x, scale=1.0):
    return scale * jnp.mean((x @ params["w"]) ** 2)


PARAMS = {"w": jnp.arange(6.0).reshape(3, 2)}
BATCH = jnp.arange(24.0).reshape(2, 4, 3)


def shard_map(step, *, check_vma):
    """Maps as vmap does: batch and results have an axis of replicas in front."""

    def mapped(p, x):
        return jax.tree.map(lambda y: y[None], step(p, x[0]))

    return sharded(2, mapped, (jax.P(), jax.P(AXIS)), jax.P(AXIS), check_vma=check_vma)


OVER = {"in_axes": (None, 0), "axis_name": AXIS}
MAPPED = {
    "shard_map": functools.partial(shard_map, check_vma=True),
    "shard_map unchecked": functools.partial(shard_map, check_vma=False),
    "vmap": functools.partial(jax.vmap, **OVER),
    "pmap": functools.partial(jax.pmap, **OVER),
}


@pytest.mark.parametrize("mapping", MAPPED)
def test_the_gradient_is_this_replicas_alone(mapping):
    step = MAPPED[mapping](lambda p, x: jaxcomp.local_value_and_grad(loss, AXIS)(p, x))
    value, grads = step(PARAMS, BATCH)
    for i, x in enumerate(BATCH):
        expected = jax.value_and_grad(loss)(PARAMS, x)
        assert_allclose(value[i], expected[0], rtol=1e-6)
        assert_allclose(grads["w"][i], expected[1]["w"], rtol=1e-6)


def test_keywords_of_value_and_grad_are_passed_on_and_the_axes_may_be_two():
    def fun(a, x, b):
        return jnp.sum((a + 2 * b) * x), {"mean": x.mean()}

    axes = ("x", "y")
    step = jaxcomp.local_value_and_grad(fun, axes, argnums=(0, -1), has_aux=True)
    a = jnp.arange(3.0)
    rows = jnp.arange(12.0).reshape(2, 2, 3)
    within = jax.vmap(step, (None, 0, None), axis_name="y")
    found = jax.vmap(within, (None, 0, None), axis_name="x")(a, rows, a)
    close(found, ((rows @ (3 * a), {"mean": rows.mean(-1)}), (rows, 2 * rows)))


def test_an_unbound_axis_is_refused():
    with pytest.raises(ValueError, match="'data' is not bound"):
        jaxcomp.local_value_and_grad(loss, AXIS)(PARAMS, BATCH[0])
