"""Times a training step of a transformer of GPT-2 small's size: bfloat16, Adam, a reducer."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxcomp
from benchmarks.card.updates import AXIS, mesh_of, queued_ms
from benchmarks.common.language_model import lm
from benchmarks.common.runs import Run

_GPT2 = lm.ModelConfig(12, 768, 12, 1024, jnp.bfloat16, vocabulary=50257)


def strategies(quick: bool) -> dict[str, Any]:
    """Lists the reducers by name; None averages nothing."""
    powersgd = partial(jaxcomp.powersgd, axis_name=AXIS, start_step=0)
    every = {"none": None, "rank 32": powersgd(32)}
    if not quick:
        every |= {
            "rank 4": powersgd(4),
            "rank 128": powersgd(128),
            "rank 32, int6": powersgd(32, comm_dtype="int6"),
            "all-reduce": jaxcomp.allreduce(axis_name=AXIS),
        }
    return every


def timed(name: str, reducer: Any, mesh: Any, small: bool) -> Run:
    """Compiles and times the step with one reducer; eight sequences of 1,024 on each device."""
    sizes = lm.ModelConfig(2, 64, 2, 16, jnp.bfloat16) if small else _GPT2
    sequences = (2 if small else 8) * mesh.size
    loss = partial(lm.loss_fn, lm.Transformer(sizes))
    optimizer = optax.adamw(3e-4)
    averaged: Any = None
    if reducer is not None:
        averaged = jaxcomp.value_and_grad(loss, reducer, mesh=mesh)

    def step(params: Any, kept: Any, inner: Any, tokens: Any) -> Any:
        if averaged:
            (value, grads), kept = averaged(kept, params, tokens)
        else:
            value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, inner = optimizer.update(grads, inner, params)
        return optax.apply_updates(params, updates), kept, inner, value

    params = lm.init_params(lm.Transformer(sizes), 0)
    params = jax.device_put(params, jax.NamedSharding(mesh, jax.P()))
    shape = (sequences, sizes.context + 1)
    tokens = jax.random.randint(jax.random.key(1), shape, 0, sizes.vocabulary)
    tokens = jax.device_put(tokens, jax.NamedSharding(mesh, jax.P(AXIS)))
    held = [params, averaged.init(params) if averaged else (), optimizer.init(params)]
    del params
    start = time.perf_counter()
    compiled = jax.jit(step, donate_argnums=(0, 1, 2)).lower(*held, tokens).compile()
    row: Run = {"kind": "step", "reducer": name, "devices": mesh.size}
    row["compile_s"] = time.perf_counter() - start
    row["tokens"] = sequences * sizes.context
    losses = []

    def once() -> Any:
        *held[:], value = compiled(*held, tokens)
        losses.append(value)
        return value

    row["queued_ms"] = queued_ms(once, 2 if small else 20)
    row["losses"] = [float(losses[0]), float(losses[-1])]
    row["right"] = all(map(math.isfinite, row["losses"]))
    return row


def rows(small: bool, quick: bool, devices: int) -> Iterator[Run]:
    """Yields a row for each reducer on one device."""
    del devices
    for name, reducer in strategies(quick).items():
        yield timed(name, reducer, mesh_of(jax.devices()[:1]), small)
