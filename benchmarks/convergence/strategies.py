"""The strategies of the convergence study.

To add a strategy, add it to `STRATEGIES`; the command line and the report then have it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import optax

import jaxcomp
from benchmarks.convergence.optimizers import optimizer
from benchmarks.convergence.runs import Compared, early_momentum
from benchmarks.convergence.training import AXIS, Config


@dataclass(frozen=True)
class Strategy(Compared):
    """A way in which replicas agree on an update.

    Attributes:
      name: The name on the command line and in the file of runs.
      label: The description in ``--help``, the table and the picture.
      make: A function from the setting to a reducer, or to `local_sgd` if `local`.
      local: Whether parameters differ between replicas.
    """

    name: str
    label: str
    make: Callable[[Config], Any]
    local: bool = False

    def reducer(self, config: Config) -> Any:
        """Makes the reducer."""
        return self.make(config)

    def behind(self, config: Config) -> optax.GradientTransformation:
        """Makes AdamW with clipping, 10% warm-up and a cosine decay to 5%, as in the examples."""
        return optimizer("adamw", config.steps, config.learning_rate, 0.9)

    @property
    def stored(self) -> dict[str, Any]:
        """Returns the fields that a finished run stores."""
        return {"strategy": self.name}

    @property
    def program(self) -> Strategy:
        """Returns the strategy itself: each needs its own program."""
        return self


def _powersgd(name: str, label: str, rank: int, **options: Any) -> Strategy:
    """Makes `jaxcomp.powersgd` from the first step on."""
    reducer = jaxcomp.powersgd(rank, axis_name=AXIS, start_step=0, **options)
    return Strategy(name, label, lambda config: reducer)


def _by_spectrum(name: str, label: str, ratio: float, wire: str | None = None) -> Strategy:
    """Makes `jaxcomp.powersgd` with the ranks by spectrum that send `ratio` times fewer bytes."""

    def make(config: Config) -> Any:
        ranks = jaxcomp.ranks_by_spectrum(
            early_momentum(config, EXACT, config.steps // 4), ratio=ratio, comm_dtype=wire
        )
        return jaxcomp.powersgd(ranks, axis_name=AXIS, start_step=0, comm_dtype=wire)

    return Strategy(name, label, make)


def _local(name: str, label: str, every: int, **options: Any) -> Strategy:
    """Makes `jaxcomp.local_sgd` around AdamW, with an average after a number of steps."""

    def make(config: Config) -> Any:
        inner = EXACT.behind(config)
        return jaxcomp.local_sgd(inner, sync_every=every, axis_name=AXIS, **options)

    return Strategy(name, label, make, local=True)


_AVERAGE = jaxcomp.allreduce(axis_name=AXIS)
_INT8 = jaxcomp.error_feedback(jaxcomp.quantized_allreduce(axis_name=AXIS))
_OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)
EXACT = Strategy("allreduce", "float32 all-reduce", lambda config: _AVERAGE)
_EVERY = (
    EXACT,
    Strategy("int8", "int8 all-reduce", lambda config: _INT8),
    *(_powersgd(f"powersgd-r{r}", f"rank {r}", r) for r in (1, 4, 8, 16)),
    _powersgd("powersgd-r4-no-feedback", "rank 4, no residual", 4, error_feedback=False),
    _powersgd("powersgd-r8-bf16", "rank 8, bfloat16", 8, comm_dtype="bfloat16"),
    _powersgd("powersgd-r16-int8", "rank 16, int8", 16, comm_dtype="int8"),
    # The ratios are those of ranks 4 and 16 in this model, so that each has its equal above.
    _by_spectrum("spectrum-r4", "ranks by spectrum", 22.4),
    _by_spectrum("spectrum-r16-int8", "ranks by spectrum, int8", 20.2, "int8"),
    _local("local-h6-int8", "local SGD every 6 steps, int8", 6, reducer=_INT8),
    _local("diloco-h32", "DiLoCo every 32 steps", 32, outer=_OUTER),
)
STRATEGIES = {strategy.name: strategy for strategy in _EVERY}


def by_name(strategy: str) -> Strategy:
    """Returns the strategy that a finished run stores."""
    return STRATEGIES[strategy]
