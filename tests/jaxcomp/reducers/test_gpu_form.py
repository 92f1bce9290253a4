"""The form of an update that GPUs run, here on a CPU: the same values as the CPU's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxcomp
from tests.helpers.leaves import by_layer, random_grads
from tests.helpers.runners import AXIS, simulate

SHAPES = {"wide": (136, 200), "tall": (200, 136), "twin": (136, 200), "stack": (2, 150, 132)}


@pytest.fixture
def on_gpus(monkeypatch):
    """Every choice by platform is the one for others than CPUs."""

    def chosen():
        jax.clear_caches()
        monkeypatch.setattr(lax, "platform_dependent", lambda *args, default, **_: default(*args))

    yield chosen
    jax.clear_caches()


@pytest.mark.parametrize(
    ("rank", "dtype", "wire", "atol"),
    [
        (4, jnp.float32, None, 1e-4),
        (128, jnp.float32, None, 1e-4),
        (32, jnp.bfloat16, jnp.bfloat16, 6e-2),
        (32, jnp.float32, jnp.int8, 0.3),
    ],
)
def test_an_update_is_that_of_the_cpu(rank, dtype, wire, atol, on_gpus):
    """Outputs and residuals over two steps; bases of one space may differ, and do not show."""
    grads = {name: x.astype(dtype) for name, x in random_grads(SHAPES, 2, 2).items()}
    options = {"start_step": 0, "min_compression_rate": 0.5, "matrix_dims": by_layer}
    tx = jaxcomp.powersgd(rank, axis_name=AXIS, comm_dtype=wire, **options)
    expected, after = simulate("shard_map", tx, grads)
    on_gpus()
    tx = jaxcomp.powersgd(rank, axis_name=AXIS, comm_dtype=wire, **options)
    outputs, state = simulate("shard_map", tx, grads)
    for name in SHAPES:
        for a, b in ((outputs, expected), (state.residual, after.residual)):
            a, b = np.asarray(a[name], np.float32), np.asarray(b[name], np.float32)
            assert np.abs(a - b).max() < atol * np.abs(b).max()
