"""Runs torch's own powerSGD_hook over gloo on recorded gradients; a script for subprocesses.

    python -m tests.helpers.torch_hook INPUT.npz OUTPUT.npz START RANK:EPS [RANK:EPS ...]

INPUT has one array ``(replicas, steps, *torch_shape)`` for each parameter. OUTPUT gets the hook's
results of all steps (``RANK:EPS/out/NAME``: ``(steps, *torch_shape)``), and the Q factors that the
first compressed step draws (``RANK:EPS/q/NAME``: ``(cols, r)``), before torch orthogonalises them.
"""

import collections
import math
import sys

import numpy as np
import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hook

from tests.helpers.ranks import run_ranks


class Recorded(torch.nn.Module):
    """A module with given gradients: its loss is the inner product of parameters and gradients."""

    def __init__(self, shapes):
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape)))

    def forward(self, gradients):
        return sum((p * gradients[name]).sum() for name, p in self.named_parameters())


def first_factors(order, shapes, rank, min_rate):
    """Draws the Q factors of the first compressed step as torch does, shape by shape; by name."""
    groups = collections.defaultdict(list)
    for name in order:
        rows, *rest = shapes[name]
        groups[rows, math.prod(rest)].append(name)
    torch.manual_seed(np.random.RandomState(0).randint(1_000_000_000))
    factors = {}
    for (rows, cols), names in groups.items():
        r = min(rows, cols, rank)
        if (rows + cols) * r * min_rate < rows * cols:
            for name in names:
                factors[name] = torch.randn(1, cols, r)[0].numpy()
    return factors


def run(index, data, setting, start):
    """Returns the hook's results of all steps on this process, and the first Q factors."""
    rank, eps = map(float, setting.split(":"))
    shapes = {name: x.shape[2:] for name, x in data.items()}
    module = Recorded(shapes)
    # One bucket, because over gloo the collectives of several buckets wait for each other for ever.
    model = torch.nn.parallel.DistributedDataParallel(module, bucket_cap_mb=1000)
    state = hook.PowerSGDState(
        None,
        matrix_approximation_rank=int(rank),
        start_powerSGD_iter=start,
        orthogonalization_epsilon=eps,
    )
    names = {p: n for n, p in module.named_parameters()}
    orders = []

    def recording_hook(state, bucket):
        orders.append([names[p] for p in bucket.parameters()])
        return hook.powerSGD_hook(state, bucket)

    model.register_comm_hook(state, recording_hook)
    steps = []
    for step in range(next(iter(data.values())).shape[1]):
        model.zero_grad()
        model({name: torch.from_numpy(x[index, step]) for name, x in data.items()}).backward()
        steps.append([p.grad.numpy().copy() for p in module.parameters()])
    arrays = {}
    for name, *outputs in zip(shapes, *steps, strict=True):
        arrays[f"{setting}/out/{name}"] = np.stack(outputs)
    factors = first_factors(orders[start], shapes, int(rank), state.min_compression_rate)
    for name, q in factors.items():
        arrays[f"{setting}/q/{name}"] = q
    return arrays


def worker(index, source, target, start, settings):
    data = dict(np.load(source))
    arrays = {}
    for setting in settings:
        arrays |= run(index, data, setting, start)
    if index == 0:
        np.savez(target, **arrays)


if __name__ == "__main__":
    source, target, start, *settings = sys.argv[1:]
    world = next(iter(np.load(source).values())).shape[0]
    run_ranks(worker, world, source, target, int(start), settings)
