"""The examples in torch_bridge's docstrings run, and every public name has one."""

import doctest
import importlib
import pkgutil

import jax
import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

import torch_bridge


@pytest.fixture
def job(alone):
    """What the examples about a torch job have around them."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 4))
    state = PowerSGDState(None, 1, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {"ddp_model": model, "state": state, "optimizer": optimizer}


def test_the_examples_run(job):
    attempted = 0
    for found in pkgutil.walk_packages(torch_bridge.__path__, "torch_bridge."):
        if not found.name.endswith("__main__"):
            module = importlib.import_module(found.name)
            with jax.numpy_dtype_promotion("standard"):  # what a user has
                result = doctest.testmod(module, extraglobs=job)
            assert not result.failed, found.name
            attempted += result.attempted
    assert attempted >= 80, attempted  # of all, so that none of the walk's wings goes missing


def test_every_public_name_has_an_example():
    for name in torch_bridge.__all__:
        assert ">>>" in (getattr(torch_bridge, name).__doc__ or ""), name
