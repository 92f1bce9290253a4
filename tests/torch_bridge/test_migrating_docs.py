"""The programs in docs/migrating.md: a DDP job saves, JAX goes on, and DDP goes on after that."""

import collections
import copy
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hook

import torch_bridge
from tests.helpers.bridge import linears, move_weights, steps_in_jax, steps_in_torch
from tests.helpers.control import assert_no_further
from tests.helpers.paths import DOCS

PAGE = DOCS / "migrating.md"
BATCHES = np.random.default_rng(0).normal(size=(40, 16, 24)).astype(np.float32)


def torch_loss(model, batch):
    x = torch.from_numpy(batch)
    return ((model(x) - torch.sin(x[:, :16])) ** 2).mean()


class Model(nn.Module):
    """Nested calls, which linen numbers from the outside."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(16)(jnp.tanh(nn.Dense(48)(x)))


def jax_loss(params, batch):
    out = Model().apply({"params": params}, batch)
    return jnp.mean((out - jnp.sin(batch[:, :16])) ** 2)


def new_job():
    """Model, DDP around it and optimizer, as the page's reader has them."""
    torch.manual_seed(1)
    layers = collections.OrderedDict(
        first=torch.nn.Linear(24, 48), tanh=torch.nn.Tanh(), second=torch.nn.Linear(48, 16)
    )
    model = torch.nn.Sequential(layers)
    ddp_model = torch.nn.parallel.DistributedDataParallel(model)
    return model, ddp_model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def torch_steps(ddp_model, optimizer, batches):
    return steps_in_torch(lambda batch: torch_loss(ddp_model, batch), optimizer, batches)


def job_of_ten_steps():
    model, ddp_model, optimizer = new_job()
    state = hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=4)
    ddp_model.register_comm_hook(state, hook.powerSGD_hook)
    torch_steps(ddp_model, optimizer, BATCHES[:10])
    return model, ddp_model, optimizer, state


def run_that_stays(seed):
    """Returns the losses after ten steps of a control, whose weights are moved before each step."""
    model, ddp_model, optimizer, _ = job_of_ten_steps()
    losses = []
    for step, batch in enumerate(BATCHES[10:]):
        move_weights(model, 1_000 * seed + step)
        losses += torch_steps(ddp_model, optimizer, [batch])
    return np.array(losses)


def test_the_programs_of_the_page_move_a_run_and_bring_it_back(alone, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    programs = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    save, go_on, _, hand_back, return_, _ = (compile(x, PAGE.name, "exec") for x in programs)

    _, ddp_model, optimizer, state = job_of_ten_steps()
    names = {"ddp_model": ddp_model, "state": state, "optimizer": optimizer}
    exec(save, names | {"inputs": torch.from_numpy(BATCHES[0, :3])})
    stayed = torch_steps(ddp_model, optimizer, BATCHES[10:])
    controls = [run_that_stays(seed) for seed in range(3)]

    names = {"abstract_params": linears(Dense_0=(48, 16), Dense_1=(24, 48)), "model": Model()}
    exec(go_on, names)
    assert names["checkpoint"].extra["epoch"] == 3
    assert names["step"] == 10
    assert names["run"].difference < 1e-6
    params, opt_state, moved = steps_in_jax(
        jax_loss, *(names[n] for n in ("transformation", "params", "opt_state")), BATCHES[10:25]
    )
    names |= {"params": params, "opt_state": opt_state}
    exec(hand_back, names)

    model, ddp_model, optimizer = new_job()
    back = {
        "torch": torch,
        "torch_bridge": torch_bridge,
        "model": model,
        "ddp_model": ddp_model,
        "optimizer": optimizer,
        "rank": 0,
        "world_size": 1,
        "batch": BATCHES[25],
        "loss": lambda batch: torch_loss(ddp_model, batch),
    }
    exec(return_, back)
    before = copy.deepcopy(model.state_dict())
    np.testing.assert_array_equal(before["first.weight"].numpy().T, params["Dense_1"]["kernel"])
    moved += torch_steps(ddp_model, optimizer, BATCHES[25:])
    assert_no_further(np.array(moved), np.array(stayed), *controls)
    assert moved[-1] < 0.9 * moved[0]


class Normalised(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9, name="norm")(x)
        return nn.Dense(16, name="out")(jnp.tanh(nn.Dense(48, name="hidden")(x)))


def test_the_loop_with_statistics_follows_torch(alone, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(1)
    layers = collections.OrderedDict(norm=torch.nn.BatchNorm1d(24), hidden=torch.nn.Linear(24, 48))
    layers |= {"tanh": torch.nn.Tanh(), "out": torch.nn.Linear(48, 16)}
    module = torch.nn.Sequential(layers)
    ddp_model = torch.nn.parallel.DistributedDataParallel(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    state = hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=4)
    ddp_model.register_comm_hook(state, hook.powerSGD_hook)
    torch_steps(ddp_model, optimizer, BATCHES[:10])
    example = torch.from_numpy(BATCHES[0, :3])
    torch_bridge.save_checkpoint(
        "checkpoint.pt", ddp_model, state, optimizer=optimizer, example=example
    )
    stayed = torch_steps(ddp_model, optimizer, BATCHES[10:20])

    model = Normalised()
    losses = []
    names = {
        "model": model,
        "abstract_variables": jax.eval_shape(model.init, jax.random.key(0), BATCHES[0]),
        "mesh": jax.make_mesh((1,), ("data",), devices=jax.devices()[:1]),
        "loss": lambda outputs, y: jnp.mean((outputs - y) ** 2),
        "batches": [(x, np.sin(x[:, :16])) for x in BATCHES[10:20]],
        "losses": losses,
    }
    programs = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(compile(programs[2], PAGE.name, "exec"), names)
    np.testing.assert_allclose(losses, stayed, rtol=1e-4)
    back = torch.load("continued.pt", weights_only=True)["state_dict"]
    # Flax's variance is over n, torch's over n - 1.
    for name, tolerance in (("norm.running_mean", 1e-5), ("norm.running_var", 0.1)):
        np.testing.assert_allclose(back[name], module.state_dict()[name], atol=tolerance)
    assert back["norm.num_batches_tracked"] == 10


def test_the_page_shows_a_flatten():
    programs = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names = {}
    exec(compile(programs[-1], PAGE.name, "exec"), names)
    said, pooled = (names[n]["fc"]["kernel"] for n in ("said", "pooled"))
    np.testing.assert_array_equal(pooled, names["model"]["fc.weight"].T)
    moved = names["model"]["fc.weight"].reshape(10, 8, 4, 4).transpose(2, 3, 1, 0)
    np.testing.assert_array_equal(said, moved.reshape(128, 10))
