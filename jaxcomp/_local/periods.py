"""Decides when the replicas of `local_sgd` are averaged: periods, hierarchies and schedules.

`local_sgd` asks `Periods` for the level that is due after an update: 0 for a local step, else the
number of a level, the widest last. Where bytes are counted, `between` lists the levels of many
updates. A fixed period needs only the count; the length of a scheduled round depends on where the
last one ended, so the state keeps `last_sync`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np

from jaxcomp._base.checks import check_axis_name, check_function, check_int, check_number
from jaxcomp._base.typing import Array, Axes, AxisName, Schedule
from jaxcomp._mesh.collectives import axis_tuple

# A number of steps, a schedule that returns it, or a number for each level of a hierarchy.
SyncEvery: TypeAlias = int | Schedule | Mapping[AxisName, int]


class Level(NamedTuple):
    """Describes a level of a hierarchy: the axes to average over, the steps between averages."""

    axes: Axes
    period: int


class Periods(NamedTuple):
    """Finds the level that is averaged after an update, numbered from 1; 0 is no level."""

    levels: tuple[Level, ...]  # the widest last; with a schedule, one level whose period is unused
    schedule: Schedule | None
    start_step: int
    offset: int

    def due(self, count: Any, last_sync: Any) -> Array:
        """Returns the widest level that is due after an update, in the integer dtype of `count`.

        Args:
          count: The number of the update, from 1; without a schedule also an array of numbers, of
            JAX or NumPy.
          last_sync: The number of the last update that ended with an average. Read only with a
            schedule.
        """
        numpy = count.__array_namespace__()
        level = numpy.zeros_like(count)
        if self.schedule is not None:
            # The round's length is fixed when it begins. Schedules give floats: 7.9999 means 8.
            length = check_number("sync_every", self.schedule(last_sync), 0)
            length = jnp.maximum(jnp.round(length), 1)
            level = (count - last_sync >= length.astype(jnp.int32)).astype(jnp.int32)
        else:
            for number, (_, period) in enumerate(self.levels, start=1):
                # Wider levels come later and replace narrower ones that are due too.
                level = numpy.where((count - self.offset) % period == 0, number, level)
        return numpy.where(count > self.start_step, level, 0)

    def between(self, begin: int, end: int) -> list[int]:
        """Returns the level after each of the updates numbered ``begin + 1`` to ``end``."""
        if self.schedule is None:
            # All at once, because fixed periods do not look at the last average; in NumPy, because
            # JAX would compile `due` again for every number of updates.
            return self.due(np.arange(begin + 1, end + 1), None).tolist()
        levels: list[int] = []
        last_sync = jnp.int32(self.start_step)
        for count in range(begin + 1, end + 1):
            levels.append(int(self.due(jnp.int32(count), last_sync)))
            if levels[-1]:
                last_sync = jnp.int32(count)
        return levels


def check_periods(
    sync_every: SyncEvery, axis_name: AxisName, start_step: Any, offset: Any
) -> Periods:
    """Checks the arguments of `local_sgd` that determine when to average."""
    check_axis_name(axis_name)
    start_step = check_int("start_step", start_step, 0)
    axes = axis_tuple(axis_name)
    if callable(sync_every):
        check_function("sync_every", sync_every, "count")
        if offset is not None:
            raise ValueError(
                "`offset` needs a fixed period, and sync_every is a schedule, whose first round "
                "begins at start_step. Leave offset out."
            )
        return Periods((Level(axes, 1),), sync_every, start_step, start_step)
    if offset is None:
        offset = start_step
    offset = check_int("offset", offset, 0)
    if isinstance(sync_every, Mapping):
        levels = _check_hierarchy(sync_every, axis_name)
    else:
        levels = (Level(axes, check_int("sync_every", sync_every, 1)),)
    return Periods(levels, None, start_step, offset)


def check_known(argument: str, axes: AxisName, axis_name: AxisName) -> Axes:
    """Returns `axes` as a tuple; refuses axes that are not in `axis_name`."""
    check_axis_name(axes)
    for name in axis_tuple(axes):
        if name not in axis_tuple(axis_name):
            raise ValueError(
                f"`{argument}` names the axis {name!r}, which is not in axis_name={axis_name!r}. "
                "Name it there, or correct it."
            )
    return axis_tuple(axes)


def _check_hierarchy(sync_every: Mapping[AxisName, int], axis_name: AxisName) -> tuple[Level, ...]:
    """Returns the levels of a hierarchy, the narrowest first; refuses levels that do not nest."""
    levels = []
    for key, period in sync_every.items():
        axes = check_known("sync_every", key, axis_name)
        levels.append(Level(axes, check_int(f"sync_every[{key!r}]", period, 1)))
    # With equal periods the wider level comes later and wins.
    levels.sort(key=lambda level: (level.period, len(level.axes)))
    everywhere = set(axis_tuple(axis_name))
    fits = bool(levels) and set(levels[-1].axes) == everywhere
    for narrow, wide in itertools.pairwise(levels):
        within = set(narrow.axes) <= set(wide.axes)
        fits &= within and wide.period % narrow.period == 0
    if not fits:
        raise ValueError(
            f"`sync_every` is {dict(sync_every)!r}. Each level must have the axes of the level "
            "before and more, and a multiple of its period; the last level must have all axes of "
            f"axis_name={axis_name!r}. Otherwise some replicas would never synchronise."
        )
    return tuple(levels)
