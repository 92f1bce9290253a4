"""Measures the constants of the devices that JAX has.

`advise` uses assumed constants for a GPU or a CPU, or what `measure` returns. Compression is timed
on one device, where nothing is sent, as the difference to a step without a reducer. A collective is
timed with two sizes, over all devices and on one, which gives its fixed time and its bandwidth.
"""

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
from jaxcomp._base.checks import answers_other_names, check_int
from jaxcomp._base.leaves import floating_leaves
from jaxcomp._base.typing import PyTree
from jaxcomp._reducers.allreduce import allreduce
from jaxcomp._reducers.error_feedback import error_feedback
from jaxcomp._reducers.powersgd import powersgd
from jaxcomp._reducers.quantized import quantized_allreduce
from jaxcomp._reducers.reducer import Reducer
from jaxcomp._states.place import shard_state, state_specs

_Device: TypeAlias = Any  # jax.Device, which type checkers take for a variable
_AXIS = "replicas"
# Values in each of two vectors that are averaged: so few that the fixed time counts, and so many
# that the bandwidth does.
_FEW = 1 << 9
_MANY = 1 << 22
_REPEATS = 8  # runs of each step
_SHORTEST = 1e-6  # seconds: limit for a difference of two times, which noise can make negative


@answers_other_names
def measure(
    params: PyTree = 10_000_000,
    *,
    rank: int = 16,
    devices: Sequence[_Device] | None = None,
) -> Calibration:
    """Times compression and an all-reduce on the devices that JAX has, for `advise`.

    On several hosts, call it in every process after ``jax.distributed.initialize()``; the
    all-reduce then runs over the network. `advise` uses the slower one of the measured network and
    its `bandwidth` argument.

    Args:
      params: The parameters, as arrays or shapes; or their number, such as 10_000_000 or ``"10M"``,
        for which a transformer's shapes are assumed.
      rank: The rank at which `powersgd` is timed, with factors in six bits.
      devices: The devices of the all-reduce; None for all that JAX has.

    Returns:
      The constants, from the shortest of repeated runs. With one device, the all-reduce's time is
      assumed and not measured.

    Raises:
      ValueError: If `rank` is not a positive integer, or no leaf is compressed at this rank.

    Example:
      >>> import jax, jaxcomp
      >>> calibration = jaxcomp.measure(100_000, rank=2, devices=jax.devices()[:1])
      >>> calibration.powersgd.per_value > 0
      True
    """
    rank = check_int("rank", rank, 1)
    shapes, _ = shapes_of(params)
    tree = floating_leaves(shapes)
    low_rank = powersgd(rank, axis_name=_AXIS, start_step=0, comm_dtype="int6")
    if not any(leaf.rank for leaf in low_rank.bytes(tree, replicas=1).leaves):
        raise ValueError(f"At rank {rank} nothing of this model is compressed: no time to measure.")
    if devices is None:
        devices = jax.devices()
    local = next(device for device in devices if device.process_index == jax.process_index())
    assumed = ASSUMED["gpu"]
    if local.platform == "cpu":
        assumed = ASSUMED["cpu"]
    integers = quantized_allreduce(axis_name=_AXIS)
    # For each: the reducer that compresses, or None, and a reducer with the same collectives.
    reducers: dict[str, tuple[Reducer | None, Reducer]] = {
        "allreduce": (None, allreduce(axis_name=_AXIS)),
        "allreduce_16": (None, allreduce(axis_name=_AXIS, comm_dtype=assumed.half)),
        "int8": (error_feedback(integers), integers),
        "powersgd": (low_rank, integers),
    }
    alone = _step_time(optax.identity(), tree, [local])  # the optimizer without a reducer
    constants: dict[str, Any] = {}
    for name, (reducer, wire) in reducers.items():
        costs: ReducerCosts = getattr(assumed, name)
        if reducer is not None:
            seconds = _step_time(reducer, tree, [local]) - alone
            assumed_seconds = costs.compression_time(reducer.bytes(tree, replicas=1))
            # One time does not tell what a value and what a column costs: scale both alike. Noise
            # can make the difference too small.
            times = max(seconds / assumed_seconds, 0.01)
            per_value = times * costs.per_value
            costs = costs._replace(per_value=per_value, per_column=times * costs.per_column)
        if len(devices) > 1:
            overhead, bandwidth = _collective(wire, devices, local)
            costs = costs._replace(overhead=overhead, bandwidth=bandwidth)
        constants[name] = costs
    device = f"measured: {len(devices)} x {local.device_kind}, jax {jax.__version__}"
    if len(devices) == 1:
        device += "; the time of a collective is assumed"
    return dataclasses.replace(assumed, device=device, **constants)


def _collective(
    reducer: Reducer, devices: Sequence[_Device], local: _Device
) -> tuple[float, float]:
    """Times the average of few and of many values, over all devices and on one device.

    Returns:
      Overhead in seconds, and bandwidth in bytes per second.
    """
    seconds = []
    sent = []
    replicas = len(devices)
    for values in (_FEW, _MANY):
        vectors = 2 * [jax.ShapeDtypeStruct((values,), jnp.float32)]
        together = _step_time(reducer, vectors, devices)
        alone = _step_time(reducer, vectors, [local])
        seconds.append(max(together - alone, _SHORTEST))
        payload = reducer.bytes(vectors, replicas=replicas).bytes_after
        sent.append(2 * (replicas - 1) / replicas * payload)
    longer = max(seconds[1] - seconds[0], _SHORTEST)
    return seconds[0], (sent[1] - sent[0]) / longer


def _step_time(reducer: Any, tree: Sequence[Any], devices: Sequence[_Device]) -> float:
    """Times an SGD step with a reducer, in seconds; on one device nothing goes on the wire.

    The step includes the optimizer, because XLA fuses the reducer's output with the update.
    """
    mesh = Mesh(np.array(devices), (_AXIS,), axis_types=(AxisType.Auto,))
    # The noise repeats, which is fast to make; times do not depend on the values.
    # A prime number of values, so that the rows of a matrix are not all equal.
    noise = np.random.default_rng(0).standard_normal(100_003, np.float32)

    def filled(leaf: Any) -> np.ndarray:
        return np.resize(noise, leaf.shape).astype(leaf.dtype)

    arrays = jax.tree.map(filled, tree)
    grads = jax.device_put(arrays, NamedSharding(mesh, jax.P()))
    params = jax.tree.map(jnp.copy, grads)
    optimizer = optax.chain(reducer, optax.sgd(1e-3))
    state = shard_state(optimizer.init(params), mesh, _AXIS)
    specs = (jax.P(), state_specs(state, _AXIS))

    def step(params: PyTree, state: PyTree, grads: PyTree) -> tuple[PyTree, PyTree]:
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state

    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(*specs, jax.P()), out_specs=specs, check_vma=False
    )
    compiled = jax.jit(mapped, donate_argnums=(0, 1))  # the state is updated in place
    shortest = float("inf")  # longer runs waited for other programs, or compiled
    for _ in range(_REPEATS):
        start = time.perf_counter()
        params, state = compiled(params, state, grads)
        jax.block_until_ready((params, state))
        seconds = time.perf_counter() - start
        shortest = min(shortest, seconds)
    return shortest
