"""What XLA makes of an update for a GPU, read on a machine that has none.

    python -m benchmarks.gpu_program
    python -m benchmarks.gpu_program --trees gpt2-small --ranks 4,32 --reducers powersgd

Compiles one update of every reducer for eight GPUs and counts, in the optimised program: kernels;
words that they move for every gradient value, beside the floor below which no program goes; memory
beside the donated gradients and state, as a multiple of the gradients; library calls; collectives
with dtype and bytes; seconds to compile, by the clock and of the processor. Where a GPU is at hand
it is timed too, on that GPU: the update as `benchmarks.overhead` does, torch's hook, and the time
to move seven words for every value.

Installs nothing. It needs an environment of its own, 5.6 GB: pip install "jax[cuda12]" optax.

Writes gpu_program-h200.json and gpu_program-h200.md, or -a100. `--report` needs no compiler.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.common.arguments import at_least, command_line, listed, one_of, positive_int
from benchmarks.common.machine import describe
from benchmarks.common.paths import RESULTS, ROOT
from benchmarks.common.tables import write_page
from benchmarks.gpu_program.report import paged, results, table
from benchmarks.gpu_program.target import NEEDED, TARGETS, compiler_found
from benchmarks.gpu_program.timing import gpu_found, times
from benchmarks.gpu_program.worker import RANKLESS, REDUCERS
from benchmarks.overhead.trees import TREES

PAGE = ROOT / "docs" / "gpu.md"


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The arguments, checked."""
    parser = command_line("benchmarks.gpu_program", __doc__)
    shown = " (default: %(default)s)"
    add = parser.add_argument
    add("--trees", default="mlp,resnet50,gpt2-small", help=f"of {', '.join(TREES)}" + shown)
    add("--reducers", default=";".join(REDUCERS), help="separated by semicolons" + shown)
    add("--ranks", default="1,2,4,32,128", help=shown.strip())
    add("--target", choices=TARGETS, default="h200", help=shown.strip())
    add("--devices", type=int, default=8, metavar="N", help=shown.strip())
    add("--map", choices=("shard_map", "pmap"), default="shard_map", help=shown.strip())
    add("--limit", type=float, default=1800, metavar="S", help="seconds for a program" + shown)
    add("--tag", default="", help="what the names of the files end with, such as -pmap")
    add("--keep", action="store_true", help="keep the file's other programs, and say so in it")
    add("--report", action="store_true", help="only write the tables of docs/gpu.md anew")
    add("--out", type=Path, default=RESULTS, help="folder for the results" + shown)
    given = parser.parse_args(argv)
    try:
        given.trees = listed("--trees", given.trees, one_of("--trees", TREES))
        known = one_of("--reducers", REDUCERS)
        given.reducers = tuple(known(name.strip()) for name in given.reducers.split(";"))
        given.ranks = listed("--ranks", given.ranks, positive_int("--ranks"))
        at_least("--devices", given.devices, 2)
    except ValueError as error:
        parser.error(str(error))
    return given


def jobs(given: argparse.Namespace) -> list[dict[str, Any]]:
    """A program for every tree, reducer and, where it has one, rank."""
    return [
        {"tree": tree, "reducer": reducer, "rank": rank}
        for tree in given.trees
        for reducer in given.reducers
        for rank in (given.ranks[:1] if reducer in RANKLESS else given.ranks)
    ]


def kept(earlier: dict[str, Any], again: list[dict[str, Any]]) -> dict[str, Any]:
    """The programs of an earlier run that are not compiled again, and how they were made."""
    made = {"command": earlier["command"], "date": earlier["date"]}
    gone = set(map(_place, again))
    cases = [case for case in earlier["cases"] if _place(case) not in gone]
    return {"earlier": [*earlier.get("earlier", []), made], "cases": cases}


def _place(job: dict[str, Any]) -> tuple[int, ...]:
    """Where a program stands in a table; that of a reducer without ranks has one place."""
    tree, reducer = list(TREES).index(job["tree"]), list(REDUCERS).index(job["reducer"])
    return tree, reducer, 0 if job["reducer"] in RANKLESS else job["rank"]


def compiled(job: dict[str, Any], limit: float) -> dict[str, Any]:
    """What a process of its own counts, or under ``error`` why it could not."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.gpu_program.worker"],
            cwd=ROOT,
            input=json.dumps(job),
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not compiled after {limit:.0f} s"}
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return {"error": lines[-1] if lines else f"ended with {done.returncode}"}
    return json.loads(done.stdout.splitlines()[-1])


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    given = parse(argv)
    if given.report:
        found = results(given.out)
        return write_page("gpu_program", PAGE, lambda page: paged(page, found))
    if not compiler_found():
        print(f"gpu_program: {NEEDED}", file=sys.stderr)
        return 1
    run = describe("benchmarks.gpu_program", ["jax", "jaxlib"])
    run |= {"settings": {k: str(v) for k, v in vars(given).items()}, "cases": []}
    given.out.mkdir(parents=True, exist_ok=True)
    stem = given.out / f"gpu_program-{given.target}{given.tag}"
    if given.keep and Path(f"{stem}.json").exists():
        run |= kept(json.loads(Path(f"{stem}.json").read_text()), jobs(given))
    timed = times(given.trees, given.ranks, given.reducers) if gpu_found() else {}
    for job in jobs(given):
        target = {"target": given.target, "devices": given.devices, "map": given.map}
        case = job | compiled(job | target, given.limit) | timed.get(tuple(job.values()), {})
        print(json.dumps(case), file=sys.stderr)
        run["cases"] = sorted([*run["cases"], case], key=_place)
        Path(f"{stem}.json").write_text(json.dumps(run, indent=1) + "\n")
    text = table(run)
    Path(f"{stem}.md").write_text(text)
    print(text)
    return 1 if any("error" in case for case in run["cases"]) else 0


if __name__ == "__main__":
    sys.exit(main())
