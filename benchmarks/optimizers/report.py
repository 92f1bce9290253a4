"""The study's table, and its place in docs/convergence.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from statistics import mean
from typing import Any, NamedTuple

import numpy as np

import jaxcomp
from benchmarks.common.paths import ROOT
from benchmarks.common.runs import made_on
from benchmarks.common.tables import in_page, markdown, with_interval
from benchmarks.convergence.runs import Result, results
from benchmarks.convergence.training import AXIS
from benchmarks.optimizers.settings import FIRST_STEPS, STUDIES, Setting, Study

PAGE = ROOT / "docs" / "convergence.md"
COMMAND = "python -m benchmarks.optimizers --report"
_HEADER = ["sent", "seeds", "above exact (95%)", "fewer bytes"]
# How the first steps travel, all without a loss that could be seen.
_FIRST = {
    "float32": jaxcomp.allreduce(axis_name=AXIS),
    "bfloat16": jaxcomp.allreduce(axis_name=AXIS, comm_dtype="bfloat16"),
    "int8": jaxcomp.quantized_allreduce(axis_name=AXIS),
}
Finished = Sequence[dict[str, Any]]  # runs of `benchmarks.optimizers`


def made(study: Study, runs: Finished) -> dict[Setting, Result]:
    """Returns the exact average at its best, then what is compressed; nothing while it is searched.

    Args:
      study: Whose.
      runs: Of `benchmarks.optimizers`.
    """
    by_setting = results(_of(study, runs), Setting)
    try:
        exact = study.exact(lambda setting, seed: by_setting[setting].losses[seed])
    except KeyError:
        return {}
    several = (exact, *study.compressed(exact))
    return {setting: by_setting[setting] for setting in several if setting in by_setting}


class Gaps(NamedTuple):
    """How far above their exact runs some ended that are alike but for their seeds."""

    name: str
    width: int
    tokens: int  # in a step of all replicas
    rank: int
    percents: list[float]


def gaps_of(study: Study, runs: Finished) -> Iterator[Gaps]:
    """Yields the ranks of a study that were run; ranks by spectrum are left out."""
    by_setting = made(study, runs)
    config = study.config
    tokens = config.replicas * config.batch_size * config.context
    for setting, result in by_setting.items():
        if setting.rank:
            percents = result.gaps(next(iter(by_setting.values())))
            yield Gaps(study.name, config.width, tokens, setting.rank, percents)


def logarithmic_error(percents: Sequence[float], expected: Sequence[float]) -> float:
    """Returns the root mean square of the differences of logarithms."""
    differences = np.log(percents) - np.log(expected)
    return float(np.sqrt(np.mean(differences**2)))


def paged(page: str, runs: Finished) -> str:
    """Returns the page with the table of all studies that are not the law's predictions.

    Raises:
      ValueError: No search has come to its end, or the page has no place for the table.
    """
    rows = []
    sources: list[dict[str, Any]] = []
    for study in STUDIES:
        rows += _rows(study, runs)
        sources += _of(study, runs)
    if not rows:
        raise ValueError("no search has come to its end; run python -m benchmarks.optimizers.")
    page = in_page(page, COMMAND, f"{markdown(_HEADER, rows)}\n\n{made_on(sources)}\n")
    return in_page(page, f"{COMMAND}, first steps", f"{first_steps(runs)}\n")


def _of(study: Study, runs: Finished) -> list[dict[str, Any]]:
    """Returns the finished runs of a study."""
    config = asdict(study.config)
    several = []
    for run in runs:
        if run["config"] == config and run["setting"]["optimizer"] == study.optimizer:
            several.append(run)
    return several


def _rows(study: Study, runs: Finished) -> Iterator[list[str]]:
    by_setting = made(study, runs)
    for setting, result in by_setting.items():
        exact = next(iter(by_setting.values()))
        label = setting.sent
        above = with_interval(result.gaps(exact), "+.1f", "%")
        if result is exact:
            label = f"**{setting.label}**"
            above = f"loss {mean(result.losses.values()):.3f}"
            if study.name:
                label += f", {study.name}"
        yield [label, str(len(result.losses)), above, f"{exact.sent / result.sent:.1f}x"]


def first_steps(runs: Finished) -> str:
    """Returns the table of runs whose first steps are exact, by how these would travel."""
    config = FIRST_STEPS.config
    first = {}
    for name, reducer in _FIRST.items():
        first[name] = reducer.bytes(config.params(), replicas=config.replicas).bytes_after
    several = made(FIRST_STEPS, runs)
    exact = next(iter(several.values()), None)
    rows = []
    for setting, result in several.items():
        if exact is None or result is exact:
            continue
        row = [setting.sent, str(len(result.losses))]
        row.append(with_interval(result.gaps(exact), "+.1f", "%"))
        for sent in first.values():
            whole = result.sent + setting.exact_steps * (sent - first["float32"])
            row.append(f"{exact.sent / whole:.1f}x")
        rows.append(row)
    header = ["sent", "seeds", "above exact (95%)"]
    for name in _FIRST:
        header.append(f"fewer bytes, first in {name}")
    about = made_on(_of(FIRST_STEPS, runs))
    return f"{markdown(header, rows)}\n\n{about}"
