"""Measures one update of PowerSGD on one device: time, memory and kernels, beside copies."""

from __future__ import annotations

import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp

import jaxcomp
from benchmarks.common.runs import Run
from benchmarks.overhead.trees import Shapes, gpt2, size

AXIS = "data"
RANKS = (4, 32, 128, 1, 8, 16, 64, 216)
# What the names of kernels have in them, by class; the first class that fits.
_CLASSES = {
    "products on tensor cores": ("tensorop", "s16816", "hmma", "wgmma", "bf16"),
    "products on plain cores": ("ffma", "simt", "sgemm"),
    "products by Triton": ("gemm_fusion", "triton"),
    "Cholesky and solves": ("potrf", "trsm", "cholesky"),
    "reductions": ("reduce",),
    "copies": ("memcpy", "copy"),
    "elementwise": ("loop_", "fusion", "concatenate", "wrapped"),
}


def class_of(kernel: str) -> str:
    """Returns the class of a kernel by its name."""
    for name, marks in _CLASSES.items():
        if any(mark in kernel.lower() for mark in marks):
            return name
    return "other"


def tree(small: bool) -> Shapes:
    """Returns the shapes of GPT-2 small's gradients, or of a tiny model's."""
    return gpt2(2, 64) if small else gpt2(12, 768)


def mesh_of(devices: Sequence[Any]) -> jax.sharding.Mesh:
    """Makes a mesh of some devices along `AXIS`."""
    return jax.make_mesh(
        (len(devices),), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,), devices=devices
    )


def seconds_of(call: Callable[[], Any], warm_up: int, steps: int) -> list[float]:
    """Returns the wall-clock seconds of each of `steps` calls; waits for each call."""
    taken = []
    for _ in range(warm_up + steps):
        start = time.perf_counter()
        jax.block_until_ready(call())
        taken.append(time.perf_counter() - start)
    return taken[warm_up:]


def queued_ms(call: Callable[[], Any], steps: int) -> float:
    """Returns the milliseconds of a call in a loop that waits once, at its end."""
    last = jax.block_until_ready(call())
    start = time.perf_counter()
    for _ in range(steps):
        last = call()
    jax.block_until_ready(last)
    return 1e3 * (time.perf_counter() - start) / steps


def kernels_of(call: Callable[[], Any], steps: int) -> tuple[Counter[str], Counter[str]]:
    """Profiles calls; returns launches and microseconds of each GPU kernel, over all calls."""
    launches: Counter[str] = Counter()
    microseconds: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            seconds_of(call, 0, steps)
        for path in Path(folder).rglob("*.xplane.pb"):
            for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
                for line in plane.lines:
                    # Other lines repeat what the streams have, under XLA's own names.
                    events = line.events if "GPU" in plane.name and "Stream" in line.name else ()
                    for event in events:
                        launches[event.name] += 1
                        microseconds[event.name] += event.duration_ns / 1e3
    return launches, microseconds


def copies(values: int, steps: int) -> Run:
    """Times kernels that move two and seven words for every value."""

    def seven(a: Any, b: Any, c: Any) -> Any:
        return a + b, b - c, a * c, a - c

    words = jnp.ones(values)
    two_words = partial(jax.jit(jnp.negative), words)
    seven_words = partial(jax.jit(seven), words, 2 * words, 3 * words)
    return {
        "kind": "copies",
        "values": values,
        "two_words_ms": queued_ms(two_words, steps),
        "seven_words_ms": queued_ms(seven_words, steps),
    }


class Update:
    """One compiled update of a tree of gradients; each call takes the last outputs as gradients."""

    def __init__(self, tx: Any, shapes: Mapping[str, Sequence[int]]):
        """Compiles the update on one device, and draws gradients."""
        mesh = mesh_of(jax.devices()[:1])
        grads = {}
        for i, (name, shape) in enumerate(shapes.items()):
            grads[name] = jax.random.normal(jax.random.key(i), shape)
        grads = jax.device_put(grads, jax.NamedSharding(mesh, jax.P()))
        state = jaxcomp.shard_state(tx.init(grads), mesh, AXIS)
        specs = (jax.P(), jaxcomp.state_specs(state, AXIS))

        def update(grads: Any, state: Any) -> Any:
            return tx.update(jaxcomp.as_local(grads, AXIS), state)

        mapped = jax.shard_map(update, mesh=mesh, in_specs=specs, out_specs=specs)
        start = time.perf_counter()
        self._run = jax.jit(mapped, donate_argnums=(0, 1)).lower(grads, state).compile()
        self.compile_seconds = time.perf_counter() - start
        memory: Any = self._run.memory_analysis()
        self.temporary_bytes = memory.temp_size_in_bytes
        # The output takes the gradient's place, as in torch's bucket, and is the next gradient.
        self._held = (grads, state)

    def __call__(self) -> Any:
        """Returns outputs and state."""
        self._held = self._run(*self._held)
        return self._held


def update(rank: int, shapes: Shapes, steps: int, **options: Any) -> Run:
    """Times one update and profiles it."""
    step = Update(jaxcomp.powersgd(rank, axis_name=AXIS, start_step=0, **options), shapes)
    seconds_of(step, 0, 3)
    row: Run = {"kind": "update", "rank": rank, "options": options}
    row["compile_s"] = step.compile_seconds
    row["queued_ms"] = queued_ms(step, steps)
    row["waited_ms"] = 1e3 * median(seconds_of(step, 0, steps))
    row["temporary"] = step.temporary_bytes / 4 / size(shapes)
    profiled = 3
    launches, microseconds = kernels_of(step, profiled)
    row["launches"] = launches.total() / profiled
    row["classes_us"] = classes = defaultdict(float)
    row["kernels"] = {}
    for name, total in microseconds.most_common():
        classes[class_of(name)] += total / profiled
        if len(row["kernels"]) < 60:
            row["kernels"][name] = (launches[name] / profiled, total / profiled)
    return row


def rows(small: bool, quick: bool, devices: int) -> Iterator[Run]:
    """Yields a row for copies and one for each rank, one after the other."""
    del devices
    shapes = tree(small)
    steps = 3 if small else 30
    yield copies(size(shapes), steps)
    for rank in RANKS[:3] if quick else RANKS:
        yield update(rank, shapes, steps)
    if not quick:
        yield update(32, shapes, steps, comm_dtype="int6")
        yield update(4, shapes, steps, residual_dtype="bfloat16")
