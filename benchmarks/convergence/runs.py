"""Runs that are made once: a file of JSON lines, and what is not in it yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from benchmarks.common.machine import describe
from benchmarks.common.runs import append_run, read_runs
from benchmarks.convergence.training import Config, Trainer

PACKAGES = ("jax", "flax", "optax")


class AnySetting(Protocol):
    """How a run is made; can be compared and hashed."""

    @property
    def local(self) -> bool:
        """Whether parameters differ between replicas."""
        ...

    @property
    def label(self) -> str:
        """It in a few words."""
        ...

    @property
    def stored(self) -> dict[str, Any]:
        """What a finished run says of it."""
        ...

    @property
    def build(self) -> Callable[[Config], Any]:
        """The transformation, from local gradients to updates."""
        ...

    @property
    def bytes_sent(self) -> Callable[[Config], list[int]]:
        """By each replica, in each step."""
        ...


S = TypeVar("S", bound=AnySetting)


class Runs(Generic[S]):
    """Finished runs, and new ones."""

    def __init__(self, path: Path, config: Config, made_of: Callable[..., S], program: str):
        """Reads what is there.

        Args:
          path: Of the JSON lines.
          config: What all runs have in common; those with another one do not count.
          made_of: From what a run says of its setting, as arguments, to the setting.
          program: The module whose runs these are.
        """
        self.path, self.config, self._program = path, config, program
        self._trainer: tuple[S, Trainer] | None = None  # the last one, compiled
        self._losses = {
            (made_of(**run["setting"]), run["seed"]): run["curve"][-1][1]
            for run in read_runs(path)
            if run["config"] == asdict(config)
        }

    def loss(self, setting: S, seed: int) -> float:
        """The final held-out loss, trained for if it is not there."""
        key = setting, seed
        if key not in self._losses:
            self._losses[key] = self._train(setting, seed)
        return self._losses[key]

    def _train(self, setting: S, seed: int) -> float:
        if self._trainer is None or self._trainer[0] != setting:
            tx = setting.build(self.config)
            self._trainer = setting, Trainer(self.config, tx, local=setting.local)
        done = self._trainer[1].run(seed)
        run = {
            "setting": setting.stored,
            "seed": seed,
            "curve": done.curve,
            "bytes": sum(setting.bytes_sent(self.config)),
            "seconds": round(done.seconds, 1),
            "config": asdict(self.config),
            "about": describe(self._program, PACKAGES),
        }
        append_run(self.path, run)
        final = done.curve[-1][1]
        print(f"{setting.label:66} {seed} {final:.4f}", flush=True)
        return final


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
        """How far above the exact run of the same seed, in per cent, for each seed."""
        both = (seed for seed in self.losses if seed in exact.losses)
        return [100 * (self.losses[seed] / exact.losses[seed] - 1) for seed in both]


def results(runs: Sequence[dict[str, Any]], made_of: Callable[..., S]) -> dict[S, Result]:
    """The finished runs by their setting, in the order in which they were made."""
    found: dict[S, Result] = {}
    for run in runs:
        result = found.setdefault(made_of(**run["setting"]), Result({}, run["bytes"]))
        result.losses[run["seed"]] = run["curve"][-1][1]
    return found
