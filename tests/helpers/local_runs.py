"""Training loops whose replicas have different parameters, under each of JAX's mappings."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.helpers.runners import (
    AXIS,
    WHOLE,
    over_replicas,
    spread,
    stack,
    start,
    steps_of,
    types_of,
)

SHAPES = {"a": (4, 3), "b": (5,), "c": ()}
PARAMS = {name: jnp.full(shape, 0.5) for name, shape in SHAPES.items()}


def towards(params, target):
    """Returns the gradient of ``|params - target|^2 / 2``."""
    return jax.tree.map(lambda p, t: p - t, params, target)


def step_of(optimizer):
    """Makes the step of a round, `towards` a target; its third result is the parameters."""

    def step(params, state, target):
        updates, state = optimizer.update(towards(params, target), state, params)
        params = optax.apply_updates(params, updates)
        return params, state, params

    return step


def run(mapping, tx, params, targets, gradient=towards):
    """Trains every replica towards its own targets ``(n, steps, *shape)``, one update for each.

    Returns the parameters after every step, ``(n, steps, *shape)``, and the final state with the
    mapping's axes, both as NumPy arrays.
    """
    n = jax.tree.leaves(targets)[0].shape[0]
    state, specs = start(mapping, tx.init(params), n)

    def step(own, state):
        params, target = own
        updates, state = tx.update(gradient(params, target), state, params)
        return optax.apply_updates(params, updates), state

    mapped = over_replicas(mapping, step, n, specs, out=jax.P(AXIS))
    trajectory = []
    params = stack(params, n)
    if mapping != "vmap":
        params = spread(params, n)
    for target in steps_of(targets):
        before = types_of((params, state))
        params, state = mapped((params, target), state)
        assert types_of((params, state)) == before
        trajectory.append(jax.device_get(params))
    return jax.tree.map(lambda *x: np.stack(x, axis=1), *trajectory), jax.device_get(state)


def rounds(round_, params, targets, state=None, mapping="shard_map", weights=None):
    """Runs rounds over ``(n, steps, *shape)`` targets, in one compiled program.

    They begin with a consolidated state, by default ``round_.init(params)``.

    Returns the parameters of each device, ``(n, *shape)``; the state; and the third results of the
    steps, ``(n, steps, ...)``.
    """
    n, steps = jax.tree.leaves(targets)[0].shape[:2]
    if state is None:
        state = round_.init(params)
    state, specs = start(mapping, state, n)

    def train(own, state, params):
        targets, weight = own

        def one(carry, batches):
            params, state, ends = round_(*carry, batches, weight=weight)
            return (params, state), ends

        def reshaped(tree, kept, *lengths):
            return jax.tree.map(lambda x: x.reshape(*lengths, *x.shape[kept:]), tree)

        batches = reshaped(targets, 1, -1, round_.sync_every)
        (params, state), ends = jax.lax.scan(one, (params, state), batches)
        return (params, reshaped(ends, 2, steps)), state

    mapped = over_replicas(mapping, train, n, specs, shared=1, out=(WHOLE, jax.P(AXIS)))
    (params, ends), state = mapped((targets, weights), state, params)
    if mapping == "shard_map":  # a replicated array: each device has a copy
        params = jax.tree.map(lambda x: np.stack([s.data for s in x.addressable_shards]), params)
    return params, state, jax.device_get(ends)


NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)


def in_numpy(start, targets, period, turn, delay, alpha):
    """Trains one fragment by Streaming DiLoCo in NumPy: SGD(0.1) inside, `NESTEROV` outside.

    An average is used after every `period` steps, the first time after step `turn` (from 1). The
    average is of the parameters `delay` steps earlier, and a share `alpha` of the local parameters
    is kept. With ``delay=alpha=0`` and ``turn=period`` this is DiLoCo's Algorithm 1.

    Returns the local parameters after each step, ``(n, steps, *shape)``, and the global parameters.
    """
    targets = np.asarray(targets, np.float64)
    local = np.full_like(targets[:, 0], start)
    anchor = local[0]
    pseudo_gradient = momentum = 0.0
    trajectory = []
    anchors = []
    for step in range(1, targets.shape[1] + 1):
        local = local - 0.1 * (local - targets[:, step - 1])
        if (step + delay - turn) % period == 0:
            pseudo_gradient = anchor - local.mean(0)
        if (step - turn) % period == 0:
            momentum = 0.9 * momentum + pseudo_gradient
            anchor = anchor - 0.7 * (pseudo_gradient + 0.9 * momentum)
            local = (1 - alpha) * anchor + alpha * local
        trajectory.append(local)
        anchors.append(anchor)
    return np.stack(trajectory, axis=1), np.stack(anchors)
