"""Fits the cost model's constants on the devices at hand, in less than a minute."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding

from jaxcomp._advise_calibration import ASSUMED, Calibration
from jaxcomp._advise_params import assumed_params, count_values
from jaxcomp._checks import check_int
from jaxcomp._collectives import as_local, mean_each
from jaxcomp._combinators import error_feedback
from jaxcomp._cost_model import int8_work, powersgd_work
from jaxcomp._matricize import plan_leaves
from jaxcomp._powersgd import powersgd
from jaxcomp._quantize import quantized_allreduce
from jaxcomp._state import shard_state, state_specs
from jaxcomp._typing import Array, PyTree

_Device: TypeAlias = Any  # jax.Device, which type checkers take for a variable
_AXIS = "replicas"
_COPY_BYTES = {"cpu": 1 << 27}
_MANY_COPY_BYTES = 1 << 30  # a GPU's caches hold tens of megabytes
# Trees beyond this are scaled down: compression takes a time per value that it does not change.
_MAX_VALUES = {"cpu": 20_000_000}
_MANY_VALUES = 500_000_000
_PAYLOADS = tuple(1 << k for k in (12, 16, 18, 20, 22, 24))  # bytes
_REPEATED = 5  # collectives in one program: a step does not wait for Python between them
_BUDGET = 1.0  # seconds for each thing that is timed, beside its compilation


def measure(
    params: PyTree | int = 10_000_000,
    *,
    ranks: Sequence[int] = (1, 4, 16),
    devices: Sequence[_Device] | None = None,
) -> Calibration:
    """Times memory, an all-reduce and compression on the present devices, for `advise`.

    On several hosts call it in every process after ``jax.distributed.initialize()``: the all-reduce
    is then the network's. Give `advise` no bandwidth, and it uses what was measured here; give it
    one, and what was measured is taken for the software's part, to which the link's is added.

    Args:
      params: The model to compress, arrays or shapes, or a number of parameters. A part of it is
        taken where it is large.
      ranks: At which to time `powersgd`; those that leave nothing to compress are passed over.
      devices: Among which to time the all-reduce; None for all that JAX has.

    Returns:
      The constants; the median of repeated runs each. With one device the all-reduce is assumed.

    Raises:
      ValueError: If an argument is unusable.

    Example:
      >>> import jax, jaxcomp
      >>> calibration = jaxcomp.measure(100_000, ranks=(1,), devices=jax.devices()[:1])
      >>> calibration.memory_bandwidth > 0
      True
    """
    ranks = sorted({check_int("ranks", rank, 1) for rank in ranks})
    if isinstance(params, (int, np.integer)):
        params, _ = assumed_params(int(params))
    devices = list(jax.devices() if devices is None else devices)
    own = next(device for device in devices if device.process_index == jax.process_index())
    assumed = ASSUMED["cpu" if own.platform == "cpu" else "gpu"]
    tree = _scaled(params, _MAX_VALUES.get(own.platform, _MANY_VALUES))
    bandwidth = _memory_bandwidth(own)

    table = []
    for rank in ranks:
        plans = plan_leaves(tree, rank, 2.0)
        work = powersgd_work(plans, bandwidth, assumed.flops)
        if work:
            reducer = powersgd(rank, axis_name=_AXIS, start_step=0)
            table.append((rank, _update_time(reducer, tree, own) / work))
    quantized = error_feedback(quantized_allreduce(axis_name=_AXIS))
    int8 = _update_time(quantized, tree, own) / int8_work(count_values(tree), bandwidth)

    fitted: dict[str, Any] = {}
    if len(devices) > 1:
        overhead, seconds_per_byte = _fit_allreduce(devices)
        fitted = {"overhead": overhead, "bandwidth": 1 / seconds_per_byte, "devices": len(devices)}
    processes = len({device.process_index for device in devices})
    return dataclasses.replace(
        assumed,
        device=(
            f"measured: {len(devices)} x {own.device_kind} in {processes} process"
            f"{'es' * (processes > 1)}, jax {jax.__version__}"
            + ("" if len(devices) > 1 else "; the time of a collective is assumed")
        ),
        platform=own.platform,
        memory_bandwidth=bandwidth,
        powersgd=tuple(table) or assumed.powersgd,
        int8=int8,
        **fitted,
    )


def _scaled(params: PyTree, most: int) -> PyTree:
    """Shapes with the same mix as `params` and about `most` values at the most."""
    leaves = [
        jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype)
        for leaf in jax.tree.leaves(params)
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    ]
    if not leaves:
        raise ValueError("The parameters hold nothing that is floating.")
    total = sum(leaf.size for leaf in leaves)
    if total <= most:
        return leaves
    kept = []
    for kind in dict.fromkeys((leaf.shape, leaf.dtype) for leaf in leaves):
        count = sum((leaf.shape, leaf.dtype) == kind for leaf in leaves)
        shape, wanted = list(kind[0]), count * most / total  # of this shape
        if shape and wanted < 1:  # not even one: a shorter one
            longest = int(np.argmax(shape))
            shape[longest] = max(1, round(shape[longest] * wanted))
        leaf = jax.ShapeDtypeStruct(tuple(shape), kind[1])
        kept += [leaf] * max(1, round(wanted))
    return kept


def _memory_bandwidth(device: _Device) -> float:
    """Bytes read and written per second by an operation on a large array in place."""
    size = _COPY_BYTES.get(device.platform, _MANY_COPY_BYTES) // 4
    x = jax.device_put(np.zeros(size, np.float32), device)
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    return 2 * 4 * size / _median_time(add, x)


def _update_time(reducer: Any, tree: PyTree, device: _Device) -> float:
    """Seconds of one update among one replica: compression without communication."""
    mesh = Mesh(np.array([device]), (_AXIS,), axis_types=(AxisType.Auto,))
    # Repeated, so that a large tree is quickly made: no time depends on the values.
    noise = np.random.default_rng(0).standard_normal(100_003, np.float32)
    grads = [np.resize(noise, leaf.shape).astype(leaf.dtype) for leaf in tree]
    grads = jax.device_put(grads, NamedSharding(mesh, jax.P()))
    state = reducer.init(grads)
    specs = state_specs(state, _AXIS)
    state = shard_state(state, mesh, _AXIS)

    def update(carry: tuple[PyTree, PyTree], grads: PyTree) -> tuple[PyTree, PyTree]:
        return reducer.update(as_local(grads, _AXIS), carry[1])

    mapped = jax.shard_map(
        update, mesh=mesh, in_specs=((jax.P(), specs), jax.P()), out_specs=(jax.P(), specs)
    )
    # The last output's memory serves the next: a training step does not ask for fresh pages either.
    step = jax.jit(mapped, donate_argnums=0)
    outputs = jax.tree.map(jnp.zeros_like, grads)
    return _median_time(lambda carry: step(carry, grads), (outputs, state))


def _fit_allreduce(devices: Sequence[_Device]) -> tuple[float, float]:
    """Seconds per all-reduce and per byte that a ring sends, with the least relative errors."""
    mesh = Mesh(np.array(devices), (_AXIS,), axis_types=(AxisType.Auto,))
    share = 2 * (len(devices) - 1) / len(devices)
    times = [_allreduce_time(mesh, payload) for payload in _PAYLOADS]
    return fit_line([share * payload for payload in _PAYLOADS], times)


def fit_line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Intercept and slope, both positive, of the line with the least squared relative errors."""
    weights = 1 / np.asarray(y)
    columns = np.stack([np.ones(len(x)), np.asarray(x)], axis=1) * weights[:, None]
    (intercept, slope), *_ = np.linalg.lstsq(columns, np.ones(len(x)), rcond=None)
    # Noise may tilt the line beyond the axes; no line is better there than the nearest one inside.
    intercept = max(float(intercept), 0.01 * min(y))
    slope = max(float(slope), 0.01 * min(t / b for t, b in zip(y, x, strict=True)))
    return intercept, slope


