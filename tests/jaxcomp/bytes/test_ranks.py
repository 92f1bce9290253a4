"""Ranks by spectrum: the budget is kept, and nothing else that fits it carries more."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import jaxcomp
from jaxcomp import ranks_by_spectrum
from tests.helpers.leaves import by_layer

SHAPES = {"a": (24, 16), "b": (40, 20), "bias": (16,), "embedding": (64, 12)}


def matrix(shape, spectrum, seed=0):
    """Makes a matrix with these singular values, and zeros after them."""
    rng = np.random.default_rng(seed)
    rows, cols = shape
    left, _ = np.linalg.qr(rng.normal(size=(rows, len(spectrum))))
    right, _ = np.linalg.qr(rng.normal(size=(cols, len(spectrum))))
    product = left @ np.diag(spectrum) @ right.T
    return jnp.asarray(product, jnp.float32)


def decaying(seed=0):
    """Makes gradients whose singular values decay, each leaf at a speed and a size of its own."""
    rng = np.random.default_rng(seed)
    grads = {"bias": jnp.ones(16)}
    for name in ("a", "b", "embedding"):
        shape = SHAPES[name]
        spectrum = rng.uniform(0.5, 0.95) ** np.arange(min(shape))
        size = rng.uniform(0.1, 10)
        grads[name] = size * matrix(shape, spectrum, seed)
    return grads


def ranks(tree, rank, replicas=None, **options):
    """Returns the rank of each leaf by its name, and how many times fewer bytes are sent."""
    tx = jaxcomp.powersgd(rank, axis_name="data", **options)
    stats = tx.bytes(tree, replicas=replicas)
    by_name = {leaf.path[2:-2]: leaf.rank for leaf in stats.leaves}
    return by_name, stats.ratio


def gain(grads, chosen, adaptive):
    """Adds up what the ranks send, as the docstring counts it; 0 is a leaf that is sent whole."""
    total = 0.0
    for name in ("a", "b", "embedding"):
        x = np.asarray(grads[name], np.float64)
        energy = np.linalg.svd(x, compute_uv=False) ** 2
        sent = energy[: chosen[name] or None].sum()
        if adaptive:
            sent = sent / np.sqrt(np.mean(x**2))
        total += sent
    return total


@given(st.integers(0, 20), st.floats(2.1, 4.5), st.booleans())
def test_the_budget_is_kept_and_nearly_used_up(seed, ratio, adaptive):
    grads = decaying(seed)
    _, found = ranks(grads, ranks_by_spectrum(grads, ratio=ratio, adaptive=adaptive))
    assert found >= ratio * 0.999999
    # What is left does not pay for one more column of the cheapest leaf, or the rest of a leaf.
    values = sum(x.size for x in grads.values())
    assert values / ratio - values / found < grads["b"].size // 2


@pytest.mark.parametrize(("seed", "adaptive"), [(0, True), (1, False), (2, True)])
def test_no_other_ranks_of_that_many_bytes_carry_more(seed, adaptive):
    grads = decaying(seed)
    chosen, best_ratio = ranks(grads, ranks_by_spectrum(grads, ratio=4.0, adaptive=adaptive))
    carried = gain(grads, chosen, adaptive) * (1 + 1e-6)
    for a, b, embedding in itertools.product(range(1, 5), range(1, 7), range(1, 6)):
        by_leaf = {"['a']": a, "['b']": b, "['embedding']": embedding, "['bias']": None}
        others, ratio = ranks(grads, jaxcomp.Ranks(by_leaf))
        assert ratio < best_ratio or gain(grads, others, adaptive) <= carried


def test_a_leaf_that_wants_everything_is_left_alone():
    grads = {"flat": matrix((32, 32), np.ones(32)), "sharp": matrix((256, 256), [50.0])}
    chosen = ranks_by_spectrum(grads, ratio=30.0)
    in_json = json.dumps(chosen.by_leaf)
    for rank in (chosen, jaxcomp.Ranks(json.loads(in_json))):
        by_name, _ = ranks(grads, rank)
        assert by_name == {"flat": 0, "sharp": 1}


def test_stacked_layers_are_batches_and_cost_as_many():
    spectrum = 0.5 ** np.arange(16)
    layers = jnp.stack([matrix((24, 16), spectrum, seed) for seed in range(3)])
    rank = ranks_by_spectrum({"w": layers}, ratio=3.0, matrix_dims=by_layer)
    chosen, ratio = ranks({"w": layers}, rank, matrix_dims=by_layer)
    assert chosen == {"w": 3}
    assert ratio == pytest.approx(24 * 16 / (3 * 40))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_gradients_and_leaves_that_are_no_matrices(dtype):
    grads = jax.tree.map(lambda x: x.astype(dtype), decaying()) | {"steps": jnp.arange(3)}
    rank = ranks_by_spectrum(grads, ratio=3.0)
    del grads["steps"]
    chosen, _ = ranks(grads, rank)
    assert chosen.pop("bias") == 0
    assert min(chosen.values()) >= 1


@pytest.mark.parametrize(("wire", "ratio"), [(jnp.int8, 14.0), ("float16", 5.0), ("float32", 3.0)])
def test_with_a_dtype_the_ratio_is_of_bytes(wire, ratio):
    grads = {name: jnp.tile(x, (4,) * x.ndim) for name, x in decaying(1).items()}
    rank = ranks_by_spectrum(grads, ratio=ratio, comm_dtype=wire)
    _, found = ranks(grads, rank, comm_dtype=wire, replicas=4)
    # int8: shares are padded, which the budget does not know.
    assert ratio * 0.97 <= found <= ratio * 1.15


def test_zero_gradients_get_one_column():
    grads = {"a": jnp.zeros((24, 16)), "b": matrix((40, 20), np.ones(20))}
    by_name, _ = ranks(grads, ranks_by_spectrum(grads, ratio=3.0))
    assert by_name["a"] == 1


def test_a_matrix_of_one_row_gets_its_one_column():
    grads = {"a": matrix((24, 16), 0.7 ** np.arange(16)), "row": jnp.ones((1, 64))}
    chosen = ranks_by_spectrum(grads, ratio=1.2, min_compression_rate=0.0)
    assert chosen.by_leaf["['row']"] == 1


def test_a_ratio_that_rank_one_just_reaches():
    # Rank 1 of 16 x 16 sends 32 of 256 values.
    chosen = ranks_by_spectrum({"a": matrix((16, 16), np.ones(16))}, ratio=8.0)
    assert chosen.by_leaf["['a']"] == 1


def test_the_ratio_that_the_message_names_can_be_reached():
    grads = {"a": matrix((20, 13), np.ones(13))}  # rank 1 sends 33 of 260 values: 7.88 times fewer
    with pytest.raises(ValueError, match="at most") as caught:
        ranks_by_spectrum(grads, ratio=100.0)
    *_, last = str(caught.value).split()
    assert ranks_by_spectrum(grads, ratio=float(last.strip("."))).by_leaf == {"['a']": 1}


def test_ranks_of_boxed_gradients_are_for_the_boxed_parameters():
    model = nnx.Linear(24, 16, rngs=nnx.Rngs(0))
    params = nnx.state(model, nnx.Param)
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    with jax.numpy_dtype_promotion("standard"):  # Adam does not run under strict promotion
        optimizer.update(model, params)
    by_ratio = ranks_by_spectrum(params, ratio=2.5)
    by_loss = ranks_by_spectrum(optimizer, loss_budget="50%")
    for chosen in (by_ratio, by_loss):
        assert chosen.by_leaf.keys() == {"['bias']", "['kernel']"}
        assert jaxcomp.powersgd(chosen, axis_name="data").bytes(params).ratio > 1


def test_messages():
    grads = decaying()
    with pytest.raises(ValueError, match=r"rank 1 for every leaf sends .* at most \d"):
        ranks_by_spectrum(grads, ratio=100.0)
    with pytest.raises(ValueError, match=r"sends \d+ bytes, but ratio=100 allows only"):
        ranks_by_spectrum(grads, ratio=100.0, comm_dtype="int8")
    with pytest.raises(ValueError, match=r"must be a dict of ranks .*, got 4\. One rank"):
        jaxcomp.Ranks(4)
    with pytest.raises(ValueError, match="`comm_dtype` must be one of"):
        ranks_by_spectrum(grads, ratio=3.0, comm_dtype="int4")
    chosen = jaxcomp.powersgd(ranks_by_spectrum(grads, ratio=3.0), axis_name="data")
    with pytest.raises(ValueError, match=r"saw no gradient of the leaf \['other'\]") as caught:
        chosen.init({"other": jnp.zeros((64, 64))})
    assert """{**ranks.by_leaf, "['other']": 8}""" in str(caught.value)
    with pytest.raises(ValueError, match=r"\['a'\] is not finite"):
        ranks_by_spectrum(grads | {"a": jnp.full((24, 16), jnp.nan)}, ratio=3.0)
    with pytest.raises(ValueError, match="`ratio` must be a finite number, at least 1"):
        ranks_by_spectrum(grads, ratio=0.5)
    with pytest.raises(ValueError, match="`adaptive` must be True or False"):
        ranks_by_spectrum(grads, ratio=3.0, adaptive=1)  # type: ignore[arg-type]
