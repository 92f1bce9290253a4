"""Training loops of several replicas whose parameters differ, under each of JAX's mappings."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from hlo import text
from runners import AXIS, first, mesh_of, placed, sharded, spread, stack, steps_of, types_of

import jaxcomp

SHAPES = {"a": (4, 3), "b": (5,), "c": ()}
PARAMS = {name: jnp.full(shape, 0.5) for name, shape in SHAPES.items()}


def towards(params: Any, target: Any) -> Any:
    """The gradient of ``|params - target|^2 / 2``."""
    return jax.tree.map(lambda p, t: p - t, params, target)


def step_of(optimizer: optax.GradientTransformation) -> Any:
    """A step `towards` a target, for a round; it returns its parameters besides."""

    def step(params: Any, state: Any, target: Any) -> Any:
        updates, state = optimizer.update(towards(params, target), state, params)
        params = optax.apply_updates(params, updates)
        return params, state, params

    return step


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
        return sharded(n, local, (jax.P(AXIS), specs, jax.P(AXIS)), (jax.P(AXIS), specs))
    if mapping == "pmap":
        return jax.pmap(step, axis_name=AXIS, devices=jax.devices()[:n])
    return jax.jit(jax.vmap(step, axis_name=AXIS))


def rounds(
    round_: Any,
    params: Any,
    targets: Any,
    state: Any = None,
    mapping: str = "shard_map",
    weights: Any = None,
) -> Any:
    """Rounds of `local_sgd_round` over ``(n, steps, *shape)`` targets, in one compiled program.

    Args:
      round_: Over AXIS, made with ``inner_init`` if there is no `state`.
      params: The initial parameters.
      targets: What `step_fn` gets as its batches.
      state: Consolidated; by default ``round_.init(params)``.
      mapping: One of runners.MAPPINGS. shard_map runs with check_vma=True.
      weights: How much each replica counts, ``(n,)``.

    Returns:
      The parameters as each device has them, ``(n, *shape)``; the state; what the steps returned
      besides, ``(n, steps, ...)``.
    """
    n, steps = jax.tree.leaves(targets)[0].shape[:2]
    state = round_.init(params) if state is None else state

    def train(params: Any, state: Any, targets: Any, weight: Any) -> Any:
        def one(carry: Any, batches: Any) -> Any:
            params, state, ends = round_(*carry, batches, weight=weight)
            return (params, state), ends

        every = round_.sync_every
        split = jax.tree.map(lambda x: x.reshape(-1, every, *x.shape[1:]), targets)
        (params, state), ends = jax.lax.scan(one, (params, state), split)
        return params, state, jax.tree.map(lambda x: x.reshape(steps, *x.shape[2:]), ends)

    if mapping != "shard_map":
        pmap = functools.partial(jax.pmap, devices=jax.devices()[:n])
        mapped = {"vmap": jax.vmap, "pmap": pmap}[mapping](
            train, in_axes=(None, None, 0, 0), axis_name=AXIS
        )
        return jax.jit(mapped)(params, state, targets, weights)

    def local(params: Any, state: Any, targets: Any, weight: Any) -> Any:
        params, state, ends = train(params, state, first(targets), first(weight))
        return params, state, jax.tree.map(lambda x: x[None], ends)

    own, specs = jax.P(AXIS), jaxcomp.state_specs(state, AXIS)
    mapped = sharded(n, local, (jax.P(), specs, own, own), (jax.P(), specs, own))
    placed = jaxcomp.shard_state(state, mesh_of(n), AXIS)
    params, state, ends = mapped(params, placed, targets, weights)
    # The same array on every device: each has its own copy.
    copies = jax.tree.map(lambda x: np.stack([s.data for s in x.addressable_shards]), params)
    return copies, state, jax.device_get(ends)


NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)


def in_numpy(
    start: Any,
    targets: Any,
    period: int,
    turn: int = 0,
    delay: int = 0,
    alpha: float = 0.0,
    *,
    inner: float = 0.0,
    outer: bool = True,
) -> tuple[np.ndarray, np.ndarray]:
    """One fragment under Streaming DiLoCo in NumPy: SGD(0.1) inside, `NESTEROV` outside.

    With ``delay=alpha=0`` and ``turn=0`` it is DiLoCo's Algorithm 1, or local SGD.

    Args:
      start: The initial parameters.
      targets: What each replica goes `towards`, ``(n, steps, *shape)``.
      period: Steps from one use of an average to the next.
      turn: The first use comes after this step, counted from 1; 0 for `period`.
      delay: Steps from the average to its use.
      alpha: Share of the local parameters that is kept.
      inner: Momentum of the inner optimizer.
      outer: Whether there is an outer optimizer, or means are set.

    Returns:
      The local parameters after each step, ``(n, steps, *shape)``, and the global ones.
    """
    targets = np.asarray(targets, np.float64)
    local = np.full_like(targets[:, 0], start)
    anchor, momentum, pseudo = local[0], 0.0, np.nan
    own = np.zeros_like(local)
    trajectory, anchors = [], []
    for step in range(1, targets.shape[1] + 1):
        own = inner * own + local - targets[:, step - 1]
        local = local - 0.1 * own
        if (step + delay - turn) % period == 0:
            pseudo = anchor - local.mean(0)
        if (step - turn) % period == 0:
            momentum = 0.9 * momentum + pseudo
            anchor = anchor - (0.7 * (pseudo + 0.9 * momentum) if outer else pseudo)
            local = (1 - alpha) * anchor + alpha * local
        trajectory.append(local)
        anchors.append(anchor)
    return np.stack(trajectory, axis=1), np.stack(anchors)


def compile_step(tx: Any, params: Any, n: int) -> str:
    """The HLO of one update under shard_map, for parameters with a leading axis of replicas."""
    state = jax.eval_shape(tx.init, params)
    specs = jaxcomp.state_specs(state, AXIS)
    stacked = jax.tree.map(lambda x: jax.ShapeDtypeStruct((n, *x.shape), x.dtype), params)
    return text(_mapped("shard_map", tx, n, specs), stacked, placed(state, specs, n), stacked)
