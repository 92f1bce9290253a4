"""Reads the tail of the momentum's spectrum in exact runs, after each sixteenth of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean

from benchmarks.common.paths import RESULTS
from benchmarks.common.runs import Run, read_runs
from benchmarks.convergence.runs import Runs
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
    if study.optimizer not in TAIL_LAWS or find(study, read_runs(path)):
        return
    trainer = runs.trainer(exact)
    carry = trainer.start(0)
    stride = study.config.steps // _READINGS
    tails: Run = {}
    for first in range(0, study.config.steps // 2, stride):
        carry = trainer.advance(carry, 0, first, first + stride)
        momentum = read_momentum(carry[1])
        tails[str(first + stride)] = by_rank = {}
        for setting in study.compressed(exact):
            if setting.rank:
                ranks = ranks_of(momentum.tree, setting.rank, setting.min_compression_rate, None)
                by_rank[str(setting.rank)] = round(momentum.tail(ranks), 4)
    row = {"setting": exact.stored, "seed": 0, "tails": tails}
    runs.append(path, row)
    for rank, tail in second_quarter(row, study.config.steps).items():
        gap = TAIL_LAWS[study.optimizer].gap(tail)
        print(f"{study.name}: rank {rank} has a tail of {tail:.3f}, which foretells {gap:+.1%}")


def find(study: Study, rows: Sequence[Run]) -> dict[int, float]:
    """Returns the tails of a study by rank, from all rows; none if they were not read."""
    config = asdict(study.config)
    # How often and on how much a run is evaluated changes nothing in its momentum.
    for name in ("eval_every", "eval_sequences"):
        del config[name]
    for row in rows:
        setting = row["setting"]
        searched = (setting["rate"], setting["momentum"]) in study.rates
        same = row["config"].items() >= config.items()
        if same and searched and setting["optimizer"] == study.optimizer:
            return second_quarter(row, study.config.steps)
    return {}


def second_quarter(row: Run, steps: int) -> dict[int, float]:
    """Returns the mean tail by rank, over the readings from a quarter of a run to a half."""
    several: dict[int, list[float]] = {}
    for step, tails in row["tails"].items():
        if steps // 4 <= int(step) <= steps // 2:
            for rank, tail in tails.items():
                several.setdefault(int(rank), []).append(tail)
    return {rank: mean(tails) for rank, tails in several.items()}
