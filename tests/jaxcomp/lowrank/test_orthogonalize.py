"""Orthonormal columns, whatever comes in."""

import re

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from leaves import random_grads
from runners import AXIS, simulate

import jaxcomp
from jaxcomp._lowrank.orthogonalize import cholesky_bases, spare_directions
from jaxcomp.extend import map_by_shape, orthogonalize

# What runs on CPU, and on other devices. One battery for both.
FORMS = {"cpu": jax.jit(orthogonalize), "cholesky": jax.jit(lambda x: cholesky_bases([x])[0])}
forms = pytest.mark.parametrize("form", FORMS)


def assert_orthonormal(p, atol=2e-5):
    gram = np.asarray(p, np.float64).swapaxes(-1, -2) @ np.asarray(p, np.float64)
    np.testing.assert_allclose(gram, np.broadcast_to(np.eye(p.shape[-1]), gram.shape), atol=atol)


@forms
@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from([2, 4]),
    st.sampled_from([0, 30]),
    st.sampled_from([1e-30, 1e-3, 1.0, 1e30]),
    st.integers(0, 5),
)
def test_columns_are_orthonormal_and_span_the_same_space(form, rank, extra, scale, seed):
    x = np.random.default_rng(seed).normal(size=(2, rank + extra, rank)).astype(np.float32)
    p = np.asarray(FORMS[form](jnp.asarray(x * np.float32(scale))), np.float64)
    assert_orthonormal(p)
    q = np.linalg.qr(x.astype(np.float64))[0]
    # Nearly singular inputs have ill-determined columns; the projectors still agree closely.
    condition = np.linalg.cond(x.astype(np.float64)).max()
    projector = lambda y: y @ y.swapaxes(-1, -2)  # noqa: E731
    np.testing.assert_allclose(projector(p), projector(q), atol=1e-6 * max(condition, 10))


@forms
@pytest.mark.parametrize("rank", [1, 2, 3, 8])
def test_zero_and_repeated_columns_get_a_direction_of_their_own(form, rank):
    column = jnp.arange(1.0, 13.0)[:, None]
    for x in (jnp.zeros((12, rank)), jnp.tile(column, rank), jnp.eye(12, rank).at[:, 0].set(0)):
        assert_orthonormal(FORMS[form](x))


@forms
def test_equal_columns_without_any_rounding_get_directions_of_their_own(form):
    one_row = jnp.zeros((64, 4)).at[0].set(1.0)
    for x in (jnp.ones((64, 4)), one_row, jnp.ones((64, 4)).at[3].set(1e30)):
        assert_orthonormal(FORMS[form](x))


@forms
def test_smooth_columns_of_which_float32_tells_a_few_apart(form):
    assert_orthonormal(FORMS[form](jnp.asarray(np.vander(np.linspace(0, 1, 64), 64), jnp.float32)))


@forms
def test_values_at_the_end_of_the_range(form):
    x = jax.random.normal(jax.random.key(0), (64, 4))
    assert_orthonormal(FORMS[form](x / jnp.abs(x).max() * jnp.float32(3e38)))


@forms
def test_columns_of_very_different_size(form):
    x = np.random.default_rng(0).normal(size=(20, 2)).astype(np.float32)
    p = FORMS[form](jnp.asarray(x * np.float32([1e30, 1e-30])))
    assert_orthonormal(p)
    q = np.linalg.qr(x)[0]
    np.testing.assert_allclose(p @ p.T, q @ q.T, atol=1e-5)


@forms
@pytest.mark.parametrize("least", [1e-2, 1e-5, 1e-8])
def test_many_columns_of_which_few_differ(form, least):
    """Singular values that fall to `least`; half of the columns are sums of the others."""
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.normal(size=(200, 12)))[0]
    values = np.geomspace(1, least, 12)
    x = (basis * values) @ rng.normal(size=(12, 24))
    p = np.asarray(FORMS[form](jnp.asarray(x, jnp.float32)), np.float64)
    assert_orthonormal(p)
    # Every direction that float32 tells from rounding is in the span.
    kept = basis[:, values > 1e-5]
    assert np.linalg.norm(kept - p @ (p.T @ kept), 2) < 0.05


