"""How long a data-parallel step takes, from what each replica sends and what compression costs.

docs/performance.md has the model in formulas, with its assumptions and its error.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding

from jaxcomp._base.checks import check_int
from jaxcomp._base.stats import CompressionStats
from jaxcomp._base.typing import Array, MatrixDimsFn, PyTree
from jaxcomp._bytes.units import parse
from jaxcomp._lowrank.matrices import plan_leaves
from jaxcomp._mesh.collectives import axis_size, exchange, gather
from jaxcomp._reducers.allreduce import allreduce
from jaxcomp._reducers.error_feedback import error_feedback
from jaxcomp._reducers.powersgd import powersgd
from jaxcomp._reducers.quantized import quantized_allreduce
from jaxcomp._states.place import shard_state, state_specs

_Device: TypeAlias = Any  # jax.Device, which type checkers take for a variable
_AXIS = "replicas"

# Of a training step's time the backward pass takes two thirds: it has two matrix products where the
# forward pass has one.
_BACKWARD_SHARE = 2 / 3
# A break-even bandwidth is a power of this, up to 1e15 bytes per second.
_BASE = 1 + 1e-6
_POWERS = range(round(math.log(1e15, _BASE)))


class Link(NamedTuple):
    """What connects the senders: the replicas, or the hosts that they lie on."""

    senders: int
    bandwidth: float  # bytes per second in each direction
    latency: float  # seconds from one sender to the next, one way


class ReducerCosts(NamedTuple):
    """What the step of one kind of reducer takes on a kind of device, beside its computation."""

    overhead: float  # seconds of a collective, whatever its size
    bandwidth: float = math.inf  # bytes per second that it reaches where no link limits it
    # One after another: ring all-reduces, or pairs of an all-to-all and an all-gather.
    collectives: int = 1
    overlap: float = 0.0  # the share of the backward pass with which it overlaps
    per_value: float = 0.0  # seconds of compression, residual included
    per_column: float = 0.0  # the same, times the rank

    def compression_time(self, sent: CompressionStats) -> float:
        """Returns the seconds to compress the leaves that become fewer bytes."""
        seconds = 0.0
        for leaf in sent.leaves:
            if leaf.bytes_after < leaf.bytes_before:
                seconds += leaf.size * (self.per_value + leaf.rank * self.per_column)
        return seconds

    def communication_time(self, sent: CompressionStats, link: Link) -> float:
        """Returns the seconds from the first to the last byte, before any overlap."""
        if link.senders == 1:
            return 0.0
        hops = 2 * (link.senders - 1)
        fixed = self.collectives * (self.overhead + hops * link.latency)
        bandwidth = min(link.bandwidth, self.bandwidth)
        return fixed + hops / link.senders * sent.bytes_after / bandwidth

    def step_time(self, sent: CompressionStats, compute: float, link: Link) -> float:
        """Returns the seconds of a step, of which `compute` are without communication."""
        hidden = self.overlap * _BACKWARD_SHARE * compute
        exposed = max(0.0, self.communication_time(sent, link) - hidden)
        return compute + self.compression_time(sent) + exposed


@dataclasses.dataclass(frozen=True)
class Calibration:
    """The model's constants for one kind of device, measured by `measure` or assumed."""

    device: str  # what was measured or assumed, in words
    half: str  # the 16-bit dtype to send; XLA's CPU backend would send bfloat16 as float32
    allreduce: ReducerCosts  # of float32
    allreduce_16: ReducerCosts  # of `half`, with its rounding
    int8: ReducerCosts
    powersgd: ReducerCosts  # with factors in integers
    training_flops: float  # per second of a training step, to estimate the tokens of a step


# What to expect of a device that nobody has measured. The adviser prints the words along. Values
# are read and written in float32: 7 times by PowerSGD if ideally fused (the sum of gradient and
# residual, the second product, output and new residual), 9 times by int8 inside of error_feedback
# (the sum, integers and scales, the mean's decoding, the residual). A column takes 8 operations.
ASSUMED = {
    "gpu": Calibration(
        device=(
            "NVIDIA H200, compression as measured (2.2 ms and 59 us per rank for 124 million "
            "values, jax 0.11.2); assumed: 20 us per collective, exact averages beside 70% of the "
            "backward pass"
        ),
        half="bfloat16",
        allreduce=ReducerCosts(20e-6, overlap=0.7),
        allreduce_16=ReducerCosts(20e-6, overlap=0.7),
        int8=ReducerCosts(40e-6, per_value=3 * 9 * 4 / 4.8e12),
        powersgd=ReducerCosts(
            40e-6, collectives=2, per_value=2.2e-3 / 124.4e6, per_column=59e-6 / 124.4e6
        ),
        training_flops=400e12,  # 40% of what an H200's data sheet has for bfloat16
    ),
    "cpu": Calibration(
        device=(
            "assumed, as a core of an AMD EPYC was measured: memory at 20 GB/s and 80 Gflop/s, "
            "500 us per collective, which reaches 1 GB/s (100 MB/s in float16)"
        ),
        half="float16",
        allreduce=ReducerCosts(500e-6, 1e9),
        allreduce_16=ReducerCosts(500e-6, 100e6),
        int8=ReducerCosts(1e-3, 500e6, per_value=4 * 9 * 4 / 20e9),
        powersgd=ReducerCosts(
            1e-3, 500e6, collectives=2, per_value=1.25 * 7 * 4 / 20e9, per_column=1.25 * 8 / 80e9
        ),
        training_flops=120e9,  # 256 tokens of 12.9 million parameters in 160 ms
    ),
}


