"""Leaf to matrix and back, and the rule that decides what is compressed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxcomp import MatrixDims
from jaxcomp._lowrank import matrices
from jaxcomp.extend import MatrixView, default_matrix_dims, plan_leaves
from tests.helpers.leaves import random_grads, zeros_of_one
from tests.helpers.reducers import powersgd
from tests.helpers.reference import assert_steps
from tests.helpers.runners import simulate


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
def test_default_rule_and_no_transpose(shape, name, rows, cols):
    dims = dims_of(shape, name)
    assert dims == MatrixDims((), rows, cols)
    text = jax.jit(MatrixView(shape, dims).matricize).lower(jnp.zeros(shape)).as_text()
    assert "transpose" not in text


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


@settings(max_examples=4)  # each compiles a program of its own, of five leaves
@given(st.lists(views(), min_size=5, max_size=5), st.sampled_from([1, 2, 9]))
def test_a_step_does_not_depend_on_the_memory_order(views, rank):
    """Both products and the outer one, of every order of axes: equal to those of matrices."""
    grads = random_grads({f"leaf{i}": view.shape for i, view in enumerate(views)}, 2, 2)
    dims = lambda path, _: views[int(path[0].key[4:])].dims  # noqa: E731
    tx = powersgd(rank, min_compression_rate=0.0, matrix_dims=dims)
    state = tx.init(zeros_of_one(grads))
    outputs, after = simulate("vmap", tx, grads, state)
    for view, name in zip(views, grads, strict=True):
        order = sum(view.dims, ())

        def matrices(x, order=order, view=view):
            lead = range(x.ndim - len(order))
            axes = (*lead, *(len(lead) + axis for axis in order))
            return x.transpose(axes).reshape(*x.shape[: len(lead)], -1, view.n_rows, view.n_cols)

        factors = state.q[name].reshape(-1, *state.q[name].shape[-2:])
        trees = (grads, outputs, after.residual)
        given, found, residual = (matrices(np.float64(tree[name])) for tree in trees)
        for i, q in enumerate(factors):
            assert_steps(given[:, :, i], found[:, i], residual[:, i], q, worst=1e4)


def test_compressed_iff_it_saves_by_the_asked_factor():
    tree = {"w": jnp.zeros((10, 40))}
    # (10 + 40) * 2 * rate < 400 is false at rate 4, where the two sides are equal.
    assert plan_leaves(tree, 2, 4.0)[0].rank == 0
    assert plan_leaves(tree, 2, 3.99)[0].rank == 2
    # The rank never exceeds the smaller side.
    assert plan_leaves(tree, 99, 0.0)[0].rank == 10
    others = {"a": jnp.zeros((9, 9), jnp.int32), "b": jnp.zeros((0, 9)), "c": jnp.zeros(())}
    assert [plan.rank for plan in plan_leaves(others | {"d": None}, 1, 0.0)] == [0, 0, 0]


UNUSABLE = [MatrixDims((), (0,), (0,)), MatrixDims((), (0,)), MatrixDims((), (0,), (2,)), (1, 2)]


@pytest.mark.parametrize(
    ("rank", "dims"),
    [*((rank, None) for rank in (0, -1, 1.5, True)), *((1, dims) for dims in UNUSABLE)],
)
def test_unusable_ranks_and_dimensions_name_the_leaf(rank, dims):
    with pytest.raises(ValueError, match=r"\['w'\]"):
        plan_leaves({"w": jnp.zeros((4, 4))}, lambda *_: rank, 0.0, dims and (lambda *_: dims))


class Card:
    """A GPU as JAX lists it."""

    platform = "gpu"

    def __init__(self, capability):
        self.compute_capability = capability


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        (["9.0"], True),
        (["8.0", "9.0"], True),
        (["7.5"], False),
        (["9.0", "7.0"], False),
        ([], True),
    ],
)
def test_cards_older_than_ampere_multiply_in_float32(capabilities, expected, monkeypatch):
    """XLA refuses products of parts in bfloat16 for them, and one is enough for all."""
    cards = [Card(capability) for capability in capabilities]
    monkeypatch.setattr(jax, "devices", lambda: cards)
    matrices._multiplies_parts.cache_clear()
    assert matrices._multiplies_parts() == expected
    matrices._multiplies_parts.cache_clear()
