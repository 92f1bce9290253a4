"""Orthonormal columns, whatever comes in."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from numpy.testing import assert_allclose

from jaxcomp.extend import orthogonalize
from tests.helpers import hlo
from tests.helpers.leaves import normal, random_grads
from tests.helpers.reducers import powersgd
from tests.helpers.runners import simulate


def elsewhere(x):
    """Computes as on devices that are no CPUs: Cholesky QR of blocks of rows."""

    def default_of(*arguments, default, **_):
        return default(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lax, "platform_dependent", default_of)
        return orthogonalize(x)


# What runs on CPU, and on other devices. One battery for both.
FORMS = {"cpu": jax.jit(orthogonalize), "cholesky": jax.jit(elsewhere)}
forms = pytest.mark.parametrize("form", FORMS)


def assert_orthonormal(p, atol=2e-5):
    p = np.float64(p)
    gram = p.mT @ p
    identity = np.eye(p.shape[-1])
    assert_allclose(gram, np.broadcast_to(identity, gram.shape), atol=atol)


@forms
@pytest.mark.parametrize(
    "shape",  # of more and fewer rows than a block, and of stacks
    [(2, 2, 2), (4, 4), (34, 4), (700, 4), (9, 4), (40, 7), (3, 40, 4), (2, 2, 8, 4)],
)
def test_columns_are_orthonormal_and_span_the_same_space(form, shape):
    x = normal(*shape)
    q, _ = np.linalg.qr(np.float64(x))
    projector = q @ q.mT
    # Nearly singular inputs have ill-determined columns; the projectors still agree closely.
    condition = np.linalg.cond(np.float64(x)).max()
    falling = np.geomspace(1e30, 1e-30, shape[-1])
    for scale in (1e-30, 1.0, 1e30, falling):
        scaled = jnp.asarray(x * np.float32(scale))
        p = np.float64(FORMS[form](scaled))
        assert_orthonormal(p)
        assert_allclose(p @ p.mT, projector, atol=1e-6 * max(condition, 10))


def hard_matrices():
    """Makes matrices of which some columns, or all, have no direction of their own."""
    rng = np.random.default_rng(0)
    one = np.ones((64, 4))
    square = rng.normal(size=(64, 64))
    narrow = square[:, :4]
    row = np.arange(64)[:, None]
    matrices = {
        "equal without any rounding": one,
        "in one row": np.where(row == 0, one, 0),
        "one row far larger": np.where(row == 3, 1e30, one),
        "smooth": np.vander(np.linspace(0, 1, 64), 64),
        "at the end of the range": narrow / np.abs(narrow).max() * 3e38,
        "nearly equal": square[:, :1] + 10.0 ** rng.uniform(-8, 0, size=64) * square,
        "zeros of a million rows": np.zeros((1_000_000, 3)),
        "one column of zeros": np.zeros((12, 1)),
    }
    column = np.arange(1.0, 13.0)[:, None]
    for n in (2, 3, 8):
        matrices[f"{n} columns of zeros"] = np.zeros((12, n))
        matrices[f"{n} equal"] = np.tile(column, n)
        one_is_zero = np.eye(12, n)
        one_is_zero[:, 0] = 0
        matrices[f"one of {n} zero"] = one_is_zero
    return matrices


HARD = hard_matrices()


@forms
@pytest.mark.parametrize("name", HARD)
def test_columns_without_a_direction_of_their_own_get_one(form, name):
    matrix = jnp.asarray(HARD[name], jnp.float32)
    assert_orthonormal(FORMS[form](matrix))


@forms
@pytest.mark.parametrize("least", [1e-2, 1e-5, 1e-8])
def test_many_columns_of_which_few_differ(form, least):
    """Singular values that fall to `least`; half of the columns are sums of the others."""
    rng = np.random.default_rng(0)
    basis, _ = np.linalg.qr(rng.normal(size=(200, 12)))
    values = np.geomspace(1, least, 12)
    x = (basis * values) @ rng.normal(size=(12, 24))
    p = np.float64(FORMS[form](jnp.asarray(x, jnp.float32)))
    assert_orthonormal(p)
    # Every direction that float32 tells from rounding is in the span.
    kept = basis[:, values > 1e-5]
    assert np.linalg.norm(kept - p @ (p.T @ kept), 2) < 0.05


def test_many_matrices_take_memory_in_proportion():
    """Takes a mixture of experts: nothing is as large as matrices times blocks (342 MiB here)."""
    factors = jax.ShapeDtypeStruct((3, 64, 27, 64, 4), jnp.float32)
    compiled = FORMS["cholesky"].lower(factors).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 12 * 4 * factors.size
    assert not re.search(r"constant\([^)]{100}", compiled.as_text())


def test_eps_is_torchs():
    """``column / (norm + eps)``, then the later columns minus their share of the shrunk one."""
    x = normal(6, 2)
    eps = 1e-2
    first = x[:, 0] / (np.linalg.norm(x[:, 0]) + eps)
    second = x[:, 1] - (first @ x[:, 1]) * first
    second /= np.linalg.norm(second) + eps
    expected = np.stack([first, second], axis=1)
    assert_allclose(orthogonalize(jnp.asarray(x), eps), expected, atol=1e-6)


def test_many_equal_leaves_on_many_devices_do_not_wait_for_each_other():
    """jaxlib's batched QR dead-locks when more devices than threads call it at once."""
    tx = powersgd(9, min_compression_rate=0.0)
    grads = random_grads({f"layer_{i}": (40, 30) for i in range(12)}, 8, 20)
    outputs, _ = simulate("pmap", tx, grads)
    assert np.isfinite(outputs["layer_0"]).all()
    # What can wait is a batch: none is left in the compiled program.
    text = hlo.text(orthogonalize, jnp.ones((5, 40, 9)))
    assert re.search("custom-call.*geqrf", text)
    assert not re.search(r"\[5,.* custom-call.*geqrf", text)
