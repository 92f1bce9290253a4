"""Reads the tail of the momentum's spectrum in exact runs, after each sixteenth of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean

from benchmarks.common.paths import RESULTS
from benchmarks.common.runs import Run, read_runs
from benchmarks.convergence.runs import Runs
from benchmarks.convergence.training import Config
from benchmarks.optimizers.settings import Setting, Study
from jaxcomp._bytes.gap import TAIL_LAWS, ranks_of, read_momentum

OUT = RESULTS / "tails.jsonl"
_READINGS = 8  # in a run, evenly spaced; those of its first half are made


def measure(runs: Runs, study: Study, exact: Setting, path: Path = OUT) -> None:
    """Makes the first half of an exact run, seed 0, and appends its tails unless they are stored.

    Args:
      runs: The runs of the study.
      study: The study with the ranks.
      exact: The study's exact average.
      path: The file of JSON lines.
    """
    in_six_bits = [each for each in study.compressed(exact) if each.rank and each.wire == "int6"]
    if find(study, read_runs(path)).keys() >= {setting.rank for setting in in_six_bits}:
        return
    trainer = runs.trainer(exact)
    carry = trainer.start(0)
    stride = study.config.steps // _READINGS
    tails: Run = {}
    for first in range(0, study.config.steps // 2, stride):
        carry = trainer.advance(carry, 0, first, first + stride)
        # Only tails are read, so that any gap will do for an optimizer without a law of its own.
        momentum = read_momentum(carry[1], measured=(1, 1e-3))
        tails[str(first + stride)] = by_rank = {}
        for setting in in_six_bits:
            ranks = ranks_of(momentum.tree, setting.rank, setting.min_compression_rate, None)
            by_rank[str(setting.rank)] = round(momentum.tail(ranks), 4)
    row = {"setting": exact.stored, "seed": 0, "tails": tails}
    runs.append(path, row)
    law = TAIL_LAWS.get(study.optimizer, TAIL_LAWS["adamw"])
    for rank, tail in second_quarter(row, study.config.steps).items():
        gap = law.gap(tail)
        print(f"{study.name}: rank {rank} has a tail of {tail:.3f}, which foretells {gap:+.1%}")


def find(study: Study, rows: Sequence[Run]) -> dict[int, float]:
    """Returns the tails of a study by rank, from the row with most of its ranks; or none."""
    ranks = {sent.get("rank") for sent in study.sent}
    several: list[dict[int, float]] = [{}]
    # How often and on how much a run is evaluated changes nothing in its momentum.
    evaluated = {"eval_every": 1, "eval_sequences": 64}
    config = replace(study.config, **evaluated)
    for row in rows:
        setting = row["setting"]
        searched = (setting["rate"], setting["momentum"]) in study.rates
        same = replace(Config(**row["config"]), **evaluated) == config
        if same and searched and setting["optimizer"] == study.optimizer:
            several.append(second_quarter(row, study.config.steps))
    return max(several, key=lambda tails: len(tails.keys() & ranks))


def second_quarter(row: Run, steps: int) -> dict[int, float]:
    """Returns the mean tail by rank, over the readings from a quarter of a run to a half."""
    several: dict[int, list[float]] = {}
    for step, tails in row["tails"].items():
        if steps // 4 <= int(step) <= steps // 2:
            for rank, tail in tails.items():
                several.setdefault(int(rank), []).append(tail)
    return {rank: mean(tails) for rank, tails in several.items()}
