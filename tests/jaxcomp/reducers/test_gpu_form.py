"""The form of an update that GPUs run, here on a CPU: the same values as the CPU's own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from numpy.testing import assert_allclose

import jaxcomp
from jaxcomp._lowrank.matrices import MatrixView, product
from tests.helpers.control import apart, assert_no_further
from tests.helpers.leaves import by_layer, equal, random_grads
from tests.helpers.runners import AXIS, simulate

SHAPES = {"wide": (136, 200), "twin": (136, 200), "tall stack": (2, 200, 136)}
# Pairs of parts whose products an NVIDIA GPU adds up, the smallest first.
PAIRS = ((1, 1), (2, 0), (0, 2), (1, 0), (0, 1), (0, 0))


def parts_of(x):
    """Splits float32 values into three parts in bfloat16, the largest first."""
    parts = []
    for _ in range(3):
        part = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        parts.append(part)
        x = x - part
    return parts


def product_of_parts(subscripts, first, second, einsum=jnp.einsum):
    """Computes what ``DotAlgorithmPreset.BF16_BF16_F32_X6`` stands for."""
    left = parts_of(first)
    right = parts_of(second)
    total = 0
    for i, j in PAIRS:
        total = total + einsum(subscripts, left[i], right[j], precision="highest")
    return total


@pytest.fixture
def on_gpus(monkeypatch):
    """Takes the form for others than CPUs in every choice by platform, with products of parts."""

    einsum = jnp.einsum

    def of_gpus(*arguments, default, cuda=None, **_):
        """Takes the branch of NVIDIA GPUs where there is one, else that of all but CPUs."""
        return (cuda or default)(*arguments)

    def emulated(subscripts, *arrays, precision=None, **others):
        """Multiplies in parts where a preset asks for it, which no CPU has."""
        if precision == lax.DotAlgorithmPreset.BF16_BF16_F32_X6:
            return product_of_parts(subscripts, *arrays, einsum=einsum)
        return einsum(subscripts, *arrays, precision=precision, **others)

    def chosen():
        jax.clear_caches()
        monkeypatch.setattr(lax, "platform_dependent", of_gpus)
        monkeypatch.setattr(jnp, "einsum", emulated)

    yield chosen
    jax.clear_caches()


@pytest.mark.parametrize(
    ("rank", "eps", "dtype", "wire", "atol"),
    [
        (1, 0.0, jnp.float32, None, 2e-5),
        (2, 9.0, jnp.float32, None, 2e-5),  # an eps beside which norms are not large
        (4, 0.0, jnp.float32, None, 2e-5),
        (128, 0.0, jnp.float32, None, 2e-5),
        (32, 0.0, jnp.bfloat16, jnp.bfloat16, 6e-2),
        (32, 0.0, jnp.float32, jnp.int8, 0.3),
    ],
)
def test_an_update_is_that_of_the_cpu(rank, eps, dtype, wire, atol, on_gpus):
    """Outputs and residuals over two steps; bases of one space may differ, and do not show."""
    grads = {name: x.astype(dtype) for name, x in random_grads(SHAPES, 2, 2).items()}

    def run():
        options = {"start_step": 0, "min_compression_rate": 0.5, "matrix_dims": by_layer}
        tx = jaxcomp.powersgd(rank, axis_name=AXIS, comm_dtype=wire, eps=eps, **options)
        outputs, state = simulate("shard_map", tx, grads)
        return outputs, state.residual

    expected = run()
    on_gpus()

    def compare(one, other):
        one = np.float32(one)
        other = np.float32(other)
        assert np.abs(one - other).max() < atol * np.abs(other).max()

    jax.tree.map(compare, run(), expected)


@pytest.mark.parametrize("rank", [4, 32])
def test_a_step_that_is_not_finite_leaves_the_state_as_it_was(rank, on_gpus):
    grads = random_grads(SHAPES, 2, 2)
    grads["twin"][1, 1, 5] = np.nan
    on_gpus()
    tx = jaxcomp.powersgd(rank, axis_name=AXIS, start_step=0, min_compression_rate=0.5)
    outputs, state = simulate("shard_map", tx, grads)
    first = {name: x[:, :1] for name, x in grads.items()}
    equal(state, simulate("shard_map", tx, first)[1])
    for output in outputs.values():
        assert np.isnan(output[1]).all()


def test_a_product_over_a_long_axis_is_summed_in_equal_pieces(on_gpus):
    rng = np.random.default_rng(0)
    leaf = jnp.float32(rng.normal(size=(9000, 48)))
    factor = jnp.float32(rng.normal(size=(9000, 4)))
    view = MatrixView(leaf.shape, jaxcomp.MatrixDims(rows=(0,), cols=(1,)))
    transposed = functools.partial(product, view, transposed=True)
    expected = transposed(leaf, factor)
    on_gpus()
    assert "f32[72,125,48]" in str(jax.make_jaxpr(transposed)(leaf, factor))
    assert_allclose(transposed(leaf, factor), expected, atol=3e-6 * np.abs(expected).max())


def is_plain(subscripts, first, second):
    """Returns whether the last axis of one matrix meets the first of another, without a batch.

    Axes of length 1 do not count, because XLA removes them.
    """
    inputs, output = subscripts.split("->")
    axes = []
    for letters, array in zip(inputs.split(","), (first, second), strict=True):
        batch = array.ndim - len(letters.replace("...", ""))
        letters = letters.replace("...", "ABCD"[:batch])
        axes.append([x for x, size in zip(letters, array.shape, strict=True) if size > 1])
    shared = [x for x in axes[0] if x in axes[1]]
    contracted = [x for x in shared if x not in output and x.islower()]
    return shared == contracted == axes[0][-1:] == axes[1][:1]


def test_products_of_parts_keep_their_precision_on_several_gpus(on_gpus, monkeypatch):
    """Programs for several GPUs lose it where the last axis of a matrix meets another's first."""
    on_gpus()
    einsum = jnp.einsum
    seen = []

    def recorded(subscripts, *arrays, precision=None, **others):
        if precision == lax.DotAlgorithmPreset.BF16_BF16_F32_X6:
            seen.append(is_plain(subscripts, *arrays))
        return einsum(subscripts, *arrays, precision=precision, **others)

    monkeypatch.setattr(jnp, "einsum", recorded)
    tx = jaxcomp.powersgd(16, axis_name=AXIS, start_step=0, min_compression_rate=0.5)
    for shapes in ({"alone": (64, 96)}, {"tall": (96, 64), "wide": (40, 96), "kernel": (3, 8, 40)}):
        simulate("shard_map", tx, random_grads(shapes, 2, 1))
    assert len(seen) > 10
    assert not any(seen)


