"""The programs in docs/migrating.md: a DDP job saves, JAX goes on, and DDP goes on after that."""

import collections
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from numpy.testing import assert_allclose, assert_array_equal
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hook

import torch_bridge
from tests.helpers.bridge import linears, move_weights, steps_in_jax, steps_in_torch
from tests.helpers.control import assert_no_further
from tests.helpers.paths import DOCS
from tests.helpers.rounding import rounding

PAGE = DOCS / "migrating.md"
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
BATCHES = np.random.default_rng(0).normal(size=(40, 16, 24)).astype(np.float32)


def program(number):
    """Compiles one of the programs of the page."""
    return compile(PROGRAMS[number], PAGE.name, "exec")


class Model(nn.Module):
    """Nested calls, which linen numbers from the outside."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(16)(jnp.tanh(nn.Dense(48)(x)))


def jax_loss(params, batch):
    out = Model().apply({"params": params}, batch)
    return jnp.mean((out - jnp.sin(batch[:, :16])) ** 2)


class Job:
    """Model, DDP around it and optimizer, as the page's reader has them."""

    def __init__(self, **layers):
        torch.manual_seed(1)
        layers |= {"first": torch.nn.Linear(24, 48), "tanh": torch.nn.Tanh()}
        layers |= {"second": torch.nn.Linear(48, 16)}
        self.model = torch.nn.Sequential(collections.OrderedDict(layers))
        self.ddp_model = torch.nn.parallel.DistributedDataParallel(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)

    def loss(self, batch):
        x = torch.from_numpy(batch)
        return ((self.ddp_model(x) - torch.sin(x[:, :16])) ** 2).mean()

    def steps(self, batches):
        return steps_in_torch(self.loss, self.optimizer, batches)

    def ten_steps(self):
        """Trains with the hook; returns what the program that saves finds around it."""
        state = hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=4)
        self.ddp_model.register_comm_hook(state, hook.powerSGD_hook)
        self.steps(BATCHES[:10])
        names = {"ddp_model": self.ddp_model, "state": state, "optimizer": self.optimizer}
        return names | {"inputs": torch.from_numpy(BATCHES[0, :3])}


def run_that_stays(seed, batches, **layers):
    """Returns the losses after ten steps of a control, whose weights are moved before each step."""
    job = Job(**layers)
    job.ten_steps()
    losses = []
    for step, batch in enumerate(batches):
        move_weights(job.model, 1_000 * seed + step)
        losses += job.steps([batch])
    return np.array(losses)


def test_the_programs_of_the_page_move_a_run_and_bring_it_back(alone, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = Job()
    exec(program(0), job.ten_steps())
    stayed = job.steps(BATCHES[10:])
    controls = [run_that_stays(seed, BATCHES[10:]) for seed in range(3)]

    names = {"abstract_params": linears(Dense_0=(48, 16), Dense_1=(24, 48)), "model": Model()}
    exec(program(1), names)
    assert names["checkpoint"].extra["epoch"] == 3
    assert names["step"] == 10
    assert names["run"].difference < 1e-6
    params, opt_state, moved = steps_in_jax(
        jax_loss, *(names[n] for n in ("transformation", "params", "opt_state")), BATCHES[10:25]
    )
    exec(program(4), names | {"params": params, "opt_state": opt_state})

    job = Job()
    names = {"torch": torch, "torch_bridge": torch_bridge, "rank": 0, "world_size": 1}
    names |= {"model": job.model, "ddp_model": job.ddp_model, "optimizer": job.optimizer}
    exec(program(5), names | {"batch": BATCHES[25], "loss": job.loss})
    kernel = job.model.state_dict()["first.weight"].numpy().T
    assert_array_equal(kernel, params["Dense_1"]["kernel"])
    moved += job.steps(BATCHES[25:])
    assert_no_further(np.array(moved), np.array(stayed), *controls)
    assert moved[-1] < 0.9 * moved[0]


class Normalised(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9, name="norm")(x)
        return nn.Dense(16, name="second")(jnp.tanh(nn.Dense(48, name="first")(x)))


def test_the_loop_with_statistics_follows_torch(alone, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = Job(norm=torch.nn.BatchNorm1d(24))
    exec(program(0), job.ten_steps())
    variance = job.model.norm.running_var.numpy().copy()
    stayed = job.steps(BATCHES[10:20])
    controls = []
    for seed in range(3):
        controls.append(run_that_stays(seed, BATCHES[10:20], norm=torch.nn.BatchNorm1d(24)))
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
    exec(program(2), names)
    assert_no_further(np.array(losses), np.array(stayed), *controls)
    back = torch.load("continued.pt", weights_only=True)["state_dict"]
    for x in BATCHES[10:20]:
        variance = 0.9 * variance + 0.1 * x.var(0)  # over n, as Flax has it, and torch over n - 1
    expected = {"running_mean": job.model.norm.running_mean, "running_var": variance}
    allowed = rounding(10 * len(BATCHES[0]), largest=np.square(BATCHES).mean(1))
    for name, values in expected.items():
        assert_allclose(back[f"norm.{name}"], values, rtol=0, atol=allowed)
    assert back["norm.num_batches_tracked"] == 10


class Module(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.bn = nnx.BatchNorm(24, momentum=0.9, rngs=rngs)
        self.hidden = nnx.Linear(24, 48, rngs=rngs)
        self.out = nnx.Linear(48, 16, rngs=rngs)

    def __call__(self, x):
        return self.out(jnp.tanh(self.hidden(self.bn(x))))


def test_an_nnx_model_is_filled_and_goes_back(alone, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = Job(norm=torch.nn.BatchNorm1d(24))
    exec(program(0), job.ten_steps())
    names = {"make_model": Module}
    exec(program(3), names)
    run, model = names["run"], names["model"]
    assert run.difference < 1e-6
    structure = jax.tree.structure(run.optimizer.init(nnx.state(model, nnx.Param)))
    assert jax.tree.structure(run.optimizer_state) == structure
    back = torch_bridge.to_torch(model, run.opt_state, like=run)["state_dict"]
    for name, value in job.model.state_dict().items():
        assert_array_equal(back[name], value)
    before = np.array(model.bn.mean)
    model(BATCHES[0])  # in training mode
    assert np.abs(np.array(model.bn.mean) - before).max() > 0


def test_the_page_shows_a_flatten():
    names = {}
    exec(program(-1), names)
    mapped, pooled = (names[n]["fc"]["kernel"] for n in ("mapped", "pooled"))
    assert_array_equal(pooled, names["model"]["fc.weight"].T)
    moved = names["model"]["fc.weight"].reshape(10, 8, 4, 4).transpose(2, 3, 1, 0)
    assert_array_equal(mapped, moved.reshape(128, 10))
