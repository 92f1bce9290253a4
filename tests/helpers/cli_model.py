"""A Flax model for the command line's `--params`, and a torch checkpoint of the same model."""

import functools

import jax
import torch

import torch_bridge
from tests.helpers.bridge import linears
from tests.helpers.hook_states import random_run

params = functools.partial(linears, fc1=(32, 24), fc2=(24, 48))
PARAMS = ("--params", f"{__name__}:params")


def with_keys():
    """Returns the parameters beside a random state, as an nnx model with dropout has one."""
    return params() | {"dropout": {"key": jax.random.key(3)}}


def no_keys():
    return jax.eval_shape(with_keys)


APPLY = ("--apply", f"{__name__}:apply")


def apply(params, x):
    """Returns the outputs of the Flax model."""
    for layer in ("fc1", "fc2"):
        x = x @ params[layer]["kernel"] + params[layer]["bias"]
    return x


def document():
    """Makes the checkpoint of a run of one rank with momentum, and random factors and errors."""
    torch.manual_seed(0)
    model = torch.nn.Sequential()
    model.add_module("fc1", torch.nn.Linear(32, 24))
    model.add_module("fc2", torch.nn.Linear(24, 48))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(4, 32)).sum().backward()
    optimizer.step()
    order = [["fc2.bias", "fc2.weight", "fc1.bias", "fc1.weight"]]
    found, _, _ = random_run(model.state_dict(), order, start_powerSGD_iter=5)
    return {
        "state_dict": model.state_dict(),
        "comm_hook_state": torch_bridge.state_from_record(found.powersgd[0]),
        "optimizer": optimizer.state_dict(),
        "layout": found.layout.to_json(),
        "world_size": 1,
        "epoch": 3,
    }
