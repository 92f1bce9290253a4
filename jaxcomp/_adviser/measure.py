"""Models the time of a data-parallel step, and measures the model's constants.

docs/performance.md has the formulas of the model, its assumptions and its error. A step takes its
computation, its compression, and that part of its collectives which does not overlap with the
backward pass. The constants of a device are in a `Calibration`, one `ReducerCosts` for each kind of
reducer: assumed ones for a GPU or a CPU, or what `measure` returns. `advise` applies them to a
`Link`.

`measure` times compression on one device, where nothing is sent, as the difference to a step
without a reducer. A collective is timed with two sizes, over all devices and on one, which gives
its fixed time and its bandwidth.

In the place of parameters both take a number, for a first answer before there is a model.
`shapes_of` makes a transformer's shapes from it.
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

from jaxcomp._base.checks import answers_other_names, check_int
from jaxcomp._base.leaves import checked_params, floating_leaves
from jaxcomp._base.stats import CompressionStats
from jaxcomp._base.typing import MatrixDimsFn, PyTree
from jaxcomp._bytes.units import parse
from jaxcomp._lowrank.matrices import plan_leaves
from jaxcomp._reducers.allreduce import allreduce
from jaxcomp._reducers.error_feedback import error_feedback
from jaxcomp._reducers.powersgd import powersgd
from jaxcomp._reducers.quantized import quantized_allreduce
from jaxcomp._reducers.reducer import Reducer
from jaxcomp._states.place import shard_state, state_specs

# The backward pass takes two thirds of a step's time: it has two matrix products for each one of
# the forward pass.
_BACKWARD_SHARE = 2 / 3
# A break-even bandwidth is rounded to a power of this base, at most 1e15 bytes per second.
_BASE = 1 + 1e-6
_POWERS = range(round(math.log(1e15, _BASE)))
# Those of GPT-2 small: width 768 has 12 layers.
_HEAD_WIDTH = 64
_VOCABULARY = 50_257
# Numbers outside of these are more likely a slip, such as 124 for "124M", than a model.
_SMALLEST = 10_000
_LARGEST = 10**12
_Device: TypeAlias = Any  # jax.Device, which type checkers take for a variable
_AXIS = "replicas"
# Values in each of two vectors that are averaged: so few that the fixed time counts, and so many
# that the bandwidth does.
_FEW = 1 << 9
_MANY = 1 << 22
_REPEATS = 8  # runs of each step
_SHORTEST = 1e-6  # seconds: limit for a difference of two times, which noise can make negative


class Link(NamedTuple):
    """Describes the network link between senders: replicas, or hosts with several replicas."""

    senders: int
    bandwidth: float  # bytes per second in each direction
    latency: float  # seconds from one sender to the next, one way


class ReducerCosts(NamedTuple):
    """Holds the costs of one kind of reducer in a step, on one kind of device."""

    overhead: float  # seconds that a collective takes in addition to its bytes
    bandwidth: float = math.inf  # bytes per second that it reaches if no link is slower
    # Number of collectives that follow one another; an all-to-all with its all-gather counts once.
    collectives: int = 1
    overlap: float = 0.0  # fraction of the backward pass that the collectives overlap with
    per_value: float = 0.0  # seconds to compress one value, with its residual
    per_column: float = 0.0  # seconds for one value and one column of the factors

    def compression_time(self, sent: CompressionStats) -> float:
        """Returns the seconds to compress all leaves that compression makes smaller."""
        seconds = 0.0
        for leaf in sent.leaves:
            if leaf.bytes_after < leaf.bytes_before:
                seconds += leaf.size * (self.per_value + leaf.rank * self.per_column)
        return seconds

    def communication_time(self, sent: CompressionStats, link: Link) -> float:
        """Returns the seconds of all collectives, without any overlap."""
        if link.senders == 1:
            return 0.0
        # A ring passes every share around twice: once to sum it, once to hand it out.
        hops = 2 * (link.senders - 1)
        fixed = self.collectives * (self.overhead + hops * link.latency)
        bandwidth = min(link.bandwidth, self.bandwidth)
        return fixed + hops / link.senders * sent.bytes_after / bandwidth

    def step_time(self, sent: CompressionStats, compute: float, link: Link) -> float:
        """Returns the seconds of a step whose computation takes `compute` seconds."""
        hidden = self.overlap * _BACKWARD_SHARE * compute
        exposed = max(0.0, self.communication_time(sent, link) - hidden)
        return compute + self.compression_time(sent) + exposed


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Holds the model's constants for one kind of device, measured by `measure` or assumed."""

    device: str  # a description: what was measured, what was assumed
    half: str  # the 16-bit wire dtype; XLA's CPU backend sends bfloat16 as float32
    allreduce: ReducerCosts  # all-reduce of float32
    allreduce_16: ReducerCosts  # all-reduce of `half`, with the cast
    int8: ReducerCosts
    powersgd: ReducerCosts  # with factors in integers
    training_flops: float  # operations per second in training, to estimate the tokens of a step


