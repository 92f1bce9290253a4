"""Two settings that take a GPU: width 512 with 32,768 tokens a step, width 1,024 with 4,096.

Exact runs at three rates, then PowerSGD at three ranks with the best of them, one after the other
in one process. The rate is in the optimizer's state, so that one compiled step serves all three.
What the ranks are expected to cost is read off the exact run's momentum and written down before any
of them is run.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcomp
from benchmarks.common.machine import describe
from benchmarks.common.paths import RESULTS
from benchmarks.common.runs import append_run, read_runs
from benchmarks.convergence.optimizers import schedule
from benchmarks.convergence.runs import PACKAGES
from benchmarks.convergence.training import AXIS, Config, Trainer
from jaxcomp._bytes.gap import TAIL_LAWS

OUT = RESULTS / "scale.jsonl"
# What an H200 is taken to reach in products of float32 that run on its tensor cores, in operations
# a second: 30% of the 495 Tflop/s in its data sheet. Not measured.
_REACHED = 150e12
_COMPILATION = 30.0  # seconds for each program, not measured either
_READINGS = 8  # in a run, evenly spaced; those of its second quarter are read


class Large(NamedTuple):
    """A setting, the rates that are tried and the ranks that are predicted."""

    config: Config
    rates: tuple[float, ...]
    ranks: tuple[int, ...]

    @property
    def operations(self) -> float:
        """Operations of a run: six for each parameter and token."""
        config = self.config
        values = sum(leaf.size for leaf in jax.tree.leaves(config.params()))
        tokens = config.replicas * config.batch_size * config.context
        return 6.0 * values * tokens * config.steps


_ONCE = Config(layers=4, eval_every=480, eval_sequences=4096)
SETTINGS = (
    Large(replace(_ONCE, width=512, heads=8, batch_size=128), (1e-3, 2e-3, 4e-3), (64, 96, 128)),
    Large(replace(_ONCE, width=1024, heads=16, batch_size=16), (2.5e-4, 5e-4, 1e-3), (64, 96, 128)),
)


def small(large: Large) -> Large:
    """Returns the same program at a size for a CPU."""
    config = large.config
    tiny = replace(
        config,
        steps=8,
        eval_every=8,
        eval_sequences=64,
        width=config.width // 16,
        heads=2,
        layers=1,
        batch_size=max(1, config.batch_size // 64),
    )
    return Large(tiny, large.rates[:2], (2,))


def estimated_seconds() -> float:
    """Returns what all runs take on an H200, from their operations: an estimate."""
    seconds = 0.0
    for large in SETTINGS:
        runs = len(large.rates) + len(large.ranks)
        programs = 1 + len(large.ranks)
        seconds += runs * large.operations / _REACHED + programs * _COMPILATION
    return seconds


def run(program: str, *, dry: bool, out: Path = OUT) -> None:
    """Makes what is missing, and prints each row.

    Args:
      program: The module whose rows these are.
      dry: Whether to make it at a size for a CPU, and to keep nothing.
      out: Of the JSON lines.
    """
    print(f"On an H200 all runs are estimated to take {estimated_seconds() / 60:.0f} minutes.")
    for large in SETTINGS:
        rows = _Rows(out, program, keep=not dry)
        _run_one(small(large) if dry else large, rows)


class _Rows:
    """Finished runs and predictions, which are not made again."""

    def __init__(self, path: Path, program: str, *, keep: bool):
        """Reads what is there, unless nothing is kept."""
        self._path = path
        self._program = program
        self._keep = keep
        self.rows: list[dict[str, Any]] = read_runs(path) if keep else []

    def get(self, config: Config, rank: int, rate: float, field: str) -> dict[str, Any] | None:
        """Finds the row of a run that has a field; rank 0 is the exact average."""
        for row in self.rows:
            same = (row["config"], row["rank"], row["rate"]) == (asdict(config), rank, rate)
            if same and field in row:
                return row
        return None

    def add(self, config: Config, row: dict[str, Any]) -> dict[str, Any]:
        """Appends a row, and prints it."""
        print(row, flush=True)
        row["config"] = asdict(config)
        row["about"] = describe(self._program, PACKAGES)
        self.rows.append(row)
        if self._keep:
            append_run(self._path, row)
        return row


def _run_one(large: Large, rows: _Rows) -> None:
    config = large.config
    exact_trainer = Trainer(config, _transformation(config, 0), local=False)
    exact = []
    for rate in large.rates:
        row = rows.get(config, 0, rate, "loss")
        if row is None:
            row = rows.add(config, _trained(exact_trainer, large, 0, rate))
        exact.append(row)
    best = min(exact, key=lambda row: row["loss"])
    rate = best["rate"]
    for rank in large.ranks:
        if rows.get(config, rank, rate, "predicted") is None:
            predicted = TAIL_LAWS["adamw"].gap(best["tails"][str(rank)])
            rows.add(config, {"rank": rank, "rate": rate, "predicted": predicted})
    for rank in large.ranks:
        if rows.get(config, rank, rate, "loss") is None:
            trainer = Trainer(config, _transformation(config, rank), local=False)
            row = _trained(trainer, large, rank, rate)
            row["gap"] = row["loss"] / best["loss"] - 1
            rows.add(config, row)


def _transformation(config: Config, rank: int) -> optax.GradientTransformation:
    """AdamW as everywhere in these studies, but with the rate in its state."""
    if rank:
        reducer = jaxcomp.powersgd(rank, axis_name=AXIS, start_step=0, comm_dtype="int6")
    else:
        reducer = jaxcomp.allreduce(axis_name=AXIS)

    def scaled(rate: float) -> optax.GradientTransformation:
        return optax.scale(-rate)

    return optax.chain(
        reducer,
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(),
        optax.add_decayed_weights(0.01),
        optax.scale_by_schedule(schedule(config.steps, 1.0)),
        optax.inject_hyperparams(scaled)(rate=1.0),
    )


def _trained(trainer: Trainer, large: Large, rank: int, rate: float) -> dict[str, Any]:
    """Trains one run, and reads the tails of an exact one."""
    config = trainer.config
    params, state = trainer.start(0)
    state[-1].hyperparams["rate"] = jnp.float32(rate)
    carry = (params, state)
    stride = config.steps // _READINGS
    readings = []
    for first in range(0, config.steps, stride):
        carry = trainer.advance(carry, 0, first, first + stride)
        in_second_quarter = config.steps // 4 <= first + stride <= config.steps // 2
        if not rank and in_second_quarter:
            readings.append([jaxcomp.predict_gap(carry[1], r).tail for r in large.ranks])
    row = {"rank": rank, "rate": rate, "loss": trainer.held_out_loss(carry[0])}
    if not rank:
        tails = np.mean(readings, axis=0)
        row["tails"] = {str(r): float(tail) for r, tail in zip(large.ranks, tails, strict=True)}
    return row
