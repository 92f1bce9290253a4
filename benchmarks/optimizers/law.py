"""The law in width and tokens of `jaxcomp.advise`, fitted to the committed runs, and compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from statistics import mean

import numpy as np

from benchmarks.cluster.plan import parse_strategy
from benchmarks.common.tables import in_page, markdown, with_interval
from benchmarks.convergence import strategies
from benchmarks.convergence.runs import results
from benchmarks.optimizers.report import Finished, Gaps, gaps_of, logarithmic_error, made
from benchmarks.optimizers.settings import FIRST_STEPS, PREDICTED, STUDIES, UNSEEN
from benchmarks.time_to_loss import report as over_links
from benchmarks.time_to_loss.task import Config as OverLinks
from jaxcomp._bytes.gap import LAWS, Law

COMMAND = "python -m benchmarks.optimizers --law"
_STEPS = 480  # runs of fewer are not fitted: they lose less
_HEADER = ["not fitted", "seeds", "above exact", "the law", "its interval"]


def fitted(several: Sequence[Gaps]) -> Law:
    """Returns the coefficients with the least squares.

    Args:
      several: Of several ranks and widths.
    """
    rows = []
    for gaps in several:
        for percent in gaps.percents:
            rows.append((gaps.width, gaps.tokens, gaps.rank, percent))
    widths, tokens, ranks, percents = np.array(rows, float).T
    times = np.sqrt(tokens / 1024)
    columns = np.stack([times / ranks, -times / widths], axis=1)
    solution = np.linalg.lstsq(columns, percents, rcond=None)[0]
    off = (percents - columns @ solution) / times
    return Law(
        runs=len(rows),
        widths=(int(widths.min()), int(widths.max())),
        tokens=(int(tokens.min()), int(tokens.max())),
        a=float(solution[0]),
        k=float(solution[1] / solution[0]),
        spread=float(np.sqrt(np.sum(off**2) / (len(rows) - 2))),
        error=0.0,
    )


def laws(runs: Finished) -> dict[str, Law]:
    """Fits the law of each optimizer.

    Args:
      runs: Of `benchmarks.optimizers`.
    """
    by_optimizer = {}
    for optimizer in LAWS:
        several = []
        for study in STUDIES:
            if study.optimizer == optimizer and study.config.steps >= _STEPS:
                several += gaps_of(study, runs)
        by_optimizer[optimizer] = fitted(several)
    # Depth and context were changed behind AdamW alone.
    law = by_optimizer["adamw"]
    means = []
    expected = []
    for study in PREDICTED:
        for gaps in gaps_of(study, runs):
            means.append(mean(gaps.percents))
            expected.append(100 * law.gap(gaps.rank, gaps.width, gaps.tokens))
    error = logarithmic_error(means, expected)
    return {optimizer: replace(law, error=error) for optimizer, law in by_optimizer.items()}


def int8_gaps(runs: Finished, others: Finished) -> list[float]:
    """Returns how far above exact runs the int8 all-reduce ended, in per cent, for each run.

    Args:
      runs: Of `benchmarks.optimizers`.
      others: Of `benchmarks.convergence`.
    """
    by_strategy = results(others, strategies.by_name)
    int8 = by_strategy[strategies.STRATEGIES["int8"]]
    percents = int8.gaps(by_strategy[strategies.EXACT])
    by_setting = made(FIRST_STEPS, runs)
    for setting, result in by_setting.items():
        if setting.wire == "int8":
            percents += result.gaps(next(iter(by_setting.values())))
    return percents


def _over_links(links: Finished) -> Iterator[Gaps]:
    """Yields PowerSGD over links in the usual setting; of rounds, those of 3 and 4 steps."""
    usual = OverLinks()
    by_name = over_links.results([run for run in links if run["config"] == asdict(usual)])
    exact = by_name[over_links.EXACT]
    tokens = usual.processes * usual.sequences * usual.context
    for name in sorted(by_name):
        framework, _, text = name.partition("/")
        strategy = parse_strategy(text)
        every_few = strategy.every in (1, 3, 4) and not strategy.start
        if by_name[name].borrowed or strategy.kind != "powersgd" or not every_few:
            continue
        way = "int6"
        if framework == "torch":
            way = "torch's hook"
        elif strategy.in_rounds:
            way = f"rounds of {strategy.every} steps"
        percents = by_name[name].gaps(exact)
        yield Gaps(f"over links, {way}", usual.width, tokens, strategy.number, percents)


def compared(runs: Finished, links: Finished) -> str:
    """Returns a table of runs that were not fitted, and what the law says of them."""
    law = LAWS["adamw"]
    several = []
    for study in (*UNSEEN, *STUDIES):
        if study in UNSEEN or study.config.steps < _STEPS:
            several += gaps_of(study, runs)
    several += _over_links(links)
    rows = []
    for gaps in several:
        at = (gaps.rank, gaps.width, gaps.tokens)
        gap = 100 * law.gap(*at)
        half = 100 * law.half_width(*at)
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


def report(runs: Finished, links: Finished, others: Finished) -> str:
    """Returns the coefficients as fitted now, the int8 all-reduce, and the comparison."""
    lines = [f"{name}: {law}" for name, law in laws(runs).items()]
    lines.append(f"int8 all-reduce: {with_interval(int8_gaps(runs, others), '+.2f', '%')}")
    return "\n".join([*lines, "", compared(runs, links)])
