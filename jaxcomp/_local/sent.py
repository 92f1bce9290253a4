"""What local SGD puts on the wire: in one step, and on average over a cycle of steps."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp._base.leaves import compute_dtype, leaf_dtype
from jaxcomp._base.stats import CompressionStats, LeafStats, dense_leaves
from jaxcomp._base.typing import PyTree
from jaxcomp._local.fragments import make_fragments
from jaxcomp._local.periods import Periods

# (part of the parameters, how many averages came before or None) -> what a reducer sends of it
Reduced = Callable[[PyTree, int | None], CompressionStats]


@dataclasses.dataclass(frozen=True)
class Sent:
    """The bytes of `local_sgd` and `local_sgd_round`."""

    periods: Periods
    reduced: Reduced | None  # None: parameters or pseudo-gradients are averaged exactly
    averages_inner: bool  # whether the inner state is averaged too
    inner_init: Callable[[PyTree], PyTree] | None = None
    shares_start: bool = False  # whether the parameters are averaged at the end of `start_step`

    def count_bytes(self, params: PyTree, step: int | None) -> CompressionStats:
        """The answer of ``bytes``."""
        if step is None:
            return self._over_a_cycle(params)
        start = self.periods.start_step
        if step < start:
            return self._before_start(params, step)
        events = self._events(start, step + 1)
        if not events[-1]:
            return _combined(params, [])
        nth = int((events[:-1] == events[-1]).sum())
        return _combined(params, [self.payload(params, int(events[-1]), nth)])

    def payload(self, params: PyTree, event: int, nth: int | None) -> CompressionStats:
        """What one average sends.

        Args:
          params: All parameters.
          event: Which average, as `Periods.due` numbers them.
          nth: How many of these came before; None for one after all exact ones.
        """
        levels, count = self.periods.levels, self.periods.fragments
        inner = exact_leaves(self._inner(params), "inner state ")
        if count == 1 and event < len(levels):  # a narrow level: a plain average
            return CompressionStats.of([*exact_leaves(params), *inner])
        split = make_fragments(params, self.periods.split)
        part = split.take(params, event - 1 if count > 1 else 0)
        if self.reduced is None:
            return CompressionStats.of([*exact_leaves(part), *inner])
        return CompressionStats.of([*self.reduced(part, nth).leaves, *inner])

    def _inner(self, params: PyTree) -> PyTree:
        if not (self.averages_inner and self.inner_init):
            return ()
        return jax.eval_shape(self.inner_init, params)

    def _over_a_cycle(self, params: PyTree) -> CompressionStats:
        if self.periods.schedule is not None:
            raise ValueError(
                "`sync_every` is a schedule, so there is no cycle of fixed length to average over. "
                "Pass `step`."
            )
        period = self.periods.levels[-1].period
        begin = max(self.periods.start_step, self.periods.offset)
        events = collections.Counter(self._events(begin, begin + period).tolist())
        payloads = [
            self.payload(params, event, None)
            for event, times in events.items()
            for _ in range(times if event else 0)
        ]
        return _combined(params, payloads).scaled(1 / period)

    def _before_start(self, params: PyTree, step: int) -> CompressionStats:
        """Shared steps: gradients are averaged, at the end the parameters too."""
        if self.reduced is None:
            parts = [CompressionStats.of(dense_leaves(params))]
        else:
            split, count = make_fragments(params, self.periods.split), self.periods.fragments
            parts = [self.reduced(split.take(params, k), step) for k in range(count)]
        if self.shares_start and step == self.periods.start_step - 1:
            parts.append(CompressionStats.of(exact_leaves(params)))
        return _combined(params, parts)

    def _events(self, begin: int, end: int) -> np.ndarray:
        """The average after each of the updates numbered ``begin + 1`` to ``end`` (from 1)."""
        if self.periods.schedule is None:
            due = self.periods.due(jnp.arange(begin + 1, end + 1), jnp.int32(0))
            return np.where(self.periods.sends(due), due, 0)
        events, last = [], self.periods.start_step
        for count in range(begin + 1, end + 1):
            events.append(int(self.periods.due(jnp.int32(count), jnp.int32(last))))
            last = count if events[-1] else last
        return np.asarray(events)


def exact_leaves(tree: PyTree, prefix: str = "") -> list[LeafStats]:
    """What `average` sends: float32, or the leaf's own dtype where that is wider."""
    wide = jax.tree.map(
        lambda x: (
            jax.ShapeDtypeStruct(np.shape(x), compute_dtype(leaf_dtype(x)))
            if jnp.issubdtype(leaf_dtype(x), jnp.floating)
            else x
        ),
        tree,
    )
    return [dataclasses.replace(leaf, path=prefix + leaf.path) for leaf in dense_leaves(wide)]


def _combined(params: PyTree, parts: Iterable[CompressionStats]) -> CompressionStats:
    """The sum of several payloads, beside an all-reduce of the gradients."""
    found = {leaf.path: dataclasses.replace(leaf, bytes_after=0) for leaf in dense_leaves(params)}
    for leaf in (leaf for part in parts for leaf in part.leaves):
        known = found.get(leaf.path, dataclasses.replace(leaf, bytes_before=0, bytes_after=0))
        after = known.bytes_after + leaf.bytes_after
        found[leaf.path] = dataclasses.replace(
            leaf, bytes_before=known.bytes_before, bytes_after=after
        )
    return CompressionStats.of(found.values())
