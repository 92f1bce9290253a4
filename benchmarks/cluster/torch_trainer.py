"""The torch side of the cluster benchmark: DistributedDataParallel and its hooks over gloo."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Iterator
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
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks.cluster.plan import Strategy
from benchmarks.common.models import FULL, LEARNING_RATE, MLP, TINY, Transformer, make_batches

_PORT = 29_501
# One bucket: with several, powerSGD_hook hangs over gloo.
_BUCKET_MEGABYTES = 1_000
# The hook does not take less, because DDP settles its buckets in the second iteration.
_START_ITERATION = 2
_WARM_UP = _START_ITERATION + 8


class Block(nn.Module):
    """A pre-norm transformer block; see `common.models.Transformer`."""

    def __init__(self, sizes: Transformer):
        super().__init__()
        width = sizes.width
        self.heads = sizes.heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From and to (batch, context, width)."""
        batch, context, width = x.shape
        heads = self.qkv(self.norm_1(x)).view(batch, context, 3, self.heads, width // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(functional.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class TorchTransformer(nn.Module):
    """See `common.models.Transformer`."""

    def __init__(self, sizes: Transformer):
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Embedding(sizes.context, sizes.width)
        self.blocks = nn.Sequential(*(Block(sizes) for _ in range(sizes.layers)))
        self.norm = nn.LayerNorm(sizes.width)
        self.out = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """From (batch, context) to (batch, context, vocabulary)."""
        positions = torch.arange(tokens.shape[1])
        return self.out(self.norm(self.blocks(self.tokens(tokens) + self.positions(positions))))


def make_model(sizes: MLP | Transformer) -> nn.Module:
    """The model, with the same parameters in every process."""
    torch.manual_seed(0)
    if isinstance(sizes, Transformer):
        return TorchTransformer(sizes)
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes.widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def join(index: int, processes: int, address: str) -> None:
    """Finds the other processes, at ``host:port`` of the first."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{address}",
        rank=index,
        world_size=processes,
        timeout=datetime.timedelta(hours=1),
    )


def data_parallel(model: nn.Module, strategy: Strategy) -> nn.Module:
    """The model as a strategy trains it: with torch's own hook of that name."""
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


def averaged_locally(optimizer: torch.optim.Optimizer, strategy: Strategy) -> Any:
    """The optimizer, which with local SGD averages parameters now and then."""
    if strategy.kind != "local-sgd":
        return optimizer
    averager = PeriodicModelAverager(strategy.number, warmup_steps=0)
    return PostLocalSGDOptimizer(optimizer, averager)


class TorchTrainer:
    """One process of a torch job; see `process.Trainer`."""

    def __init__(self, model: str, index: int, processes: int, address: str, *, tiny: bool):
        """Joins the other processes and makes the data."""
        join(index, processes, f"{address}:{_PORT}")
        self._sizes = (TINY if tiny else FULL)[model]
        self._batches = [
            (torch.from_numpy(x.copy()), torch.from_numpy(y).long())
            for x, y in make_batches(self._sizes, index)
        ]
        self.parameters = sum(p.numel() for p in make_model(self._sizes).parameters())
        self._model: nn.Module = nn.Identity()
        self._optimizer: Any = None
        self._feed: Iterator[Any] = iter(())
        self._steps = 1
        self._loss = torch.zeros(())

    def prepare(self, strategy: Strategy) -> float | None:
        """See `process.Trainer`; torch says nothing of its payload."""
        self._model, self._optimizer = nn.Identity(), None
        self._model = data_parallel(make_model(self._sizes), strategy)
        self._optimizer = averaged_locally(
            torch.optim.SGD(self._model.parameters(), lr=LEARNING_RATE), strategy
        )
        self._feed = itertools.cycle(self._batches)
        self._steps = strategy.round_steps
        for _ in range(_WARM_UP):
            self.sample()
        return None

    def sample(self) -> None:
        """See `process.Trainer`."""
        for _ in range(self._steps):
            x, y = next(self._feed)
            self._optimizer.zero_grad()
            logits = self._model(x)
            self._loss = functional.cross_entropy(logits.flatten(0, -2), y.flatten())
            self._loss.backward()
            self._optimizer.step()

    def loss(self) -> float:
        """See `process.Trainer`."""
        return self._loss.item()
