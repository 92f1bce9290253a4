"""Fits the constants of the model of a step on the devices at hand, in less than a minute."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding

from jaxcomp._adviser.calibration import ASSUMED, Calibration
from jaxcomp._adviser.model import Link, Software, Traffic, communication_time
from jaxcomp._adviser.shapes import assumed_params, count_values
from jaxcomp._base.checks import check_int
from jaxcomp._base.typing import Array, PyTree
from jaxcomp._mesh.axes import axis_size
from jaxcomp._mesh.collectives import exchange, gather, reduce_mean
from jaxcomp._reducers.error_feedback import error_feedback
from jaxcomp._reducers.powersgd import powersgd
from jaxcomp._reducers.quantized import quantized_allreduce
from jaxcomp._states.place import shard_state, state_specs

_Device: TypeAlias = Any  # jax.Device, which type checkers take for a variable
_AXIS = "replicas"
_COPY_BYTES = {"cpu": 1 << 27}
_MANY_COPY_BYTES = 1 << 30  # a GPU's caches hold tens of megabytes
_PAYLOADS = tuple(1 << k for k in (12, 18, 22, 25))  # bytes
_REPEATED = 2  # collectives in one program: a step does not wait for Python between them
_REPEATS = 5  # where several processes wait for each other, and must agree on how often
_BUDGET = 1.0  # seconds for each thing that is timed, beside its compilation


def measure(
    params: PyTree | int = 10_000_000,
    *,
    rank: int = 16,
    devices: Sequence[_Device] | None = None,
) -> Calibration:
    """Times memory, an all-reduce and compression on the present devices, for `advise`.

    On several hosts call it in every process after ``jax.distributed.initialize()``: the all-reduce
    is then the network's. Give `advise` no bandwidth, and it uses what was measured here; give it
    one, and what was measured is taken for the software: the slower of it and the link counts.

    Args:
      params: The model to compress, arrays or shapes, or a number of parameters.
      rank: At which to time `powersgd` with factors in six bits.
      devices: Among which to time the all-reduce; None for all that JAX has.

    Returns:
      The constants; the median of repeated runs each. With one device the all-reduce is assumed.

    Raises:
      ValueError: If an argument is unusable, or that rank leaves nothing to compress.

    Example:
      >>> import jax, jaxcomp
      >>> calibration = jaxcomp.measure(100_000, rank=2, devices=jax.devices()[:1])
      >>> calibration.memory_bandwidth > 0
      True
    """
    rank = check_int("rank", rank, 1)
    if isinstance(params, (int, np.integer)):
        params, _ = assumed_params(int(params))
    tree = [x for x in jax.tree.leaves(params) if jnp.issubdtype(x.dtype, jnp.floating)]
    if not tree:
        raise ValueError("The parameters hold nothing that is floating.")
    devices = list(jax.devices() if devices is None else devices)
    own = next(device for device in devices if device.process_index == jax.process_index())
    ideal = dataclasses.replace(
        ASSUMED["cpu" if own.platform == "cpu" else "gpu"],
        device=_words(devices),
        platform=own.platform,
        memory_bandwidth=_memory_bandwidth(own),
        powersgd=1.0,
        int8=1.0,
    )
    if len(devices) > 1:
        fitted: dict[str, Any] = {k: _fit(way, devices) for k, way in _ways(own.platform).items()}
        ideal = dataclasses.replace(ideal, devices=len(devices), **fitted)

    plain = _step_time(optax.identity(), tree, [own])
    reducer = powersgd(rank, axis_name=_AXIS, start_step=0, comm_dtype="int6")
    sent = reducer.bytes(tree, replicas=1)
    if not any(leaf.compressed for leaf in sent.leaves):
        raise ValueError(f"At rank {rank} no leaf is compressed. Pass a lower rank to measure.")
    compressed = _step_time(reducer, tree, [own])
    # Among all replicas, because what one of them has to do depends on how many there are.
    quantized = error_feedback(quantized_allreduce(axis_name=_AXIS))
    payload = quantized.bytes(tree, replicas=len(devices)).bytes_after
    link = Link(len(devices), math.inf, 0.0)
    exchanged = communication_time(Traffic(payload, 1, ideal.exchange), link)
    quantizing = _step_time(quantized, tree, devices) - exchanged
    return dataclasses.replace(
        ideal,
        powersgd=_factor(compressed - plain, ideal.powersgd_time(sent)),
        int8=_factor(quantizing - plain, ideal.int8_time(count_values(tree))),
    )


def _words(devices: Sequence[_Device]) -> str:
    processes = len({device.process_index for device in devices})
    plural = "es" * (processes > 1)
    text = f"{len(devices)} x {devices[0].device_kind} in {processes} process{plural}"
    alone = "; the time of a collective is assumed" * (len(devices) == 1)
    return f"measured: {text}, jax {jax.__version__}{alone}"


def _factor(seconds: float, work: float) -> float:
    # Noise can make a difference of two times as small as it likes; no device is ten times faster
    # than its memory.
    return max(seconds / work, 0.1)


def _memory_bandwidth(device: _Device) -> float:
    """Bytes read and written per second by an operation on a large array in place."""
    size = _COPY_BYTES.get(device.platform, _MANY_COPY_BYTES) // 4
    x = jax.device_put(np.zeros(size, np.float32), device)
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    return 2 * 4 * size / _median_time(add, x)


def _step_time(reducer: Any, tree: PyTree, devices: Sequence[_Device]) -> float:
    """Seconds of an SGD step on given gradients; with one device nothing goes on the wire.

    The step is around it because XLA fuses a reducer's output with what the optimizer does to it.
    """
    mesh = Mesh(np.array(devices), (_AXIS,), axis_types=(AxisType.Auto,))
    # Repeated, so that a large tree is quickly made: no time depends on the values.
    noise = np.random.default_rng(0).standard_normal(100_003, np.float32)
    grads = [np.resize(noise, leaf.shape).astype(leaf.dtype) for leaf in tree]
    placed = NamedSharding(mesh, jax.P())
    state = reducer.init(grads)
    specs = (jax.P(), state_specs(state, _AXIS))
    state = shard_state(state, mesh, _AXIS)

    def step(carry: tuple[PyTree, PyTree], grads: PyTree) -> tuple[PyTree, PyTree]:
        params, state = carry
        updates, state = reducer.update(grads, state)
        scaled = [u * jnp.asarray(-1e-3, u.dtype) for u in updates]
        return [p + u for p, u in zip(params, scaled, strict=True)], state

    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(specs, jax.P()), out_specs=specs, check_vma=False
    )
    # As in training, the new parameters and state take the place of the old ones.
    compiled = jax.jit(mapped, donate_argnums=0)
    params, grads = jax.device_put(grads, placed), jax.device_put(grads, placed)
    repeats = None if len(devices) == 1 else _REPEATS
    return _median_time(lambda carry: compiled(carry, grads), (params, state), repeats)


class _Way(NamedTuple):
    """A way to average, as the library does it: packing and rounding included."""

    dtype: Any  # of the values on the device
    width: int  # bytes of each on the wire
    function: Callable[[Array], Array]  # from a vector to its average or the like


def _ways(platform: str) -> dict[str, _Way]:
    narrow = jnp.float16 if platform == "cpu" else jnp.bfloat16

    def mean(x: Array, wire: Any) -> Array:
        return jnp.concatenate(reduce_mean(jnp.split(x, 2), _AXIS, wire).means)

    def swap(x: Array) -> Array:
        received = exchange(x.reshape(axis_size(_AXIS), -1), _AXIS)
        return gather(received[0], _AXIS).reshape(x.shape)

    return {
        "allreduce": _Way(jnp.float32, 4, lambda x: mean(x, jnp.float32)),
        "allreduce_16": _Way(jnp.float32, 2, lambda x: mean(x, narrow)),
        "exchange": _Way(jnp.int8, 1, swap),
    }


def _fit(way: _Way, devices: Sequence[_Device]) -> Software:
    """Seconds per average and bytes sent per second, with the least relative errors."""
    mesh = Mesh(np.array(devices), (_AXIS,), axis_types=(AxisType.Auto,))
    # Both halves of a vector, and each replica's share of it, are whole numbers of values.
    counts = [-(-size // (way.width * 2 * mesh.size)) * 2 * mesh.size for size in _PAYLOADS]
    sent = [2 * (mesh.size - 1) / mesh.size * way.width * count for count in counts]
    overhead, seconds_per_byte = fit_line(sent, [_average_time(way, mesh, n) for n in counts])
    return Software(overhead, 1 / seconds_per_byte)


def _average_time(way: _Way, mesh: Mesh, count: int) -> float:
    """Seconds of one of several averages in a row, of `count` values each."""
    sharding = NamedSharding(mesh, jax.P(_AXIS))
    # Made on the devices: with several processes no one of them could hand over the whole array.
    x = jax.jit(lambda: jnp.ones(mesh.size * count, way.dtype), out_shardings=sharding)()

    def repeated(x: Array) -> Array:
        return lax.fori_loop(0, _REPEATED, lambda _, x: way.function(x), x)

    spec = jax.P(_AXIS)
    mapped = jax.shard_map(repeated, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return _median_time(jax.jit(mapped, donate_argnums=0), x, _REPEATS) / _REPEATED


def fit_line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Intercept and slope, both positive, of the line with the least squared relative errors."""
    weights = 1 / np.asarray(y)
    columns = np.stack([np.ones(len(x)), np.asarray(x)], axis=1) * weights[:, None]
    (intercept, slope), *_ = np.linalg.lstsq(columns, np.ones(len(x)), rcond=None)
    # Noise may tilt the line beyond the axes; no line is better there than the nearest one inside.
    intercept = max(float(intercept), 0.01 * min(y))
    slope = max(float(slope), 0.01 * min(t / b for t, b in zip(y, x, strict=True)))
    return intercept, slope


def _median_time(function: Callable[[Any], Any], carry: Any, repeats: int | None = None) -> float:
    """The median time of calls that each take the last one's result.

    Args:
      function: What to time; may donate its argument.
      carry: The first argument.
      repeats: How many calls; None for as many as the budget holds.
    """
    for _ in range(2):  # compile; fill caches
        carry = jax.block_until_ready(function(carry))
    times: list[float] = []
    while len(times) < (repeats or 5) or (repeats is None and sum(times) < _BUDGET):
        start = time.perf_counter()
        carry = jax.block_until_ready(function(carry))
        times.append(time.perf_counter() - start)
    return statistics.median(times)
