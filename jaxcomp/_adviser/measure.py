"""Fits the constants of the model of a step on the devices at hand, in less than a minute."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding

from jaxcomp._adviser.model import ASSUMED, Calibration, ReducerCosts
from jaxcomp._adviser.shapes import shapes_of
from jaxcomp._base.checks import check_int
from jaxcomp._base.typing import Array, PyTree
from jaxcomp._mesh.collectives import axis_size, exchange, gather
from jaxcomp._reducers.allreduce import allreduce
from jaxcomp._reducers.error_feedback import error_feedback
from jaxcomp._reducers.powersgd import powersgd
from jaxcomp._reducers.quantized import quantized_allreduce
from jaxcomp._states.place import shard_state, state_specs

_Device: TypeAlias = Any  # jax.Device, which type checkers take for a variable
_AXIS = "replicas"
_FEW, _MANY = 1 << 9, 1 << 22  # values in each of two vectors that are averaged
_REPEATS = 8  # of each step
_SHORTEST = 1e-6  # seconds between two times, which noise may turn round


def measure(
    params: PyTree | int | str = 10_000_000,
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
      The constants, by the shortest of repeated runs. With one device the all-reduce is assumed.

    Raises:
      ValueError: If `rank` is no positive integer, or leaves nothing to compress.

    Example:
      >>> import jax, jaxcomp
      >>> calibration = jaxcomp.measure(100_000, rank=2, devices=jax.devices()[:1])
      >>> calibration.powersgd.per_value > 0
      True
    """
    rank = check_int("rank", rank, 1)
    tree = [
        x for x in jax.tree.leaves(shapes_of(params)[0]) if jnp.issubdtype(x.dtype, jnp.floating)
    ]
    low_rank = powersgd(rank, axis_name=_AXIS, start_step=0, comm_dtype="int6")
    int8 = error_feedback(quantized_allreduce(axis_name=_AXIS))
    if not any(leaf.rank for leaf in low_rank.bytes(tree, replicas=1).leaves):
        raise ValueError(f"At rank {rank} nothing of this model is compressed: no time to measure.")
    devices = list(jax.devices() if devices is None else devices)
    own = next(device for device in devices if device.process_index == jax.process_index())
    assumed = ASSUMED["cpu" if own.platform == "cpu" else "gpu"]
    plain = _step_time(optax.identity(), tree, [own])

    def compression(reducer: Any, costs: ReducerCosts) -> ReducerCosts:
        """With the time that compression takes here."""
        seconds = _step_time(reducer, tree, [own]) - plain
        times = seconds / costs.compression_time(reducer.bytes(tree, replicas=1))
        times = max(times, 0.01)  # noise can make a difference of two times too small
        return costs._replace(
            per_value=times * costs.per_value, per_column=times * costs.per_column
        )

    def collective(average: Any, width: int) -> dict[str, float]:
        """From how much longer steps take that average few and many values of `width` bytes."""
        seconds, payloads = list[float](), list[int]()
        for values in (_FEW, _MANY):
            values += -values % len(devices)  # the same number from each replica to each
            vectors = 2 * [jax.ShapeDtypeStruct((values,), jnp.float32)]
            together, alone = (_step_time(average, vectors, some) for some in (devices, [own]))
            seconds.append(max(together - alone, _SHORTEST))
            payloads.append(2 * width * values)
        sent = 2 * (len(devices) - 1) / len(devices) * (payloads[1] - payloads[0])
        bandwidth = sent / max(seconds[1] - seconds[0], _SHORTEST)
        return {"overhead": seconds[0], "bandwidth": bandwidth}

    device = f"measured: {len(devices)} x {own.device_kind}, jax {jax.__version__}"
    int8, low_rank = compression(int8, assumed.int8), compression(low_rank, assumed.powersgd)
    if len(devices) == 1:
        device += "; the time of a collective is assumed"
        return dataclasses.replace(assumed, device=device, int8=int8, powersgd=low_rank)
    half = allreduce(axis_name=_AXIS, comm_dtype=assumed.half)
    exchange_costs = collective(optax.stateless(_exchanged), 1)
    return dataclasses.replace(
        assumed,
        device=device,
        allreduce=assumed.allreduce._replace(**collective(allreduce(axis_name=_AXIS), 4)),
        allreduce_16=assumed.allreduce_16._replace(**collective(half, 2)),
        int8=int8._replace(**exchange_costs),
        powersgd=low_rank._replace(**exchange_costs),
    )


def _exchanged(vectors: Any, params: PyTree) -> list[Array]:
    """What the two collectives of an average in integers make of them, without the rounding."""
    del params
    shares = [x.astype(jnp.int8).reshape(axis_size(_AXIS), -1) for x in vectors]
    received = [exchange(x, _AXIS)[0] for x in shares]
    return [gather(x, _AXIS).ravel().astype(jnp.float32) for x in received]


def _step_time(reducer: Any, tree: Sequence[Any], devices: Sequence[_Device]) -> float:
    """Seconds of an SGD step on given gradients: on one device nothing goes on the wire.

    The step is around the reducer because XLA fuses its output with what the optimizer does to it.
    """
    mesh = Mesh(np.array(devices), (_AXIS,), axis_types=(AxisType.Auto,))
    # Repeated, so that a large tree is quickly made: no time depends on the values.
    noise = np.random.default_rng(0).standard_normal(100_003, np.float32)
    grads = [np.resize(noise, leaf.shape).astype(leaf.dtype) for leaf in tree]
    optimizer = optax.chain(reducer, optax.sgd(1e-3))
    state = optimizer.init(grads)
    specs = (jax.P(), state_specs(state, _AXIS))

    def step(params: PyTree, state: PyTree, grads: PyTree) -> tuple[PyTree, PyTree]:
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state

    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(*specs, jax.P()), out_specs=specs, check_vma=False
    )
    compiled = jax.jit(mapped, donate_argnums=(0, 1))  # the state stays where it is in memory
    params, grads = (jax.device_put(grads, NamedSharding(mesh, jax.P())) for _ in range(2))
    state = shard_state(state, mesh, _AXIS)
    shortest = float("inf")  # the others waited for other programs, or compiled
    for _ in range(_REPEATS):
        start = time.perf_counter()
        params, state = jax.block_until_ready(compiled(params, state, grads))
        shortest = min(shortest, time.perf_counter() - start)
    return shortest
