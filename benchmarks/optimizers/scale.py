"""Two settings that take a GPU: width 512 with 32,768 tokens a step, width 1,024 with 4,096.

Exact runs at three rates, then PowerSGD at three ranks with the best of them, one after the other
in one process. The rate is in the optimizer's state, so that one compiled step serves all three.
What the ranks are expected to cost is read off the exact run's momentum and written down before any
of them is run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    rows = [] if dry else read_runs(out)
    for large in SETTINGS:
        for row in _missing(small(large) if dry else large, rows):
            row["about"] = describe(program, PACKAGES)
            rows.append(row)
            print(row, flush=True)
            if not dry:
                append_run(out, row)


def _missing(large: Large, rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields runs and predictions that are not among the rows, to which each is added meanwhile."""
    config = asdict(large.config)

    def made(rank: int, rate: float, field: str) -> dict[str, Any] | None:
        key = {"config": config, "rank": rank, "rate": rate}
        alike = [row for row in rows if row.items() >= key.items() and field in row]
        return alike[0] if alike else None

    trainer = Trainer(large.config, _transformation(large.config, 0), local=False)
    exact = []
    for rate in large.rates:
        row = made(0, rate, "loss")
        if row is None:
            row = _trained(trainer, large, 0, rate)
            yield row
        exact.append(row)
    best = min(exact, key=lambda row: row["loss"])
    rate = best["rate"]
    for rank in large.ranks:
        if made(rank, rate, "predicted") is None:
            predicted = TAIL_LAWS["adamw"].gap(best["tails"][str(rank)])
            yield {"rank": rank, "rate": rate, "predicted": predicted, "config": config}
    for rank in large.ranks:
        if made(rank, rate, "loss") is None:
            trainer = Trainer(large.config, _transformation(large.config, rank), local=False)
            row = _trained(trainer, large, rank, rate)
            row["gap"] = row["loss"] / best["loss"] - 1
            yield row


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
    row: dict[str, Any] = {"rank": rank, "rate": rate, "config": asdict(config)}
    row["loss"] = trainer.held_out_loss(carry[0])
    if not rank:
        tails = np.mean(readings, axis=0).tolist()
        row["tails"] = dict(zip(map(str, large.ranks), tails, strict=True))
    return row
