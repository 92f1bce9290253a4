"""Runs DDP jobs of two ranks over gloo that stay in torch, or continue from files of JAX.

    python -m tests.helpers.whole_run FOLDER CASE [CASE ...]

For each case it runs STEPS steps without a break. At MOVES[0] it saves ``CASE.to_jax.pt`` and, in
torch's documented form, ``CASE.RANK.pt``. Then it runs the same steps as controls, whose gradients
differ by one rounding from MOVES[0] on. When ``CASE.to_torch.pt`` exists, it runs the steps from
MOVES[1] on. The losses go to ``CASE.RANK.json``.
"""

import json
import pathlib
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_wrapper
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

import torch_bridge
from tests.helpers.bridge import steps_in_torch
from tests.helpers.ranks import run_ranks
from tests.helpers.script import wait_for
from tests.helpers.two_frameworks import TorchModel

WORLD = 2
START = 3
MOVES = (6, 11)
STEPS = 16
CLASSES = 5


def network(n, x):
    """Computes a network with BatchNorm, a flatten, a frozen layer, an unused layer, and twins."""
    x = n.gelu(n.bn(n.conv(x, "conv1", 16, 3), "norm"))
    x = n.dense(n.flatten(n.gelu(n.conv(x, "conv2", 32, 3, 2))), "frozen", 48)
    n.dense(n.zeros((1, 40)), "unused", 24)
    return n.dense(n.gelu(n.dense(x, "fc", 32) + n.dense(x, "twin", 32)), "head", CLASSES)


def batch(step, rank):
    """Returns noisy patterns and their classes."""
    patterns = np.random.default_rng(0).standard_normal((CLASSES, 3, 7, 7))
    random = np.random.default_rng([step, rank])
    y = random.integers(CLASSES, size=16)
    x = patterns[y] + 0.3 * random.standard_normal((16, 3, 7, 7))
    return x.transpose(0, 2, 3, 1).astype(np.float32), y


def own_hook(state, bucket):
    """Wraps the hook in a function of the user's."""
    return torch_bridge.waiting_hook(state, bucket)


HOOKS = {
    "own": own_hook,
    "rebuilt": own_hook,
    "half": fp16_compress_wrapper(torch_bridge.waiting_hook),
    "static": powerSGD_hook,  # with one bucket torch's own hook does not hang over gloo
}
# The number of controls; the difference of a single control is partly chance.
CONTROLS = 3
RANKS = dict.fromkeys(HOOKS, 2) | {"static": 4}


def fresh(case):
    """Makes the optimizer and the DDP model, which rebuilds its buckets in two of the cases."""
    torch.manual_seed(1)
    module = TorchModel(network)
    looks = case in ("own", "half")
    static = case == "static"
    module(torch.from_numpy(batch(0, 0)[0]))  # the first call makes the layers
    module.norm.reset_running_stats()
    module.conv2.to(memory_format=torch.channels_last)
    module.frozen.requires_grad_(False)
    module.unused.requires_grad_(looks)
    model = nn.parallel.DistributedDataParallel(
        module,
        bucket_cap_mb=1000 if static else 0.01,
        find_unused_parameters=looks,
        static_graph=static,
    )
    trained = [(n, p) for n, p in model.module.named_parameters() if p.requires_grad]
    if case == "own":  # an optimizer without names, which come from the layout
        trained = [parameter for _, parameter in trained]
    return model, torch.optim.SGD(trained, lr=0.1, momentum=0.9)


def loss_of(model, step, rank):
    x, y = batch(step, rank)
    return nn.functional.cross_entropy(model(torch.from_numpy(x)), torch.from_numpy(y))


def train(model, optimizer, rank, first, last):
    return steps_in_torch(lambda step: loss_of(model, step, rank), optimizer, range(first, last))


def end_of(losses, model):
    """Returns the results to compare: the losses, and the final running mean of a norm."""
    return losses, model.module.norm.running_mean.tolist()


def stayed(case, rank, folder):
    """Trains without a break, and saves both kinds of checkpoint at MOVES[0]."""
    model, optimizer = fresh(case)
    state = PowerSGDState(None, RANKS[case], start_powerSGD_iter=START)
    model.register_comm_hook(state, HOOKS[case])
    losses = train(model, optimizer, rank, 0, MOVES[0])
    document = {
        "state_dict": model.state_dict(),
        "comm_hook": powerSGD_hook,
        "comm_hook_state": state,
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
    }
    torch.save(document, folder / f"{case}.{rank}.pt")
    # If rank 0 cannot write, both ranks raise, and neither waits for the other.
    with pytest.raises(RuntimeError, match="hooks of `extra`"):
        torch_bridge.save_checkpoint(folder / "never.pt", model, state, extra={"hooks": [len]})
    path = folder / f"{case}.to_jax.pt"
    torch_bridge.save_checkpoint(path, model, state, optimizer=optimizer, extra={"epoch": 3})
    losses += train(model, optimizer, rank, MOVES[0], STEPS)
    return end_of(losses, model)


def apart(hook, seed):
    """Returns a hook that first changes all values of a bucket by one rounding, up or down.

    In half precision torch rounds P, Q and the error by as much, and JAX does not.
    """
    generator = torch.Generator().manual_seed(seed)

    def moved(state, bucket):
        values = bucket.buffer()
        signs = torch.randint(2, values.shape, generator=generator) * 2 - 1
        rounding = torch.finfo(values.dtype).eps
        values.add_(values * signs.to(values.dtype) * rounding)
        return hook(state, bucket)

    return moved


def control(case, rank, seed):
    """Trains like `stayed`, but from MOVES[0] on gradients are changed by one rounding."""
    model, optimizer = fresh(case)
    state = PowerSGDState(None, RANKS[case], start_powerSGD_iter=START)
    inner = torch_bridge.waiting_hook if case == "half" else HOOKS[case]
    moved = apart(inner, 2 * seed + rank)

    def hook(state, bucket):
        return (moved if steps > MOVES[0] else inner)(state, bucket)

    steps = 0
    model.register_comm_hook(state, fp16_compress_wrapper(hook) if case == "half" else hook)
    losses = []
    for steps in range(1, STEPS + 1):
        losses += train(model, optimizer, rank, steps - 1, steps)
    return end_of(losses, model)


def returned(case, rank, folder):
    """Continues the training from the file that JAX wrote."""
    path = folder / f"{case}.to_torch.pt"
    wait_for(path.exists)
    model, optimizer = fresh(case)
    document = torch.load(path, weights_only=True)
    model.module.load_state_dict(document["state_dict"])
    optimizer.load_state_dict(document["optimizer"])
    checkpoint = torch_bridge.load(path)
    state = torch_bridge.state_from_record(checkpoint.record(rank, WORLD))
    torch_bridge.resume_powersgd(
        model,
        state,
        checkpoint.layout,
        lambda: loss_of(model, 1_000, rank).backward(),
        hook=HOOKS[case],
    )
    return end_of(train(model, optimizer, rank, MOVES[1], STEPS), model)


def worker(rank, folder, *cases):
    first = {case: stayed(case, rank, folder) for case in cases}
    for case in cases:
        controls = [control(case, rank, seed) for seed in range(CONTROLS)]
        runs = {}
        runs["stayed"], runs["stayed_mean"] = first[case]
        runs["returned"], runs["mean"] = returned(case, rank, folder)
        runs["controls"], runs["control_means"] = zip(*controls, strict=True)
        (folder / f"{case}.{rank}.json").write_text(json.dumps(runs))


if __name__ == "__main__":
    run_ranks(worker, WORLD, pathlib.Path(sys.argv[1]), *sys.argv[2:])
