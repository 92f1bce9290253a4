"""The JAX side of both benchmarks: jaxcomp under `shard_map`, one CPU device each, gloo."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import unflatten_dict
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomp
from benchmarks.cluster.plan import Strategy
from benchmarks.cluster.task import WEIGHT_DECAY, Task, read_task
from benchmarks.common.language_model import lm

AXIS = "data"
_PORT = 29_500


class Program(NamedTuple):
    """A compiled step, a function that makes its state, and one that places its data."""

    step: Callable[..., Any]
    init: Callable[..., Any]  # rounds may go on with an inner state
    place: Callable[[Any], Any]  # a batch, or the batches of a round along a new first axis


class Trainer:
    """One process of a `jax.distributed` job; `process.answer` calls its methods."""

    def __init__(self, folder: Path, index: int, processes: int, address: str):
        """Joins the other processes.

        Args:
          folder: The folder with the tasks, a file for each seed.
          index: The number of this process.
          processes: The number of processes.
          address: The address of the first process.
        """
        jax.config.update("jax_num_cpu_devices", 1)
        jax.distributed.initialize(f"{address}:{_PORT}", processes, index)
        self._mesh = jax.make_mesh((processes,), (AXIS,), axis_types=(AxisType.Auto,))
        self._folder = folder
        self._index = index
        self._task = read_task(folder / "0.npz")
        self._loss = partial(loss_of, self._task)
        self._evaluate = jax.jit(self._loss)
        self._programs: dict[tuple[Strategy, Strategy], Program] = {}
        self._strategy = Strategy("none")
        self._state: Any = ()
        self.parameters = sum(map(np.size, self._task.params.values()))

    def start(self, strategy: Strategy, seed: int) -> float | None:
        """Makes new parameters and state; returns the bytes per step that jaxcomp predicts."""
        self._state = ()  # gives its memory back before there is a second one
        self._task = read_task(self._folder / f"{seed}.npz")
        self._strategy = strategy
        params = unflatten_dict(self._task.params, sep="/")
        # A step compiles when it is first called: here, on parameters that are then thrown away.
        for phase in reversed(strategy.phases):
            if (strategy, phase) not in self._programs:
                tx = make_optimizer(self._task, strategy.start)
                self._programs[strategy, phase] = make_program(
                    phase, self._loss, tx, params, self._mesh
                )
            self._state = self._programs[strategy, phase].init(params)
            self._run(phase, range(phase.round_steps))
        self._state = self._programs[strategy, strategy.phases[0]].init(params)
        return payload(strategy.phases[-1], params, self._mesh.size)

    def train(self, steps: Sequence[int]) -> list[float]:
        """Takes steps with the batches of these numbers; returns the seconds of each call."""
        first, *later = self._strategy.phases
        before = [step for step in steps if not later or step < self._strategy.start]
        seconds = self._run(first, before)
        rest = steps[len(before) :]
        if rest and rest[0] == self._strategy.start:
            # From here on in rounds, which go on with the parameters and the optimizer's state.
            params, (_, inner) = self._state
            self._state = self._programs[self._strategy, later[0]].init(params, inner)
        for phase in later:
            seconds += self._run(phase, rest)
        return seconds

    def _run(self, phase: Strategy, steps: Sequence[int]) -> list[float]:
        program = self._programs[self._strategy, phase]
        seconds = []
        for first in range(0, len(steps), phase.round_steps):
            several = [
                self._task.batch(step, self._index)
                for step in steps[first : first + phase.round_steps]
            ]
            batch = several[0]
            if phase.in_rounds:
                batch = tuple(map(np.stack, zip(*several, strict=True)))
            batch = program.place(batch)
            began = time.perf_counter()
            *state, loss = program.step(*self._state, batch)
            self._state = tuple(state)
            jax.block_until_ready((state, loss))
            seconds.append(time.perf_counter() - began)
        return seconds

    def loss(self) -> float:
        """Evaluates this process's share of the held-out data."""
        params = jax.tree.map(lambda x: x.addressable_data(0), self._state[0])
        return float(self._evaluate(params, self._task.share(self._index)))


