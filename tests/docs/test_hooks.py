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
from numpy.testing import assert_allclose, assert_array_equal

import jaxcomp
from tests.helpers.control import apart, assert_no_further
from tests.helpers.paths import DOCS
from tests.helpers.rounding import rounding
from tests.helpers.runners import mesh_of

TEXT = (DOCS / "hooks.md").read_text()
ROWS = [re.split(r" *\| *", line)[1:-1] for line in re.findall(r"^\| .*$", TEXT, re.M)]
CALLS = {row[0]: row[-1].strip("`") for row in ROWS if row[0] != "torch"}
# Functions of torch that are hooks or make one; the last three are not public there.
HOOK = (
    r"[a-zA-Z]\w*_(hook|wrapper|interleaved)|hook_with_zero_step"
    r"|_hook_then_optimizer|_apply_optim_in_backward_hook|_reducer_allreduce_and_upcast_hook"
)

PARAMS = {"w": jnp.zeros((16, 12))}


def one_update(tx):
    """Makes gradients of four replicas, and one update; returns the outputs and the gradients."""
    rng = np.random.default_rng(0)
    grads = {"w": jnp.asarray(rng.normal(size=(4, 16, 12)), jnp.float32)}
    step = jax.vmap(tx.update, in_axes=(0, None, None), axis_name="data")
    with jax.numpy_dtype_promotion("standard"):
        outputs, _ = jax.jit(step)(grads, tx.init(PARAMS), PARAMS)
    return outputs["w"], grads["w"]


def tolerance_of(call, grads):
    """Returns how far the first output may be from the mean: everything is sent, as it says."""
    largest = np.abs(grads).max()
    if "quantized" in call:
        return largest / 127  # one of 8 bits
    for dtype in ("bfloat16", "float16"):
        if dtype in call:
            return rounding(len(grads), largest=largest, dtype=dtype)
    return rounding(len(grads), largest=largest)


@pytest.mark.parametrize("name", CALLS)
def test_the_call_in_the_table_runs(name):
    outputs, grads = one_update(eval(CALLS[name], {"jaxcomp": jaxcomp, "optax": optax, "jnp": jnp}))
    mean = grads.mean(0)
    if CALLS[name].startswith("optax.identity"):
        assert_array_equal(outputs, grads)
    else:
        assert_array_equal(outputs[0], outputs[3])
        if "sgd(0.1" in CALLS[name]:  # local SGD too averages exactly until start_step
            mean = -0.1 * mean
        assert_allclose(outputs[0], mean, rtol=0, atol=tolerance_of(CALLS[name], grads))


@pytest.mark.parametrize("optimizer", [optax.sgd(0.1, momentum=0.9), optax.adam(0.01)])
def test_zero_as_in_the_page(optimizer):
    """Only a part of the moments on every device, and the numbers of the whole."""
    (text,) = re.findall(r"```python\n((?:(?!```).)*split.*?)```", TEXT, re.DOTALL)
    rng = np.random.default_rng(0)
    shapes = {"w": (16, 12), "odd": (7, 12), "scale": ()}  # two that do not divide over four
    params = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    batch = rng.normal(size=(8, 16)).astype(np.float32)

    def loss_fn(params, x):
        return jnp.mean((params["scale"] * (x @ params["w"])) ** 2) + jnp.sum(params["odd"] ** 2)

    page = {"jax": jax, "jaxcomp": jaxcomp, "optax": optax, "mesh": mesh_of(4)}
    page |= {"params": params, "optimizer": optimizer, "loss_fn": loss_fn}
    page["reducer"] = jaxcomp.powersgd(rank=2, axis_name="data", start_step=0)
    exec(text, page)
    run = page["value_and_grad"]

    def trained(params, moments, step):
        state = run.init(params)
        for _ in range(3):
            params, state, moments = step(params, state, moments, batch)
        return params, moments

    @jax.jit
    def whole_step(params, state, moments, batch):
        (_, grads), state = run(state, params, batch)
        updates, moments = optimizer.update(grads, moments)
        return optax.apply_updates(params, updates), state, moments

    with jax.numpy_dtype_promotion("standard"):  # what a user has
        whole, _ = trained(params, optimizer.init(params), whole_step)
        control, _ = trained(apart(params), optimizer.init(params), whole_step)
        split, moments = trained(params, page["opt_state"], page["train_step"])
    assert_no_further(split, whole, control)
    moment = optax.tree.get(moments, "mu", optax.tree.get(moments, "trace"))
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
