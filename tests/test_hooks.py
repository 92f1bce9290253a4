"""docs/hooks.md: every call in its tables runs, and every hook of torch is in them."""

import importlib
import inspect
import re
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomp

TEXT = (Path(__file__).parents[1] / "docs" / "hooks.md").read_text()
LINES = [line for line in TEXT.splitlines() if line.startswith("| ")]
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in LINES]
CALLS = {row[0]: row[-1].strip("`") for row in ROWS if row[0] != "torch"}
# How far the first output may be from the exact mean: these send everything.
EXACT = {
    "`allreduce_hook`": 1e-6,
    "`fp16_compress_hook`": 2e-3,
    "`bf16_compress_hook`": 2e-2,
    "`quantization_pertensor_hook`": 3e-2,
    "`quantization_perchannel_hook`": 3e-2,
    "8 bits with error feedback (no equivalent)": 3e-2,
    "a bfloat16 all-reduce first (no equivalent)": 2e-2,
}


@pytest.mark.parametrize("name", CALLS)
def test_the_call_in_the_table_runs(name):
    tx = eval(CALLS[name], {"jaxcomp": jaxcomp, "optax": optax, "jnp": jnp})
    params = {"w": jnp.zeros((16, 12))}
    rng = np.random.default_rng(0)
    grads = {"w": jnp.asarray(rng.normal(size=(4, 16, 12)), jnp.float32)}
    step = jax.vmap(tx.update, in_axes=(0, None, None), axis_name="data")
    with jax.numpy_dtype_promotion("standard"):
        outputs, _ = jax.jit(step)(grads, tx.init(params), params)
    mean = grads["w"].mean(0)
    if "identity" in CALLS[name]:
        np.testing.assert_array_equal(outputs["w"], grads["w"])
    elif "local_sgd" in CALLS[name]:  # exact averages until start_step
        np.testing.assert_allclose(
            outputs["w"], -0.1 * np.broadcast_to(mean, (4, 16, 12)), atol=1e-6
        )
    else:
        np.testing.assert_array_equal(outputs["w"][0], outputs["w"][3])
        tolerance = EXACT.get(name, 2e-2)  # PowerSGD's first steps are exact, in comm_dtype
        np.testing.assert_allclose(outputs["w"][0], mean, atol=tolerance)


@pytest.mark.torch
def test_every_hook_and_enum_member_of_torch_is_there():
    hooks = pytest.importorskip("torch.distributed.algorithms.ddp_comm_hooks")
    for member in hooks.DDPCommHookType:
        assert f"| `{member.name}` |" in TEXT
    for module in ("default_hooks", "debugging_hooks", "powerSGD_hook", "quantization_hooks",
                   "post_localSGD_hook", "ddp_zero_hook"):  # fmt: skip
        with warnings.catch_warnings(action="ignore"):  # torch's own
            found = importlib.import_module(f"{hooks.__name__}.{module}")
        for name, _ in inspect.getmembers(found, inspect.isfunction):
            if re.fullmatch(r"[a-zA-Z]\w*_(hook|wrapper|interleaved)|hook_with_zero_step", name):
                assert f"`{name}" in TEXT, name