def training(rank):
    """Returns a function that trains a small network for 20 steps, and returns the losses.

    There are two replicas. They begin with what `move` makes of the first parameters.
    """
    mesh = jax.make_mesh((2,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    rng = np.random.default_rng(0)
    begun = {
        "in": np.float32(rng.normal(size=(40, 64)) / 8),
        "out": np.float32(rng.normal(size=(64, 30)) / 8),
    }
    inputs = np.float32(rng.normal(size=(32, 40)))
    targets = np.float32(np.sin(inputs @ rng.normal(size=(40, 30))))

    def loss(params, inputs, targets):
        return jnp.mean((jnp.tanh(inputs @ params["in"]) @ params["out"] - targets) ** 2)

    tx = jaxcomp.powersgd(rank, axis_name=AXIS, start_step=0, min_compression_rate=1.0)
    averaged = jaxcomp.value_and_grad(loss, tx, mesh=mesh)

    @jax.jit
    def step(params, state):
        (value, grads), state = averaged(state, params, inputs, targets)
        return jax.tree.map(lambda p, g: p - 0.3 * g, params, grads), state, value

    def losses(move=lambda params: params):
        params = move(begun)
        state = averaged.init(params)
        found = []
        for _ in range(20):
            params, state, value = step(params, state)
            found.append(float(value))
        return np.array(found)

    return losses


def test_training_is_that_of_the_cpu(on_gpus):
    train = training(rank=8)
    expected = train()
    control = train(apart)
    on_gpus()
    assert_no_further(training(rank=8)(), expected, control)
    assert expected[-1] < 0.9 * expected[0]


@pytest.mark.parametrize(
    ("subscripts", "first", "second"),
    [
        ("ij,jr->ir", (768, 3072), (3072, 32)),
        ("ir,jr->ij", (768, 128), (768, 128)),
        ("ki,kj->ij", (512, 32), (512, 32)),
    ],
)
def test_products_of_parts_round_as_those_of_float32(subscripts, first, second):
    """Six products of parts in bfloat16 leave no more than one product of float32 does."""
    rng = np.random.default_rng(0)
    first = np.float32(rng.normal(size=first))
    second = np.float32(rng.normal(size=second))
    exact = np.einsum(subscripts, np.float64(first), np.float64(second))
    of_parts = np.linalg.norm(product_of_parts(subscripts, first, second) - exact)
    plain = np.linalg.norm(jnp.einsum(subscripts, first, second) - exact)
    assert of_parts < max(2 * plain, 3e-7 * np.linalg.norm(exact))
