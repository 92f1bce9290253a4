"""When replicas are averaged: periods, hierarchies of them, schedules, staggered fragments."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax.numpy as jnp

from jaxcomp._base.checks import check_axis_name, check_int
from jaxcomp._base.typing import Array, AxisName, Schedule
from jaxcomp._local.fragments import Split, check_split
from jaxcomp._mesh.axes import axis_tuple

# A number of steps, a schedule that gives it, or one number for each level of a hierarchy.
SyncEvery: TypeAlias = int | Schedule | Mapping[AxisName, int]


@dataclasses.dataclass(frozen=True)
class Level:
    """One level of a hierarchy: the axes that are averaged over, and how often."""

    axes: tuple[str, ...]
    period: int


@dataclasses.dataclass(frozen=True)
class Periods:
    """Which event is due after an update. Events are numbered from 1; 0 is none."""

    levels: tuple[Level, ...]  # the widest last; with a schedule, one level whose period is unused
    schedule: Schedule | None
    start_step: int
    offset: int
    split: Split
    delay: int = 0  # updates between the average of a fragment and its use

    @property
    def fragments(self) -> int:
        """How many there are."""
        return self.split if isinstance(self.split, int) else len(self.split)

    @property
    def ends(self) -> list[int]:
        """After how many updates of a period each fragment's average is used."""
        period = self.levels[-1].period
        # At least one step apart, because there are no more fragments than steps in a period.
        return [k * period // self.fragments for k in range(1, self.fragments + 1)]

    def due(self, count: Array, last_sync: Array) -> Array:
        """The event after update number `count` (from 1); int32 scalar.

        Without fragments event ``k`` is the average of level ``k``, and the widest level that is
        due wins; with fragments event ``k`` is the average of fragment ``k``. With a delay the
        average of fragment ``k`` is used in event ``fragments + k``, so many updates later.
        """
        event = jnp.zeros([], jnp.int32)
        if self.schedule is not None:
            # The round's length is fixed when it begins. Schedules give floats: 7.9999 means 8.
            length = jnp.maximum(jnp.round(jnp.asarray(self.schedule(last_sync))), 1)
            event = (count - last_sync >= length.astype(jnp.int32)).astype(jnp.int32)
        else:
            for number, (period, shift) in enumerate(self._phases(), start=1):
                sent = shift - self.delay
                event = jnp.where((count - self.offset - sent) % period == 0, number, event)
                if self.delay:
                    # What would have been sent before start_step was not.
                    used = (count - self.offset - shift) % period == 0
                    used &= count - self.delay > self.start_step
                    event = jnp.where(used, self.fragments + number, event)
        return jnp.where(count > self.start_step, event, 0)

    def sends(self, event: Array) -> Array:
        """Whether an average over the replicas is taken in this event."""
        return (event > 0) & (event <= self.fragments) if self.delay else event > 0

    def meets(self, event: Array) -> Array:
        """Whether parameters are set to an average in this event."""
        return event > (self.fragments if self.delay else 0)

    def _phases(self) -> list[tuple[int, int]]:
        """(period, shift) of every event."""
        if self.fragments == 1:
            return [(level.period, 0) for level in self.levels]
        return [(self.levels[0].period, end) for end in self.ends]


def check_periods(
    sync_every: SyncEvery,
    axis_name: AxisName,
    start_step: Any,
    offset: Any,
    fragments: Any,
    delay: Any = 0,
) -> Periods:
    """Reads the arguments of `local_sgd` that say when to average.

    Raises:
      ValueError: If one is unusable, or they contradict each other, with what to pass instead.
    """
    check_axis_name(axis_name)
    start_step = check_int("start_step", start_step, 0)
    split = check_split(fragments)
    delay = check_int("fragment_sync_delay", delay, 0)
    schedule = sync_every if callable(sync_every) else None
    if schedule is not None:
        levels = (Level(axis_tuple(axis_name), 1),)
        if offset is not None:
            raise ValueError(
                "`offset` needs a fixed period, and sync_every is a schedule, whose first round "
                "begins at start_step. Leave offset out."
            )
    elif isinstance(sync_every, Mapping):
        levels = _check_hierarchy(sync_every, axis_name)
    else:
        levels = (Level(axis_tuple(axis_name), check_int("sync_every", sync_every, 1)),)
    offset = start_step if offset is None else check_int("offset", offset, 0)
    periods = Periods(levels, schedule, start_step, offset, split, delay)
    if periods.fragments > 1 or delay:
        _check_fragments(periods)
    return periods


def check_known(argument: str, axes: AxisName, axis_name: AxisName) -> None:
    """Refuses `axes` that are not all in `axis_name`.

    Raises:
      ValueError: Naming the argument and the first such axis.
    """
    check_axis_name(axes)
    unknown = [name for name in axis_tuple(axes) if name not in axis_tuple(axis_name)]
    if unknown:
        raise ValueError(
            f"`{argument}` names the axis {unknown[0]!r}, which is not in "
            f"axis_name={axis_name!r}. Name it there, or correct it."
        )


def _check_fragments(periods: Periods) -> None:
    fragments, delay, period = periods.fragments, periods.delay, periods.levels[0].period
    if periods.schedule is not None or len(periods.levels) != 1:
        argument = f"`fragments` needs one fixed period to be staggered over, got {fragments=}"
        if fragments == 1:
            argument = f"`fragment_sync_delay` needs one fixed period, got {delay}"
        raise ValueError(
            f"{argument} with a schedule or a hierarchy. Pass an integer as sync_every, or "
            "fragments=1 and fragment_sync_delay=0."
        )
    if fragments > period:
        raise ValueError(
            f"fragments={fragments} cannot be staggered over sync_every={period} steps: "
            "at most one fragment is averaged per step. Pass at most as many fragments as steps."
        )
    if delay >= period // fragments:
        raise ValueError(
            f"fragment_sync_delay={delay} must be less than the steps between two averages, "
            f"sync_every // fragments = {period // fragments}: what one sends arrives before the "
            "next is sent. Pass a shorter delay or a larger sync_every."
        )


def _check_hierarchy(sync_every: Mapping[AxisName, int], axis_name: AxisName) -> tuple[Level, ...]:
    known = axis_tuple(axis_name)
    levels = []
    for key, period in sync_every.items():
        check_known("sync_every", key, axis_name)
        levels.append(Level(axis_tuple(key), check_int(f"sync_every[{key!r}]", period, 1)))
    # With equal periods the wider level comes later and wins.
    levels.sort(key=lambda level: (level.period, len(level.axes)))
    for narrow, wide in itertools.pairwise(levels):
        if wide.period % narrow.period:
            raise ValueError(
                f"`sync_every` averages over {narrow.axes} every {narrow.period} steps and over "
                f"{wide.axes} every {wide.period}: each period must divide the next."
            )
        if not set(narrow.axes) <= set(wide.axes):
            raise ValueError(
                f"`sync_every` averages over {wide.axes} every {wide.period} steps, and these do "
                f"not contain {narrow.axes}, averaged every {narrow.period}. Let a level contain "
                f"the axes of the one before: {tuple(dict.fromkeys(narrow.axes + wide.axes))!r}."
            )
    if not levels or set(levels[-1].axes) != set(known):
        widest = levels[-1].axes if levels else ()
        raise ValueError(
            f"`sync_every` averages over {widest} at most, so replicas along the other axes of "
            f"axis_name={axis_name!r} would never meet. Give a period for all of them."
        )
    return tuple(levels)
