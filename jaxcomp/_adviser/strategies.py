"""The strategies that the adviser compares, as what they send and what compressing costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomp._adviser.calibration import Calibration
from jaxcomp._adviser.model import (
    Bucket,
    Traffic,
    allreduces,
    int8_factors_work,
    int8_work,
    interpolate,
    powersgd_work,
)
from jaxcomp._adviser.programs import Program, gpu_program
from jaxcomp._adviser.shapes import count_values
from jaxcomp._base.checks import check_int
from jaxcomp._base.leaves import Integers
from jaxcomp._base.stats import CompressionStats
from jaxcomp._base.typing import PyTree
from jaxcomp._bytes.local_stats import local_sgd_stats
from jaxcomp._bytes.stats import compression_stats, quantized_stats
from jaxcomp._lowrank.matricize import LeafPlan, plan_leaves
from jaxcomp._reducers.buckets import in_buckets, is_embedding

LOCAL_SGD = "local SGD"
ONE_SIDED = "one-sided"


@dataclasses.dataclass(frozen=True)
class Strategies:
    """Named traffic of every strategy, for given parameters, replicas and device."""

    params: PyTree
    workers: int
    constants: Calibration
    min_compression_rate: float
    comm_dtype: Any = None  # of PowerSGD
    gpu_kernels: bool = False  # of PowerSGD, likewise

    @property
    def _on_gpu(self) -> bool:
        return self.constants.platform == "gpu"

    @property
    def narrow(self) -> str:
        """The 16-bit dtype on the wire: XLA's CPU backend sends bfloat16 as float32."""
        return "float16" if self.constants.platform == "cpu" else "bfloat16"

    def exact(self) -> list[tuple[str, Traffic]]:
        """The averages that lose nothing, or next to nothing."""
        values, workers, constants = count_values(self.params), self.workers, self.constants
        return [
            (
                "all-reduce float32",
                allreduces(4 * values, workers, constants.allreduce, overlaps=True),
            ),
            (
                f"all-reduce {self.narrow}",
                allreduces(2 * values, workers, constants.allreduce_16, overlaps=True),
            ),
        ]

    def ranks(self, asked: Sequence[int] | None) -> list[int]:
        """Those asked for, or the powers of two that the shapes allow."""
        if asked is not None:
            return [check_int("ranks", rank, 1) for rank in asked]
        return self._allowed()

    def two_sided(self, rank: int) -> tuple[str, Traffic]:
        """PowerSGD with two factors a step."""
        return f"powersgd rank {rank}{self._wire_suffix}", self._factors(rank, False)

    def one_sided(self, rank: int) -> tuple[str, Traffic]:
        """PowerSGD with one factor a step."""
        return f"{ONE_SIDED} rank {rank}{self._wire_suffix}", self._factors(rank, True)

    def in_buckets(self, rank: int, counts: Sequence[int]) -> list[tuple[str, Traffic]]:
        """Two-sided with collectives for each group of layers, which only a GPU hides.

        A layer's share of the backward pass is taken to be that of its values; what is looked up
        has none.
        """
        found = list[tuple[str, Traffic]]()
        leaves = jax.tree_util.tree_flatten_with_path(self.params)[0]
        floating = [jnp.issubdtype(leaf.dtype, jnp.floating) for _, leaf in leaves]
        sent = iter(self._stats(rank, False).leaves)
        sizes = [next(sent).bytes_after if own else 0 for own in floating]
        work = [0 if is_embedding(path) else leaf.size for path, leaf in leaves]
        for count in counts if self._on_gpu else ():
            groups = in_buckets(self.params, count)
            if len(groups) == count > 1:
                shares = tuple(Bucket(_share(sizes, g), _share(work, g)) for g in groups)
                traffic = dataclasses.replace(self._factors(rank, False, count), buckets=shares)
                found.append((f"{self.two_sided(rank)[0]}, buckets={count}", traffic))
        return found

    @property
    def _wire_suffix(self) -> str:
        return f" {self.comm_dtype.name}" if self.comm_dtype is not None else ""

    def others(self, sync_every: int) -> list[tuple[str, Traffic]]:
        """int8 with its residual, and local SGD."""
        workers, constants = self.workers, self.constants
        work = int8_work(count_values(self.params), constants.memory_bandwidth) * constants.int8
        if self._on_gpu:
            plans = plan_leaves(self.params, lambda path, leaf: None, self.min_compression_rate)
            work += constants.launch * gpu_program("quantized_allreduce", _floating(plans)).kernels
        payload = quantized_stats(self.params, replicas=workers).bytes_after
        average = local_sgd_stats(self.params, sync_every=1).bytes_per_step
        return [
            # An all-to-all and an all-gather take half a ring's steps and bytes each.
            ("int8", allreduces(payload, workers, constants.exchange, compression=work)),
            (
                f"{LOCAL_SGD} H={sync_every}",
                allreduces(average, workers, constants.allreduce).every(sync_every),
            ),
        ]

    def _plans(self, rank: int) -> list[LeafPlan]:
        return _floating(plan_leaves(self.params, rank, self.min_compression_rate))

    def _allowed(self) -> list[int]:
        """Powers of two at which leaves are still compressed, and send less than 16 bits would."""
        ranks = []
        narrow = 2 * count_values(self.params)
        while any(plan.rank == 2 ** len(ranks) for plan in self._plans(2 ** len(ranks))):
            ranks.append(2 ** len(ranks))
        return [rank for rank in ranks if self._stats(rank, False).bytes_after < narrow]

    def _stats(self, rank: int, alternating: bool) -> CompressionStats:
        return compression_stats(
            self.params,
            rank=rank,
            min_compression_rate=self.min_compression_rate,
            comm_dtype=self.comm_dtype,
            alternating=alternating,
            replicas=self.workers,
        )

    def _factors(self, rank: int, alternating: bool, buckets: int = 1) -> Traffic:
        software = self.constants.allreduce
        if isinstance(self.comm_dtype, Integers):
            # As with int8 gradients: an all-to-all and an all-gather in place of each all-reduce.
            software = self.constants.exchange
        elif self.comm_dtype is not None and self.comm_dtype.itemsize == 2:
            software = self.constants.allreduce_16
        return allreduces(
            self._stats(rank, alternating).bytes_after,
            self.workers,
            software,
            count=1 if alternating else 2 * buckets,
            compression=self._compression(rank, alternating, buckets),
        )

    def _compression(self, rank: int, alternating: bool, buckets: int) -> float:
        """Seconds."""
        constants, plans = self.constants, self._plans(rank)
        program = self._program(plans, alternating, buckets) if self._on_gpu else None
        work = powersgd_work(
            plans,
            constants.memory_bandwidth,
            constants.flops,
            alternating=alternating,
            words=program and program.words,
        )
        work *= interpolate(constants.one_sided if alternating else constants.powersgd, rank)
        if isinstance(self.comm_dtype, Integers) and (program is None or alternating):
            rounding = int8_factors_work(plans, constants.memory_bandwidth, alternating=alternating)
            work += rounding * constants.int8
        return work + (constants.launch * program.kernels if program else 0.0)

    def _program(self, plans: Sequence[LeafPlan], alternating: bool, buckets: int) -> Program:
        """What was counted: one-sided steps in the plain form only, and without their rounding."""
        if alternating:
            return gpu_program("powersgd, alternating", plans)
        form = "powersgd, gpu_kernels" if self.gpu_kernels else "powersgd"
        wire = ", int8" if isinstance(self.comm_dtype, Integers) else ""
        return gpu_program(form + wire, plans, buckets)


def _floating(plans: Sequence[LeafPlan]) -> list[LeafPlan]:
    return [plan for plan in plans if jnp.issubdtype(plan.dtype, jnp.floating)]


def _share(sizes: Sequence[int], group: Sequence[int]) -> float:
    return sum(sizes[i] for i in group) / max(1, sum(sizes))
