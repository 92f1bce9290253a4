"""Leaf to matrix and back, and the rule that decides what is compressed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxcomp import MatrixDims
from jaxcomp._lowrank.matrices import (
    MatrixView,
    default_matrix_dims,
    outer,
    plan_leaves,
    product,
)


def dims_of(shape, name="kernel"):
    return default_matrix_dims((jax.tree_util.DictKey(name),), jnp.zeros(shape))


@pytest.mark.parametrize(
    ("shape", "name", "rows", "cols"),
    [
        ((8, 4), "kernel", (1,), (0,)),  # dense (in, out): torch's (out, in)
        ((3, 3, 16, 32), "kernel", (3,), (0, 1, 2)),  # HWIO: (O, HWI)
        ((64, 4, 16), "kernel", (1, 2), (0,)),  # attention (E, heads, head)
        ((4, 16, 64), "kernel", (2,), (0, 1)),  # attention's output (heads, head, E)
        ((3, 3, 1, 32), "kernel", (3,), (0, 1, 2)),  # depthwise: a tie goes to the later cut
        ((100, 8), "embedding", (0,), (1,)),  # (vocab, features), as in torch
    ],
)
def test_default_rule(shape, name, rows, cols):
    assert dims_of(shape, name) == MatrixDims((), rows, cols)


@pytest.mark.parametrize("shape", [(), (5,)])
def test_vectors_and_scalars_are_no_matrices(shape):
    assert dims_of(shape) is None


@st.composite
def views(draw):
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=2, max_size=5)))
    axes = draw(st.permutations(range(len(shape))))
    a = draw(st.integers(1, len(shape) - 1))
    b = draw(st.integers(a + 1, len(shape)))
    return MatrixView(shape, MatrixDims(tuple(axes[b:]), tuple(axes[:a]), tuple(axes[a:b])))


@given(views())
def test_unmatricize_undoes_matricize(view):
    leaf = np.arange(np.prod(view.shape)).reshape(view.shape)
    matrix = view.matricize(leaf)
    pair = (view.n_cols, view.n_rows) if view.cols_first else (view.n_rows, view.n_cols)
    assert matrix.shape == (*view.batch, *pair)
    np.testing.assert_array_equal(view.unmatricize(matrix), leaf)


@given(views(), st.sampled_from([1, 2, 5, 9]))
def test_products_do_not_depend_on_the_memory_order(view, rank):
    rng = np.random.default_rng(0)
    leaf = rng.normal(size=view.shape)
    m = leaf.transpose(view.dims.batch + view.dims.rows + view.dims.cols)
    m = m.reshape(*view.batch, view.n_rows, view.n_cols)
    p = rng.normal(size=(*view.batch, view.n_rows, rank))
    q = rng.normal(size=(*view.batch, view.n_cols, rank))
    x, p32, q32 = map(np.float32, (leaf, p, q))

    def jitted(function, *args):
        return np.asarray(jax.jit(functools.partial(function, view))(*args))

    transposed = functools.partial(product, transposed=True)
    left, right = jitted(product, x, q32), jitted(transposed, x, p32)
    np.testing.assert_allclose(left, m @ q, atol=1e-4)
    np.testing.assert_allclose(right, m.swapaxes(-1, -2) @ p, atol=1e-4)
    whole = jitted(outer, p32, q32)
    assert whole.shape == view.shape
    order = view.dims.batch + view.dims.rows + view.dims.cols
    whole = whole.transpose(order).reshape(m.shape)
    np.testing.assert_allclose(whole, p @ q.swapaxes(-1, -2), atol=1e-4)


def test_a_common_leaf_is_not_transposed():
    for shape, name in [((8, 4), "kernel"), ((3, 3, 4, 8), "kernel"), ((9, 4), "embedding")]:
        view = MatrixView(shape, dims_of(shape, name))
        text = jax.jit(view.matricize).lower(jnp.zeros(shape)).as_text()
        assert "transpose" not in text


def test_compressed_iff_it_saves_by_the_asked_factor():
    tree = {"w": jnp.zeros((10, 40))}
    # (10 + 40) * 2 * rate < 400 is false at rate 4, where the two sides are equal.
    assert plan_leaves(tree, 2, 4.0)[0].rank == 0
    assert plan_leaves(tree, 2, 3.99)[0].rank == 2
    # The rank never exceeds the smaller side.
    assert plan_leaves(tree, 99, 0.0)[0].rank == 10


def test_only_floating_leaves_with_values_are_compressed():
    tree = {
        "a": jnp.zeros((9, 9), jnp.int32),
        "b": jnp.zeros((0, 9)),
        "c": jnp.zeros(()),
        "d": None,
    }
    assert [plan.rank for plan in plan_leaves(tree, 1, 0.0)] == [0, 0, 0]


@pytest.mark.parametrize(
    "dims",
    [
        MatrixDims(rows=(0,), cols=(0,)),
        MatrixDims(rows=(0,)),
        MatrixDims(rows=(0,), cols=(2,)),
        (1, 2),
    ],
)
def test_unusable_matrix_dims_name_the_leaf(dims):
    with pytest.raises(ValueError, match=r"\['w'\] with shape \(4, 4\)"):
        plan_leaves({"w": jnp.zeros((4, 4))}, 1, 0.0, lambda path, leaf: dims)


@pytest.mark.parametrize("rank", [0, -1, 1.5, True])
def test_an_unusable_rank_names_the_leaf(rank):
    with pytest.raises(ValueError, match=r"\['w'\]"):
        plan_leaves({"w": jnp.zeros((4, 4))}, lambda path, leaf: rank, 0.0)
