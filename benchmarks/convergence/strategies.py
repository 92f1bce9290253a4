"""The strategies of the convergence study: how each is built, and what it sends.

To add one, add an entry to `STRATEGIES`; the command line and the report pick it up.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import optax

import jaxcomp
from benchmarks.convergence.reducers import difference, low_rank, whitened
from benchmarks.convergence.training import AXIS, Config, Switch, adamw, early_momentum

# Of a reducer, which type checkers know as the Optax transformation that it is.
Make = Callable[[Config], Any]


@dataclass(frozen=True)
class Strategy:
    """How replicas agree on an update, and what that costs.

    Attributes:
      family: What it is shown as.
      summary: One line for ``--help``.
      build: The setting -> the whole Optax transformation.
      payloads: The setting -> bytes that each replica hands to the network in each step.
      local: Whether parameters differ between replicas.
      switch: What takes over in the middle of the run, if anything does.
    """

    family: str
    summary: str
    build: Callable[[Config], optax.GradientTransformation]
    payloads: Callable[[Config], list[int]]
    local: bool = False
    switch: Switch | None = None

    def bytes_sent(self, config: Config, payload: int | None = None) -> Callable[[int], int]:
        """A function from a number of steps to the bytes that each replica sent in them.

        Args:
          config: The setting.
          payload: Of each step after the switch; None without one.
        """
        payloads = self.payloads(config)
        if self.switch and payload is not None:
            at = self.switch.step(config)
            payloads[at:] = [payload] * (config.steps - at)
        return lambda steps: sum(payloads[:steps])


def _every_step(
    family: str,
    summary: str,
    make: Make,
    *,
    start: float = 0.0,
    rate: float = 1.0,
    momentum: float = 0.9,
) -> Strategy:
    """A reducer in front of AdamW; exact for the share `start` of the steps."""

    def reducer(config: Config) -> Any:
        if not start:
            return make(config)
        exact = jaxcomp.allreduce(axis_name=AXIS)
        return jaxcomp.switch_at(round(start * config.steps), exact, make(config))

    def build(config: Config) -> optax.GradientTransformation:
        return optax.chain(reducer(config), adamw(config, rate, momentum))

    def payloads(config: Config) -> list[int]:
        exact = round(start * config.steps)
        count = functools.partial(reducer(config).bytes, config.params(), replicas=config.replicas)
        # The exact steps are alike; of the others the mean counts, as one-sided steps take turns.
        first = exact * [count(step=0).bytes_after] if exact else []
        return first + [count().bytes_after] * (config.steps - exact)

    return Strategy(family, summary, build, payloads)


def _rank_of(rank: Any, config: Config) -> Any:
    """A rank as the reducers take it; `_Spectrum` is fitted to the model first."""
    return rank.fit(config) if isinstance(rank, _Spectrum) else rank


@dataclass(frozen=True)
class _Spectrum:
    """Ranks by spectrum that send so many times fewer values than the dense gradient.

    Bytes instead of values with a `comm_dtype`.
    """

    ratio: float
    adaptive: bool = True
    comm_dtype: str | None = None

    def fit(self, config: Config) -> Any:
        """The ranks of the model of a study."""
        gradients = early_momentum(config)
        return jaxcomp.ranks_by_spectrum(
            gradients, ratio=self.ratio, adaptive=self.adaptive, comm_dtype=self.comm_dtype
        )


def _powersgd(
    summary: str,
    rank: Any,
    *,
    family: str | None = None,
    wrap: Callable[[jaxcomp.Reducer], jaxcomp.Reducer] = lambda reducer: reducer,
    start: float = 0.0,
    **options: Any,
) -> Strategy:
    """`jaxcomp.powersgd`."""
    if options.get("alternating"):
        named = "one-sided"
    else:
        named = "PowerSGD, narrow factors" if "comm_dtype" in options else "PowerSGD"

    def make(config: Config) -> jaxcomp.Reducer:
        ranks = _rank_of(rank, config)
        return wrap(jaxcomp.powersgd(ranks, axis_name=AXIS, start_step=0, **options))

    return _every_step(family or named, summary, make, start=start)


def own_spectrum(summary: str, rank: int, *, ratio: float, share: float) -> Strategy:
    """`jaxcomp.powersgd` with int8 factors, then with ranks by the run's own momentum."""

    def reducer(rank: Any) -> jaxcomp.Reducer:
        return jaxcomp.powersgd(rank, axis_name=AXIS, start_step=0, comm_dtype="int8")

    def adapt(config: Config, params: Any, state: Any) -> tuple[Any, Any, int]:
        momentum = optax.tree.get(state, "mu")
        ranks = jaxcomp.ranks_by_spectrum(momentum, ratio=ratio, comm_dtype="int8")
        tx = optax.chain(reducer(ranks), adamw(config))
        one = jaxcomp.adapt_state(jaxcomp.consolidate(state), params, tx)
        state = jaxcomp.stack_replicas(one, config.replicas)
        return tx, state, reducer(ranks).bytes(params, replicas=config.replicas).bytes_after

    first = _powersgd(summary, rank, comm_dtype="int8")
    return dataclasses.replace(first, switch=Switch(share, adapt))


