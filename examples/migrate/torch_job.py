"""The PyTorch part of `from_torch.py`: one rank of a DDP job over gloo.

    python examples/migrate/torch_job.py FIRST|LAST RANK FOLDER

FIRST trains every case to the end, and writes a checkpoint at the first move. It then trains a
control, whose weights are moved by one rounding before every later step: the control shows how far
two correct runs diverge. LAST continues from the checkpoints that JAX wrote. Both write the losses
to FOLDER, one file per run and rank.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import signal
from typing import Any

import torch
import torch.distributed as dist
from models import TORCH_MODELS, batch, torch_loss
from plan import CASES, MOVES, START, STEPS, WORLD, Case
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import torch_bridge


def optimizer_of(case: Case, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Makes momentum SGD or AdamW."""
    # At these rates every loss falls smoothly. With a loss that jumps, any two runs with different
    # rounding diverge within a few steps, even without a move.
    if case.optimizer == "sgd":
        rate = 0.02 if case.model == "cnn" else 0.05
        return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.01)


def fresh(case: Case) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    """Makes the model under DDP and its optimizer."""
    torch.manual_seed(1)
    # One bucket: over gloo, the hook hangs with several.
    model = DistributedDataParallel(TORCH_MODELS[case.model](), bucket_cap_mb=1000)
    return model, optimizer_of(case, model)


def train(case: Case, model: Any, optimizer: torch.optim.Optimizer, step: int, rank: int) -> float:
    """Trains for one step; returns the loss of this rank."""
    optimizer.zero_grad()
    loss = torch_loss(model, batch(case.model, step, rank))
    loss.backward()
    optimizer.step()
    return loss.item()


def uninterrupted(case: Case, rank: int, folder: pathlib.Path) -> list[float]:
    """Trains for all steps in torch, and saves a checkpoint at the first move."""
    model, optimizer = fresh(case)
    state = powerSGD_hook.PowerSGDState(None, case.rank, start_powerSGD_iter=START)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    losses = []
    for step in range(STEPS):
        if step == MOVES[0]:
            path = folder / f"{case.name}.to_jax.pt"
            # The file gets a few inputs and the model's outputs, which check the model in JAX.
            inputs = torch.from_numpy(batch(case.model, step, rank)["x"][:4])
            torch_bridge.save_checkpoint(path, model, state, optimizer=optimizer, example=inputs)
        losses.append(train(case, model, optimizer, step, rank))
    return losses


def move_by_one_rounding(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Moves every weight to the next number above or below it."""
    with torch.no_grad():
        for parameter in model.parameters():
            up = torch.rand(parameter.shape, generator=generator) < 0.5
            end = torch.where(up, torch.inf, -torch.inf)
            parameter.copy_(torch.nextafter(parameter, end))


def one_rounding_apart(case: Case, rank: int, folder: pathlib.Path) -> list[float]:
    """Trains in torch; from the first move on, changes weights by one rounding before a step."""
    model, optimizer = fresh(case)
    state = powerSGD_hook.PowerSGDState(None, case.rank, start_powerSGD_iter=START)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for step in range(STEPS):
        if step >= MOVES[0]:
            move_by_one_rounding(model, generator)
        losses.append(train(case, model, optimizer, step, rank))
    return losses


def returned(case: Case, rank: int, folder: pathlib.Path) -> list[float]:
    """Trains after the second move, from the checkpoint that JAX wrote."""
    path = folder / f"{case.name}.to_torch.pt"
    document = torch.load(path, weights_only=True)
    checkpoint = torch_bridge.load(path)
    assert checkpoint.layout is not None
    model, optimizer = fresh(case)
    model.module.load_state_dict(document["state_dict"])
    optimizer.load_state_dict(document["optimizer"])
    state = torch_bridge.state_from_record(checkpoint.record(rank))
    data = batch(case.model, MOVES[1], rank)
    torch_bridge.resume_powersgd(
        model, state, checkpoint.layout, lambda: torch_loss(model, data).backward()
    )
    return [train(case, model, optimizer, step, rank) for step in range(MOVES[1], STEPS)]


def main() -> None:
    """Runs all cases as one rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("phase", choices=["FIRST", "LAST"])
    parser.add_argument("rank", type=int, choices=range(WORLD))
    parser.add_argument("folder", type=pathlib.Path)
    phase, rank, folder = vars(parser.parse_args()).values()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the parent process says that it was interrupted
    torch.set_num_threads(1)
    store = f"file://{folder / f'{phase}.store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD)
    runs = {"LAST": returned}
    if phase == "FIRST":
        runs = {"FIRST": uninterrupted, "CONTROL": one_rounding_apart}
    for name, run in runs.items():
        losses = {}
        for case in CASES:
            if (folder / case.name).exists():  # chosen by the parent process
                losses[case.name] = run(case, rank, folder)
        (folder / f"{name}.{rank}.json").write_text(json.dumps(losses))
    dist.barrier()
    # gloo's threads may outlive the interpreter's shutdown, which aborts the process.
    os._exit(0)


if __name__ == "__main__":
    main()
