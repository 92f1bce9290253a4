"""Calls outside of jax.jit: compiled once, for all that the program depends on."""

import dataclasses
import gc
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

import jaxcomp
from tests.helpers.classifier import KINDS, grid, placed
from tests.helpers.leaves import close, normal
from tests.helpers.reducers import reducer

P = jax.P


def mean_square(w, x):
    return jnp.mean((x @ w - 1) ** 2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_call_compiles_nothing(kind, caplog):
    mesh = grid(4, kind)
    run = jaxcomp.value_and_grad(mean_square, reducer("powersgd"), mesh=mesh)
    w = placed(mesh, normal(16, 16))
    x = placed(mesh, normal(8, 16, seed=1), P("data"))
    _, state = run(run.init(w), w, x)
    with jax.log_compiles():
        found, _ = run(state, w, x)
        fresh = run.init(w)
    assert "Compiling" not in caplog.text
    assert jax.tree.map(jnp.shape, fresh) == jax.tree.map(jnp.shape, state)
    close(found, jax.jit(run)(state, w, x)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_third_round_compiles_nothing(kind, caplog):
    def step(w, inner, x):
        value, gradient = jax.value_and_grad(mean_square)(w, x)
        return w - 0.1 * gradient, inner, value

    mesh = grid(4, kind)
    run = jaxcomp.local_sgd_round(step, sync_every=2, axis_name="data", mesh=mesh)
    x = normal(2, 8, 16, seed=1)
    w, state, _ = run(normal(16, 16), run.init(normal(16, 16), ()), x)
    w, state, _ = run(w, state, x)  # what it returns lies on the mesh
    with jax.log_compiles():
        found = run(w, state, x)
    assert "Compiling" not in caplog.text
    close(found, jax.jit(run)(w, state, x))


def test_a_call_that_is_differentiated_or_mapped_is_compiled_too():
    traces = []

    def loss(w, x):
        traces.append(w)
        return mean_square(w, x)

    run = jaxcomp.value_and_grad(loss, reducer("allreduce"), mesh=grid(2))
    w = normal(16, 16)
    x = normal(8, 16, seed=1)

    def norm(gradient_of, w):
        return jnp.sum(gradient_of(w) ** 2)

    def averaged(w):
        return run((), w, x)[0][1]

    for transform in (jax.grad, lambda norm: jax.vmap(norm, in_axes=1)):
        found = [transform(lambda w: norm(averaged, w))(w) for _ in range(2)]
        expected = transform(lambda w: norm(lambda w: jax.grad(mean_square)(w, x), w))(w)
        assert_allclose(found, [expected] * 2, rtol=1e-4, atol=1e-6)
    assert len(traces) == 2  # one for each shape of the parameters


def test_a_call_moves_nothing_to_the_devices_unasked():
    mesh = grid(2)
    run = jaxcomp.value_and_grad(mean_square, reducer("powersgd"), mesh=mesh)
    w = jax.device_put(normal(16, 16), jax.NamedSharding(mesh, jax.P()))
    x = jax.device_put(normal(8, 16), jax.NamedSharding(mesh, jax.P("data")))
    state = run.init(w)
    with jax.transfer_guard("disallow"):
        (value, _), _ = run(state, w, x)
    assert_allclose(value, mean_square(w, x), rtol=1e-5)


def test_an_argument_on_another_device_is_explained():
    run = jaxcomp.value_and_grad(mean_square, reducer("powersgd"), mesh=grid(2))
    w = jax.device_put(normal(16, 16), jax.devices()[0])
    with pytest.raises(ValueError, match="incompatible devices") as caught:
        run(run.init(w), w, normal(8, 16))
    assert "jax.device_put(x, jax.NamedSharding(mesh, jax.P()))" in caught.value.__notes__[-1]


def test_a_changed_copy_is_not_taken_for_the_first():
    def loss(w, x):
        return mean_square(w, x), jnp.sum(x > 0)

    run = jaxcomp.value_and_grad(loss, reducer("allreduce"), mesh=grid(2), has_aux=True, aux="sum")
    w = normal(16, 16)
    x = normal(8, 16, seed=1)
    (_, summed), _ = run((), w, x)[0]
    (_, stacked), _ = dataclasses.replace(run, aux="stack")((), w, x)[0]
    assert summed == jnp.sum(x > 0)
    assert stacked.shape == (2,)
    assert jnp.sum(stacked) == summed


def test_other_arguments_are_not_taken_for_those_of_the_first_call():
    """Passes equal shapes with other flags, options that change, and a batch of other rows."""

    def loss(w, x, options):
        value = jnp.mean((x @ w) ** 2, axis=1).max()
        if options is True:
            return -value
        return value * getattr(options, "scale", 1.0)

    mesh = grid(2)
    run = jaxcomp.value_and_grad(loss, reducer("allreduce"), mesh=mesh)
    w = normal(8, 8)
    x = normal(8, 8, seed=1)
    options = types.SimpleNamespace(scale=2.0)  # has no hash

    def value(x, options):
        (value, _), _ = run((), w, x, options)
        return float(value)

    def expected(first, second):
        return (loss(w, first, None) + loss(w, second, None)) / 2

    by_rows = float(expected(x[:4], x[4:]))
    values = [value(x, flag) for flag in (True, 1, 1.0)]
    assert_allclose(values, [-by_rows, by_rows, by_rows], rtol=1e-6)
    assert_allclose(value(x, options), 2 * by_rows, rtol=1e-6)
    options.scale = 3.0
    assert_allclose(value(x, options), 3 * by_rows, rtol=1e-6)


def test_rows_are_split_as_each_call_says():
    def loss(w, x):
        return w * jnp.mean(x), x.sum()

    mesh = grid(2)
    run = jaxcomp.value_and_grad(loss, reducer("allreduce"), has_aux=True, aux="stack", mesh=mesh)
    x = normal(8, 8)
    for axis, spec in enumerate([P("data"), P(None, "data")]):
        ((_, sums), _), _ = run((), np.float32(1), placed(mesh, x, spec))
        assert_allclose(sums, list(map(np.sum, np.split(x, 2, axis))), rtol=1e-5)


def test_nothing_is_kept_of_arrays_and_functions():
    def loss(w, x):
        return jnp.mean(x @ w)

    run = jaxcomp.value_and_grad(loss, reducer("allreduce"), mesh=grid(2))
    w = jnp.ones(8)
    run((), w, normal(8, 8))
    array = weakref.ref(w)
    del w
    gc.collect()
    assert array() is None
    function = weakref.ref(loss)
    del run, loss
    gc.collect()
    assert function() is None
