"""Reads the tail of the momentum's spectrum in exact runs, after each eighth of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import optax

from benchmarks.common.paths import RESULTS
from benchmarks.common.runs import Run, read_runs
from benchmarks.convergence.runs import Runs
from benchmarks.convergence.training import Config
from benchmarks.optimizers.settings import Setting, Study
from jaxcomp._bytes.gap import TAIL_LAWS, Momentum, ranks_of, read_momentum, spectra_of
from jaxcomp._lowrank.matrices import plan_leaves

OUT = RESULTS / "tails.jsonl"
# Behind `Setting.kept`: other measures than the tail, for studies of single kinds of leaves.
OF_DECREASE = ", of the decrease"
BY_PARAMETERS = ", by parameters"
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
    if find(study, read_runs(path)).keys() >= {setting.kept for setting in in_six_bits}:
        return
    trainer = runs.trainer(exact)
    carry = trainer.start(0)
    stride = study.config.steps // _READINGS
    tails: Run = {}
    for first in range(0, study.config.steps // 2, stride):
        carry = trainer.advance(carry, 0, first, first + stride)
        # Only tails are read, so that any gap will do for an optimizer without a law of its own.
        momentum = read_momentum(carry[1], measured=(1, 1e-3))
        tails[str(first + stride)] = by_kept = {}
        for setting in in_six_bits:
            ranks = ranks_of(momentum.tree, setting.rank_of, setting.min_compression_rate, None)
            by_kept[setting.kept] = round(momentum.tail(ranks), 4)
            if study.by_kind:
                of_decrease = _of_decrease(carry[1], ranks)
                by_kept[f"{setting.kept}{OF_DECREASE}"] = round(of_decrease, 4)
                by_parameters = _by_parameters(momentum, ranks)
                by_kept[f"{setting.kept}{BY_PARAMETERS}"] = round(by_parameters, 4)
    row = {"setting": exact.stored, "seed": 0, "tails": tails}
    runs.append(path, row)
    law = TAIL_LAWS.get(study.optimizer, TAIL_LAWS["adamw"])
    for kept, tail in second_quarter(row, study.config.steps).items():
        if "," in kept:
            continue
        gap = law.gap(tail)
        print(f"{study.name}: rank {kept} has a tail of {tail:.3f}, which foretells {gap:+.1%}")


def _by_parameters(momentum: Momentum, ranks: Mapping[str, int]) -> float:
    """Returns the mean over leaves, by their parameters, of the share that ranks leave out."""
    sizes = _sizes(momentum.tree)
    left_out = 0.0
    for name, rank in ranks.items():
        energy = momentum.spectra[name]
        left_out += sizes[name] * energy[rank:].sum() / energy.sum()
    return float(left_out / sum(sizes[name] for name in momentum.spectra))


def _sizes(tree: Any) -> dict[str, int]:
    return {plan.path: plan.size for plan in plan_leaves(tree, 1, 0.0, None)}


def _of_decrease(opt_state: Any, ranks: Mapping[str, int]) -> float:
    """Returns the share of the loss's decrease, to first order, that ranks leave out behind Adam.

    A leaf lowers the loss by its squared momentum divided by the momentum's root mean square, as in
    `jaxcomp.ranks_by_spectrum`.
    """
    momentum = optax.tree.get(opt_state, "mu")
    sizes = _sizes(momentum)
    in_all = 0.0
    left_out = 0.0
    for name, energy in spectra_of(momentum, None).items():
        decrease = energy / np.sqrt(energy.sum() / sizes[name])
        in_all += decrease.sum()
        if name in ranks:
            left_out += decrease[ranks[name] :].sum()
    return float(left_out / in_all)


def find(study: Study, rows: Sequence[Run]) -> dict[str, float]:
    """Returns the tails of a study by `Setting.kept`, from the row with most of them; or none."""
    wanted = {Setting(study.optimizer, 0.0, **sent).kept for sent in study.sent}
    several: list[dict[str, float]] = [{}]
    # How often and on how much a run is evaluated changes nothing in its momentum.
    evaluated = {"eval_every": 1, "eval_sequences": 64}
    config = replace(study.config, **evaluated)
    for row in rows:
        setting = row["setting"]
        searched = (setting["rate"], setting["momentum"]) in study.rates
        same = replace(Config(**row["config"]), **evaluated) == config
        if same and searched and setting["optimizer"] == study.optimizer:
            several.append(second_quarter(row, study.config.steps))
    return max(several, key=lambda tails: len(tails.keys() & wanted))


def second_quarter(row: Run, steps: int) -> dict[str, float]:
    """Returns the mean tails over the readings from a quarter of a run to a half."""
    several: dict[str, list[float]] = {}
    for step, tails in row["tails"].items():
        if steps // 4 <= int(step) <= steps // 2:
            for kept, tail in tails.items():
                several.setdefault(kept, []).append(tail)
    return {kept: mean(tails) for kept, tails in several.items()}
