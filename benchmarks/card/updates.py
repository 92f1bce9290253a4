"""One update of PowerSGD on one device: its time, memory and kernels beside those of copies."""

from __future__ import annotations

import glob
import math
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jaxcomp
from benchmarks.overhead.trees import Shapes, gpt2

AXIS = "data"
RANKS = (4, 32, 128, 1, 8, 16, 64, 216)
QUICK_RANKS = (4, 32, 128)
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


def seconds_of(call: Callable[[], Any], warm_up: int, steps: int) -> list[float]:
    """Returns the wall-clock seconds of each of `steps` calls, each waited for."""
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


def kernels_of(call: Callable[[], Any], steps: int) -> dict[str, tuple[float, float]]:
    """Profiles a call; returns launches and microseconds of each kernel of a GPU, for one call."""
    totals: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(steps):
                jax.block_until_ready(call())
        for path in glob.glob(f"{folder}/**/*.xplane.pb", recursive=True):
            for name, microseconds in _events(jax.profiler.ProfileData.from_file(path)):
                entry = totals.setdefault(name, [0, 0])
                entry[0] += 1
                entry[1] += microseconds
    return {name: (n / steps, total / steps) for name, (n, total) in totals.items()}


def _events(profile: Any) -> Iterator[tuple[str, float]]:
    """Yields names and microseconds of what ran on a GPU's streams."""
    for plane in profile.planes:
        if "GPU" not in plane.name:
            continue
        for line in plane.lines:
            # Other lines repeat what the streams have, under XLA's own names.
            if "Stream" in line.name:
                for event in line.events:
                    yield event.name, event.duration_ns / 1e3


def copies(values: int, steps: int) -> dict[str, Any]:
    """Times kernels that move two and seven words for every value."""

    def seven(a: Any, b: Any, c: Any) -> Any:
        return a + b, b - c, a * c, a - c

    words = [jnp.full(values, float(k)) for k in range(3)]
    negated = jax.jit(lambda x: -x)
    mixed = jax.jit(seven)
    return {
        "kind": "copies",
        "values": values,
        "two_words_ms": queued_ms(lambda: negated(words[0]), steps),
        "seven_words_ms": queued_ms(lambda: mixed(*words), steps),
    }


class Update:
    """One compiled update of the gradients of a tree, which a call makes of the last outputs."""

    def __init__(self, tx: Any, shapes: Mapping[str, Sequence[int]]):
        """Compiles it on one device, and draws gradients."""
        mesh = jax.make_mesh((1,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
        grads = {}
        for i, (name, shape) in enumerate(shapes.items()):
            grads[name] = jax.random.normal(jax.random.key(i), shape)
        grads = jax.device_put(grads, jax.sharding.NamedSharding(mesh, jax.P()))
        state = jaxcomp.shard_state(tx.init(grads), mesh, AXIS)
        specs = jaxcomp.state_specs(state, AXIS)
        mapped = jax.shard_map(
            lambda g, s: tx.update(jaxcomp.as_local(g, AXIS), s),
            mesh=mesh,
            in_specs=(jax.P(), specs),
            out_specs=(jax.P(), specs),
        )
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


def update(rank: int, shapes: Shapes, steps: int, **options: Any) -> dict[str, Any]:
    """Times one update and profiles it."""
    step = Update(jaxcomp.powersgd(rank, axis_name=AXIS, start_step=0, **options), shapes)
    seconds_of(step, 0, 3)
    row: dict[str, Any] = {"kind": "update", "rank": rank, "options": options}
    row["compile_s"] = step.compile_seconds
    row["queued_ms"] = queued_ms(step, steps)
    row["waited_ms"] = 1e3 * statistics.median(seconds_of(step, 0, steps))
    values = sum(math.prod(shape) for shape in shapes.values())
    row["temporary"] = step.temporary_bytes / 4 / values
    kernels = kernels_of(step, 3)
    classes: defaultdict[str, float] = defaultdict(float)
    for name, (_, microseconds) in kernels.items():
        classes[class_of(name)] += microseconds
    row["launches"] = sum(launches for launches, _ in kernels.values())
    row["classes_us"] = dict(classes)
    longest = sorted(kernels.items(), key=lambda item: -item[1][1])
    row["kernels"] = dict(longest[:60])
    return row


def rows(small: bool, quick: bool, devices: int) -> Iterator[dict[str, Any]]:
    """Yields a row for copies and one for each rank, one after the other."""
    del devices
    shapes = tree(small)
    steps = 3 if small else 30
    yield copies(sum(math.prod(shape) for shape in shapes.values()), steps)
    for rank in QUICK_RANKS if quick else RANKS:
        yield update(rank, shapes, steps)
    if not quick:
        yield update(32, shapes, steps, comm_dtype="int6")
        yield update(4, shapes, steps, residual_dtype="bfloat16")
