"""The JAX side of the cluster benchmark: jaxcomp under `shard_map`, one CPU device each, gloo."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomp
from benchmarks.cluster.plan import Strategy
from benchmarks.common.models import FULL, LEARNING_RATE, MLP, TINY, Transformer, make_batches

AXIS = "data"
_PORT = 29_500
# The first step compiles; until about the eighth the allocator still asks the system for memory.
_WARM_UP = 8


class FlaxMLP(nn.Module):
    """See `common.models.MLP`."""

    sizes: MLP

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """From (batch, inputs) to (batch, classes)."""
        for width in self.sizes.widths[1:-1]:
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(self.sizes.widths[-1])(x)


class FlaxTransformer(nn.Module):
    """See `common.models.Transformer`."""

    sizes: Transformer

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """From (batch, context) to (batch, context, vocabulary)."""
        sizes = self.sizes
        x = nn.Embed(sizes.vocabulary, sizes.width, name="tokens")(tokens)
        x = x + nn.Embed(sizes.context, sizes.width, name="positions")(jnp.arange(sizes.context))
        for _ in range(sizes.layers):
            x = self._block(x)
        return nn.Dense(sizes.vocabulary, use_bias=False)(nn.LayerNorm(epsilon=1e-5)(x))

    def _block(self, x: jax.Array) -> jax.Array:
        width = self.sizes.width
        qkv = nn.Dense(3 * width)(nn.LayerNorm(epsilon=1e-5)(x))
        heads = qkv.reshape(*x.shape[:2], 3, self.sizes.heads, width // self.sizes.heads)
        q, k, v = (heads[:, :, i] for i in range(3))
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + nn.Dense(width)(mixed.reshape(x.shape))
        hidden = nn.gelu(nn.Dense(4 * width)(nn.LayerNorm(epsilon=1e-5)(x)), approximate=True)
        return x + nn.Dense(width)(hidden)


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled step, how its state begins, and how its data get where the step wants them."""

    step: Callable[[Any, Any, Any], tuple[Any, Any, Any]]
    init: Callable[..., tuple[Any, Any]]  # rounds may go on from parameters and an inner state
    place: Callable[[Any], Any]  # a batch, or the batches of a round along a new first axis
    in_round: int = 1  # batches that one call of the step takes; more than 1 are stacked

    def placed(self, batches: Sequence[Any]) -> list[Any]:
        """What the step is called with, one after the other; of rounds, whole ones."""
        if self.in_round == 1:
            return [self.place(batch) for batch in batches]
        firsts = range(0, len(batches) - self.in_round + 1, self.in_round)
        rounds = (batches[first : first + self.in_round] for first in firsts)
        return [self.place(jax.tree.map(lambda *xs: np.stack(xs), *some)) for some in rounds]


class JaxTrainer:
    """One process of a `jax.distributed` job; see `process.Trainer`."""

    def __init__(self, model: str, index: int, processes: int, address: str, *, tiny: bool):
        """Joins the other processes and makes the model and its data."""
        jax.config.update("jax_num_cpu_devices", 1)
        jax.distributed.initialize(f"{address}:{_PORT}", processes, index)
        mesh = jax.make_mesh((processes,), (AXIS,), axis_types=(AxisType.Auto,))
        sizes = (TINY if tiny else FULL)[model]
        module = FlaxMLP(sizes) if isinstance(sizes, MLP) else FlaxTransformer(sizes)
        batches = make_batches(sizes, index)
        # On the host: every strategy starts from the same values.
        params = jax.device_get(jax.jit(module.init)(jax.random.key(0), batches[0][0]))

        def loss(params: Any, batch: Any) -> jax.Array:
            x, y = batch
            logits = cast(jax.Array, module.apply(params, x))
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

        self.parameters = sum(x.size for x in jax.tree.leaves(params))
        self._task = Task(loss, params, mesh, optax.sgd(LEARNING_RATE))
        self._batches = batches
        self._programs: dict[Strategy, Program] = {}  # compiled once, used at every rate
        self._program: Program
        self._state: tuple[Any, Any] = ((), ())
        self._feed: Iterator[Any] = iter(())
        self._calls = 1  # of the step in one sample
        self._losses: Any = None

    def prepare(self, strategy: Strategy) -> float | None:
        """See `process.Trainer`."""
        self._state = ((), ())  # gives its memory back before there is a second one
        if strategy not in self._programs:
            self._programs[strategy] = make_program(strategy, self._task)
        self._program = self._programs[strategy]
        self._state = self._program.init()
        # As many as a sample takes, if there are not so many different ones.
        least = itertools.islice(itertools.cycle(self._batches), self._program.in_round)
        batches = max(self._batches, list(least), key=len)
        self._feed = itertools.cycle(self._program.placed(batches))
        self._calls = strategy.round_steps // self._program.in_round
        for _ in range(_WARM_UP):
            self.sample()
        return payload(strategy, self._task.params, self._task.mesh.size)

    def sample(self) -> None:
        """See `process.Trainer`."""
        for _ in range(self._calls):
            params, opt_state, self._losses = self._program.step(*self._state, next(self._feed))
            self._state = params, opt_state
            jax.block_until_ready((self._state, self._losses))

    def loss(self) -> float:
        """See `process.Trainer`."""
        return float(np.mean(self._losses.addressable_shards[0].data))


