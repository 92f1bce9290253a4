"""The JAX side of both benchmarks: jaxcomp under `shard_map`, one CPU device each, gloo."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomp
from benchmarks.cluster.plan import Strategy

AXIS = "data"
_PORT = 29_500


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled step, how its state begins, and how its data get where the step wants them."""

    step: Callable[[Any, Any, Any], tuple[Any, Any, Any]]
    init: Callable[..., tuple[Any, Any]]  # rounds may go on with an inner state
    place: Callable[[Any], Any]  # a batch, or the batches of a round along a new first axis
    in_round: int = 1  # batches that one call of the step takes; more than 1 are stacked


@dataclasses.dataclass(frozen=True)
class Task:
    """What is trained, on which devices."""

    loss: Callable[[Any, Any], jax.Array]
    params: Any  # shapes
    mesh: Mesh
    optimizer: optax.GradientTransformation


class Trainer:
    """One process of a `jax.distributed` job; `process.answer` says what is asked of it."""

    def __init__(
        self,
        problem: Callable[[str, int], Any],
        model: str,
        index: int,
        processes: int,
        address: str,
    ):
        """Joins the other processes.

        Args:
          problem: Of a `jax_side`: from the model and the index to parameters, data and loss.
          model: What is trained.
          index: Of this process.
          processes: How many there are.
          address: Of the first.
        """
        jax.config.update("jax_num_cpu_devices", 1)
        jax.distributed.initialize(f"{address}:{_PORT}", processes, index)
        self._mesh = jax.make_mesh((processes,), (AXIS,), axis_types=(AxisType.Auto,))
        self._problem = problem(model, index)
        self._shapes = jax.eval_shape(lambda: self._problem.params(0))
        self.parameters = sum(x.size for x in jax.tree.leaves(self._shapes))
        self._compiled: dict[tuple[Strategy, Strategy], Program] = {}
        self._phases: list[Program] = []
        self._switch = 0  # the step from which on the last phase counts
        self._state: tuple[Any, Any] = ((), ())

    def start(self, strategy: Strategy, seed: int) -> float | None:
        """Begins anew; returns the bytes a step that jaxcomp promises."""
        self._state = ((), ())  # gives its memory back before there is a second one
        params = self._problem.params(seed)
        self._switch = strategy.start
        self._phases = [self._program(strategy, phase) for phase in strategy.phases]
        # A step compiles when it is first called: here, on parameters that are then thrown away.
        for program in reversed(self._phases):
            self._state = program.init(params)
            self._run(program, range(program.in_round))
        self._state = self._phases[0].init(params)
        return payload(strategy.phases[-1], self._shapes, self._mesh.size)

    def _program(self, strategy: Strategy, phase: Strategy) -> Program:
        """Makes the program of a phase, or returns it: it is used at every rate."""
        if (strategy, phase) not in self._compiled:
            optimizer = self._problem.optimizer(strategy.start)
            task = Task(self._problem.loss, self._shapes, self._mesh, optimizer)
            self._compiled[strategy, phase] = make_program(phase, task)
        return self._compiled[strategy, phase]

    def train(self, steps: Sequence[int]) -> list[float]:
        """Takes steps with the batches of these numbers; returns the seconds of each call."""
        before = [step for step in steps if step < self._switch]
        seconds = self._run(self._phases[0], before)
        if len(self._phases) > 1 and len(before) < len(steps):
            # From here on in rounds, which go on with the parameters and the optimizer's state.
            params, (_, inner) = self._state
            del self._phases[0]
            self._state = self._phases[0].init(params, inner)
        return seconds + self._run(self._phases[0], steps[len(before) :])

    def _run(self, program: Program, steps: Sequence[int]) -> list[float]:
        batches = [self._problem.batch(step) for step in steps]
        ready = batches
        if program.in_round > 1:
            ready = []
            for first in range(0, len(batches), program.in_round):
                several = batches[first : first + program.in_round]
                ready.append(jax.tree.map(lambda *xs: np.stack(xs), *several))
        seconds = []
        for batch in map(program.place, ready):
            began = time.perf_counter()
            params, opt_state, loss = program.step(*self._state, batch)
            self._state = params, opt_state
            jax.block_until_ready((self._state, loss))
            seconds.append(time.perf_counter() - began)
        return seconds

    def loss(self) -> float:
        """Evaluates this process's share."""
        params = jax.tree.map(lambda x: x.addressable_data(0), self._state[0])
        return float(np.mean(self._problem.evaluate(params)))


