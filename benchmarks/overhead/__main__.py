"""Measures the time to compress, decompress and keep the residual, on one core.

    python -m benchmarks.overhead
    python -m benchmarks.overhead --trees gpt2-small --ranks 4 --steps 20
    python -m benchmarks.overhead --growth

In one run it times an update of `jaxcomp.powersgd` and a step of torch's `powerSGD_hook` with world
size 1, on gradients with the shapes of well-known models. Nothing is sent, so all of the time is
overhead. It compares with a floor: the time to move 7 words for every gradient value, at this
machine's copy bandwidth in the same run. That is: gradient and residual are read, and their sum is
written; the sum is read for each factor and once more for the rest; residual and output are
written. On a GPU use `benchmarks.card`.

Each framework runs in its own process with the same settings of the allocator, and overwrites the
gradient with the output, as DDP's bucket does.

It writes overhead-cpu.json (every sample), overhead-cpu.md and overhead-cpu.png. With `--growth` it
measures jaxcomp alone on all trees, and writes growth-cpu.json, growth-cpu.md and growth-cpu.png.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from benchmarks.common.arguments import at_least, call, command_line, listed, one_of
from benchmarks.common.machine import ALLOCATOR, ONE_THREAD, describe
from benchmarks.common.paths import RESULTS
from benchmarks.common.runs import Run
from benchmarks.common.worker import run_worker
from benchmarks.overhead.report import plot, plot_growth, table
from benchmarks.overhead.trees import TREES, size, torch_layout


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Returns the arguments, checked."""
    parser = command_line("benchmarks.overhead", __doc__)
    add = parser.add_argument
    trees = f"of {', '.join(TREES)}"
    add("--trees", type=listed(one_of(TREES)), default="mlp,resnet50,gpt2-small", help=trees)
    add("--ranks", type=listed(at_least(int, 1)), default="1,4,32,128", help="ranks for each tree")
    add("--steps", type=at_least(int, 1), default=12, help="timed steps per case")
    add("--alone", action="store_true", help="without torch")
    add("--out", type=Path, default=RESULTS, help="folder for the results")
    add(
        "--growth",
        action="store_true",
        help="all trees, ranks 4 and 32, alone, by default",
    )
    add("--report", action="store_true", help="only write table and picture again")
    if parser.parse_known_args(argv)[0].growth:
        parser.set_defaults(trees=",".join(TREES), ranks="4,32", alone=True)
    return parser.parse_args(argv)


def rows_of(options: argparse.Namespace, tree: str) -> Iterator[tuple[str, Run]]:
    """Yields the rows of each framework's worker.

    Raises:
      SystemExit: If a worker fails, with the end of its error output.
    """
    shapes = TREES[tree]()
    job = {"ranks": options.ranks, "steps": options.steps, "device": "cpu"}
    job["warmup"] = 12  # until the allocator has what it needs and asks the system for no more
    settings = {"JAX_PLATFORMS": "cpu", **ALLOCATOR, **ONE_THREAD}
    job["shapes"] = shapes
    for framework in ("jax", "torch"):
        if framework == "torch":
            if options.alone:
                return
            job["shapes"] = torch_layout(shapes)
        result = run_worker([f"benchmarks.overhead.{framework}_worker"], job, settings)
        if result["code"]:
            sys.exit(f"overhead: {framework} on {tree} ended badly.\n{result['errors']}")
        for row in result["rows"]:
            yield framework, row


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    options = parse(argv)
    draw = plot
    stem = options.out / "overhead-cpu"
    if options.growth:
        draw = plot_growth
        stem = options.out / "growth-cpu"
    written = stem.with_suffix(".json")
    if options.report:
        run = json.loads(written.read_text())
    else:
        run = describe("benchmarks.overhead", ["numpy"])
        # The workers inherit both. Threads of one program that share a core wake each other; with
        # the default policy each such hand-over can cost a time slice.
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        run["settings"] = {name: str(value) for name, value in vars(options).items()}
        run["cases"] = []
        options.out.mkdir(parents=True, exist_ok=True)
        for tree in options.trees:
            measure(options, tree, run)
            written.write_text(json.dumps(run, indent=1) + "\n")
    text = table(run)
    stem.with_suffix(".md").write_text(text)
    draw(run, stem.with_suffix(".png"))
    print(text)
    return 0


def measure(options: argparse.Namespace, tree: str, run: Run) -> None:
    """Adds a case for every rank of a tree, and the versions in the workers."""
    words = size(TREES[tree]())
    cases: dict[int, Run] = {}
    for rank in options.ranks:
        cases[rank] = {"tree": tree, "words": words, "rank": rank}
        run["cases"].append(cases[rank])
    for framework, row in rows_of(options, tree):
        kind = row.pop("kind")
        if kind == "versions":
            run["machine"]["versions"] |= row
            continue
        rank = row.pop("rank")
        middle = median(row["seconds"])
        if kind == "copy":
            # A copy moves two words for every value, the floor seven.
            cases[rank] |= {"copy_seconds": row["seconds"], "floor": 3.5 * middle}
        else:
            cases[rank][framework] = row | {"median": middle}
            print(f"{tree}, {framework}, rank {rank}: {1e3 * middle:.1f} ms", file=sys.stderr)


if __name__ == "__main__":
    call(main)
