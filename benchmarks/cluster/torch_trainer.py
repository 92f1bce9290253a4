"""The torch side of both benchmarks: DistributedDataParallel and its hooks over gloo."""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from benchmarks.cluster.plan import Strategy
from benchmarks.cluster.task import WEIGHT_DECAY, read_task
from benchmarks.cluster.torch_models import make_model

_PORT = 29_501
# One bucket: with several, powerSGD_hook hangs over gloo.
_BUCKET_MEGABYTES = 1_000
# The hook does not take less, because DDP settles its buckets in the second iteration.
_START_ITERATION = 2


def tensors(inputs: np.ndarray, targets: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns inputs, and targets as torch's loss takes them."""
    return torch.from_numpy(inputs), torch.from_numpy(targets).long()


def loss_of(model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns the mean cross-entropy."""
    return cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def data_parallel(model: nn.Module, strategy: Strategy) -> nn.Module:
    """Wraps the model in DDP, with torch's hook for the strategy."""
    if strategy.kind == "none":
        return model
    wrapped = DistributedDataParallel(model, bucket_cap_mb=_BUCKET_MEGABYTES)
    state: Any = None
    if strategy.kind == "fp16":
        wrapped.register_comm_hook(state, default_hooks.fp16_compress_hook)
    elif strategy.kind == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            None, strategy.number, start_powerSGD_iter=_START_ITERATION
        )
        hook = powerSGD_hook.powerSGD_hook
        if strategy.wire == "fp16":
            hook = default_hooks.fp16_compress_wrapper(hook)
        wrapped.register_comm_hook(state, hook)
    elif strategy.kind == "local-sgd":
        state = post_localSGD_hook.PostLocalSGDState(
            None, None, start_localSGD_iter=0, post_local_gradient_allreduce=False
        )
        wrapped.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    return wrapped


class Trainer:
    """One process of a torch job; `process.answer` calls its methods."""

    def __init__(self, folder: Path, index: int, processes: int, address: str):
        """Joins the other processes; see `jax_trainer.Trainer`."""
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{address}:{_PORT}",
            rank=index,
            world_size=processes,
            timeout=datetime.timedelta(hours=1),
        )
        self._folder = folder
        self._index = index
        self._task = read_task(folder / "0.npz")
        self._model = make_model(self._task)
        self._wrapped: nn.Module | None = None
        self._optimizer: Any = None
        self._steps = 0  # so far
        self._call = 1  # steps
        self.parameters = sum(map(np.size, self._task.params.values()))

    def start(self, strategy: Strategy, seed: int) -> None:
        """Makes new parameters and state; torch does not predict its bytes."""
        self._wrapped = self._optimizer = None
        self._task = read_task(self._folder / f"{seed}.npz")
        self._model = make_model(self._task)
        self._wrapped = data_parallel(self._model, strategy)
        parameters = self._model.parameters()
        if self._task.largest_norm:
            options: Any = {"weight_decay": WEIGHT_DECAY, "fused": True}
            self._optimizer = torch.optim.AdamW(parameters, lr=0.0, **options)
        else:
            self._optimizer = torch.optim.SGD(parameters, lr=0.0)
        if strategy.kind == "local-sgd":
            averager = PeriodicModelAverager(strategy.number, warmup_steps=0)
            self._optimizer = PostLocalSGDOptimizer(self._optimizer, averager)
        self._steps = 0
        self._call = strategy.round_steps

    def train(self, steps: Sequence[int]) -> list[float]:
        """Takes steps with the batches of these numbers; returns the seconds of each call."""
        task = self._task
        seconds = [0.0] * math.ceil(len(steps) / self._call)
        for number, step in enumerate(steps):
            batch = tensors(*task.batch(step, self._index))
            began = time.perf_counter()
            for group in self._optimizer.param_groups:
                group["lr"] = task.rate(self._steps)
            self._optimizer.zero_grad()
            loss_of(self._wrapped, *batch).backward()
            if task.largest_norm:
                nn.utils.clip_grad_norm_(self._model.parameters(), float(task.largest_norm))
            self._optimizer.step()
            seconds[number // self._call] += time.perf_counter() - began
            self._steps += 1
        return seconds

    def loss(self) -> float:
        """Evaluates this process's share of the held-out data."""
        with torch.no_grad():
            return loss_of(self._model, *tensors(*self._task.share(self._index))).item()
