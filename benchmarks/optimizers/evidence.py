"""The tables that `jaxcomp.recommend` reads, written from the finished runs."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import asdict
from statistics import mean, stdev
from typing import Any

import jaxcomp
from benchmarks.cluster.plan import parse_strategy
from benchmarks.common.paths import RESULTS, ROOT
from benchmarks.common.printed import with_printed
from benchmarks.common.runs import read_runs
from benchmarks.common.tables import write_page
from benchmarks.convergence.runs import Result, results
from benchmarks.convergence.training import AXIS, Config
from benchmarks.optimizers.report import best
from benchmarks.optimizers.settings import GRID, WIDE, Grid, Setting, longer, wider
from benchmarks.time_to_loss import report as over_links
from benchmarks.time_to_loss.task import Config as OverLinks

MODULE = ROOT / "jaxcomp" / "_adviser" / "evidence.py"
PAGE = ROOT / "docs" / "choosing.md"
COMMAND = "python -m benchmarks.optimizers --evidence"
CONVERGENCE = RESULTS / "convergence.jsonl"  # has the int8 all-reduce, with AdamW
TIME_TO_LOSS = RESULTS / "time_to_loss.jsonl"  # has the wider model with AdamW
_INT8, _EXACT = "int8", "allreduce"  # strategies there
_PLACE = re.compile(rf"(?<=^# {re.escape(COMMAND)}\n).*?(?=^# end$)", re.DOTALL | re.MULTILINE)


def with_tables(
    module: str,
    runs: Sequence[dict[str, Any]],
    convergence: Sequence[dict[str, Any]],
    links: Sequence[dict[str, Any]],
    config: Config,
) -> str:
    """The module with the tables of these runs.

    Args:
      module: Its text.
      runs: Of this study.
      convergence: Of `benchmarks.convergence`.
      links: Of `benchmarks.time_to_loss`.
      config: Of the runs that are interpolated; those of four times the steps, and of four times
        the width, stand beside them.

    Raises:
      ValueError: No compressed runs follow a finished search, or the module has no place for
        the tables.
    """
    exact, rows = _measured(runs, config)
    if not exact:
        raise ValueError("no compressed runs after a search; run python -m benchmarks.optimizers.")
    if len(_PLACE.findall(module)) != 1:
        raise ValueError(f"{MODULE.name} has no single place for the tables.")
    wide = [*_wide(runs, config), *_over_links(links, config)]
    tuned = "".join(f'    "{name}": "{said}",\n' for name, said in exact.items())
    text = (
        f"{_study(config)}\n"
        f"EXACT: dict[str, str] = {{\n{tuned}}}\n"
        f"INT8 = {_call(_int8(convergence, config))}\n"
        "MEASURED: Sequence[Measured] = [\n"
        + "".join(f"    {_call(row)},\n" for row in rows)
        + "]\n"
        f"WIDTH = {wider(config).width}\n"
        f"WIDE_REPLICAS = {wider(config).replicas}\n"
        "WIDE: Sequence[Measured] = [\n" + "".join(f"    {_call(row)},\n" for row in wide) + "]\n"
    )
    return _PLACE.sub(lambda _: text, module)


def write(runs: Sequence[dict[str, Any]], config: Config) -> int:
    """The module and the page anew; the exit code of a command that did so."""
    program = "benchmarks.optimizers"
    others = read_runs(CONVERGENCE), read_runs(TIME_TO_LOSS)
    return write_page(
        program, MODULE, lambda module: with_tables(module, runs, *others, config)
    ) or write_page(program, PAGE, with_printed)


def _study(config: Config) -> str:
    stats = jaxcomp.powersgd(1, axis_name=AXIS).bytes(config.params())
    left = sum(leaf.bytes_before for leaf in stats.leaves if not leaf.compressed)
    fields = {
        "parameters": sum(leaf.size for leaf in stats.leaves),
        "uncompressed": round(left / stats.bytes_before, 6),
        "width": config.width,
        "context": config.context,
        "batch_size": config.batch_size,
        "replicas": config.replicas,
        "steps": config.steps,
    }
    return "STUDY = Study(\n" + "".join(f"    {k}={v},\n" for k, v in fields.items()) + ")"


def _measured(
    runs: Sequence[dict[str, Any]], config: Config
) -> tuple[dict[str, str], list[tuple[Any, ...]]]:
    """How each optimizer was set, and a row for each uniform rank behind it, by optimizer."""
    own, long = (
        results([run for run in runs if run["config"] == asdict(c)], Setting)
        for c in (config, longer(config))
    )
    exact, rows = dict[str, str](), list[tuple[Any, ...]]()
    for name, setting in _searched(own, GRID).items():
        found = [
            *_rows(setting, own, config.steps),
            *_rows(setting, long, longer(config).steps),
        ]
        if found:
            momentum = "" if setting.momentum is None else f" and momentum {setting.momentum:g}"
            exact[name] = f"rate {setting.rate:g}{momentum}"
            rows += found
    return exact, rows


def _wide(runs: Sequence[dict[str, Any]], config: Config) -> list[tuple[Any, ...]]:
    """The rows of the wider model, which has a search of its own."""
    found = results([run for run in runs if run["config"] == asdict(wider(config))], Setting)
    searched = _searched(found, WIDE).values()
    return [row for setting in searched for row in _rows(setting, found, config.steps)]


def _searched(found: dict[Setting, Result], grid: Grid) -> dict[str, Setting]:
    """The best exact setting of each optimizer whose search is finished."""
    chosen = dict[str, Setting]()
    for name in grid:
        with contextlib.suppress(KeyError):  # not searched to its end
            chosen[name] = best(name, lambda setting, seed: found[setting].losses[seed], grid)
    return chosen


def _over_links(runs: Sequence[dict[str, Any]], config: Config) -> list[tuple[Any, ...]]:
    """The rows of AdamW in the wider model, of strategies with more than one seed.

    Its rate was not searched for: it is the same with and without compression.
    """
    setting, alike = OverLinks(), wider(config)
    if (setting.width, setting.processes) != (alike.width, alike.replicas):
        raise ValueError("time_to_loss and the wider model differ in their width or replicas.")
    found = over_links.results([run for run in runs if run["config"] == asdict(setting)])
    rows = list[tuple[Any, ...]]()
    for name, own in found.items():
        framework, _, strategy = name.partition("/")
        plan = parse_strategy(strategy)
        if (framework, plan.kind) == ("jax", "powersgd") and len(own.losses) > 1:
            exact = found[over_links.EXACT]
            ratio, above = exact.sent / own.sent, own.gaps(exact)
            wire = plan.comm_dtype or "float32"
            rows.append(_row("adamw", setting.steps, wire, plan.number, ratio, above, plan.every))
    return sorted(rows, key=lambda row: row[4])


def _rows(exact: Setting, found: dict[Setting, Result], steps: int) -> list[tuple[Any, ...]]:
    rows = []
    for setting, own in found.items():
        tuned_alike = (setting.optimizer, setting.rate, setting.momentum) == (
            exact.optimizer,
            exact.rate,
            exact.momentum,
        )
        above = own.gaps(found[exact]) if tuned_alike and exact in found else []
        if setting.rank and not setting.ratio and above:
            ratio = found[exact].sent / own.sent
            rows.append(_row(exact.optimizer, steps, setting.wire, setting.rank, ratio, above))
    return sorted(rows, key=lambda row: (row[2], row[4]))


def _row(
    optimizer: str,
    steps: int,
    wire: str,
    rank: int,
    ratio: float,
    above: Sequence[float],
    every: int = 1,
) -> tuple[Any, ...]:
    """The fields of a `Measured`, gaps in shares and no longer in per cent."""
    gap = round(mean(above) / 100, 4)
    spread = round(stdev(above) / 100, 4) if len(above) > 1 else None
    fields = optimizer, steps, wire, rank, round(ratio, 2), gap, spread, len(above)
    return fields if every == 1 else (*fields, every)


def _int8(convergence: Sequence[dict[str, Any]], config: Config) -> tuple[Any, ...]:
    last = {
        (run["strategy"], run["seed"]): run["curve"][-1]
        for run in convergence
        if run["config"] == asdict(config) and run["strategy"] in (_INT8, _EXACT)
    }
    pairs = [(own, last.get((_EXACT, seed))) for (what, seed), own in last.items() if what == _INT8]
    above = [100 * (own[2] / exact[2] - 1) for own, exact in pairs if exact]
    ratios = [exact[1] / own[1] for own, exact in pairs if exact]
    if not above:
        raise ValueError(f"{CONVERGENCE.name} has no run of {_INT8} with {config.steps} steps.")
    return _row("adamw", config.steps, "int8 all-reduce", 0, ratios[0], above)


def _call(fields: Sequence[Any]) -> str:
    shown = (f'"{field}"' if isinstance(field, str) else repr(field) for field in fields)
    return f"Measured({', '.join(shown)})"