def _low_rank(
    summary: str,
    rank: Any,
    *,
    family: str = "PowerSGD, narrow factors",
    wrap: Callable[[jaxcomp.Reducer], Any] = jaxcomp.error_feedback,
    rate: float = 1.0,
    momentum: float = 0.9,
    **options: Any,
) -> Strategy:
    """`reducers.low_rank` in a wrapper that gives it a residual."""
    return _every_step(
        family,
        summary,
        lambda config: wrap(low_rank(_rank_of(rank, config), axis_name=AXIS, **options)),
        rate=rate,
        momentum=momentum,
    )


def _difference(summary: str, rank: int, *, rate: float = 1.0, **options: Any) -> Strategy:
    """`reducers.difference` in front of Adam without a momentum of its own."""
    wrap = lambda reducer: difference(reducer)  # noqa: E731
    return _low_rank(
        summary, rank, family="difference", wrap=wrap, rate=rate, momentum=0.0, **options
    )


def _prediction(reducer: jaxcomp.Reducer) -> jaxcomp.Reducer:
    return difference(reducer, decay=1.0, momentum=False)


def _local(
    summary: str,
    every: int,
    *,
    outer: bool = True,
    reducer: Callable[[], Any] | None = None,
) -> Strategy:
    """`jaxcomp.local_sgd`: local AdamW, and a meeting every so many steps."""

    def build(config: Config) -> Any:
        return jaxcomp.local_sgd(
            adamw(config),
            sync_every=every,
            axis_name=AXIS,
            reducer=reducer and reducer(),
            outer=optax.sgd(0.7, momentum=0.9, nesterov=True) if outer else None,
        )

    def payloads(config: Config) -> list[int]:
        replicas, last = config.replicas, every - 1  # the first step that averages
        meeting = build(config).bytes(config.params(), replicas=replicas, step=last).bytes_after
        return [meeting * ((step + 1) % every == 0) for step in range(config.steps)]

    return Strategy("local", summary, build, payloads, local=True)


def _int8() -> Any:
    return jaxcomp.error_feedback(jaxcomp.quantized_allreduce(axis_name=AXIS))


def _blocks_only(path: Any, leaf: Any) -> int | None:
    del leaf
    return 4 if path[0].key.startswith("block") else None


def _compressed_meetings(rank: int) -> Any:
    return lambda: jaxcomp.powersgd(rank, axis_name=AXIS, start_step=0)


