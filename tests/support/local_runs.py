"""Training loops of several replicas whose parameters differ, under each of JAX's mappings."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
from runners import AXIS, mesh_of

import jaxcomp


def towards(params: Any, target: Any) -> Any:
    """The gradient of ``|params - target|^2 / 2``."""
    return jax.tree.map(lambda p, t: p - t, params, target)


def run(mapping: str, tx: Any, params: Any, targets: Any, gradient: Any = towards) -> Any:
    """Trains every replica towards its own targets, one update for each.

    Args:
      mapping: One of runners.MAPPINGS. shard_map runs with check_vma=True.
      tx: `local_sgd` or anything around it, over AXIS.
      params: The initial parameters.
      targets: A tree like params of ``(n, steps, *shape)``.
      gradient: (params, target) -> gradient.

    Returns:
      The parameters after every step, ``(n, steps, *shape)``, and the final state as the mapping
      leaves it.
    """
    n = jax.tree.leaves(targets)[0].shape[0]

    def steps(params: Any, state: Any, targets: Any) -> Any:
        def one(carry: Any, target: Any) -> Any:
            params, state = carry
            updates, state = tx.update(gradient(params, target), state, params)
            params = optax.apply_updates(params, updates)
            return (params, state), params

        (_, state), trajectory = jax.lax.scan(one, (params, state), targets)
        return trajectory, state

    state = tx.init(params)
    stacked = jax.tree.map(lambda x: jnp.broadcast_to(x, (n, *jnp.shape(x))), params)
    if mapping == "shard_map":
        specs, mesh = jaxcomp.state_specs(state, AXIS), mesh_of(n)

        def local(params: Any, state: Any, targets: Any) -> Any:
            trajectory, state = steps(*[first(params), state, first(targets)])
            return jax.tree.map(lambda x: x[None], trajectory), state

        mapped = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(jax.P(AXIS), specs, jax.P(AXIS)),
            out_specs=(jax.P(AXIS), specs),
        )
        return jax.jit(mapped)(stacked, jaxcomp.shard_state(state, mesh, AXIS), targets)
    if mapping == "pmap":
        mapped = jax.pmap(steps, axis_name=AXIS, devices=jax.devices()[:n])
    else:
        mapped = jax.jit(jax.vmap(steps, axis_name=AXIS))
    states = jax.tree.map(lambda x: jnp.broadcast_to(x, (n, *jnp.shape(x))), state)
    return mapped(stacked, states, targets)


def first(tree: Any) -> Any:
    """This replica's entry of arrays with a leading axis of length 1."""
    return jax.tree.map(lambda x: x[0], tree)


def compile_step(tx: Any, params: Any, n: int) -> str:
    """The HLO of one update under shard_map, for parameters with a leading axis of replicas."""
    state = jax.eval_shape(tx.init, params)
    specs = jaxcomp.state_specs(state, AXIS)

    def step(stacked, state, target):
        own = first(stacked)
        updates, state = tx.update(towards(own, first(target)), state, own)
        return jax.tree.map(lambda x: x[None], optax.apply_updates(own, updates)), state

    mapped = jax.shard_map(
        step,
        mesh=mesh_of(n),
        in_specs=(jax.P(AXIS), specs, jax.P(AXIS)),
        out_specs=(jax.P(AXIS), specs),
    )
    stacked = jax.tree.map(lambda x: jax.ShapeDtypeStruct((n, *x.shape), x.dtype), params)
    # A global per-replica array is n blocks along axis 0.
    tiled = lambda x: jax.ShapeDtypeStruct((n * x.shape[0], *x.shape[1:]), x.dtype)  # noqa: E731
    placed = jax.tree.map(lambda x, s: tiled(x) if s == jax.P(AXIS) else x, state, specs)
    return jax.jit(mapped).lower(stacked, placed, stacked).compile().as_text()


def computations(hlo: str) -> dict[str, str]:
    """Name -> text of every computation of a compiled program; the entry's name is ENTRY."""
    found = {}
    for block in re.split(r"\n(?=\S)", hlo):
        head = re.match(r"(ENTRY )?%?([\w.\-]+) ", block)
        if head:
            found["ENTRY" if head[1] else head[2]] = block
    return found


def unconditional(hlo: str) -> str:
    """The text of the computations that run in every step: those that no conditional chooses."""
    blocks = computations(hlo)
    seen, queue = set(), ["ENTRY"]
    while queue:
        name = queue.pop()
        if name in seen or name not in blocks:
            continue
        seen.add(name)
        for line in blocks[name].splitlines():
            if " conditional(" not in line:
                queue += re.findall(r"(?:calls|to_apply|body|condition)=%?([\w.\-]+)", line)
    return "\n".join(blocks[name] for name in seen)
