"""`powersgd(comm_dtype=jnp.int8)` and "int6": factors as integers, everything else as it is."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomp
from jaxcomp.extend import BlockLayout, mean_by_shares
from tests.helpers.classifier import grid
from tests.helpers.leaves import (
    COMPRESSED,
    SHAPES,
    SMALL,
    as_matrix,
    random_grads,
    with_value,
    zeros,
)
from tests.helpers.reducers import powersgd
from tests.helpers.reference import orthogonalize
from tests.helpers.runners import AXIS, MAPPINGS, first, sharded, simulate, steps_of


def rounded(blocks, levels):
    scale = np.abs(blocks).max(-1, keepdims=True) / levels
    return np.where(scale == 0, 0, scale * np.rint(blocks / np.where(scale == 0, 1, scale)))


def integer_mean(own, levels=127):
    """Mean, and contributions as sent, of factors ``(replicas, n, r)``: from the definition."""
    replicas, n, r = own.shape
    per_column = math.ceil(n / 128)
    share = math.ceil(n * r / replicas)
    blocks = math.ceil(share / math.ceil(n / per_column))
    length = math.ceil(share / blocks)
    flat = np.zeros((replicas, replicas * blocks * length))
    flat[:, : n * r] = own.transpose(0, 2, 1).reshape(replicas, -1)
    sent = rounded(flat.reshape(replicas, replicas, blocks, length), levels)
    mean = sent.mean(0)
    output = rounded(mean, levels)
    for k in range(replicas):
        sent[k, k] += replicas * (output[k] - mean[k])
    columns = [x.reshape(-1)[: n * r].reshape(r, n).T for x in (output, *sent)]
    return columns[0], np.stack(columns[1:])


def reference(m, q, levels=127):
    """One step from matrices ``(replicas, rows, cols)``: output, new residuals, new factor."""
    p = orthogonalize(integer_mean(m @ orthogonalize(q), levels)[0])
    q, own = integer_mean(m.transpose(0, 2, 1) @ p, levels)
    return p @ q.T, m - p @ own.transpose(0, 2, 1), q


@pytest.mark.parametrize(("mapping", "bits"), [*((m, 8) for m in MAPPINGS), ("vmap", 6)])
def test_equals_the_numpy_reference(mapping, bits):
    n, rank, levels = 3, 2, 2 ** (bits - 1) - 1
    grads = random_grads(SHAPES, n, 3)
    level, close, seen = 10 / levels, 0, 0  # on a few factors' entries
    tx = powersgd(rank, comm_dtype=f"int{bits}")
    state = tx.init(zeros())
    for now in steps_of(grads):  # each from the mean residual of the last
        one = jax.tree.map(lambda g: g[:, None], now)
        outputs, new = simulate(mapping, tx, one, state)
        for name in COMPRESSED:
            m = as_matrix(name, now[name]) + as_matrix(name, state.residual[name])
            output, residual, factor = reference(m, np.asarray(state.q[name], np.float64), levels)
            errors = [
                as_matrix(name, outputs[name][0]) - output,
                as_matrix(name, new.residual[name]) - residual,
                np.abs(new.q[name]) - np.abs(factor),
            ]
            largest = max(np.abs(x).max() for x in errors)
            # A value within float32's rounding of the middle goes to the other side, now and then.
            assert largest < 2 * level
            close += largest < 1e-4
            seen += 1
        np.testing.assert_allclose(outputs["bias"][0], now["bias"].mean(0), rtol=1e-6)
        state = jaxcomp.consolidate(new)
    assert close >= 2 / 3 * seen


@pytest.mark.parametrize("size", [1, 5, 24, 129])
def test_six_bits_are_the_integers_that_eight_would_hold(size):
    """Four integers in three bytes and back: every level, either sign, any length."""
    levels = np.arange(-31, 32)
    values = np.resize(np.concatenate([[31], levels]), (2, 3, size)).astype(np.float32)
    values[..., 0] = 31  # so that the scale is 1
    layout = BlockLayout(values[0].size * 2, 2, 3, size, bits=6)
    rows = layout.encode(jnp.asarray(values))
    assert rows.shape == (2, layout.row_bytes)
    assert layout.row_bytes == 4 * math.ceil((3 * math.ceil(3 * size / 4) + 3 * 4) / 4)
    np.testing.assert_array_equal(layout.decode(rows, jnp.float32), values)


def test_arrays_travel_the_same_in_a_stack():
    n, arrays = 2, np.random.default_rng(0).normal(size=(2, 5, 6, 8)).astype(np.float32)
    own = BlockLayout.of(48, n, 16)

    def apart(x):
        found = mean_by_shares([*x], [own] * 5, AXIS)
        return jnp.stack(found.means), jnp.stack(found.sent)

    def together(x):
        # Two stacks around a single one: they are encoded together, in the same order.
        found = mean_by_shares([x[:2], x[2], x[3:]], [own] * 3, AXIS)
        join = lambda values: jnp.concatenate([values[0], values[1][None], values[2]])  # noqa: E731
        return join(found.means), join(found.sent)

    results = [jax.jit(jax.vmap(f, axis_name=AXIS))(arrays) for f in (apart, together)]
    jax.tree.map(np.testing.assert_array_equal, *results)


@pytest.mark.parametrize("values", [(1e30, 1e-30, 1e-38, 1e-42, 0.0), (3e38,), (3.4e38,)], ids=str)
def test_either_end_of_the_float_range(values):
    """One large value on every replica, of which the sum would overflow; or hardly any at all."""
    none = np.zeros((4, 3, 24, 16), np.float32)
    grads = [with_value(none, np.s_[:, :, 5, 7], x) for x in values]
    tx = powersgd(1, comm_dtype=jnp.int8)
    outputs, state = simulate("vmap", tx, grads)
    for x, gradient, output, residual, q in zip(
        values, grads, outputs, state.residual, state.q, strict=True
    ):
        assert np.isfinite(residual).all()
        assert np.isfinite(q).all()
        if x > 1e38:  # with its residual too large for float32 in the end: then a bad step
            assert np.isnan(output[int(state.count) :]).all()
        elif x > 1e-37 or x == 0:
            total = np.asarray(output, np.float64).sum(0)
            total += np.asarray(residual, np.float64).mean(0)
            np.testing.assert_allclose(total, gradient[0].sum(0), rtol=1e-5, atol=1e-4 * x)


def test_columns_of_zeros_and_of_subnormals_stay_what_they_are():
    grads = random_grads({"w": (24, 16)}, 2, 3)
    grads["w"][..., 8:] = 0
    grads["w"][..., 4:8] *= np.float32(1e-40)
    tx = powersgd(8, comm_dtype=jnp.int8)
    outputs, state = simulate("vmap", tx, grads)
    assert not np.any(outputs["w"][..., 8:])
    assert np.abs(outputs["w"][..., 4:8]).max() < 1e-38
    assert np.isfinite(state.residual["w"]).all()


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(jaxcomp.quantized_allreduce, block_size=16),
        functools.partial(jaxcomp.powersgd, 2, start_step=0, comm_dtype="int8"),
    ],
    ids=["values", "factors"],
)
def test_several_axes_are_one_axis_of_as_many_replicas(make):
    grads = jax.tree.map(lambda x: x[:, 0], random_grads(SMALL, 6, 1))

    def mean(axis_name):
        tx = make(axis_name=axis_name)
        return lambda g: tx.update(g, tx.init(zeros(SMALL)))[0]

    one = jax.jit(jax.vmap(mean(AXIS), axis_name=AXIS))(grads)
    folded = jax.tree.map(lambda x: x.reshape(2, 3, *x.shape[1:]), grads)
    nested = jax.vmap(jax.vmap(mean(("a", "b")), axis_name="b"), axis_name="a")
    two = jax.jit(nested)(folded)
    local = lambda g: mean(("data", "model"))(first(g))  # noqa: E731
    three = sharded(grid(2, model=3), local, jax.P(("data", "model")), jax.P())(grads)
    for name in SMALL:
        np.testing.assert_allclose(two[name][1, 2], one[name][0], atol=1e-5)
        np.testing.assert_allclose(three[name], one[name][0], atol=1e-5)


def test_float64_gradients_keep_their_digits():
    with jax.enable_x64(True):
        grads = {"w": np.random.default_rng(0).normal(size=(3, 24, 16)) / 3}
        grads["bias"] = np.random.default_rng(1).normal(size=(3, 16))
        tx = powersgd(2, comm_dtype=jnp.int8)
        step = jax.vmap(lambda g: tx.update(g, tx.init(g)), axis_name=AXIS)
        outputs, state = jax.jit(step)(jax.tree.map(jnp.asarray, grads))
        assert outputs["w"].dtype == state.residual["w"].dtype == jnp.float64
        total = outputs["w"][0] + state.residual["w"].mean(0)
        np.testing.assert_allclose(total, grads["w"].mean(0), atol=1e-14)
        np.testing.assert_allclose(outputs["bias"][0], grads["bias"].mean(0), rtol=1e-14)