def _allreduce_time(mesh: Mesh, payload: int) -> float:
    """Seconds of one of several averages in a row, as the library does them, packing included."""
    sharding = NamedSharding(mesh, jax.P(_AXIS))
    shape = (mesh.size, payload // 4)
    # Made on the devices: with several processes no one of them could hand over the whole array.
    x = jax.jit(lambda: jnp.ones(shape, jnp.float32), out_shardings=sharding)()

    def repeated(x: Array) -> Array:
        def body(_: Any, x: Array) -> Array:
            halves = jnp.split(x.reshape(-1), 2)
            means = mean_each(halves, _AXIS)
            return as_local(jnp.concatenate(means).reshape(x.shape), _AXIS)

        return lax.fori_loop(0, _REPEATED, body, x)

    mapped = jax.shard_map(repeated, mesh=mesh, in_specs=jax.P(_AXIS), out_specs=jax.P(_AXIS))
    return _median_time(jax.jit(mapped, donate_argnums=0), x, repeats=15) / _REPEATED


def _median_time(function: Callable[[Any], Any], carry: Any, repeats: int | None = None) -> float:
    """The median time of calls that each take the last one's result.

    Args:
      function: What to time; may donate its argument.
      carry: The first argument.
      repeats: How many calls. None for as many as the budget holds; several processes that wait
        for each other need a number, so that all of them make as many.
    """
    for _ in range(2):  # compile; fill caches
        carry = jax.block_until_ready(function(carry))
    times: list[float] = []
    while len(times) < (repeats or 5) or (repeats is None and sum(times) < _BUDGET):
        start = time.perf_counter()
        carry = jax.block_until_ready(function(carry))
        times.append(time.perf_counter() - start)
    return statistics.median(times)
