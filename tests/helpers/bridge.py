"""Torch weights, Flax trees, training steps of both, and short forms of torch_bridge's calls."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import torch_bridge
from tests.helpers.control import apart


def values(*shape, dtype=np.float32):
    """Draws normal values, always the same values for a shape."""
    return np.random.default_rng(len(shape) + sum(shape)).standard_normal(shape).astype(dtype)


def kernels(**shapes):
    return {name: {"kernel": np.zeros(shape, np.float32)} for name, shape in shapes.items()}


def linears(**shapes):
    found = kernels(**shapes)
    for name, shape in shapes.items():
        found[name]["bias"] = np.zeros(shape[1:], np.float32)
    return found


def norm(width):
    return {"scale": np.zeros(width, np.float32), "bias": np.zeros(width, np.float32)}


def randomize(module):
    """Draws weights with which outputs have about the size of inputs, and positive variances."""
    with torch.no_grad():
        for name, value in module.state_dict().items():
            if value.is_floating_point():
                drawn = torch.rand(value.shape) + 0.5 if "var" in name else torch.randn(value.shape)
                value.copy_(drawn if value.ndim < 2 else drawn * value[0].numel() ** -0.5)
    return module


def move_weights(module, seed):
    """Changes every weight by one rounding, for a control; see control.py."""
    with torch.no_grad():
        for k, parameter in enumerate(module.parameters()):
            moved = apart(parameter.numpy(), 1_000 * seed + k)
            parameter.copy_(torch.from_numpy(moved))


def params_to_torch(params, like, **said):
    found = torch_bridge.pair(like, params, **said)
    return torch_bridge.params_to_torch(params, like, pairs=found)


def ddp_job(module, steps=4, scaler=None, **options):
    """Trains a module in DDP at rank 2, compressed from the third step on.

    Returns the DDP model, the hook's state and the optimizer. `options` are arguments of the state.
    """
    ddp = DistributedDataParallel(module)
    settings = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2} | options
    state = powerSGD_hook.PowerSGDState(None, **settings)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    inputs = next(module.parameters()).shape[-1]
    for _ in range(steps):
        optimizer.zero_grad()
        scaler.scale((ddp(torch.randn(8, inputs)) ** 2).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    return ddp, state, optimizer


def steps_in_torch(loss, optimizer, batches):
    """Takes one training step with each batch; returns the losses."""
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        value = loss(batch)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def steps_in_jax(loss, tx, params, opt_state, batches):
    """Takes one step with each batch on one replica; returns parameters, state and losses."""

    def step(params, opt_state, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    mapped = jax.jit(jax.vmap(step, in_axes=(None, None, 0), axis_name="data"))
    losses = []
    with jax.numpy_dtype_promotion("standard"):  # optax's Adam needs it
        for batch in batches:
            stacked = jax.tree.map(lambda x: jnp.asarray(x)[None], batch)
            results = mapped(params, opt_state, stacked)
            params, opt_state, value = jax.tree.map(lambda x: x[0], results)
            losses.append(float(value))
    return params, opt_state, losses
