"""Checks that replicas on several devices stay equal bit for bit, and times their steps."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxcomp
from benchmarks.card import step
from benchmarks.card.updates import AXIS, mesh_of, queued_ms, tree
from benchmarks.common.runs import Run


def equal_everywhere(values: Any) -> bool:
    """Returns whether every device has the same bits of every (replicated) array."""
    for x in jax.tree.leaves(values):
        copies = {np.asarray(shard.data).tobytes() for shard in x.addressable_shards}
        if len(copies) > 1:
            return False
    return True


def update(name: str, reducer: Any, mesh: Any, small: bool) -> Run:
    """Runs updates with other gradients on each device; checks outputs and counts bytes."""
    params = jax.tree.map(jnp.zeros, tree(small), is_leaf=lambda x: isinstance(x, tuple))
    state = jaxcomp.shard_state(reducer.init(params), mesh, AXIS)
    specs = jaxcomp.state_specs(state, AXIS)

    def run(state: Any) -> Any:
        key = jax.random.fold_in(jax.random.key(0), jax.lax.axis_index(AXIS))
        grads = {}
        for i, (path, x) in enumerate(params.items()):
            grads[path] = jax.random.normal(jax.random.fold_in(key, i), x.shape)
        return reducer.update(grads, state)

    # Without a check by type: what counts here is what the devices hold.
    mapped = jax.shard_map(
        run, mesh=mesh, in_specs=(specs,), out_specs=(jax.P(), specs), check_vma=False
    )
    compiled = jax.jit(mapped).lower(state).compile()
    outputs, after = compiled(state)
    sent = jaxcomp.collectives(compiled, mesh=mesh)
    row: Run = {"kind": "replicas", "reducer": name, "devices": mesh.size}
    row["right"] = equal_everywhere((outputs, getattr(after, "q", ())))
    row["collectives"] = list(map(str, sent))
    row["bytes"] = sum(collective.bytes for collective in sent)
    row["bytes_expected"] = reducer.bytes(params, replicas=mesh.size).bytes_after
    row["queued_ms"] = queued_ms(partial(compiled, state), 3 if small else 20)
    return row


def rows(small: bool, quick: bool, devices: int) -> Iterator[Run]:
    """Yields, for all devices and then for fewer, an update and a step with each reducer."""
    for count in sorted({devices, 8, 4, 2}, reverse=True):
        if count > devices:
            continue
        mesh = mesh_of(jax.devices()[:count])
        reducers = step.strategies(quick)
        reducers["all-reduce"] = jaxcomp.allreduce(axis_name=AXIS)
        for name, reducer in reducers.items():
            if reducer is not None:
                yield update(name, reducer, mesh, small)
                yield step.timed(name, reducer, mesh, small)