def loss_of(task: Task, params: Any, batch: Any) -> jax.Array:
    """Returns the mean cross-entropy of inputs and targets with the model of a task."""
    x: Any
    x, targets = batch
    if task.heads:
        context, width = task.params["positions/embedding"].shape
        model = lm.Transformer(lm.ModelConfig(task.layers, width, int(task.heads), context))
        x: Any = model.apply({"params": params}, x)
    else:
        *hidden, last = params.values()
        for layer in hidden:
            x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
        x = x @ last["kernel"] + last["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(x, targets).mean()


def make_optimizer(task: Task, start: int) -> optax.GradientTransformation:
    """Makes SGD, or clipping and AdamW; if `start` is not 0, for rounds from that step on."""
    rates = jnp.asarray(task.rates)

    def rate(step: jax.typing.ArrayLike) -> jax.Array:
        return rates[jnp.minimum(jnp.asarray(step), len(rates) - 1)]

    largest = float(task.largest_norm)
    if not largest:
        return optax.sgd(rate)

    def norm(step: jax.Array) -> jax.Array:
        return jnp.where(step < start, largest, 2 * largest)

    clip = optax.clip_by_global_norm(largest)
    adam = optax.scale_by_adam()
    if start:
        clip = optax.inject_hyperparams(optax.clip_by_global_norm)(max_norm=norm)
        adam = jaxcomp.scale_by_local_adam(axis_name=AXIS, start_step=start)
    decay = optax.add_decayed_weights(WEIGHT_DECAY)
    return optax.chain(clip, adam, decay, optax.scale_by_learning_rate(rate))


def make_program(
    strategy: Strategy,
    loss: Callable[..., jax.Array],
    tx: optax.GradientTransformation,
    params: Any,
    mesh: Mesh,
) -> Program:
    """Maps the training step of a strategy over all devices, with donation.

    Args:
      strategy: A strategy with one phase.
      loss: A function of parameters and a batch.
      tx: The optimizer.
      params: The parameters; only their shapes are used.
      mesh: A mesh of all devices.
    """
    if strategy.in_rounds:
        batch_spec = P(None, AXIS)
        step: Any = _round(strategy, loss, tx)
        init_state = step.init
    else:
        batch_spec = P(AXIS)
        step, init_state = _step_together(strategy, loss, tx)
    specs = jaxcomp.state_specs(jax.eval_shape(init_state, params), AXIS)
    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(P(), specs, batch_spec),
        out_specs=(P(), specs, P(AXIS)),
        check_vma=strategy.kind != "none",  # whose replicas part
    )

    def placed(spec: P, tree: Any) -> Any:
        sharding = NamedSharding(mesh, spec)
        place = partial(jax.make_array_from_process_local_data, sharding)
        return jax.tree.map(place, tree)

    def init(params: Any, *inner: Any) -> tuple[Any, Any]:
        if not inner:  # else they lie there already
            params = placed(P(), params)
        return params, jaxcomp.shard_state(jax.jit(init_state)(params, *inner), mesh, AXIS)

    return Program(jax.jit(mapped, donate_argnums=(0, 1)), init, partial(placed, batch_spec))


def _step_together(strategy: Strategy, loss: Any, tx: Any) -> tuple[Any, Any]:
    """Returns a step on averaged gradients (local ones for "none"), and the init of its state."""
    chain = optax.chain(make_reducer(strategy), tx)

    def step(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, Any]:
        value, grads = jaxcomp.local_value_and_grad(loss, AXIS)(params, batch)
        updates, opt_state = chain.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value[None]

    return step, chain.init


def _round(strategy: Strategy, loss: Any, tx: Any) -> Any:
    """Returns a round of local steps; at its end parameters, or their change, are averaged."""

    def step(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, Any]:
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return jaxcomp.local_sgd_round(
        step,
        sync_every=strategy.round_steps,
        axis_name=AXIS,
        inner_init=tx.init,
        reducer=make_reducer(strategy) if strategy.every > 1 else None,
    )


def make_reducer(strategy: Strategy) -> Any:
    """Makes the reducer of a strategy."""
    if strategy.kind == "none":
        return optax.identity()
    if strategy.kind == "allreduce":
        return jaxcomp.allreduce(axis_name=AXIS)
    if strategy.kind == "fp16":
        return jaxcomp.allreduce(axis_name=AXIS, comm_dtype=jnp.float16)
    if strategy.kind == "int8":
        return jaxcomp.error_feedback(jaxcomp.quantized_allreduce(axis_name=AXIS))
    return jaxcomp.powersgd(
        strategy.number, axis_name=AXIS, start_step=0, comm_dtype=strategy.comm_dtype
    )


def payload(strategy: Strategy, params: Any, processes: int) -> float:
    """Returns the bytes per step and process that jaxcomp predicts."""
    if strategy.kind == "none":
        return 0.0
    if not strategy.in_rounds:
        return float(make_reducer(strategy).bytes(params, replicas=processes).bytes_after)
    every = strategy.round_steps
    run = _round(strategy, None, optax.identity())
    return run.bytes(params, replicas=processes, step=every - 1).bytes_after / every