@forms
def test_a_square_matrix_of_nearly_equal_columns(form):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 64))
    x = x[:, :1] + 10.0 ** rng.uniform(-8, 0, size=64) * x
    assert_orthonormal(FORMS[form](jnp.asarray(x, jnp.float32)))


def test_all_matrices_of_one_rank_together():
    """Stacks and single matrices, more and fewer rows than a block."""
    shapes = [(3, 40, 4), (700, 4), (9, 4), (2, 2, 8, 4)]
    factors = [jax.random.normal(jax.random.key(i), s) for i, s in enumerate(shapes)]
    for x, p in zip(factors, cholesky_bases(factors), strict=True):
        assert p.shape == x.shape
        assert_orthonormal(p)
        np.testing.assert_allclose(p @ (p.mT @ x), x, atol=1e-5)


def test_many_matrices_take_memory_in_proportion():
    """The experts of a mixture: nothing is as large as matrices times blocks (342 MiB here)."""
    factors = [jax.ShapeDtypeStruct((64, 27, 64, 4), jnp.float32) for _ in range(3)]
    compiled = jax.jit(cholesky_bases).lower(factors).compile()
    values = sum(x.size for x in factors)
    assert compiled.memory_analysis().temp_size_in_bytes < 12 * 4 * values
    assert not re.search(r"constant\([^)]{100}", compiled.as_text())


def test_eps_is_torchs():
    """``column / (norm + eps)``, then the later columns minus their share of the shrunk one."""
    x = np.random.default_rng(0).normal(size=(6, 2)).astype(np.float32)
    eps, y = 1e-2, x.copy()
    y[:, 0] /= np.linalg.norm(y[:, 0]) + eps
    y[:, 1] -= (y[:, 0] @ y[:, 1]) * y[:, 0]
    y[:, 1] /= np.linalg.norm(y[:, 1]) + eps
    np.testing.assert_allclose(orthogonalize(jnp.asarray(x), eps), y, atol=1e-6)
    assert np.linalg.norm(orthogonalize(jnp.asarray(x), 10.0)[:, 0]) < 0.5


def test_spare_directions_are_independent_for_long_columns():
    spare = spare_directions(jnp.arange(1_000_000), 3, jnp.float32)
    correlation = np.corrcoef(np.asarray(spare).T)
    assert np.abs(correlation - np.eye(3)).max() < 0.01


def test_map_by_shape_calls_once_for_each_shape():
    calls = []

    def double(x):
        calls.append(x.shape)
        return 2 * x

    arrays = [jnp.ones((4, 2)), jnp.ones((3, 2)), 3 * jnp.ones((4, 2))]
    results = map_by_shape(double, arrays)
    assert calls == [(2, 4, 2), (1, 3, 2)]
    jax.tree.map(np.testing.assert_array_equal, results, [2 * a for a in arrays])


def test_many_equal_leaves_on_many_devices_do_not_wait_for_each_other():
    """jaxlib's batched QR dead-locks when more devices than threads call it at once."""
    shapes = {f"layer_{i}": (40, 30) for i in range(12)}
    tx = jaxcomp.powersgd(9, axis_name=AXIS, start_step=0, min_compression_rate=0.0)
    grads = random_grads(shapes, 8, 20)
    outputs, _ = simulate("pmap", tx, grads, tx.init({k: jnp.zeros(s) for k, s in shapes.items()}))
    assert np.isfinite(outputs["layer_0"]).all()
    # What can wait is a batch: none is left in the compiled program.
    text = hlo.text(orthogonalize, jnp.ones((5, 40, 9)))
    calls = [line for line in text.splitlines() if "custom-call(" in line and "geqrf" in line]
    assert calls
    assert not any("[5," in line for line in calls), calls
