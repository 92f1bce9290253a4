"""The law of `jaxcomp.advise`, fitted to the committed runs and compared with others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from statistics import mean
from typing import NamedTuple

import numpy as np

from benchmarks.cluster.plan import parse_strategy
from benchmarks.common.tables import in_page, markdown, with_interval
from benchmarks.optimizers.report import Finished, made
from benchmarks.optimizers.settings import STUDIES, UNSEEN, Study
from benchmarks.time_to_loss import report as over_links
from benchmarks.time_to_loss.task import Config as OverLinks
from jaxcomp._bytes.gap import LAWS, Law

COMMAND = "python -m benchmarks.optimizers --law"
_STEPS = 480  # runs of fewer are not fitted: they lose less
_HEADER = ["not fitted", "seeds", "above exact", "the law", "its interval"]


class Gaps(NamedTuple):
    """How far above their exact runs some ended that are alike but for their seeds."""

    name: str
    width: int
    tokens: int  # in a step of all replicas
    rank: int
    percents: list[float]


def fitted(several: Sequence[Gaps]) -> Law:
    """The coefficients with the least squares.

    Args:
      several: Of several ranks and widths.
    """
    runs = [(*gaps[1:4], percent) for gaps in several for percent in gaps.percents]
    widths, tokens, ranks, percent = np.array(runs, float).T
    times = np.sqrt(tokens / 1024)
    columns = np.stack([times / ranks, -times / widths], 1)
    found = np.linalg.lstsq(columns, percent, rcond=None)[0]
    off = (percent - columns @ found) / times
    wide, many = ((int(some.min()), int(some.max())) for some in (widths, tokens))
    spread = float(np.sqrt(np.sum(off**2) / (len(runs) - 2)))
    return Law(len(runs), wide, many, float(found[0]), float(found[1] / found[0]), spread)


def laws(runs: Finished) -> dict[str, Law]:
    """By optimizer.

    Args:
      runs: Of `benchmarks.optimizers`.
    """
    return {name: fitted(_behind(name, runs)) for name in LAWS}


def _behind(optimizer: str, runs: Finished) -> list[Gaps]:
    behind = [study for study in STUDIES if study.optimizer == optimizer]
    return [gaps for s in behind if s.config.steps >= _STEPS for gaps in _gaps(s, runs)]


def _gaps(study: Study, runs: Finished) -> Iterator[Gaps]:
    """By rank; ranks by spectrum are left out."""
    found, config = made(study, runs), study.config
    tokens = config.replicas * config.batch_size * config.context
    for setting, result in found.items():
        if setting.rank:
            percents = result.gaps(next(iter(found.values())))
            yield Gaps(study.name, config.width, tokens, setting.rank, percents)


def _over_links(links: Finished) -> Iterator[Gaps]:
    """PowerSGD over links in the usual setting; of rounds, those of 3 and 4 steps."""
    usual = OverLinks()
    found = over_links.results([run for run in links if run["config"] == asdict(usual)])
    exact, batch = found[over_links.EXACT], usual.processes * usual.sequences * usual.context
    for name in sorted(found):
        strategy = parse_strategy(name.partition("/")[2])
        if strategy.kind == "powersgd" and strategy.every in (1, 3, 4) and not strategy.start:
            way = "torch's hook" if name.startswith("torch") else "int6"
            way = f"rounds of {strategy.every} steps" if strategy.in_rounds else way
            percents = found[name].gaps(exact)
            yield Gaps(f"over links, {way}", usual.width, batch, strategy.number, percents)


def compared(runs: Finished, links: Finished) -> str:
    """A table of runs that were not fitted, and what the law says of them."""
    law, rows = LAWS["adamw"], list[list[str]]()
    short = [study for study in STUDIES if study.config.steps < _STEPS]
    unseen = [gaps for study in (*UNSEEN, *short) for gaps in _gaps(study, runs)]
    for gaps in (*unseen, *_over_links(links)):
        at = gaps.rank, gaps.width, gaps.tokens
        gap, half = 100 * law.gap(*at), 100 * law.half_width(*at)
        inside = abs(mean(gaps.percents) - gap) <= half
        rows.append(
            [
                f"{gaps.name}, rank {gaps.rank}",
                str(len(gaps.percents)),
                with_interval(gaps.percents, "+.1f", "%"),
                f"+{gap:.1f}% ± {half:.1f}",
                "inside" if inside else "outside",
            ]
        )
    return markdown(_HEADER, rows)


def paged(page: str, runs: Finished, links: Finished) -> str:
    """Returns the page with the table of runs that were not fitted."""
    return in_page(page, COMMAND, f"{compared(runs, links)}\n")


def report(runs: Finished, links: Finished) -> str:
    """The coefficients as fitted now, and the comparison."""
    found = [f"{name}: {law}" for name, law in laws(runs).items()]
    return "\n".join([*found, "", compared(runs, links)])
