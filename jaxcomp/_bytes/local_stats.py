"""What local SGD puts on the wire: bytes per step over a cycle, and the most in one step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from jaxcomp._base.stats import dense_leaves
from jaxcomp._base.typing import AxisName, PyTree
from jaxcomp._bytes.stats import CompressionStats
from jaxcomp._local.periods import check_periods
from jaxcomp._local.sent import Sent
from jaxcomp._mesh.axes import axis_tuple


@dataclasses.dataclass(frozen=True)
class LevelStats:
    """One level of a hierarchy; without one, the only level."""

    axes: tuple[str, ...]
    period: int  # steps from one average of this level to the next, wider ones included
    bytes_per_sync: int  # payload of all its fragments together
    bytes_per_step: float  # averaged over a cycle, steps that a wider level takes over left out


@dataclasses.dataclass(frozen=True)
class LocalSGDStats:
    """Payload of the all-reduces of local SGD, as each replica passes it to the collective."""

    levels: tuple[LevelStats, ...]
    bytes_before: int  # per step: plain all-reduce of the gradients in their own dtypes
    bytes_per_step: float  # averaged over a cycle
    bytes_peak: int  # the most in one step

    @property
    def ratio(self) -> float:
        """How many times fewer bytes than an all-reduce of the gradients in every step."""
        return self.bytes_before / self.bytes_per_step if self.bytes_per_step else 1.0


def local_sgd_stats(
    params: PyTree,
    *,
    sync_every: int | Mapping[AxisName, int],
    reduced: Callable[[PyTree], CompressionStats] | None = None,
    fragments: int = 1,
    inner_state: PyTree = None,
) -> LocalSGDStats:
    """Counts the bytes of `local_sgd` or `local_sgd_round` per step; exact, no device needed.

    Args:
      params: Parameters: arrays, or anything with ``shape`` and ``dtype``.
      sync_every: As for `local_sgd`, no schedule.
      reduced: What the reducer sends for a tree, where there is one: ``functools.partial(
        compression_stats, rank=4)``. None for the average of the parameters, which goes in float32
        even where they are stored narrower.
      fragments: As for `local_sgd`.
      inner_state: The inner optimizer's state, if ``average_inner_state=True``.

    Returns:
      The payload per replica in bytes, after `start_step`. A ring all-reduce over ``n`` replicas
      sends ``2 (n - 1) / n`` times as much.

    Raises:
      ValueError: If an argument is unusable.

    Example:
      >>> import jax.numpy as jnp, jaxcomp
      >>> params = {"w": jnp.zeros((512, 256)), "b": jnp.zeros(256)}
      >>> stats = jaxcomp.local_sgd_stats(params, sync_every=8)
      >>> stats.bytes_before, stats.bytes_per_step, stats.ratio
      (525312, 65664.0, 8.0)
    """
    if callable(sync_every):
        raise ValueError(
            "`sync_every` is a schedule, and bytes are counted over a cycle of fixed length. Pass "
            "the number of steps that the schedule gives at the time you ask about."
        )
    axes: AxisName = "replicas"
    if isinstance(sync_every, Mapping):
        axes = tuple(dict.fromkeys(name for key in sync_every for name in axis_tuple(key)))
    periods = check_periods(sync_every, axes, 0, None, fragments)
    given = reduced  # of a part, whatever came before
    sent = Sent(
        periods,
        None if given is None else lambda part, nth: given(part),
        inner_state is not None,
        lambda params: inner_state,
    )
    hierarchy = periods.levels if isinstance(sync_every, Mapping) else ()
    levels, peaks = [], []
    for number, level in enumerate(periods.levels, start=1):
        wider = periods.levels[number] if number < len(periods.levels) else None
        numbers = [number] if fragments == 1 else range(1, fragments + 1)
        payloads = [sent.payload(params, event, None).bytes_after for event in numbers]
        share = 1 / level.period - (1 / wider.period if wider else 0)
        axes = level.axes if hierarchy else ()
        levels.append(LevelStats(axes, level.period, sum(payloads), sum(payloads) * share))
        peaks += payloads if share else []
    before = CompressionStats.of(dense_leaves(params)).bytes_before
    per_step = sum(level.bytes_per_step for level in levels)
    return LocalSGDStats(tuple(levels), before, per_step, max(peaks))
