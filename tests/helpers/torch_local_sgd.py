"""Runs local SGD in torch over gloo; a script for subprocesses.

    python -m tests.helpers.torch_local_sgd FOLDER WORLD

Runs the cases for WORLD processes with the folder's data.npz, and writes the weights of each rank
to ``RANK.npz``.
"""

import importlib.util
import os
import pathlib
import sys
from collections import OrderedDict

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import (
    HierarchicalModelAverager,
)
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

from tests.helpers.ranks import run_ranks

RATE = 0.05
MOMENTUM = 0.9


def new_model(data):
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    names = ("w1", "b1", "w2", "b2")
    for name, parameter in zip(names, model.parameters(), strict=True):
        parameter.data.copy_(torch.tensor(data[name].T))
    return model


def batches(data, rank):
    return zip(torch.tensor(data["x"][rank]), torch.tensor(data["y"][rank]), strict=True)


def loss_of(model, x, y):
    return ((model(x) - y) ** 2).mean()


def weights(model):
    model = getattr(model, "module", model)
    return [p.detach().numpy().T.copy() for p in model.parameters()]


def post_local(data, rank, averager, start, subgroup=None):
    model = DistributedDataParallel(new_model(data))
    state = PostLocalSGDState(None, subgroup, start, subgroup is not None)
    model.register_comm_hook(state, post_localSGD_hook)
    local = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    optimizer = PostLocalSGDOptimizer(local, averager)
    for x, y in batches(data, rank):
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()
    return weights(model)


def accelerate_local_sgd(data, rank, steps):
    from accelerate import Accelerator
    from accelerate.local_sgd import LocalSGD

    accelerator = Accelerator(cpu=True)
    model = new_model(data)
    local = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    model, optimizer = accelerator.prepare(model, local)
    with LocalSGD(accelerator, model, local_sgd_steps=steps) as local_sgd:
        for x, y in batches(data, rank):
            optimizer.zero_grad()
            accelerator.backward(loss_of(model, x, y))
            optimizer.step()
            local_sgd.step()
    return weights(model)


def worker(rank, folder, world):
    data = np.load(folder / "data.npz")
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", ACCELERATE_USE_CPU="true")
    runs = {}
    averager = PeriodicModelAverager(4, warmup_steps=10)
    if world == 2:
        runs["periodic"] = post_local(data, rank, averager, 10)
        if importlib.util.find_spec("accelerate"):
            runs["accelerate"] = accelerate_local_sgd(data, rank, 8)
    else:
        subgroup, _ = dist.new_subgroups(2)
        runs["subgroup"] = post_local(data, rank, averager, 10, subgroup)
        averager = HierarchicalModelAverager(OrderedDict([(2, 2), (8, 4)]), warmup_steps=5)
        runs["hierarchical"] = post_local(data, rank, averager, 5)
    arrays = {}
    for case, leaves in runs.items():
        for index, leaf in enumerate(leaves):
            arrays[f"{case}_{index}"] = leaf
    np.savez(folder / f"{rank}.npz", **arrays)


if __name__ == "__main__":
    run_ranks(worker, int(sys.argv[2]), pathlib.Path(sys.argv[1]), int(sys.argv[2]))
