"""The strategies of the convergence study: how each is built, and what it sends.

To add one, add it to `STRATEGIES`; the command line and the report pick it up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import optax

import jaxcomp
from benchmarks.convergence.training import AXIS, Config, adamw, early_momentum


@dataclass(frozen=True)
class Strategy:
    """How replicas agree on an update, and what that costs.

    Attributes:
      name: On the command line and in the file of runs.
      label: What it is, in words: for ``--help``, the table and the picture.
      build: The setting -> the whole Optax transformation.
      bytes_sent: The setting -> what each replica hands to the network in each step.
      local: Whether parameters differ between replicas.
    """

    name: str
    label: str
    build: Callable[[Config], optax.GradientTransformation]
    bytes_sent: Callable[[Config], list[int]]
    local: bool = False

    @property
    def stored(self) -> dict[str, Any]:
        """What a finished run says of it."""
        return {"strategy": self.name}


def _every_step(name: str, label: str, make: Callable[[Config], Any]) -> Strategy:
    """A reducer in front of AdamW."""

    def build(config: Config) -> optax.GradientTransformation:
        return optax.chain(make(config), adamw(config))

    def bytes_sent(config: Config) -> list[int]:
        sent = make(config).bytes(config.params(), replicas=config.replicas).bytes_after
        return [sent] * config.steps

    return Strategy(name, label, build, bytes_sent)


def _powersgd(
    name: str, label: str, rank: int = 0, *, ratio: float = 0.0, **options: Any
) -> Strategy:
    """`jaxcomp.powersgd` from the first step on.

    Args:
      name: Of the strategy.
      label: In words.
      rank: The rank, unless ranks by spectrum are to send `ratio` times fewer bytes.
      ratio: As for `ranks_by_spectrum`.
      **options: Of `jaxcomp.powersgd`.
    """

    def make(config: Config) -> Any:
        ranks: Any = rank
        if ratio:
            ranks = jaxcomp.ranks_by_spectrum(
                early_momentum(config), ratio=ratio, comm_dtype=options.get("comm_dtype")
            )
        return jaxcomp.powersgd(ranks, axis_name=AXIS, start_step=0, **options)

    return _every_step(name, label, make)


def _local(
    name: str, label: str, every: int, *, outer: bool = False, int8: bool = False
) -> Strategy:
    """`jaxcomp.local_sgd`: local AdamW, and an average every so many steps."""

    def build(config: Config) -> Any:
        return jaxcomp.local_sgd(
            adamw(config),
            sync_every=every,
            axis_name=AXIS,
            reducer=_int8() if int8 else None,
            outer=optax.sgd(0.7, momentum=0.9, nesterov=True) if outer else None,
        )

    def bytes_sent(config: Config) -> list[int]:
        replicas, last = config.replicas, every - 1  # the first step that averages
        sent = build(config).bytes(config.params(), replicas=replicas, step=last).bytes_after
        return [sent * ((step + 1) % every == 0) for step in range(config.steps)]

    return Strategy(name, label, build, bytes_sent, local=True)


def _int8() -> Any:
    return jaxcomp.error_feedback(jaxcomp.quantized_allreduce(axis_name=AXIS))


EXACT = _every_step(
    "allreduce", "float32 all-reduce", lambda config: jaxcomp.allreduce(axis_name=AXIS)
)
_EVERY = (
    EXACT,
    _every_step("int8", "int8 all-reduce", lambda config: _int8()),
    *(_powersgd(f"powersgd-r{r}", f"rank {r}", r) for r in (1, 4, 8, 16)),
    _powersgd("powersgd-r4-no-feedback", "rank 4, no residual", 4, error_feedback=False),
    _powersgd("powersgd-r8-bf16", "rank 8, bfloat16", 8, comm_dtype="bfloat16"),
    _powersgd("powersgd-r16-int8", "rank 16, int8", 16, comm_dtype="int8"),
    # The ratios are those of ranks 4 and 16 in this model, so that each has its equal above.
    _powersgd("spectrum-r4", "ranks by spectrum", ratio=22.4),
    _powersgd("spectrum-r16-int8", "ranks by spectrum, int8", ratio=20.2, comm_dtype="int8"),
    _local("local-h6-int8", "local SGD every 6 steps, int8", 6, int8=True),
    _local("diloco-h32", "DiLoCo every 32 steps", 32, outer=True),
)
STRATEGIES = {strategy.name: strategy for strategy in _EVERY}


def by_name(strategy: str) -> Strategy:
    """Of a finished run, the strategy that it stores."""
    return STRATEGIES[strategy]