def break_even(
    step_time: Callable[[Link], float], baselines: Iterable[Callable[[Link], float]], link: Link
) -> float:
    """Finds the bandwidth below which a step is faster than each of the baselines.

    Returns:
      Bytes per second; 0 if it does not win on the slowest link and infinity if it wins on the
      fastest.
    """

    def loses(power: int) -> bool:
        at = link._replace(bandwidth=_BASE**power)
        return any(step_time(at) >= baseline(at) for baseline in baselines)

    power = bisect.bisect(_POWERS, False, key=loses)
    if power == 0:
        return 0.0
    if power == len(_POWERS):
        return math.inf
    return _BASE**power


_HEAD_WIDTH = 64
_VOCABULARY = 50_257
_SMALLEST = 10_000
_LARGEST = 10**12


def shapes_of(params: PyTree) -> tuple[PyTree, str]:
    """Returns the parameters themselves, or a transformer of about so many, like GPT-2 small.

    It has one layer for every 64 of width, and an embedding, shared with the output, of 50,257
    rows, or of a third of the parameters where these are few.

    Args:
      params: Arrays or shapes; or a number of parameters, 124_000_000 or ``"124M"``.

    Returns:
      The tree, and a sentence that says what was assumed, or none.

    Raises:
      ValueError: For a number too small for such a model, or beyond any so far.
    """
    if not isinstance(params, (int, np.integer, str)):
        return params, ""
    count = round(parse("params", params))
    if not _SMALLEST <= count <= _LARGEST:
        raise ValueError(
            f"Shapes are guessed for {_SMALLEST:,} to {_LARGEST:.0e} parameters, got {count:,}. "
            "Pass the parameters, or their shapes, to jaxcomp.advise."
        )
    width = 4
    while _values(width + 4) + min(_VOCABULARY * (width + 4), count // 3) <= count:
        width += 4
    rows = min(_VOCABULARY, (count - _values(width)) // width)
    layer = {
        "qkv": jax.ShapeDtypeStruct((width, 3 * width), jnp.float32),
        "out": jax.ShapeDtypeStruct((width, width), jnp.float32),
        "up": jax.ShapeDtypeStruct((width, 4 * width), jnp.float32),
        "down": jax.ShapeDtypeStruct((4 * width, width), jnp.float32),
        "vectors": jax.ShapeDtypeStruct((13 * width,), jnp.float32),
    }
    tree: dict[str, Any] = {f"layer_{i}": layer for i in range(_layers(width))}
    tree["embedding"] = jax.ShapeDtypeStruct((rows, width), jnp.float32)
    return tree, (
        f"shapes assumed: a transformer of {_layers(width)} layers of width {width:,} and an "
        f"embedding of {rows:,} x {width:,}, {_values(width) + rows * width:,} parameters in "
        "float32; better pass yours to jaxcomp.advise"
    )


def _layers(width: int) -> int:
    return max(1, width // _HEAD_WIDTH)


def _values(width: int) -> int:
    """Counts the parameters of all layers: kernels; biases and norms."""
    return _layers(width) * width * (12 * width + 13)


def typical_width(params: PyTree, matrix_dims: MatrixDimsFn | None = None) -> int:
    """Returns the smaller side of a matrix, as the median over the values that can be compressed.

    It is a transformer's width. 1 where there is nothing to compress.
    """
    sides = []
    for plan in plan_leaves(params, 1, 1.0, matrix_dims):
        if plan.view is not None:
            sides.append((min(plan.view.n_rows, plan.view.n_cols), plan.size))
    if not sides:
        return 1
    sides.sort()
    up_to = np.cumsum([values for _, values in sides])
    return sides[int(np.searchsorted(up_to, up_to[-1] / 2))][0]


_FEW = 1 << 9  # values in each of two vectors that are averaged
_MANY = 1 << 22
_REPEATS = 8  # of each step
_SHORTEST = 1e-6  # seconds between two times, which noise may turn round


def measure(
    params: PyTree = 10_000_000,
    *,
    rank: int = 16,
    devices: Sequence[_Device] | None = None,
) -> Calibration:
    """Times compression and an all-reduce on the present devices, for `advise`.

    On several hosts call it in every process after ``jax.distributed.initialize()``: the all-reduce
    is then the network's. Of what was measured and the link that `advise` is given the slower
    counts.

    Args:
      params: The model to compress, arrays or shapes, or a number of parameters, 10_000_000 or
        ``"10M"``, for which a transformer's shapes are assumed.
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
    tree = []
    for leaf in jax.tree.leaves(shapes_of(params)[0]):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            tree.append(leaf)
    low_rank = powersgd(rank, axis_name=_AXIS, start_step=0, comm_dtype="int6")
    if not any(leaf.rank for leaf in low_rank.bytes(tree, replicas=1).leaves):
        raise ValueError(f"At rank {rank} nothing of this model is compressed: no time to measure.")
    if devices is None:
        devices = jax.devices()
    local = next(device for device in devices if device.process_index == jax.process_index())
    assumed = ASSUMED["cpu" if local.platform == "cpu" else "gpu"]
    int8 = error_feedback(quantized_allreduce(axis_name=_AXIS))
    timed = dataclasses.replace(
        assumed,
        device=f"measured: {len(devices)} x {local.device_kind}, jax {jax.__version__}",
        int8=_with_compression(int8, assumed.int8, tree, local),
        powersgd=_with_compression(low_rank, assumed.powersgd, tree, local),
    )
    if len(devices) == 1:
        device = f"{timed.device}; the time of a collective is assumed"
        return dataclasses.replace(timed, device=device)
    exact = _collective(allreduce(axis_name=_AXIS), 4, devices, local)
    half = allreduce(axis_name=_AXIS, comm_dtype=assumed.half)
    halves = _collective(half, 2, devices, local)
    integers = _collective(optax.stateless(_exchanged), 1, devices, local)
    return dataclasses.replace(
        timed,
        allreduce=timed.allreduce._replace(**exact),
        allreduce_16=timed.allreduce_16._replace(**halves),
        int8=timed.int8._replace(**integers),
        powersgd=timed.powersgd._replace(**integers),
    )


def _with_compression(
    reducer: Any, costs: ReducerCosts, tree: Sequence[Any], device: _Device
) -> ReducerCosts:
    """Scales assumed costs to the time that compression takes on a device."""
    seconds = _step_time(reducer, tree, [device]) - _step_time(optax.identity(), tree, [device])
    times = seconds / costs.compression_time(reducer.bytes(tree, replicas=1))
    times = max(times, 0.01)  # noise can make a difference of two times too small
    per_value = times * costs.per_value
    per_column = times * costs.per_column
    return costs._replace(per_value=per_value, per_column=per_column)


def _collective(
    average: Any, width: int, devices: Sequence[_Device], local: _Device
) -> dict[str, float]:
    """Times steps that average few and many values of `width` bytes, among all devices and on one.

    Returns:
      Overhead in seconds and bandwidth in bytes per second.
    """
    seconds = []
    payloads = []
    for values in (_FEW, _MANY):
        values += -values % len(devices)  # the same number from each replica to each
        vectors = 2 * [jax.ShapeDtypeStruct((values,), jnp.float32)]
        difference = _step_time(average, vectors, devices) - _step_time(average, vectors, [local])
        seconds.append(max(difference, _SHORTEST))
        payloads.append(2 * width * values)
    sent = 2 * (len(devices) - 1) / len(devices) * (payloads[1] - payloads[0])
    bandwidth = sent / max(seconds[1] - seconds[0], _SHORTEST)
    return {"overhead": seconds[0], "bandwidth": bandwidth}


def _exchanged(vectors: Any, params: PyTree) -> list[Array]:
    """Puts vectors through the two collectives of an average in integers, without the rounding."""
    del params
    averaged = []
    for vector in vectors:
        shares = vector.astype(jnp.int8).reshape(axis_size(_AXIS), -1)
        received = exchange(shares, _AXIS)[0]
        averaged.append(gather(received, _AXIS).ravel().astype(jnp.float32))
    return averaged


def _step_time(reducer: Any, tree: Sequence[Any], devices: Sequence[_Device]) -> float:
    """Times an SGD step on given gradients, in seconds: on one device nothing goes on the wire.

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
    replicated = NamedSharding(mesh, jax.P())
    params = jax.device_put(grads, replicated)
    grads = jax.device_put(grads, replicated)
    state = shard_state(state, mesh, _AXIS)
    shortest = float("inf")  # the others waited for other programs, or compiled
    for _ in range(_REPEATS):
        start = time.perf_counter()
        params, state = jax.block_until_ready(compiled(params, state, grads))
        shortest = min(shortest, time.perf_counter() - start)
    return shortest
