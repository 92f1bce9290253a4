"""Times jaxcomp's update alone on one device; a worker of `benchmarks.overhead`.

Reads a job as JSON from standard input and prints one JSON line for the copy bandwidth and one for
every rank.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxcomp


def seconds(call: Callable[[], Any], warmup: int, steps: int) -> list[float]:
    """Wall-clock seconds of each of `steps` calls, each waited for."""
    taken = []
    for _ in range(warmup + steps):
        start = time.perf_counter()
        jax.block_until_ready(call())
        taken.append(time.perf_counter() - start)
    return taken[warmup:]


def copy_seconds(words: int, steps: int) -> list[float]:
    """Seconds to copy so many float32 words from one array to another."""
    if jax.default_backend() == "cpu":
        source, target = np.ones(words, np.float32), np.zeros(words, np.float32)
        return seconds(lambda: np.copyto(target, source), 3, steps)
    source = jnp.ones(words)
    copy = jax.jit(lambda x: -x)  # a copy that XLA cannot leave out
    return seconds(lambda: copy(source), 3, steps)


def update_seconds(job: dict[str, Any], rank: int) -> dict[str, Any]:
    """Seconds of one update, what it needs beside its arguments, and how long it compiles."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    tx = jaxcomp.powersgd(rank, axis_name="data", start_step=0)
    keys = jax.random.split(jax.random.key(0), len(job["shapes"]))
    grads = {
        name: jax.random.normal(key, shape)
        for key, (name, shape) in zip(keys, job["shapes"].items(), strict=True)
    }
    state = jaxcomp.shard_state(tx.init(grads), mesh, "data")
    specs = jaxcomp.state_specs(state, "data")
    update = jax.jit(
        jax.shard_map(
            lambda g, s: tx.update(jaxcomp.as_local(g, "data"), s),
            mesh=mesh,
            in_specs=(jax.P(), specs),
            out_specs=(jax.P(), specs),
        ),
        donate_argnums=(0, 1),
    )
    start = time.perf_counter()
    compiled = update.lower(grads, state).compile()
    compile_seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    # The output takes the gradient's place, as in torch's bucket, and is the next gradient.
    held = [(grads, state)]

    def step() -> Any:
        held[0] = compiled(*held[0])
        return held[0]

    return {
        "seconds": seconds(step, job["warmup"], job["steps"]),
        "temporary_bytes": memory.temp_size_in_bytes if memory else None,
        "compile_seconds": compile_seconds,
    }


def main() -> None:
    job = json.loads(sys.stdin.read())
    words = sum(int(np.prod(shape)) for shape in job["shapes"].values())
    device = jax.devices()[0]
    versions = {"jax": jax.__version__, "device": device.device_kind, "platform": device.platform}
    print(json.dumps({"kind": "versions", **versions}), flush=True)
    for rank in job["ranks"]:
        # The floor is measured beside every figure that is compared with it.
        copies = copy_seconds(words, job["steps"])
        print(json.dumps({"kind": "copy", "rank": rank, "seconds": copies}), flush=True)
        result = update_seconds(job, rank)
        median = statistics.median(result["seconds"])
        print(f"jax rank {rank}: {1e3 * median:.1f} ms", file=sys.stderr)
        print(json.dumps({"kind": "update", "rank": rank, **result}), flush=True)


if __name__ == "__main__":
    main()
