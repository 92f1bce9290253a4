"""Runs that are made once: a file of JSON lines, and what is not in it yet."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from benchmarks.common.machine import describe
from benchmarks.common.runs import append_run, read_runs
from benchmarks.convergence.training import Config, Trainer

PACKAGES = ("jax", "flax", "optax")
S = TypeVar("S", bound=Hashable)  # a setting


class Runs(Generic[S]):
    """Finished runs, and new ones."""

    def __init__(self, path: Path, config: Config, made_of: Callable[..., S], program: str):
        """Reads what is there.

        Args:
          path: Of the JSON lines.
          config: What all runs have in common; those with another one do not count.
          made_of: From what a run says of its setting, as arguments, to the setting, which can be
            compared and hashed and has what `Setting` and `Strategy` have.
          program: The module whose runs these are.
        """
        self.path = path
        self.config = config
        self._program = program
        self._trainer: tuple[S, Trainer] | None = None  # the last one, compiled
        self._losses = {}
        for run in read_runs(path):
            if run["config"] == asdict(config):
                self._losses[made_of(**run["setting"]), run["seed"]] = run["curve"][-1][1]

    def loss(self, setting: S, seed: int) -> float:
        """Returns the final held-out loss, trained for if it is not there."""
        if (setting, seed) not in self._losses:
            self._losses[setting, seed] = self._train(setting, seed)
        return self._losses[setting, seed]

    def _train(self, setting: Any, seed: int) -> float:
        if self._trainer is None or self._trainer[0] != setting:
            trainer = Trainer(self.config, setting.build(self.config), local=setting.local)
            self._trainer = (setting, trainer)
        began = time.monotonic()
        curve = self._trainer[1].run(seed)
        run = {
            "setting": setting.stored,
            "seed": seed,
            "curve": curve,
            "bytes": setting.bytes_sent(self.config),
            "seconds": round(time.monotonic() - began, 1),
            "config": asdict(self.config),
            "about": describe(self._program, PACKAGES),
        }
        append_run(self.path, run)
        loss = curve[-1][1]
        print(f"{setting.label:66} {seed} {loss:.4f}", flush=True)
        return loss


@dataclass(frozen=True)
class Result:
    """The runs of a setting.

    Attributes:
      losses: Final held-out loss, nats per byte, by seed.
      sent: Bytes sent by each replica in the whole run.
    """

    losses: dict[int, float]
    sent: int

    def gaps(self, exact: Result) -> list[float]:
        """Returns how far above the exact run of the same seed, in per cent, for each seed."""
        shared = [seed for seed in self.losses if seed in exact.losses]
        return [100 * (self.losses[seed] / exact.losses[seed] - 1) for seed in shared]


def results(runs: Sequence[dict[str, Any]], made_of: Callable[..., S]) -> dict[S, Result]:
    """Returns the finished runs by their setting, in the order in which they were made."""
    by_setting: dict[S, Result] = {}
    for run in runs:
        result = by_setting.setdefault(made_of(**run["setting"]), Result({}, run["bytes"]))
        result.losses[run["seed"]] = run["curve"][-1][1]
    return by_setting
