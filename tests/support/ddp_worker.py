"""A real DDP job of two ranks over gloo; a script for subprocesses.

    python ddp_worker.py train|resume FOLDER RANK-OF-THE-HOOK

`train` feeds given gradients through DDP with the PowerSGD hook and saves at SAVE_AT in the
documented form and with save_checkpoint. `resume` goes on from a hook state that the test wrote.
"""

import pathlib
import sys

import numpy as np
import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import torch_bridge

START, SAVE_AT, STEPS = 3, 6, 10
STATIC = {4}  # ranks of the hook at which DDP has a static graph, whose buckets it rebuilds later


class Feed(nn.Module):
    """A model whose gradients are whatever it is fed."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(6, 20, 3).to(memory_format=torch.channels_last)
        self.fc1 = nn.Linear(32, 24)
        self.norm = nn.LayerNorm(24)
        self.fc2 = nn.Linear(24, 48)
        self.fc3 = nn.Linear(32, 24)  # the shape of fc1: one group of factors
        self.emb = nn.Embedding(40, 16)
        self.frozen = nn.Linear(32, 24)
        for parameter in self.frozen.parameters():
            parameter.requires_grad_(False)
        self.head = nn.Linear(24, 32, bias=False)

    def forward(self, feed):
        named = dict(self.named_parameters())
        return sum((named[name] * value).sum() for name, value in feed.items())


def gradients(model, step, rank):
    """The gradients of one rank at one step, with a low-rank part that stays."""
    fixed, noise = np.random.RandomState(7), np.random.RandomState(1000 * step + rank)
    feed = {}
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        base, own = fixed.randn(*shape), noise.randn(*shape)
        if parameter.requires_grad:
            feed[name] = torch.from_numpy((base + 0.5 * own).astype(np.float32))
    return feed


def ddp(model, static_graph):
    return DistributedDataParallel(model, bucket_cap_mb=1000, static_graph=static_graph)


def run(ddp_model, out, rank, first, last, state=None):
    for step in range(first, last):
        if step == SAVE_AT and state is not None:
            save(ddp_model, state, out, rank)
        ddp_model.zero_grad()
        ddp_model(gradients(ddp_model.module, step, rank)).backward()
        if rank == 0 and step >= SAVE_AT:
            grads = {n: p.grad for n, p in ddp_model.module.named_parameters() if p.requires_grad}
            torch.save(grads, out / f"grads_{step}.pt")


def save(ddp_model, state, out, rank):
    document = {
        "state_dict": ddp_model.state_dict(),
        "comm_hook": powerSGD_hook.powerSGD_hook,
        "comm_hook_state": state,
        "epoch": 3,
    }
    torch.save(document, out / f"rank{rank}.pt")
    # What rank 0 cannot write is said on both, and neither waits for the other.
    with pytest.raises(RuntimeError, match="hooks of `extra`"):
        torch_bridge.save_checkpoint(out / "never.pt", ddp_model, state, extra={"hooks": [len]})
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.1, momentum=0.9)
    torch_bridge.save_checkpoint(
        out / "complete.pt", ddp_model, state, optimizer=optimizer, extra={"epoch": 3}
    )
    if rank == 0:
        text = torch_bridge.record_layout(ddp_model, state).to_json()
        (out / "layout.json").write_text(text)


def worker(rank, mode, out, hook_rank):
    model = ddp(Feed(), static_graph=hook_rank in STATIC)
    if mode == "train":
        state = powerSGD_hook.PowerSGDState(None, hook_rank, start_powerSGD_iter=START)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        run(model, out, rank, 0, STEPS, state)
    else:
        record = torch_bridge.load(out / "exported.pt").powersgd[0]
        state = torch_bridge.state_from_record(record)
        layout = torch_bridge.BucketLayout.from_json((out / "exported.json").read_text())
        calls = iter(range(100, 110))  # other gradients: the warm-up must leave no trace
        torch_bridge.resume_powersgd(
            model,
            state,
            layout,
            lambda: model(gradients(model.module, next(calls), rank)).backward(),
        )
        (out / "resumed").mkdir(exist_ok=True)
        run(model, out / "resumed", rank, SAVE_AT, STEPS)


if __name__ == "__main__":
    mode, folder, hook_rank = sys.argv[1:]
    run_ranks(worker, 2, mode, pathlib.Path(folder), int(hook_rank))
