"""The strategies of the convergence study: how each is built, and what it sends.

To add one, add an entry to `STRATEGIES`; the command line and the report pick it up.
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
      summary: What it is, in words: for ``--help``, the table and the picture.
      build: The setting -> the whole Optax transformation.
      payloads: The setting -> bytes that each replica hands to the network in each step.
      local: Whether parameters differ between replicas.
    """

    summary: str
    build: Callable[[Config], optax.GradientTransformation]
    payloads: Callable[[Config], list[int]]
    local: bool = False


def _every_step(summary: str, make: Callable[[Config], Any]) -> Strategy:
    """A reducer in front of AdamW."""

    def build(config: Config) -> optax.GradientTransformation:
        return optax.chain(make(config), adamw(config))

    def payloads(config: Config) -> list[int]:
        sent = make(config).bytes(config.params(), replicas=config.replicas).bytes_after
        return [sent] * config.steps

    return Strategy(summary, build, payloads)


def _powersgd(summary: str, rank: int = 0, *, ratio: float = 0.0, **options: Any) -> Strategy:
    """`jaxcomp.powersgd` from the first step on.

    Args:
      summary: In words.
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

    return _every_step(summary, make)


def _local(summary: str, every: int, *, outer: bool = False, int8: bool = False) -> Strategy:
    """`jaxcomp.local_sgd`: local AdamW, and an average every so many steps."""

    def build(config: Config) -> Any:
        return jaxcomp.local_sgd(
            adamw(config),
            sync_every=every,
            axis_name=AXIS,
            reducer=_int8() if int8 else None,
            outer=optax.sgd(0.7, momentum=0.9, nesterov=True) if outer else None,
        )

    def payloads(config: Config) -> list[int]:
        replicas, last = config.replicas, every - 1  # the first step that averages
        sent = build(config).bytes(config.params(), replicas=replicas, step=last).bytes_after
        return [sent * ((step + 1) % every == 0) for step in range(config.steps)]

    return Strategy(summary, build, payloads, local=True)


def _int8() -> Any:
    return jaxcomp.error_feedback(jaxcomp.quantized_allreduce(axis_name=AXIS))


REFERENCE = "allreduce"
STRATEGIES: dict[str, Strategy] = {
    REFERENCE: _every_step("float32 all-reduce", lambda config: jaxcomp.allreduce(axis_name=AXIS)),
    "int8": _every_step("int8 all-reduce", lambda config: _int8()),
    **{f"powersgd-r{r}": _powersgd(f"rank {r}", r) for r in (1, 2, 4, 8, 16)},
    "powersgd-r4-no-feedback": _powersgd("rank 4, no residual", 4, error_feedback=False),
    "powersgd-r8-bf16": _powersgd("rank 8, bfloat16", 8, comm_dtype="bfloat16"),
    "powersgd-r16-int8": _powersgd("rank 16, int8", 16, comm_dtype="int8"),
    "powersgd-r21-int6": _powersgd("rank 21, int6", 21, comm_dtype="int6"),
    # The ratios are those of ranks 4 and 16 in this model, so that each has its equal above.
    "spectrum-r4": _powersgd("ranks by spectrum", ratio=22.4),
    "spectrum-r16-int8": _powersgd("ranks by spectrum, int8", ratio=20.2, comm_dtype="int8"),
    "spectrum-r21-int6": _powersgd("ranks by spectrum, int6", ratio=20.2, comm_dtype="int6"),
    "local-h6-int8": _local("local SGD every 6 steps, int8", 6, int8=True),
    "local-h8": _local("local SGD every 8 steps", 8),
    "diloco-h32": _local("DiLoCo every 32 steps", 32, outer=True),
}
