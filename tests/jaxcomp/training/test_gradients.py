"""local_value_and_grad: the gradient of this replica under every mapping."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runners import AXIS, mesh_of

import jaxcomp


def loss(params, x, scale=1.0):
    return scale * jnp.mean((x @ params["w"]) ** 2)


PARAMS = {"w": jnp.arange(6.0).reshape(3, 2)}
BATCH = jnp.arange(24.0).reshape(2, 4, 3)


def expected():
    return [jax.value_and_grad(loss)(PARAMS, x) for x in BATCH]


def shard_map(step, *, check_vma):
    """As vmap: batch and results have an axis of replicas in front."""
    mapped = lambda p, x: jax.tree.map(lambda y: y[None], step(p, x[0]))  # noqa: E731
    specs = {"in_specs": (jax.P(), jax.P(AXIS)), "out_specs": jax.P(AXIS)}
    return jax.jit(jax.shard_map(mapped, mesh=mesh_of(2), **specs, check_vma=check_vma))


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
    for i, (v, g) in enumerate(expected()):
        np.testing.assert_allclose(value[i], v, rtol=1e-6)
        np.testing.assert_allclose(grads["w"][i], g["w"], rtol=1e-6)


def test_keywords_of_value_and_grad_are_passed_on():
    def with_aux(x, params):
        return loss(params, x), {"mean": x.mean()}

    def step(x, params):
        return jaxcomp.local_value_and_grad(with_aux, AXIS, argnums=-1, has_aux=True)(x, params)

    (value, aux), grads = jax.vmap(step, in_axes=(0, None), axis_name=AXIS)(BATCH, PARAMS)
    np.testing.assert_allclose(value[1], expected()[1][0], rtol=1e-6)
    np.testing.assert_allclose(aux["mean"][0], BATCH[0].mean())
    np.testing.assert_allclose(grads["w"][1], expected()[1][1]["w"], rtol=1e-6)


def test_several_argnums_and_two_axes():
    def step(a, b):
        return jaxcomp.local_value_and_grad(
            lambda a, b: jnp.sum(a * b), ("x", "y"), argnums=(0, 1)
        )(a, b)[1]

    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    mapped = jax.shard_map(
        lambda a, b: [g[None] for g in step(a, b[0])],
        mesh=mesh,
        in_specs=(jax.P(), jax.P(("x", "y"))),
        out_specs=jax.P(("x", "y")),
    )
    a, b = jnp.arange(3.0), jnp.arange(12.0).reshape(4, 3)
    grad_a, grad_b = jax.jit(mapped)(a, b)
    np.testing.assert_allclose(grad_a, b)
    np.testing.assert_allclose(grad_b, jnp.broadcast_to(a, (4, 3)))


def test_an_unbound_axis_is_refused():
    with pytest.raises(ValueError, match="'data' is not bound"):
        jaxcomp.local_value_and_grad(loss, AXIS)(PARAMS, BATCH[0])
