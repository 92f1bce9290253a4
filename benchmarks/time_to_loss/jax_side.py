"""The JAX side: jaxcomp and AdamW under `shard_map`, one CPU device in each process, gloo."""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType

import jaxcomp
from benchmarks.cluster import jax_trainer as cluster
from benchmarks.cluster.plan import Strategy
from benchmarks.common.paths import LANGUAGE_MODEL
from benchmarks.time_to_loss.task import LARGEST_NORM, WEIGHT_DECAY, Config, read_task

sys.path.insert(0, str(LANGUAGE_MODEL))
from lm import ModelConfig, Transformer, loss_fn

_PORT = 29_510


class JaxTrainer:
    """One process of a `jax.distributed` job; see `process.Trainer`."""

    def __init__(self, folder: Path, index: int, processes: int, address: str):
        """Joins the other processes."""
        jax.config.update("jax_num_cpu_devices", 1)
        jax.distributed.initialize(f"{address}:{_PORT}", processes, index)
        self._folder, self._index = folder, index
        self._mesh = jax.make_mesh((processes,), (cluster.AXIS,), axis_types=(AxisType.Auto,))
        config = Config(**json.loads((folder / "config.json").read_text()))
        sizes = ModelConfig(config.layers, config.width, config.heads, config.context)
        self._model = Transformer(sizes)
        self._evaluate = jax.jit(functools.partial(loss_fn, self._model))
        self.parameters = sum(x.size for x in read_task(folder / "0.npz").params.values())

    def start(self, strategy: Strategy, seed: int) -> None:
        """See `process.Trainer`."""
        # Gives its memory back before there is a second one.
        self._state: tuple[Any, Any] = ((), ())
        task = self._task = read_task(self._folder / f"{seed}.npz")
        rates = jnp.asarray(task.rates)

        def rate(step: jax.typing.ArrayLike) -> jax.Array:
            return rates[jnp.minimum(jnp.asarray(step), len(rates) - 1)]

        clip, adam = optax.clip_by_global_norm(LARGEST_NORM), optax.scale_by_adam()
        if start := strategy.start:
            norm = lambda step: jnp.where(step < start, LARGEST_NORM, 2 * LARGEST_NORM)  # noqa: E731
            clip = optax.inject_hyperparams(optax.clip_by_global_norm)(max_norm=norm)
            adam = jaxcomp.scale_by_local_adam(axis_name=cluster.AXIS, start_step=start)
        decay, scale = optax.add_decayed_weights(WEIGHT_DECAY), optax.scale_by_learning_rate(rate)
        optimizer = optax.chain(clip, adam, decay, scale)
        loss = functools.partial(loss_fn, self._model)
        job = cluster.Task(loss, task.tree, self._mesh, optimizer)
        self._switch = strategy.start
        self._programs = [cluster.make_program(phase, job) for phase in strategy.phases]
        # A step compiles when it is first called: here, on parameters that are then thrown away.
        for program in reversed(self._programs):
            self._state = program.init()
            self._run(program, range(program.in_round))
        self._state = self._programs[0].init()

    def train(self, steps: Sequence[int]) -> list[float]:
        """See `process.Trainer`."""
        before = [step for step in steps if step < self._switch]
        seconds = self._run(self._programs[0], before)
        if len(self._programs) > 1 and len(before) < len(steps):
            # From here on in rounds, which go on with the parameters and the optimizer's state.
            params, (_, inner) = self._state
            del self._programs[0]
            self._state = self._programs[0].init(params, inner)
        return seconds + self._run(self._programs[0], steps[len(before) :])

    def _run(self, program: cluster.Program, steps: Sequence[int]) -> list[float]:
        own = [self._task.batches[step % len(self._task.batches), self._index] for step in steps]
        seconds = []
        for batch in program.placed(own):
            began = time.perf_counter()
            params, opt_state = self._state
            params, opt_state, _ = program.step(params, opt_state, batch)
            self._state = jax.block_until_ready((params, opt_state))
            seconds.append(time.perf_counter() - began)
        return seconds

    def held_out_loss(self) -> float:
        """See `process.Trainer`."""
        params = jax.tree.map(lambda x: x.addressable_data(0), self._state[0])
        return float(np.mean(self._evaluate(params, self._task.share(self._index))))
