"""Makes each run once, and stores it in a file of JSON lines."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import jax
import optax

import jaxcomp
from benchmarks.common.machine import describe
from benchmarks.common.runs import Run, append_run, read_runs
from benchmarks.convergence.training import Config, Trainer

PACKAGES = ("jax", "flax", "optax")
S = TypeVar("S")  # a setting


class Compared:
    """A strategy and an optimizer; compared and hashed by its fields.

    Attributes:
      label: The description.
      stored: The fields that a finished run stores.
      program: The key of its compiled program; equal for settings that share a program.
      local: Whether parameters differ between replicas; `reducer` then has the optimizer too.
      before: The setting of the first steps, if they differ in their rank.
      steps_before: The number of these steps.
    """

    label: Any
    stored: Any
    program: Any
    local = False
    before: Any = None
    steps_before = 0

    def reducer(self, config: Config) -> Any:
        """Makes the reducer."""
        raise NotImplementedError

    def behind(self, config: Config) -> optax.GradientTransformation:
        """Makes the optimizer."""
        raise NotImplementedError

    def build(self, config: Config) -> optax.GradientTransformation:
        """Makes the transformation, from local gradients to updates."""
        if self.local:
            return self.reducer(config)
        return optax.chain(self.reducer(config), self.behind(config))

    def bytes_sent(self, config: Config) -> int:
        """Returns the bytes that each replica sends in a whole run."""
        shapes = config.params()
        of_run = {"replicas": config.replicas, "steps": config.steps - self.steps_before}
        sent = self.reducer(config).bytes(shapes, **of_run).bytes_after
        if self.steps_before:
            of_run["steps"] = self.steps_before
            sent += self.before.reducer(config).bytes(shapes, **of_run).bytes_after
        return sent


@functools.cache
def early_momentum(config: Config, setting: Compared, steps: int) -> Any:
    """Returns the first moment after the first steps of a run with seed 7, for all seeds."""
    seed = 7
    trainer = Trainer(config, setting.build(config))
    _, state = trainer.advance(trainer.start(seed), seed, 0, max(1, steps))
    moments = [moment for _, moment in optax.tree.get_all_with_path(state, "mu")]
    # Of several optimizers each leaf has one, and is masked for the others.
    mapped = jax.tree.map(lambda *x: min(x, key=_is_masked), *moments, is_leaf=_is_masked)
    return jax.device_get(mapped)


def _is_masked(x: Any) -> bool:
    return isinstance(x, optax.MaskedNode)


class Runs:
    """Reads finished runs and makes new ones."""

    def __init__(self, path: Path, config: Config, made_of: Callable[..., Any], program: str):
        """Reads the finished runs.

        Args:
          path: The file of JSON lines.
          config: The common setting; runs with another one are ignored.
          made_of: A function from a run's stored fields to a `Compared`.
          program: The module that makes these runs.
        """
        self.config = config
        self._path = path
        self._program = program
        self._trainers: dict[Any, Trainer] = {}  # compiled, by program
        self._losses = {}
        for run in read_runs(path):
            if Config(**run["config"]) == config:
                self._losses[made_of(**run["setting"]), run["seed"]] = run["curve"][-1][1]

    def loss(self, setting: Any, seed: int) -> float:
        """Returns the final held-out loss of a `Compared`; trains it first if necessary."""
        if (setting, seed) not in self._losses:
            began = time.monotonic()
            curve = self._curve(setting, seed)
            run = {
                "setting": setting.stored,
                "seed": seed,
                "curve": curve,
                "bytes": setting.bytes_sent(self.config),
                "seconds": round(time.monotonic() - began, 1),
            }
            self.append(self._path, run)
            loss = self._losses[setting, seed] = curve[-1][1]
            print(f"{setting.label:66} {seed} {loss:.4f}", flush=True)
        return self._losses[setting, seed]

    def _curve(self, setting: Any, seed: int) -> list[tuple[int, float]]:
        """Trains with a setting, and before it with that of the first steps."""
        trainer = self.trainer(setting)
        first = setting.steps_before
        if not first:
            return trainer.run(seed)
        before = self.trainer(setting.before)
        params, state = before.advance(before.start(seed), seed, 0, first)
        state = jaxcomp.adapt_state(state, params, setting.reducer(self.config))
        return trainer.run(seed, trainer.place((params, state)), first)

    def trainer(self, setting: Any) -> Trainer:
        """Returns a compiled trainer for a `Compared`; reuses one with the same program."""
        tx = setting.build(self.config)
        if setting.program not in self._trainers:
            self._trainers[setting.program] = Trainer(self.config, tx, local=setting.local)
        trainer = self._trainers[setting.program]
        trainer.tx = tx
        return trainer

    def append(self, path: Path, run: Run) -> None:
        """Appends a finished run to a file, with the common setting and the machine."""
        about = describe(self._program, PACKAGES)
        append_run(path, run | {"config": asdict(self.config), "about": about})


@dataclass(frozen=True)
class Result:
    """The finished runs of one setting.

    Attributes:
      losses: The final held-out loss, in nats per byte, by seed.
      sent: The bytes that each replica sent in the whole run.
    """

    losses: dict[int, float]
    sent: int

    def gaps(self, exact: Result) -> list[float]:
        """Returns the gap to the exact run of the same seed, in per cent, by increasing seed."""
        shared = sorted(self.losses.keys() & exact.losses.keys())
        return [100 * (self.losses[seed] / exact.losses[seed] - 1) for seed in shared]


def results(runs: Sequence[Run], made_of: Callable[..., S]) -> dict[S, Result]:
    """Returns the finished runs by their setting, in the order in which they were made."""
    by_setting: dict[S, Result] = {}
    for run in runs:
        result = by_setting.setdefault(made_of(**run["setting"]), Result({}, run["bytes"]))
        result.losses[run["seed"]] = run["curve"][-1][1]
    return by_setting