def make_program(strategy: Strategy, task: Task) -> Program:
    """Makes the training step of a strategy."""
    tx = task.optimizer

    def local_step(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, Any]:
        value, grads = jax.value_and_grad(task.loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    if strategy.kind == "none":
        place = functools.partial(jax.device_put, device=jax.local_devices()[0])
        step = jax.jit(local_step, donate_argnums=(0, 1))
        return Program(step, lambda params: place((params, tx.init(params))), place)
    if strategy.in_rounds:
        run = jaxcomp.local_sgd_round(
            local_step,
            sync_every=strategy.round_steps,
            axis_name=AXIS,
            inner_init=tx.init,
            reducer=_of_change(strategy),
        )
        program = _mapped(task, run, run.init, P(None, AXIS))
        return dataclasses.replace(program, in_round=strategy.round_steps)
    chain = optax.chain(make_reducer(strategy), tx)

    def step_together(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, Any]:
        value, grads = jaxcomp.local_value_and_grad(task.loss, AXIS)(params, batch)
        updates, opt_state = chain.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value[None]

    return _mapped(task, step_together, chain.init, P(AXIS))


def make_reducer(strategy: Strategy) -> Any:
    """Makes what a user of jaxcomp would put first in the chain."""
    if strategy.kind == "allreduce":
        return jaxcomp.allreduce(axis_name=AXIS)
    if strategy.kind == "fp16":
        return jaxcomp.allreduce(axis_name=AXIS, comm_dtype=jnp.float16)
    if strategy.kind == "int8":
        return jaxcomp.error_feedback(jaxcomp.quantized_allreduce(axis_name=AXIS))
    return jaxcomp.powersgd(
        strategy.number, axis_name=AXIS, start_step=0, comm_dtype=strategy.comm_dtype
    )


def _of_change(strategy: Strategy) -> Any:
    """Makes what the change of a round goes through; None to average parameters exactly."""
    return make_reducer(strategy) if strategy.every > 1 else None


def payload(strategy: Strategy, params: Any, processes: int) -> float:
    """Returns the bytes per step that jaxcomp's own figures promise, per process."""
    if strategy.kind == "none":
        return 0.0
    if not strategy.in_rounds:
        return float(make_reducer(strategy).bytes(params, replicas=processes).bytes_after)
    every = strategy.round_steps
    run = jaxcomp.local_sgd_round(
        lambda params, state, batch: (params, state, ()),
        sync_every=every,
        axis_name=AXIS,
        reducer=_of_change(strategy),
    )
    return run.bytes(params, replicas=processes, step=every - 1).bytes_after / every


def _mapped(
    task: Task, step: Callable[..., Any], init_state: Callable[..., Any], batch_spec: P
) -> Program:
    """Maps `step` over all devices, with donation."""
    mesh = task.mesh
    specs = jaxcomp.state_specs(jax.eval_shape(init_state, task.params), AXIS)
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(P(), specs, batch_spec), out_specs=(P(), specs, P(AXIS))
    )

    def placed(spec: P, tree: Any) -> Any:
        place = functools.partial(jax.make_array_from_process_local_data, NamedSharding(mesh, spec))
        return jax.tree.map(place, tree)

    def init(params: Any, *inner: Any) -> tuple[Any, Any]:
        if not inner:  # else they lie there already
            params = placed(P(), params)
        return params, jaxcomp.shard_state(jax.jit(init_state)(params, *inner), mesh, AXIS)

    step = jax.jit(mapped, donate_argnums=(0, 1))
    return Program(step, init, functools.partial(placed, batch_spec))