@dataclasses.dataclass(frozen=True)
class Task:
    """What is trained, on which devices."""

    loss: Callable[[Any, Any], jax.Array]
    params: Any  # on the host
    mesh: Mesh
    optimizer: optax.GradientTransformation


def make_program(strategy: Strategy, task: Task) -> Program:
    """The training step of a strategy."""
    if strategy.kind == "none":
        return _alone(task)
    if strategy.in_rounds:
        return _rounds(task, strategy)
    return _steps(task, make_reducer(strategy))


def make_reducer(strategy: Strategy) -> Any:
    """What a user of jaxcomp would put first in the chain."""
    rank = strategy.number
    if strategy.kind == "allreduce":
        return jaxcomp.allreduce(axis_name=AXIS)
    if strategy.kind == "fp16":
        return jaxcomp.allreduce(axis_name=AXIS, comm_dtype=jnp.float16)
    if strategy.kind == "int8":
        return jaxcomp.error_feedback(jaxcomp.quantized_allreduce(axis_name=AXIS))
    return jaxcomp.powersgd(
        rank,
        axis_name=AXIS,
        start_step=0,
        comm_dtype=strategy.comm_dtype,
    )


def _of_change(strategy: Strategy) -> Any:
    """What the change of a round goes through; None where parameters are averaged exactly."""
    return make_reducer(strategy) if strategy.every > 1 else None


def payload(strategy: Strategy, params: Any, processes: int) -> float | None:
    """Bytes per step that jaxcomp's own figures promise, per process."""
    if strategy.kind == "none":
        return 0.0
    if strategy.in_rounds:
        reducer = _of_change(strategy)
        every = strategy.round_steps
        run = jaxcomp.local_sgd_round(
            lambda params, state, batch: (params, state, ()),
            sync_every=every,
            axis_name=AXIS,
            reducer=reducer,
        )
        return run.bytes(params, replicas=processes, step=every - 1).bytes_after / every
    return float(make_reducer(strategy).bytes(params, replicas=processes).bytes_after)


def _alone(task: Task) -> Program:
    """Every process on its own: the step without any communication."""
    device = jax.local_devices()[0]
    tx, step = _local_step(task)

    def init() -> tuple[Any, Any]:
        return jax.device_put((task.params, tx.init(task.params)), device)

    return Program(
        jax.jit(step, donate_argnums=(0, 1)), init, lambda batch: jax.device_put(batch, device)
    )


def _steps(task: Task, reducer: optax.GradientTransformation) -> Program:
    """A reducer before the optimizer, in every step."""
    tx = optax.chain(reducer, task.optimizer)

    def step(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, Any]:
        value, grads = jaxcomp.local_value_and_grad(task.loss, AXIS)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value[None]

    return _mapped(task, step, tx.init, P(AXIS))


def _rounds(task: Task, strategy: Strategy) -> Program:
    """Whole rounds of local SGD."""
    tx, step = _local_step(task)
    run = jaxcomp.local_sgd_round(
        step,
        sync_every=strategy.round_steps,
        axis_name=AXIS,
        inner_init=tx.init,
        reducer=_of_change(strategy),
    )
    program = _mapped(task, run, run.init, P(None, AXIS))
    return dataclasses.replace(program, in_round=strategy.round_steps)


def _local_step(task: Task) -> tuple[optax.GradientTransformation, Callable[..., Any]]:
    tx = task.optimizer

    def step(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, Any]:
        value, grads = jax.value_and_grad(task.loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return tx, step


def _mapped(
    task: Task, step: Callable[..., Any], init_state: Callable[..., Any], batch_spec: P
) -> Program:
    """`step` on all devices, with donation."""
    mesh = task.mesh
    specs = jaxcomp.state_specs(jax.eval_shape(init_state, task.params), AXIS)
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(P(), specs, batch_spec), out_specs=(P(), specs, P(AXIS))
    )

    def init(params: Any = None, *inner: Any) -> tuple[Any, Any]:
        params = placed(P(), task.params) if params is None else params
        return params, jaxcomp.shard_state(jax.jit(init_state)(params, *inner), mesh, AXIS)

    def placed(spec: P, tree: Any) -> Any:
        place = functools.partial(jax.make_array_from_process_local_data, NamedSharding(mesh, spec))
        return jax.tree.map(place, tree)

    step = jax.jit(mapped, donate_argnums=(0, 1))
    return Program(step, init, functools.partial(placed, batch_spec))
