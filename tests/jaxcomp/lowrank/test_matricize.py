"""Leaf to matrix and back, and the rule that decides what is compressed."""

import functools

import jax
import jax.numpy as jnp
import pytest

from jaxcomp import MatrixDims
from jaxcomp._lowrank import matrices
from jaxcomp.extend import MatrixView, default_matrix_dims, plan_leaves
from tests.helpers.tables import numbers, rows


def dims_of(shape, name="kernel"):
    return default_matrix_dims((jax.tree_util.DictKey(name),), jnp.zeros(shape))


# A shape and the last part of its path, and which axes are rows and columns, as in torch: those of
# Dense (in, out) are (out, in), of HWIO (O, HWI), of attention (E, heads, head) and back. In a
# depthwise kernel a tie goes to the later cut. An embedding is (vocab, features).
RULE = rows("""
8 4 | kernel | 1 | 0
3 3 16 32 | kernel | 3 | 0 1 2
64 4 16 | kernel | 1 2 | 0
4 16 64 | kernel | 2 | 0 1
3 3 1 32 | kernel | 3 | 0 1 2
100 8 | embedding | 0 | 1
""")


@pytest.mark.parametrize(("shape", "name", "row_axes", "columns"), RULE)
def test_default_rule_and_no_transpose(shape, name, row_axes, columns):
    shape = numbers(shape)
    dims = dims_of(shape, name)
    assert dims == MatrixDims((), numbers(row_axes), numbers(columns))
    view = MatrixView(shape, dims)
    lowered = jax.jit(view.matricize).lower(jnp.zeros(shape))
    assert "transpose" not in lowered.as_text()


@pytest.mark.parametrize("shape", [(), (5,)])
def test_vectors_and_scalars_are_no_matrices(shape):
    assert dims_of(shape) is None


@pytest.mark.parametrize(("rank", "rate", "expected"), [(2, 4.0, 0), (2, 3.99, 2), (99, 0.0, 10)])
def test_compressed_iff_it_saves_by_the_asked_factor(rank, rate, expected):
    """(10 + 40) * 2 * rate < 400 is false at rate 4; the rank is at most the smaller side."""
    (plan,) = plan_leaves({"w": jnp.zeros((10, 40))}, rank, rate)
    assert plan.rank == expected


SQUARE = {"w": jnp.zeros((4, 4))}


@pytest.mark.parametrize("rank", [0, -1, 1.5, True])
def test_an_unusable_rank_names_the_leaf(rank):
    def rank_of(path, leaf):
        return rank

    with pytest.raises(ValueError, match=r"\['w'\]"):
        plan_leaves(SQUARE, rank_of, 0.0)


@pytest.mark.parametrize(
    "dims",
    [MatrixDims((), (0,), (0,)), MatrixDims((), (0,)), MatrixDims((), (0,), (2,)), (1, 2)],
)
def test_unusable_dimensions_name_the_leaf(dims):
    def dims_of_leaf(path, leaf):
        return dims

    with pytest.raises(ValueError, match=r"\['w'\]"):
        plan_leaves(SQUARE, 1, 0.0, dims_of_leaf)


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
    matrix = jnp.ones((2, 2))
    traced = jax.make_jaxpr(functools.partial(matrices.exact_einsum, "ij,jk->ik"))(matrix, matrix)
    assert ("BF16_BF16_F32_X6" in str(traced)) == expected
