"""Fits the constants of the model of a step on the devices at hand, in less than a minute."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding

from jaxcomp._adviser.model import ASSUMED, Calibration, Software
from jaxcomp._adviser.shapes import assumed_params
from jaxcomp._base.checks import check_int
from jaxcomp._base.typing import Array, PyTree
from jaxcomp._mesh.collectives import exchange, gather, reduce_mean
from jaxcomp._reducers.error_feedback import error_feedback
from jaxcomp._reducers.powersgd import powersgd
from jaxcomp._reducers.quantized import quantized_allreduce
from jaxcomp._states.place import shard_state, state_specs

_Device: TypeAlias = Any  # jax.Device, which type checkers take for a variable
_AXIS = "replicas"
_SMALL, _LARGE = 1 << 12, 1 << 25  # bytes of the collectives that are timed
_REPEATED = 2  # collectives in one program: a step does not wait for Python between them
_REPEATS = 5  # of each program


def measure(
    params: PyTree | int = 10_000_000,
    *,
    rank: int = 16,
    devices: Sequence[_Device] | None = None,
) -> Calibration:
    """Times compression and an all-reduce on the present devices, for `advise`.

    On several hosts call it in every process after ``jax.distributed.initialize()``: the all-reduce
    is then the network's. Of what was measured and the link that `advise` is given the slower
    counts.

    Args:
      params: The model to compress, arrays or shapes, or a number of parameters.
      rank: At which to time `powersgd` with factors in six bits.
      devices: Among which to time the all-reduce; None for all that JAX has.

    Returns:
      The constants; the median of repeated runs each. With one device the all-reduce is assumed.

    Raises:
      ValueError: If `rank` is no positive integer, or leaves nothing to compress.

    Example:
      >>> import jax, jaxcomp
      >>> calibration = jaxcomp.measure(100_000, rank=2, devices=jax.devices()[:1])
      >>> calibration.powersgd > 0
      True
    """
    rank = check_int("rank", rank, 1)
    if isinstance(params, (int, np.integer)):
        params, _ = assumed_params(int(params))
    tree = [x for x in jax.tree.leaves(params) if jnp.issubdtype(x.dtype, jnp.floating)]
    low_rank = powersgd(rank, axis_name=_AXIS, start_step=0, comm_dtype="int6")
    int8 = error_feedback(quantized_allreduce(axis_name=_AXIS))
    if not any(leaf.rank for leaf in low_rank.bytes(tree, replicas=1).leaves):
        raise ValueError(f"At rank {rank} nothing of this model is compressed: no time to measure.")
    devices = list(jax.devices() if devices is None else devices)
    own = next(device for device in devices if device.process_index == jax.process_index())
    processes = len({device.process_index for device in devices})
    where = f"{len(devices)} x {own.device_kind} of {processes} process{'es' * (processes > 1)}"
    assumed = "; the time of a collective is assumed" * (len(devices) == 1)
    ideal = dataclasses.replace(
        ASSUMED["cpu" if own.platform == "cpu" else "gpu"],
        device=f"measured: {where}, jax {jax.__version__}{assumed}",
        platform=own.platform,
        powersgd=1.0,
        int8=1.0,
        **(_collectives(devices) if len(devices) > 1 else {}),
    )
    plain = _step_time(optax.identity(), tree, own)

    def factor(reducer: Any) -> float:
        seconds = _step_time(reducer, tree, own) - plain
        # Noise can make a difference of two times as small as it likes; no device is ten times
        # faster than its memory.
        return max(seconds / ideal.compression_time(reducer.bytes(tree, replicas=1)), 0.1)

    return dataclasses.replace(ideal, powersgd=factor(low_rank), int8=factor(int8))


def _step_time(reducer: Any, tree: PyTree, device: _Device) -> float:
    """Seconds of an SGD step on given gradients on one device, where nothing goes on the wire.

    The step is around it because XLA fuses a reducer's output with what the optimizer does to it.
    """
    mesh = _mesh([device])
    # Repeated, so that a large tree is quickly made: no time depends on the values.
    noise = np.random.default_rng(0).standard_normal(100_003, np.float32)
    grads = [np.resize(noise, leaf.shape).astype(leaf.dtype) for leaf in tree]
    state = reducer.init(grads)
    specs = (jax.P(), state_specs(state, _AXIS))

    def step(carry: tuple[PyTree, PyTree], grads: PyTree) -> tuple[PyTree, PyTree]:
        params, state = carry
        updates, state = reducer.update(grads, state)
        scaled = [u * jnp.asarray(-1e-3, u.dtype) for u in updates]
        return [p + u for p, u in zip(params, scaled, strict=True)], state

    params, grads = (jax.device_put(grads, NamedSharding(mesh, jax.P())) for _ in range(2))
    return _median_time(step, (params, shard_state(state, mesh, _AXIS)), specs, mesh, grads)


def _collectives(devices: Sequence[_Device]) -> dict[str, Software]:
    """The times of each way to average, as the library does it: packing and rounding included.

    That of a small payload, and from that of a large one the bytes sent per second.
    """
    mesh = _mesh(devices)
    narrow = jnp.float16 if devices[0].platform == "cpu" else jnp.bfloat16

    def mean(x: Array, wire: Any) -> Array:
        return jnp.concatenate(reduce_mean(jnp.split(x, 2), _AXIS, wire).means)

    def swap(x: Array) -> Array:
        received = exchange(x.reshape(mesh.size, -1), _AXIS)
        return gather(received[0], _AXIS).reshape(x.shape)

    def seconds(average: Callable[[Array], Array], dtype: Any, width: int, payload: int) -> float:
        # Both halves of a vector, and each replica's share of it, are whole numbers of values.
        count = -(-payload // (width * 2 * mesh.size)) * 2 * mesh.size
        ones = jax.device_put(np.ones(count, dtype), NamedSharding(mesh, jax.P()))

        def repeated(x: Array) -> Array:
            return lax.fori_loop(0, _REPEATED, lambda _, x: average(x), x)

        return _median_time(repeated, ones, jax.P(), mesh) / _REPEATED

    def software(average: Callable[[Array], Array], dtype: Any, width: int) -> Software:
        small, large = (seconds(average, dtype, width, payload) for payload in (_SMALL, _LARGE))
        sent = 2 * (mesh.size - 1) / mesh.size * (_LARGE - _SMALL)
        return Software(small, sent / max(large - small, 0.01 * large))  # noise may turn them round

    return {  # with the bytes of a value on the wire
        "allreduce": software(lambda x: mean(x, jnp.float32), jnp.float32, 4),
        "allreduce_16": software(lambda x: mean(x, narrow), jnp.float32, 2),
        "exchange": software(swap, jnp.int8, 1),
    }


def _mesh(devices: Sequence[_Device]) -> Mesh:
    return Mesh(np.array(devices), (_AXIS,), axis_types=(AxisType.Auto,))


def _median_time(
    step: Callable[..., Any], carry: Any, specs: Any, mesh: Mesh, *fixed: PyTree
) -> float:
    """The median time of calls of (carry, *fixed) that each take the last one's result as carry.

    It lies on the mesh as `specs` say, and in the same memory; what is `fixed` on every device.
    """
    in_specs = (specs, *(jax.P() for _ in fixed))
    mapped = jax.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=specs, check_vma=False)
    compiled = jax.jit(mapped, donate_argnums=0)
    times: list[float] = []
    for _ in range(2 + _REPEATS):  # compile; fill caches
        start = time.perf_counter()
        carry = jax.block_until_ready(compiled(carry, *fixed))
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])
