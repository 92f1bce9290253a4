"""docs/hooks.md: every call in its tables runs, and every hook of torch is in them."""

import importlib
import inspect
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomp
from tests.helpers.paths import DOCS
from tests.helpers.runners import mesh_of

TEXT = (DOCS / "hooks.md").read_text()
LINES = [line for line in TEXT.splitlines() if line.startswith("| ")]
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in LINES]
CALLS = {row[0]: row[-1].strip("`") for row in ROWS if row[0] != "torch"}
# Functions of torch that are hooks or make one; the last three are not public there.
HOOK = (
    r"[a-zA-Z]\w*_(hook|wrapper|interleaved)|hook_with_zero_step"
    r"|_hook_then_optimizer|_apply_optim_in_backward_hook|_reducer_allreduce_and_upcast_hook"
)
# How far the first output may be from the exact mean: these send everything.
EXACT = {
    "`allreduce_hook`": 1e-6,
    "`fp16_compress_hook`": 2e-3,
    "`bf16_compress_hook`": 2e-2,
    "`quantization_pertensor_hook`": 3e-2,
    "`quantization_perchannel_hook`": 3e-2,
    "8 bits with error feedback (no equivalent)": 3e-2,
}

PARAMS = {"w": jnp.zeros((16, 12))}


def one_update(tx):
    """Outputs and gradients of four replicas."""
    rng = np.random.default_rng(0)
    grads = {"w": jnp.asarray(rng.normal(size=(4, 16, 12)), jnp.float32)}
    step = jax.vmap(tx.update, in_axes=(0, None, None), axis_name="data")
    with jax.numpy_dtype_promotion("standard"):
        outputs, _ = jax.jit(step)(grads, tx.init(PARAMS), PARAMS)
    return outputs["w"], grads["w"]


@pytest.mark.parametrize("name", CALLS)
def test_the_call_in_the_table_runs(name):
    outputs, grads = one_update(eval(CALLS[name], {"jaxcomp": jaxcomp, "optax": optax, "jnp": jnp}))
    mean = grads.mean(0)
    if CALLS[name].startswith("optax.identity"):
        np.testing.assert_array_equal(outputs, grads)
    elif "sgd(0.1" in CALLS[name]:  # local SGD too averages exactly until start_step
        np.testing.assert_allclose(outputs, -0.1 * np.broadcast_to(mean, (4, 16, 12)), atol=1e-6)
    else:
        np.testing.assert_array_equal(outputs[0], outputs[3])
        tolerance = EXACT.get(name, 2e-2)  # PowerSGD's first steps are exact, in comm_dtype
        np.testing.assert_allclose(outputs[0], mean, atol=tolerance)


@pytest.mark.parametrize("optimizer", [optax.sgd(0.1, momentum=0.9), optax.adam(0.01)])
def test_zero_as_in_the_page(optimizer):
    """Only a part of the moments on every device, and the numbers of the whole."""
    (program,) = (x for x in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if "split" in x)
    rng = np.random.default_rng(0)
    shapes = {"w": (16, 12), "odd": (7, 12), "scale": ()}  # two that do not divide over four
    params = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    batch = rng.normal(size=(8, 16)).astype(np.float32)
    reducer = jaxcomp.powersgd(rank=2, axis_name="data", start_step=0)
    page = {"jax": jax, "jaxcomp": jaxcomp, "optax": optax, "mesh": mesh_of(4), "params": params}
    page["reducer"] = reducer
    page["optimizer"] = optimizer

    def loss_fn(params, x):
        return jnp.mean((params["scale"] * (x @ params["w"])) ** 2) + jnp.sum(params["odd"] ** 2)

    page["loss_fn"] = loss_fn
    exec(program, page)
    run = page["value_and_grad"]
    whole = params
    state = other = run.init(params)
    moments = optimizer.init(params)
    opt_state = page["opt_state"]
    with jax.numpy_dtype_promotion("standard"):  # what a user has
        for _ in range(3):
            params, state, opt_state = page["train_step"](params, state, opt_state, batch)
            (_, grads), other = run(other, whole, batch)
            updates, moments = optimizer.update(grads, moments)
            whole = optax.apply_updates(whole, updates)
    for name, leaf in params.items():
        np.testing.assert_allclose(leaf, whole[name], atol=1e-5)
    moment = optax.tree.get(opt_state, "mu", optax.tree.get(opt_state, "trace"))
    assert moment["w"].addressable_shards[0].data.shape == (4, 12)
    assert moment["odd"].addressable_shards[0].data.shape == (7, 3)


@pytest.mark.torch
def test_every_hook_and_enum_member_of_torch_is_there():
    from torch.distributed.algorithms import ddp_comm_hooks as hooks

    for member in hooks.DDPCommHookType:
        assert f"| `{member.name}` |" in TEXT
    for module in ("default_hooks", "debugging_hooks", "powerSGD_hook", "quantization_hooks",
                   "post_localSGD_hook", "ddp_zero_hook", "optimizer_overlap_hooks",
                   "mixed_precision_hooks"):  # fmt: skip
        with warnings.catch_warnings(action="ignore"):  # torch's own
            found = importlib.import_module(f"{hooks.__name__}.{module}")
        for name, _ in inspect.getmembers(found, inspect.isfunction):
            if re.fullmatch(HOOK, name):
                assert any(f"`{name}" in row[0] for row in ROWS), name
