"""Kernels and collectives of an update as XLA compiles it for a GPU, on a machine that has none.

    python -m benchmarks.gpu_program
    python -m benchmarks.gpu_program --trees mlp --ranks 4

Compiles one update of each reducer for eight H200s, without autotuning, and counts in the optimised
program: kernels, collectives, memory beside gradients and state as a multiple of the gradients, and
seconds to compile. Of a conditional the branch with more kernels counts, a loop's body as often as
it runs. No program is run.

Needs an environment of its own, 5.6 GB: pip install "jax[cuda12]" optax. Prints the table that is
in docs/compatibility.md, and writes gpu_program.json.
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
from benchmarks.common.arguments import call, command_line, listed, one_of, positive_int
from benchmarks.common.machine import describe
from benchmarks.common.paths import RESULTS
from benchmarks.common.tables import markdown
from benchmarks.gpu_program.target import AXIS, NEEDED, compiler_found, mesh_of, placed
from benchmarks.overhead.trees import TREES
from jaxcomp._wire.program import Instruction, Program, read_program

OUT = RESULTS / "gpu_program.json"
_DEVICES = 8
# Names for a part of the memory, which cost nothing.
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier",
    "partition-id", "replica-id",
}  # fmt: skip
_HEADER = ("tree", "reducer", "kernels", "collectives", "temporary memory", "seconds to compile")

REDUCERS: dict[str, Callable[[int], Any]] = {
    "allreduce": lambda rank: jaxcomp.allreduce(axis_name=AXIS),
    "int8 all-reduce": lambda rank: jaxcomp.quantized_allreduce(axis_name=AXIS),
    "powersgd": lambda rank: jaxcomp.powersgd(rank, axis_name=AXIS, start_step=0),
    "powersgd, int6": lambda rank: jaxcomp.powersgd(
        rank, axis_name=AXIS, start_step=0, comm_dtype="int6"
    ),
}


def count(program: Program, computation: int | None = None) -> tuple[int, int]:
    """Counts kernels and collectives of a computation with all that it calls; by default of all."""
    kernels = collectives = 0
    computation = program.entry if computation is None else computation
    for x in program.computations[computation].instructions.values():
        if x.opcode in _FREE or x.opcode.endswith("-done"):
            continue
        if x.kind is not None:
            collectives += 1
        elif x.opcode in ("while", "conditional", "call", "async-start"):
            more = _called(program, x)
            kernels, collectives = kernels + more[0], collectives + more[1]
        else:
            kernels += 1
    return kernels, collectives


def _called(program: Program, x: Instruction) -> tuple[int, int]:
    """Counts what an instruction runs: a loop's body as often as it does, the largest branch."""
    counted = [count(program, computation) for computation in x.called]
    if x.opcode == "while":
        return x.times * sum(k for k, _ in counted), x.times * sum(c for _, c in counted)
    return max(counted)


def compiled(tree: str, reducer: str, rank: int) -> dict[str, Any]:
    """What is counted of one update; gradients and state are donated."""
    grads = {name: jax.ShapeDtypeStruct(x, jnp.float32) for name, x in TREES[tree]().items()}
    tx, mesh = REDUCERS[reducer](rank), mesh_of("h200", _DEVICES)
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
    began = time.perf_counter()
    program: Any = lowered.compile()
    seconds = time.perf_counter() - began
    kernels, collectives = count(read_program(program))
    memory = program.memory_analysis().temp_size_in_bytes
    return {
        "tree": tree,
        "reducer": reducer if "powersgd" not in reducer else f"{reducer}, rank {rank}",
        "kernels": kernels,
        "collectives": collectives,
        "temporary": memory / 4 / sum(x.size for x in grads.values()),
        "compile_seconds": seconds,
    }


def table(cases: list[dict[str, Any]]) -> str:
    """Markdown, a row for each program."""
    rows = [
        [
            case["tree"],
            case["reducer"],
            f"{case['kernels']:,}",
            str(case["collectives"]),
            f"{case['temporary']:.2f}",
            f"{case['compile_seconds']:.0f}",
        ]
        for case in cases
    ]
    return markdown(_HEADER, rows, left=2)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The arguments, checked."""
    parser = command_line("benchmarks.gpu_program", __doc__)
    parser.add_argument("--trees", default="mlp,gpt2-small", help=", ".join(TREES))
    parser.add_argument("--ranks", default="4,32")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args(argv)
    try:
        given.trees = listed("--trees", given.trees, one_of("--trees", TREES))
        given.ranks = listed("--ranks", given.ranks, positive_int("--ranks"))
    except ValueError as error:
        parser.error(str(error))
    return given


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    given = parse_arguments(argv)
    if not compiler_found():
        print(f"gpu_program: {NEEDED}", file=sys.stderr)
        return 1
    cases = [
        compiled(tree, reducer, rank)
        for tree in given.trees
        for reducer in REDUCERS
        for rank in (given.ranks if "powersgd" in reducer else given.ranks[:1])
    ]
    run = {**describe("benchmarks.gpu_program", ["jax", "jaxlib"]), "cases": cases}
    given.out.write_text(json.dumps(run, indent=1) + "\n")
    print(table(cases))
    return 0


if __name__ == "__main__":
    call(main)
