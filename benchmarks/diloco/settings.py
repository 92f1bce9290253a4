"""What a run of the study is made of, and in which order its settings are searched."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import optax

import jaxcomp
from benchmarks.convergence.optimizers import optimizer
from benchmarks.convergence.training import AXIS, Config

INNER = ("adamw", "muon")


@dataclass(frozen=True)
class Setting:
    """A run; the defaults are DiLoCo as its paper has it.

    Attributes:
      inner: Of `INNER`.
      rate: Adam's highest learning rate; Muon's is ten times as high.
      every: Local steps in a round; 1 is data parallel, and all below is without meaning.
      outer_rate: Learning rate of the outer Nesterov momentum.
      outer_momentum: That momentum; with 0 and a rate of 1 the parameters are averaged.
      average_inner: Whether the inner optimizer's moments are averaged too.
      start: Share of the steps that come first and are data parallel.
      int8: Whether 8-bit integers are sent instead of float32.
    """

    inner: str
    rate: float = 2e-3
    every: int = 30
    outer_rate: float = 0.7
    outer_momentum: float = 0.9
    average_inner: bool = False
    start: float = 0.0
    int8: bool = False

    @property
    def local(self) -> bool:
        """Whether replicas differ between averages."""
        return self.every > 1

    def build(self, config: Config) -> Any:
        """The transformation, from local gradients to updates."""
        inner = optimizer(self.inner, config.steps, self.rate)
        if not self.local:
            return optax.chain(self._reducer() or jaxcomp.allreduce(axis_name=AXIS), inner)
        averaged = self.outer_rate == 1 and not self.outer_momentum
        outer = optax.sgd(self.outer_rate, momentum=self.outer_momentum or None, nesterov=True)
        return jaxcomp.local_sgd(
            inner,
            sync_every=self.every,
            axis_name=AXIS,
            reducer=self._reducer(),
            outer=None if averaged else outer,
            average_inner_state=self.average_inner,
            start_step=round(self.start * config.steps),
        )

    def _reducer(self) -> Any:
        if not self.int8:
            return None
        return jaxcomp.error_feedback(jaxcomp.quantized_allreduce(axis_name=AXIS))

    def bytes_sent(self, config: Config) -> list[int]:
        """By each replica, in each step."""
        if not self.local:
            reducer = self._reducer() or jaxcomp.allreduce(axis_name=AXIS)
            sent = reducer.bytes(config.params(), replicas=config.replicas).bytes_after
            return [sent] * config.steps
        # Every round is like the first, and so is every step before them.
        count = functools.partial(
            self.build(config).bytes, config.params(), replicas=config.replicas
        )
        first = round(self.start * config.steps)
        before = count(step=0).bytes_after if first else 0
        met = count(step=first + self.every - 1).bytes_after
        rounds = range(first, config.steps)
        return [before] * first + [met * ((s + 1 - first) % self.every == 0) for s in rounds]

    def label(self) -> str:
        """It in a few words."""
        wire = ", int8" * self.int8
        if not self.local:
            return f"data parallel, rate {self.rate:g}{wire}"
        if self.outer_rate == 1 and not self.outer_momentum:
            outer = "average"
        else:
            outer = f"outer {self.outer_rate:g} / {self.outer_momentum:g}"
        moments = ", moments too" * self.average_inner
        start = f", after {self.start:.0%} data parallel" if self.start else ""
        return f"H={self.every}, {outer}, rate {self.rate:g}{moments}{start}{wire}"


# A line changes some fields and leaves the others at the best so far; its own best is the next
# line's beginning.
_OUTER = [(1.0, 0.0), (0.7, 0.6), (1.0, 0.5), (0.7, 0.3)]
LINES: tuple[tuple[dict[str, Any], ...], ...] = (
    tuple({"outer_rate": rate, "outer_momentum": momentum} for rate, momentum in _OUTER),
    ({"start": 0.25}, {"start": 0.5}),
    ({"rate": 1e-3}, {"rate": 4e-3}),
    ({"average_inner": True},),
    ({"outer_momentum": 0.2}, {"outer_momentum": 0.4}),
)
RATES = (1e-3, 2e-3, 4e-3)  # of data parallel


def longer(config: Config) -> Config:
    """A run of four times the steps."""
    return replace(config, steps=4 * config.steps)


def in_longer(chosen: Setting) -> tuple[Setting, ...]:
    """What is tried in it: what was chosen, and with half of its start."""
    return chosen, replace(chosen, start=chosen.start / 2)


Loss = Callable[[Setting, int], float]  # of a setting and a seed: the final held-out loss


def parallel(inner: str, loss: Loss) -> Setting:
    """Data parallel at its best rate, on seed 0."""
    return _best((Setting(inner, rate, every=1) for rate in RATES), loss)


def search(inner: str, loss: Loss) -> Iterator[tuple[Setting, Setting]]:
    """The best after each line, on seed 0, and the one before; begins with the paper's.

    Yields:
      (before, after).
    """
    best = Setting(inner, parallel(inner, loss).rate)
    for line in LINES:
        before = best
        best = _best([best, *(replace(best, **change) for change in line)], loss)
        yield before, best


def _best(settings: Iterable[Setting], loss: Loss) -> Setting:
    return min(dict.fromkeys(settings), key=lambda setting: loss(setting, 0))
