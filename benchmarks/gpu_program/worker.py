"""Compiles one update and prints what it counts as one JSON line; a child of `gpu_program`.

Reads the job as JSON from standard input: tree, reducer, rank, target, devices, map.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp

import jaxcomp
from benchmarks.gpu_program.count import count
from benchmarks.gpu_program.hlo import parse
from benchmarks.gpu_program.target import AXIS, mesh_of, placed
from benchmarks.overhead.trees import TREES


def _powersgd(**options: Any) -> Callable[[int], jaxcomp.Reducer]:
    options = {"start_step": 0} | options
    return lambda rank: jaxcomp.powersgd(rank, axis_name=AXIS, **options)


# From a rank to a reducer.
REDUCERS: dict[str, Callable[[int], jaxcomp.Reducer]] = {
    "powersgd": _powersgd(),
    "powersgd, bfloat16": _powersgd(comm_dtype=jnp.bfloat16),
    "powersgd, int8": _powersgd(comm_dtype=jnp.int8),
    "powersgd, eps=1e-8": _powersgd(eps=1e-8),  # Gram-Schmidt as torch's, up to rank 2
    "powersgd, alternating": _powersgd(alternating=True),
    "powersgd, start_step=1000": _powersgd(start_step=1000),
    "powersgd, gpu_kernels": _powersgd(gpu_kernels=True),
    "powersgd, gpu_kernels, bfloat16": _powersgd(gpu_kernels=True, comm_dtype=jnp.bfloat16),
    "powersgd, gpu_kernels, int8": _powersgd(gpu_kernels=True, comm_dtype=jnp.int8),
    "batched_powersgd": lambda rank: jaxcomp.batched_powersgd(rank, axis_name=AXIS, start_step=0),
    "allreduce": lambda rank: jaxcomp.allreduce(axis_name=AXIS),
    "allreduce, bfloat16": lambda rank: jaxcomp.allreduce(axis_name=AXIS, comm_dtype=jnp.bfloat16),
    "quantized_allreduce": lambda rank: jaxcomp.quantized_allreduce(axis_name=AXIS),
}
RANKLESS = ("allreduce", "allreduce, bfloat16", "quantized_allreduce")


def lowered(tx: jaxcomp.Reducer, shapes: Any, mesh: jax.sharding.Mesh, pmap: bool = False) -> Any:
    """An update with the gradients and the state donated, as a training step would use it."""
    grads = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    state = jax.eval_shape(tx.init, grads)
    if pmap:
        devices = list(mesh.devices.flat)
        many = [
            jax.tree.map(lambda x: jax.ShapeDtypeStruct((len(devices), *x.shape), x.dtype), tree)
            for tree in (grads, state)
        ]
        step = jax.pmap(
            lambda g, s: tx.update(g, s), axis_name=AXIS, devices=devices, donate_argnums=(0, 1)
        )
        return step.lower(*many)
    specs = jaxcomp.state_specs(state, AXIS)
    step = jax.shard_map(
        # A mean in the place of every replica's gradient, as an optimizer would use it there.
        lambda g, s: jaxcomp.as_local(tx.update(g, s), AXIS),
        mesh=mesh,
        in_specs=(jax.P(AXIS), specs),
        out_specs=(jax.P(AXIS), specs),
        check_vma=False,
    )
    donating = jax.jit(step, donate_argnums=(0, 1))
    return donating.lower(placed(grads, jax.P(AXIS), mesh), placed(state, specs, mesh))


def floor(tx: jaxcomp.Reducer, reducer: str, rank: int, shapes: Any) -> float | None:
    """Words of memory traffic a gradient value that no program for this reducer goes below."""
    if reducer == "allreduce":
        return 2.0  # the sum read, the mean written
    if not reducer.startswith("powersgd"):
        return None
    leaves = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    values = sum(x.size for x in leaves.values())
    compressed = sum(x.size for x in jax.tree.leaves(jax.eval_shape(tx.init, leaves).residual))
    each = 6 if reducer.endswith("alternating") else 7
    return (each * compressed + 2 * (values - compressed)) / values


def main() -> None:
    job = json.loads(sys.stdin.read())
    shapes, tx = TREES[job["tree"]](), REDUCERS[job["reducer"]](job["rank"])
    values = sum(int(jnp.prod(jnp.array(shape))) for shape in shapes.values())
    mesh = mesh_of(job["target"], job["devices"])
    program = lowered(tx, shapes, mesh, pmap=job["map"] == "pmap")
    start, processor = time.perf_counter(), time.process_time()
    compiled = program.compile()
    seconds, processor = time.perf_counter() - start, time.process_time() - processor
    counts, memory = count(parse(compiled.as_text())), compiled.memory_analysis()
    result = {
        "values": values,
        "kernels": counts.kernels,
        "words": counts.bytes_moved / 4 / values,
        "floor": floor(tx, job["reducer"], job["rank"], shapes),
        "temporary": memory.temp_size_in_bytes / 4 / values,
        "library_calls": dict(counts.library_calls),
        "collectives": counts.collectives,
        "compile_seconds": seconds,
        "processor_seconds": processor,
        "versions": {name: version(name) for name in ("jax", "jaxlib")},
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
