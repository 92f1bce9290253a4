"""Held-out loss of the language model against steps and bytes, for every way to send gradients.

    python -m benchmarks.convergence                                  # what is missing; the report
    python -m benchmarks.convergence --only 'powersgd*' --seeds 1     # some of them
    python -m benchmarks.convergence --report                         # the table and picture anew

Every finished run is appended to OUT.jsonl and not made again: stop the command whenever you like
and start it again. The replicas are simulated on one device (`jax.vmap`), which computes what a
cluster would; bytes are counted, not measured: the payload that each replica hands to the
collectives in the whole run (`Reducer.bytes`).
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from benchmarks.common.arguments import call, command_line
from benchmarks.common.paths import RESULTS
from benchmarks.common.runs import read_runs
from benchmarks.convergence.report import write_report
from benchmarks.convergence.runs import Runs
from benchmarks.convergence.strategies import STRATEGIES, by_name
from benchmarks.convergence.training import Config

OUT = RESULTS / "convergence"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    known = "".join(f"  {name:28} {s.label}\n" for name, s in STRATEGIES.items())
    p = command_line("benchmarks.convergence", f"{__doc__}\nstrategies:\n{known}")
    shown = " (default: %(default)s)"
    p.add_argument("--only", nargs="+", metavar="PATTERN", help="strategies, with * and ?")
    p.add_argument("--seeds", type=int, default=3, help="seeds 0, 1, ... of each" + shown)
    p.add_argument("--out", type=Path, default=OUT, help="path of the files, without a suffix")
    p.add_argument("--report", action="store_true", help="only the table and the picture")
    group = p.add_argument_group("setting (runs with another one do not count in a report)")
    for field in fields(Config):
        name = "--" + field.name.replace("_", "-")
        group.add_argument(name, type=type(field.default), default=field.default, help=shown[1:])
    return p


def chosen_strategies(patterns: Sequence[str] | None) -> list[str]:
    """Names that match a pattern, in the order of the patterns; all without patterns.

    Raises:
      ValueError: A pattern matches nothing.
    """
    chosen: dict[str, None] = {}
    for pattern in patterns or ["*"]:
        found = fnmatch.filter(STRATEGIES, pattern)
        if not found:
            raise ValueError(f"no strategy is called {pattern!r}; --help lists them")
        chosen |= dict.fromkeys(found)
    return list(chosen)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    args = parser().parse_args(arguments)
    config = Config(**{field.name: getattr(args, field.name) for field in fields(Config)})
    try:
        names = chosen_strategies(args.only)
        config.check()
    except ValueError as error:
        print(f"convergence: error: {error}", file=sys.stderr)
        return 2
    path = args.out.with_suffix(".jsonl")
    if not args.report:
        runs = Runs(path, config, by_name, "benchmarks.convergence")
        for name in names:
            for seed in range(args.seeds):
                runs.loss(STRATEGIES[name], seed)
    try:
        for written in write_report(read_runs(path), asdict(config), args.out):
            print(written)
    except ValueError as error:
        print(f"convergence: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    call(main)