STRATEGIES: dict[str, Strategy] = {
    "allreduce": _every_step(
        "exact",
        "float32, uncompressed: the reference",
        lambda config: jaxcomp.allreduce(axis_name=AXIS),
    ),
    "int8": _every_step(
        "int8",
        "8-bit integers with error feedback",
        lambda config: _int8(),
    ),
    **{f"powersgd-r{r}": _powersgd(f"PowerSGD of rank {r}", r) for r in (1, 2, 4, 8, 16)},
    "powersgd-r4-blocks": _powersgd("rank 4; embeddings and output exact", _blocks_only),
    "powersgd-r4-no-feedback": _powersgd("rank 4 without residual", 4, error_feedback=False),
    "powersgd-r4-decay": _powersgd("rank 4, residual decays by 0.9", 4, error_decay=0.9),
    "powersgd-r4-start10": _powersgd("rank 4 after 10% exact steps", 4, start=0.1),
    "powersgd-r4-start25": _powersgd("rank 4 after 25% exact steps", 4, start=0.25),
    "one-sided-r4": _powersgd("rank 4, one factor a step", 4, alternating=True),
    "one-sided-r8": _powersgd("rank 8, one factor a step", 8, alternating=True),
    "powersgd-r8-bf16": _powersgd("rank 8, bfloat16 factors", 8, comm_dtype="bfloat16"),
    "powersgd-r4-3-iterations": _low_rank(
        "rank 4, three power iterations a step", 4, family="PowerSGD", iterations=3
    ),
    "powersgd-r16-int8": _powersgd("rank 16, int8 factors", 16, comm_dtype="int8"),
    "powersgd-r21-int6": _powersgd("rank 21, int6 factors", 21, comm_dtype="int6"),
    "powersgd-r32-int4": _low_rank("rank 32, int4 factors", 32, wire="int4"),
    # The ratios are those of ranks 4, 16 and 32 in this model, so that each has its equal above.
    "spectrum-r4": _powersgd("ranks by spectrum, bytes of rank 4", _Spectrum(22.4)),
    "spectrum-r4-raw": _powersgd(
        "the same, leaves not scaled to their size", _Spectrum(22.4, adaptive=False)
    ),
    "spectrum-r16-int8": _powersgd(
        "ranks by spectrum, int8 factors", _Spectrum(20.2, comm_dtype="int8"), comm_dtype="int8"
    ),
    "spectrum-own-r16-int8": own_spectrum(
        "rank 16, int8; after 10% of the steps ranks by its own spectrum", 16, ratio=20.2, share=0.1
    ),
    "spectrum-own25-r16-int8": own_spectrum("the same after 25%", 16, ratio=20.2, share=0.25),
    "spectrum-r21-int6": _powersgd(
        "ranks by spectrum, int6 factors", _Spectrum(20.2, comm_dtype="int6"), comm_dtype="int6"
    ),
    "spectrum-r32-int4": _low_rank("ranks by spectrum, int4 factors", _Spectrum(2.62), wire="int4"),
    "whitened-r4": _low_rank(
        "rank 4 of the gradient as Adam scales it",
        4,
        family="PowerSGD",
        wrap=lambda reducer: jaxcomp.error_feedback(whitened(reducer)),
    ),
    "difference-r4": _difference("EF21 with momentum, Adam with b1=0", 4),
    "difference-r4-rate0.5": _difference("the same at half the learning rate", 4, rate=0.5),
    "difference-r4-rate0.25": _difference("the same at a quarter of it", 4, rate=0.25),
    "predicted-r16-int8": _powersgd(
        "rank 16, int8, error feedback on the change from a running mean",
        16,
        family="difference",
        wrap=_prediction,
        comm_dtype="int8",
        error_feedback=False,
    ),
    "local-h6-int8": _local(
        "local SGD: an int8 average every 6 steps", 6, outer=False, reducer=_int8
    ),
    "local-h8": _local("local SGD: an exact average every 8 steps", 8, outer=False),
    "diloco-h6-int8": _local("DiLoCo, int8 every 6 steps", 6, reducer=_int8),
    "diloco-h32": _local("DiLoCo, exact every 32 steps", 32),
    "diloco-h32-r16": _local(
        "DiLoCo, PowerSGD of rank 16 every 32 steps",
        32,
        reducer=_compressed_meetings(16),
    ),
}

# What the plot over steps shows; all of them would hide each other.
CURVES = (
    "allreduce", "int8", "powersgd-r4", "powersgd-r16", "powersgd-r16-int8", "spectrum-r16-int8",
    "one-sided-r8", "local-h6-int8",
)  # fmt: skip