# Constants for a device that was not measured; the adviser prints `device` with its result. Each
# value is read or written in float32: 7 times by an ideally fused PowerSGD (the sum of gradient and
# residual, the second product, output and new residual), and 9 times by int8 in error_feedback (the
# sum, integers and scales, decoding the mean, the residual). A column takes 8 operations.
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
        training_flops=400e12,  # 40% of the bfloat16 rate in an H200's data sheet
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
      Bytes per second; 0 if a baseline is faster even on the slowest link, infinity if the step is
      faster even on the fastest link.
    """

    def loses(power: int) -> bool:
        at = link._replace(bandwidth=_BASE**power)
        return any(step_time(at) >= baseline(at) for baseline in baselines)

    # A faster link helps the baselines more, because they send more: so it loses from some power
    # on.
    power = bisect.bisect(_POWERS, False, key=loses)
    if power == 0:
        return 0.0
    if power == len(_POWERS):
        return math.inf
    return _BASE**power


def shapes_of(params: PyTree) -> tuple[PyTree, str]:
    """Returns the parameters; or, for a number, shapes of a transformer of about that size.

    The transformer resembles GPT-2 small. It has one layer for every 64 of width. Its embedding is
    shared with the output and has 50,257 rows, or a third of the parameters if these are few.

    Args:
      params: Arrays or shapes; or a number of parameters, 124_000_000 or ``"124M"``.

    Returns:
      The tree, and a sentence with the assumptions (empty if `params` is a tree).

    Raises:
      ValueError: If the number is below 10,000 or above 10^12, or the tree is not one of
        parameters.
    """
    if not isinstance(params, (int, float, np.number, str)):
        params = checked_params("params", params)
        if not floating_leaves(params):
            raise ValueError(
                "`params` holds no floating array. Pass the parameters that are trained."
            )
        return params, ""
    count = round(parse("params", params))
    if not _SMALLEST <= count <= _LARGEST:
        raise ValueError(
            f"Shapes are guessed for {_SMALLEST:,} to {_LARGEST:.0e} parameters, got {count:,}. "
            "Pass the parameters, or their shapes, to jaxcomp.advise."
        )
    width = 4  # the largest multiple of 4 that fits, with the smallest embedding it may have
    while _values(width + 4) + min(_VOCABULARY * (width + 4), count // 3) <= count:
        width += 4
    layers = _layers(width)
    left = count - _values(width)
    rows = min(_VOCABULARY, left // width)
    layer = []
    for inputs, outputs in ((1, 3), (1, 1), (1, 4), (4, 1)):  # qkv, out, up, down
        layer.append(jax.ShapeDtypeStruct((inputs * width, outputs * width), jnp.float32))
    layer.append(jax.ShapeDtypeStruct((13 * width,), jnp.float32))  # biases and norms
    embedding = jax.ShapeDtypeStruct((rows, width), jnp.float32)
    total = _values(width) + rows * width
    assumption = (
        f"shapes assumed: a transformer of {layers} layers of width {width:,} and an embedding of "
        f"{rows:,} x {width:,}, {total:,} parameters in float32; better pass yours to "
        "jaxcomp.advise"
    )
    return {"embedding": embedding, "layers": layers * [layer]}, assumption


def _layers(width: int) -> int:
    return max(1, width // _HEAD_WIDTH)


def _values(width: int) -> int:
    """Counts the parameters of all layers: kernels, biases and norms."""
    return _layers(width) * width * (12 * width + 13)


def typical_width(params: PyTree, matrix_dims: MatrixDimsFn | None = None) -> int:
    """Returns the median, over all compressible values, of the smaller side of their matrix.

    For a transformer this is its width. Without a compressible leaf it is 1.
    """
    sides = []
    values = []
    for plan in plan_leaves(params, 1, 1.0, matrix_dims):
        if plan.view is not None:
            sides.append(min(plan.view.n_rows, plan.view.n_cols))
            values.append(plan.size)
    if not sides:
        return 1
    return int(np.quantile(sides, 0.5, weights=values, method="inverted_cdf"))


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
        raise ValueError(
            f"At rank {rank} no leaf of this model is compressed, so there is nothing to measure. "
            "Pass a lower rank."
        )
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
