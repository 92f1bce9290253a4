"""local_value_and_grad: the gradient of this replica under every mapping."""

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


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(check_vma):
    def step(params, x):
        value, grads = jaxcomp.local_value_and_grad(loss, AXIS)(params, x[0])
        return value[None], jax.tree.map(lambda g: g[None], grads)

    value, grads = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh_of(2),
            in_specs=(jax.P(), jax.P(AXIS)),
            out_specs=jax.P(AXIS),
            check_vma=check_vma,
        )
    )(PARAMS, BATCH)
    for i, (v, g) in enumerate(expected()):
        np.testing.assert_allclose(value[i], v, rtol=1e-6)
        np.testing.assert_allclose(grads["w"][i], g["w"], rtol=1e-6)


@pytest.mark.parametrize("mapped", [jax.vmap, jax.pmap])
def test_vmap_and_pmap(mapped):
    step = mapped(
        lambda p, x: jaxcomp.local_value_and_grad(loss, AXIS)(p, x),
        in_axes=(None, 0),
        axis_name=AXIS,
    )
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
