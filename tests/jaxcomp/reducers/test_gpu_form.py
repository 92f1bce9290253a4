"""The form of an update that GPUs run, here on a CPU: the same values as the CPU's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxcomp
from jaxcomp._lowrank import matrices, orthogonalize
from tests.helpers.leaves import by_layer, random_grads
from tests.helpers.runners import AXIS, simulate

SHAPES = {"wide": (136, 200), "tall": (200, 136), "twin": (136, 200), "stack": (2, 150, 132)}
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


def product_of_parts(subscripts, first, second):
    """Computes what ``DotAlgorithmPreset.BF16_BF16_F32_X6`` stands for."""
    if first.dtype != jnp.float32:
        return jnp.einsum(subscripts, first, second, precision="highest")
    left = parts_of(first)
    right = parts_of(second)
    total = 0
    for i, j in PAIRS:
        total = total + jnp.einsum(subscripts, left[i], right[j], precision="highest")
    return total


@pytest.fixture
def on_gpus(monkeypatch):
    """Takes the form for others than CPUs in every choice by platform, with products of parts."""

    def chosen():
        jax.clear_caches()
        monkeypatch.setattr(lax, "platform_dependent", lambda *args, default, **_: default(*args))
        monkeypatch.setattr(matrices, "exact_einsum", product_of_parts)
        monkeypatch.setattr(orthogonalize, "exact_einsum", product_of_parts)

    yield chosen
    jax.clear_caches()


@pytest.mark.parametrize(
    ("rank", "dtype", "wire", "atol"),
    [
        (1, jnp.float32, None, 2e-5),
        (8, jnp.float32, None, 2e-5),
        (128, jnp.float32, None, 2e-5),
        (32, jnp.bfloat16, jnp.bfloat16, 6e-2),
        (32, jnp.float32, jnp.int8, 0.3),
    ],
)
def test_an_update_is_that_of_the_cpu(rank, dtype, wire, atol, on_gpus):
    """Outputs and residuals over two steps; bases of one space may differ, and do not show."""
    grads = {name: x.astype(dtype) for name, x in random_grads(SHAPES, 2, 2).items()}

    def run():
        options = {"start_step": 0, "min_compression_rate": 0.5, "matrix_dims": by_layer}
        tx = jaxcomp.powersgd(rank, axis_name=AXIS, comm_dtype=wire, **options)
        outputs, state = simulate("shard_map", tx, grads)
        return outputs, state.residual

    expected = run()
    on_gpus()

    def compare(one, other):
        one, other = np.float32(one), np.float32(other)
        assert np.abs(one - other).max() < atol * np.abs(other).max()

    jax.tree.map(compare, run(), expected)
