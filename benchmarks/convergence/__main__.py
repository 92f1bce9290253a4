"""Measures the language model's held-out loss against steps and bytes, for every strategy.

    python -m benchmarks.convergence                                # the missing runs, the report
    python -m benchmarks.convergence --only 'powersgd*' --seeds 1   # some strategies
    python -m benchmarks.convergence --report                       # only table and picture

Every finished run is appended to OUT.jsonl and not repeated: you can stop the command and start it
again at any time. The replicas are simulated on one device (`jax.vmap`), which computes the same as
a cluster. Bytes are counted, not measured: they are the payload that each replica passes to the
collectives in the whole run (`Reducer.bytes`).
"""

from __future__ import annotations

import argparse
import fnmatch
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.arguments import add_fields, call, command_line, read_fields
from benchmarks.common.paths import RESULTS
from benchmarks.common.runs import read_runs
from benchmarks.convergence.report import write_report
from benchmarks.convergence.runs import Runs
from benchmarks.convergence.strategies import STRATEGIES, by_name
from benchmarks.convergence.training import Config

OUT = RESULTS / "convergence"


def parser() -> argparse.ArgumentParser:
    """Makes the command line."""
    lines = [__doc__, "strategies:"]
    for name, strategy in STRATEGIES.items():
        lines.append(f"  {name:28} {strategy.label}")
    p = command_line("benchmarks.convergence", "\n".join(lines))
    p.add_argument("--only", nargs="+", default=["*"], help="strategies, with * and ?")
    p.add_argument("--seeds", type=int, default=3, help="seeds 0, 1, ... of each")
    p.add_argument("--out", type=Path, default=OUT, help="path of the files, without a suffix")
    p.add_argument("--report", action="store_true", help="only the table and the picture")
    add_fields(p, Config())
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    p = parser()
    options = p.parse_args(arguments)
    chosen: dict[str, None] = {}
    for pattern in options.only:
        names = fnmatch.filter(STRATEGIES, pattern)
        if not names:
            p.error(f"no strategy is called {pattern!r}; --help lists them")
        chosen |= dict.fromkeys(names)
    path = options.out.with_suffix(".jsonl")
    try:
        config = read_fields(options, Config())
        if not options.report:
            runs = Runs(path, config, by_name, "benchmarks.convergence")
            for name in chosen:
                for seed in range(options.seeds):
                    runs.loss(STRATEGIES[name], seed)
        for written in write_report(read_runs(path), config, options.out):
            print(written)
    except ValueError as error:
        p.error(str(error))
    return 0


if __name__ == "__main__":
    call(main)
