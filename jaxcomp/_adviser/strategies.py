"""The strategies that the adviser compares, as what they send and what compressing costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxcomp._adviser.calibration import Calibration
from jaxcomp._adviser.model import (
    Traffic,
    allreduces,
    int8_factors_work,
    int8_work,
    interpolate,
    powersgd_work,
)
from jaxcomp._adviser.shapes import count_values
from jaxcomp._base.checks import check_int
from jaxcomp._base.leaves import Integers
from jaxcomp._base.typing import PyTree
from jaxcomp._bytes.local_stats import local_sgd_stats
from jaxcomp._bytes.stats import compression_stats, quantized_stats
from jaxcomp._lowrank.matricize import LeafPlan, plan_leaves

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

    def powersgd(self, ranks: Sequence[int] | None) -> list[tuple[str, Traffic]]:
        """Two-sided and one-sided, at the ranks given or those that the shapes allow."""
        chosen = self._allowed() if ranks is None else [check_int("ranks", r, 1) for r in ranks]
        wire = f" {self.comm_dtype.name}" if self.comm_dtype is not None else ""
        two_sided = [(f"powersgd rank {r}{wire}", self._factors(r, False)) for r in chosen]
        # Every other rank: the table is to be read.
        few = chosen[::2] if ranks is None else chosen
        return two_sided + [(f"{ONE_SIDED} rank {r}{wire}", self._factors(r, True)) for r in few]

    def others(self, sync_every: int) -> list[tuple[str, Traffic]]:
        """int8 with its residual, and local SGD."""
        workers, constants = self.workers, self.constants
        work = int8_work(count_values(self.params), constants.memory_bandwidth) * constants.int8
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
        return plan_leaves(self.params, rank, self.min_compression_rate)

    def _allowed(self) -> list[int]:
        """Powers of two at which leaves are still compressed, and send less than 16 bits would."""
        ranks = []
        narrow = 2 * count_values(self.params)
        while any(plan.rank == 2 ** len(ranks) for plan in self._plans(2 ** len(ranks))):
            ranks.append(2 ** len(ranks))
        return [rank for rank in ranks if self._factors(rank, False).payload < narrow]

    def _factors(self, rank: int, alternating: bool) -> Traffic:
        constants, plans = self.constants, self._plans(rank)
        payload = compression_stats(
            self.params,
            rank=rank,
            min_compression_rate=self.min_compression_rate,
            comm_dtype=self.comm_dtype,
            alternating=alternating,
            replicas=self.workers,
        ).bytes_after
        work = powersgd_work(
            plans, constants.memory_bandwidth, constants.flops, alternating=alternating
        )
        work *= interpolate(constants.one_sided if alternating else constants.powersgd, rank)
        software = constants.allreduce
        if isinstance(self.comm_dtype, Integers):
            # As with int8 gradients: an all-to-all and an all-gather in place of each all-reduce.
            software = constants.exchange
            rounding = int8_factors_work(plans, constants.memory_bandwidth, alternating=alternating)
            work += rounding * constants.int8
        elif self.comm_dtype is not None and self.comm_dtype.itemsize == 2:
            software = constants.allreduce_16
        return allreduces(
            payload, self.workers, software, count=1 if alternating else 2, compression=work
        )
