"""Training loops of several replicas whose parameters differ, under each of JAX's mappings."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
from runners import AXIS, first, mesh_of, placed, spread, stack, steps_of, types_of
from xla import users_program

import jaxcomp


def towards(params: Any, target: Any) -> Any:
    """The gradient of ``|params - target|^2 / 2``."""
    return jax.tree.map(lambda p, t: p - t, params, target)


def run(mapping: str, tx: Any, params: Any, targets: Any, gradient: Any = towards) -> Any:
    """Trains every replica towards its own targets, one update for each, with one compiled step.

    Args:
      mapping: One of runners.MAPPINGS. shard_map runs with check_vma=True.
      tx: `local_sgd` or anything around it, over AXIS.
      params: The initial parameters.
      targets: A tree like params of ``(n, steps, *shape)``.
      gradient: (params, target) -> gradient.

    Returns:
      The parameters after every step, ``(n, steps, *shape)``, and the final state as the mapping
      leaves it; both in NumPy.
    """
    n = jax.tree.leaves(targets)[0].shape[0]
    state = tx.init(params)
    specs = jaxcomp.state_specs(state, AXIS) if mapping == "shard_map" else None
    mapped = _mapped(mapping, tx, n, specs, gradient)
    params, trajectory = stack(params, n), []
    if mapping == "shard_map":
        params, state = spread(params, n), jaxcomp.shard_state(state, mesh_of(n), AXIS)
    else:
        state = stack(state, n)
    if mapping == "pmap":
        params, state = spread((params, state), n)
    for target in steps_of(targets):
        before = types_of((params, state))
        params, state = mapped(params, state, target)
        assert types_of((params, state)) == before
        trajectory.append(jax.device_get(params))
    return jax.tree.map(lambda *x: np.stack(x, axis=1), *trajectory), jax.device_get(state)


def _mapped(mapping: str, tx: Any, n: int, specs: Any, gradient: Any = towards) -> Any:
    """(params, state, target) -> params, state; parameters with a leading axis of replicas."""

    def step(params: Any, state: Any, target: Any) -> Any:
        updates, state = tx.update(gradient(params, target), state, params)
        return optax.apply_updates(params, updates), state

    def local(params: Any, state: Any, target: Any) -> Any:
        params, state = step(first(params), state, first(target))
        return jax.tree.map(lambda x: x[None], params), state

    if mapping == "shard_map":
        mapped = jax.shard_map(
            local,
            mesh=mesh_of(n),
            in_specs=(jax.P(AXIS), specs, jax.P(AXIS)),
            out_specs=(jax.P(AXIS), specs),
        )
        return jax.jit(mapped)
    if mapping == "pmap":
        return jax.pmap(step, axis_name=AXIS, devices=jax.devices()[:n])
    return jax.jit(jax.vmap(step, axis_name=AXIS))


def compile_step(tx: Any, params: Any, n: int) -> str:
    """The HLO of one update under shard_map, for parameters with a leading axis of replicas."""
    state = jax.eval_shape(tx.init, params)
    specs = jaxcomp.state_specs(state, AXIS)
    stacked = jax.tree.map(lambda x: jax.ShapeDtypeStruct((n, *x.shape), x.dtype), params)
    lowered = _mapped("shard_map", tx, n, specs).lower(stacked, placed(state, specs, n), stacked)
    return users_program(lowered).as_text()
