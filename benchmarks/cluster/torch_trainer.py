"""The torch side of both benchmarks: DistributedDataParallel and its hooks over gloo."""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

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
from torch.nn.parallel import DistributedDataParallel

from benchmarks.cluster.plan import Strategy

_PORT = 29_501
# One bucket: with several, powerSGD_hook hangs over gloo.
_BUCKET_MEGABYTES = 1_000
# The hook does not take less, because DDP settles its buckets in the second iteration.
_START_ITERATION = 2


def data_parallel(model: nn.Module, strategy: Strategy) -> nn.Module:
    """Wraps the model as a strategy trains it: with torch's own hook of that name."""
    if strategy.kind == "none":
        return model
    wrapped = DistributedDataParallel(model, bucket_cap_mb=_BUCKET_MEGABYTES)
    if strategy.kind == "fp16":
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
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
    """One process of a torch job; `process.answer` says what is asked of it."""

    def __init__(
        self,
        problem: Callable[[str, int], Any],
        model: str,
        index: int,
        processes: int,
        address: str,
    ):
        """Joins the other processes.

        Args:
          problem: Of a `torch_side`: from the model and the index to a module, data and loss.
          model: What is trained.
          index: Of this process.
          processes: How many there are.
          address: Of the first.
        """
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{address}:{_PORT}",
            rank=index,
            world_size=processes,
            timeout=datetime.timedelta(hours=1),
        )
        self._problem = problem(model, index)
        self._model: nn.Module = self._problem.model(0)
        self._wrapped: nn.Module | None = None
        self._optimizer: Any = None
        self._steps = 0  # so far
        self._call = 1  # steps
        self.parameters = sum(parameter.numel() for parameter in self._model.parameters())

    def start(self, strategy: Strategy, seed: int) -> None:
        """Begins anew; torch says nothing of its payload."""
        self._wrapped = self._optimizer = None
        self._model = self._problem.model(seed)
        self._wrapped = data_parallel(self._model, strategy)
        self._optimizer = self._problem.optimizer(self._model.parameters())
        if strategy.kind == "local-sgd":
            averager = PeriodicModelAverager(strategy.number, warmup_steps=0)
            self._optimizer = PostLocalSGDOptimizer(self._optimizer, averager)
        self._steps = 0
        self._call = strategy.round_steps

    def train(self, steps: Sequence[int]) -> list[float]:
        """Takes steps with the batches of these numbers; returns the seconds of each call."""
        problem = self._problem
        seconds = [0.0] * math.ceil(len(steps) / self._call)
        for number, batch in enumerate(map(problem.batch, steps)):
            began = time.perf_counter()
            for group in self._optimizer.param_groups:
                group["lr"] = problem.rate(self._steps)
            self._optimizer.zero_grad()
            problem.loss(self._wrapped, batch).backward()
            if problem.largest_norm:
                nn.utils.clip_grad_norm_(self._model.parameters(), problem.largest_norm)
            self._optimizer.step()
            seconds[number // self._call] += time.perf_counter() - began
            self._steps += 1
        return seconds

    def loss(self) -> float:
        """Evaluates this process's share."""
        with torch.no_grad():
            return self._problem.evaluate(self._model).item()
