"""What compression costs by itself: compress, decompress and keep the residual, on one device.

    python -m benchmarks.overhead
    python -m benchmarks.overhead --trees gpt2-small --ranks 4 --steps 20
    python -m benchmarks.overhead --device gpu --ranks 4,32
    python -m benchmarks.overhead --growth

Times one update of `jaxcomp.powersgd` and one step of torch's `powerSGD_hook` with world size 1, on
gradients with the shapes of well-known models, in one run: nothing travels, so that all of it is
overhead. The floor beside them is the time to move 7 words for every gradient value at the copy
bandwidth of this device, measured in the same run: gradient and residual read and their sum
written, the sum read for each factor and once more for what is left of it, residual and output
written.

On a CPU everything runs on one core. Each framework gets a process of its own, the same settings of
the allocator, and overwrites the gradient with the output, as DDP's bucket does.

Writes overhead-cpu.json (every sample), overhead-cpu.md and overhead-cpu.png, or -gpu; with
`--growth`, of jaxcomp alone and all trees, growth-cpu.json, growth-cpu.md and growth-cpu.png.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common.arguments import at_least, call, command_line, listed, one_of
from benchmarks.common.machine import ALLOCATOR, ONE_THREAD, describe
from benchmarks.common.paths import RESULTS, ROOT
from benchmarks.overhead.report import plot, plot_growth, table
from benchmarks.overhead.trees import TREES, torch_layout


class WorkerFailed(RuntimeError):
    """A worker ended with an error."""


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Returns the arguments, checked."""
    parser = command_line("benchmarks.overhead", __doc__)
    shown = " (default: %(default)s)"
    add = parser.add_argument
    trees = f"of {', '.join(TREES)}"
    add("--trees", type=listed(one_of(TREES)), default="mlp,resnet50,gpt2-small", help=trees)
    add("--ranks", type=listed(at_least(int, 1)), default="1,4,32,128", help=shown[1:])
    add("--steps", type=at_least(int, 1), default=12, help="timed steps per case" + shown)
    add("--device", choices=["cpu", "gpu"], default="cpu", help=shown[1:])
    add("--core", type=int, default=0, metavar="N", help="the CPU core to run on" + shown)
    frameworks = listed(one_of(("jax", "torch")))
    add("--frameworks", type=frameworks, default="jax,torch", help=shown[1:])
    add("--out", type=Path, default=RESULTS, help="folder (default: benchmarks/results)")
    add("--growth", action="store_true", help="by default all trees at ranks 4 and 32, jax alone")
    add("--report", action="store_true", help="only write table and picture of a run anew")
    if parser.parse_known_args(argv)[0].growth:
        parser.set_defaults(trees=",".join(TREES), ranks="4,32", frameworks="jax")
    given = parser.parse_args(argv)
    if given.device == "cpu" and given.core not in os.sched_getaffinity(0):
        parser.error(f"there is no core {given.core} for this program; see `taskset -p $$`.")
    return given


def measure(given: argparse.Namespace, tree: str, framework: str) -> list[dict[str, Any]]:
    """Asks the worker of a framework about a tree.

    Raises:
      WorkerFailed: If it ends with an error; the worker has said on stderr what it was.
    """
    shapes = TREES[tree]()
    job = {
        "shapes": torch_layout(shapes) if framework == "torch" else shapes,
        "ranks": given.ranks,
        "steps": given.steps,
        "warmup": 12,  # until the allocator has what it needs and asks the system for no more
        "platform": given.device,
    }
    settings = {"JAX_PLATFORMS": "cuda"}
    if given.device == "cpu":
        settings = {"JAX_PLATFORMS": "cpu", **ALLOCATOR, **ONE_THREAD}
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.overhead.{framework}_worker"],
        cwd=ROOT,
        input=json.dumps(job),
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | settings,
        check=False,
    )
    if done.returncode:
        raise WorkerFailed(f"the worker for {framework} and {tree} ended with {done.returncode}.")
    return [json.loads(line) for line in done.stdout.splitlines()]


def cases_of(given: argparse.Namespace, tree: str) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Returns a case for every rank of a tree, and the versions that the workers found."""
    words = sum(math.prod(shape) for shape in TREES[tree]().values())
    cases = {rank: {"tree": tree, "words": words, "rank": rank} for rank in given.ranks}
    versions: dict[str, str] = {}
    for framework in given.frameworks:
        for message in measure(given, tree, framework):
            kind = message.pop("kind")
            if kind == "versions":
                versions |= message
                continue
            case = cases[message.pop("rank")]
            if kind == "copy":
                # A copy moves two words for every value, the floor seven.
                case["copy_seconds"] = message["seconds"]
                case["floor"] = 3.5 * statistics.median(message["seconds"])
            else:
                case[framework] = message | {"median": statistics.median(message["seconds"])}
    return list(cases.values()), versions


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    given = parse(argv)
    stem = given.out / f"overhead-{given.device}"
    draw = plot
    if given.growth:
        stem = given.out / f"growth-{given.device}"
        draw = plot_growth
    if given.report:
        report(json.loads(stem.with_suffix(".json").read_text()), stem, draw)
        return 0
    run = describe("benchmarks.overhead", ["numpy"])
    if given.device == "cpu":
        # The workers inherit both. Threads of one program that share a core wake each other; with
        # the default policy each such hand-over can cost a time slice.
        os.sched_setaffinity(0, {given.core})
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    run["settings"] = {name: str(value) for name, value in vars(given).items()}
    run["cases"] = []
    given.out.mkdir(parents=True, exist_ok=True)
    try:
        for tree in given.trees:
            print(f"{tree}:", file=sys.stderr)
            cases, versions = cases_of(given, tree)
            run["machine"]["versions"] |= versions
            run["cases"] += cases
            stem.with_suffix(".json").write_text(json.dumps(run, indent=1) + "\n")
    except WorkerFailed as error:
        print(f"overhead: {error}", file=sys.stderr)
        return 1
    report(run, stem, draw)
    return 0


def report(run: dict[str, Any], stem: Path, draw: Callable[[dict[str, Any], Path], None]) -> None:
    """Writes the table and the picture, and prints the table."""
    text = table(run)
    stem.with_suffix(".md").write_text(text)
    draw(run, stem.with_suffix(".png"))
    print(text)


if __name__ == "__main__":
    call(main)
