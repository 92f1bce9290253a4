"""Runs torch's own powerSGD_hook over gloo on recorded gradients; a script for subprocesses.

    python -m tests.helpers.torch_hook INPUT.npz OUTPUT.npz START RANK:EPS [RANK:EPS ...]

INPUT holds one array ``(replicas, steps, *torch_shape)`` per parameter. OUTPUT gets the hook's
result of every step (``RANK:EPS/out/NAME``: ``(steps, *torch_shape)``) and the right factors that
the first compressed step draws (``RANK:EPS/q/NAME``: ``(cols, r)``), before torch orthogonalises
them.
"""

import sys

import numpy as np
import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hook

from tests.helpers.ranks import run_ranks


class Recorded(torch.nn.Module):
    """Its gradients are what it is given: the loss is the inner product with them."""

    def __init__(self, shapes):
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape)))

    def forward(self, gradients):
        return sum((p * gradients[name]).sum() for name, p in self.named_parameters())


def first_factors(order, shapes, rank, min_rate):
    """Draws the factors of the first compressed step by name, as torch does: shape by shape."""
    groups = {}
    for name in order:
        n, m = shapes[name][0], int(np.prod(shapes[name][1:]))
        r = min(n, m, rank)
        if (n + m) * r * min_rate < n * m:
            groups.setdefault((n, m), []).append((name, r))
    torch.manual_seed(np.random.RandomState(0).randint(1_000_000_000))
    return {
        name: torch.randn(1, m, r)[0].numpy()
        for (_, m), members in groups.items()
        for name, r in members
    }


def run(index, data, setting, start):
    """Returns every step's result of the hook on this process, and the first factors."""
    rank, eps = setting.split(":")
    rank = int(rank)
    shapes = {name: x.shape[2:] for name, x in data.items()}
    module = Recorded(shapes)
    # One bucket: with several, the hook's collectives over gloo wait for each other for ever.
    model = torch.nn.parallel.DistributedDataParallel(module, bucket_cap_mb=1000)
    state = hook.PowerSGDState(
        None,
        matrix_approximation_rank=rank,
        start_powerSGD_iter=start,
        orthogonalization_epsilon=float(eps),
    )
    names = {p: n for n, p in module.named_parameters()}
    orders = []

    def recording_hook(state, bucket):
        orders.append([names[p] for p in bucket.parameters()])
        return hook.powerSGD_hook(state, bucket)

    model.register_comm_hook(state, recording_hook)
    outputs = {name: [] for name in shapes}
    for step in range(next(iter(data.values())).shape[1]):
        model.zero_grad()
        model({name: torch.from_numpy(x[index, step]) for name, x in data.items()}).backward()
        for name, p in module.named_parameters():
            outputs[name].append(p.grad.numpy().copy())
    q = first_factors(orders[start], shapes, rank, state.min_compression_rate)
    arrays = {f"{setting}/out/{n}": np.stack(x) for n, x in outputs.items()}
    return arrays | {f"{setting}/q/{n}": x for n, x in q.items()}


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
