"""Predicts time, kernels and memory of an update on H200s, on a machine without a GPU.

    python -m benchmarks.gpu_program
    python -m benchmarks.gpu_program --trees mlp --ranks 4 --devices 1

It compiles one update of each reducer without autotuning, and reads the optimised program. From the
bytes and the operations of each kernel it predicts the time on one card
(`benchmarks.gpu_program.model`; the error of the prediction is below the table). It also counts
collectives and temporary memory, as a multiple of the gradients, and the seconds to compile. For a
conditional it counts the branch of ordinary steps, and a loop's body as often as it runs. It runs
no program.

It needs an environment of its own, 5 GB: pip install "jax[cuda13]" optax. It prints the table, and
writes gpu_program.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jaxcomp
from benchmarks.common.arguments import at_least, call, command_line, listed, one_of
from benchmarks.common.machine import describe
from benchmarks.common.paths import RESULTS
from benchmarks.common.runs import Run
from benchmarks.common.tables import markdown
from benchmarks.gpu_program.kernels import kernels
from benchmarks.gpu_program.model import ERROR, microseconds
from benchmarks.gpu_program.target import AXIS, NEEDED, compiler_found, mesh_of, placed
from benchmarks.overhead.trees import TREES

OUT = RESULTS / "gpu_program.json"
_HEADER = (
    "tree", "reducer", "predicted, ms", "launches", "words per value", "products, Gflop",
    "collectives", "temporary / gradients", "seconds to compile",
)  # fmt: skip

_COUNTED = ("predicted_ms", "launches", "collectives", "words", "plain_flops", "split_flops")

REDUCERS: dict[str, Callable[[int], Any]] = {
    "allreduce": lambda rank: jaxcomp.allreduce(axis_name=AXIS),
    "int8 all-reduce": lambda rank: jaxcomp.quantized_allreduce(axis_name=AXIS),
    "powersgd": lambda rank: jaxcomp.powersgd(rank, axis_name=AXIS, start_step=0),
    "powersgd, int6": lambda rank: jaxcomp.powersgd(
        rank, axis_name=AXIS, start_step=0, comm_dtype="int6"
    ),
}


def compiled(tree: str, reducer: str, rank: int, devices: int) -> Run:
    """Compiles one update with donated gradients and state, and reads the program."""
    grads = {name: jax.ShapeDtypeStruct(x, jnp.float32) for name, x in TREES[tree]().items()}
    values = sum(x.size for x in grads.values())
    tx = REDUCERS[reducer](rank)
    mesh = mesh_of(devices)
    state = jax.eval_shape(tx.init, grads)
    specs = jaxcomp.state_specs(state, AXIS)
    step = jax.shard_map(
        # A mean in the place of every replica's gradient, as an optimizer would use it there.
        lambda g, s: jaxcomp.as_local(tx.update(g, s), AXIS),
        mesh=mesh,
        in_specs=(jax.P(AXIS), specs),
        out_specs=(jax.P(AXIS), specs),
        check_vma=False,
    )
    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(
        placed(grads, jax.P(AXIS), mesh), placed(state, specs, mesh)
    )
    start = time.perf_counter()
    program: Any = lowered.compile()
    row: Run = {"tree": tree, "reducer": reducer, "devices": devices}
    row["compile_seconds"] = time.perf_counter() - start
    if "powersgd" in reducer:
        row["reducer"] = f"{reducer}, rank {rank}"
    memory = program.memory_analysis().temp_size_in_bytes
    row["temporary"] = memory / 4 / values
    return row | counted(program.as_text(), values)


def counted(text: str, values: int) -> Run:
    """Counts the kernels, bytes and time of an ordinary step of an optimised program."""
    total: Run = dict.fromkeys(_COUNTED, 0)
    for kernel in kernels(text):
        if not kernel.in_branch:
            total["predicted_ms"] += microseconds(kernel) / 1e3
            total["collectives" if kernel.kind == "collective" else "launches"] += 1
            total["words"] += kernel.bytes / 4 / values
            total["plain_flops"] += kernel.plain_flops
            total["split_flops"] += kernel.split_flops
    return total


def table(cases: list[Run]) -> str:
    """Returns a Markdown table with a row for each program."""
    rows = []
    for case in cases:
        row = [
            case["tree"],
            case["reducer"],
            f"{case['predicted_ms']:.1f}",
            f"{case['launches']:,}",
            f"{case['words']:.1f}",
            f"{(case['plain_flops'] + case['split_flops']) / 1e9:,.0f}",
            str(case["collectives"]),
            f"{case['temporary']:.2f}",
            f"{case['compile_seconds']:.0f}",
        ]
        rows.append(row)
    return markdown(_HEADER, rows, left=2)


def parser() -> argparse.ArgumentParser:
    """Makes the command line."""
    p = command_line("benchmarks.gpu_program", __doc__)
    trees = listed(one_of(TREES))
    p.add_argument("--trees", type=trees, default="mlp,gpt2-small", help=", ".join(TREES))
    reducers = listed(one_of(REDUCERS), ";")
    shown = ";".join(REDUCERS)
    p.add_argument("--reducers", type=reducers, default=shown, help="separated by semicolons")
    p.add_argument("--ranks", type=listed(at_least(int, 1)), default="4,32")
    p.add_argument("--devices", type=int, default=8, help="H200s to compile for")
    p.add_argument("--out", type=Path, default=OUT)
    return p


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    arguments = parser().parse_args(argv)
    if not compiler_found():
        print(f"gpu_program: {NEEDED}", file=sys.stderr)
        return 1
    cases = []
    for tree in arguments.trees:
        for reducer in arguments.reducers:
            ranks = arguments.ranks if "powersgd" in reducer else arguments.ranks[:1]
            for rank in ranks:
                cases.append(compiled(tree, reducer, rank, arguments.devices))
    run = describe("benchmarks.gpu_program", ["jax", "jaxlib"])
    run["cases"] = cases
    arguments.out.write_text(json.dumps(run, indent=1) + "\n")
    print(table(cases))
    print(f"\n{ERROR}")
    return 0


if __name__ == "__main__":
    call(main)
