"""Runs an Optax transformation on several replicas under each of JAX's three mappings."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

import jaxcomp

MAPPINGS = ("vmap", "pmap", "shard_map")
AXIS = "data"


def mesh_of(n: int, axis: str = AXIS) -> Mesh:
    return jax.make_mesh((n,), (axis,), axis_types=(AxisType.Auto,), devices=jax.devices()[:n])


def simulate(
    mapping: str, tx: Any, grads: Any, state: Any, params: Any = None, **extra: Any
) -> Any:
    """Feeds recorded local gradients to `tx`, step by step, in one compiled program.

    Args:
      mapping: One of MAPPINGS. shard_map runs with check_vma=True, outputs leave through P().
      tx: The transformation, mapped over AXIS.
      grads: Tree of ``(n, steps, *shape)``.
      state: A consolidated state.
      params: Replicated parameters, if the transformation wants them.
      **extra: Extra arguments of every update.

    Returns:
      Outputs ``(steps, *shape)``, asserted to be equal on all replicas, and the final state with
      per-replica leaves as ``(n, *shape)``.
    """
    n = jax.tree.leaves(grads)[0].shape[0]

    def steps(grads: Any, state: Any) -> Any:
        def one(state: Any, g: Any) -> Any:
            updates, state = tx.update(g, state, params, **extra)
            return state, updates

        state, outputs = jax.lax.scan(one, state, grads)
        return outputs, state

    if mapping == "shard_map":
        specs = jaxcomp.state_specs(state, AXIS)
        mapped = jax.shard_map(
            lambda g, s: steps(jax.tree.map(lambda x: x[0], g), s),
            mesh=mesh_of(n),
            in_specs=(jax.P(AXIS), specs),
            out_specs=(jax.P(), specs),
        )
        outputs, state = jax.jit(mapped)(grads, jaxcomp.shard_state(state, mesh_of(n), AXIS))
        split = lambda x, s: x.reshape(n, -1, *x.shape[1:]) if s == jax.P(AXIS) else x  # noqa: E731
        return outputs, jax.tree.map(split, state, specs)

    stacked = jax.tree.map(lambda x: jnp.broadcast_to(x, (n, *jnp.shape(x))), state)
    if mapping == "pmap":
        # What a script gets from flax.jax_utils.replicate.
        outputs, state = jax.pmap(steps, axis_name=AXIS, devices=jax.devices()[:n])(grads, stacked)
    else:
        outputs, state = jax.jit(jax.vmap(steps, axis_name=AXIS))(grads, stacked)
    specs = jaxcomp.state_specs(jax.tree.map(lambda x: x[0], state), AXIS)
    jax.tree.map(_assert_replicated, outputs)
    shared = lambda x, s: x if s == jax.P(AXIS) else _assert_replicated(x)  # noqa: E731
    return jax.tree.map(lambda x: x[0], outputs), jax.tree.map(shared, state, specs)


def _assert_replicated(x: jax.Array) -> jax.Array:
    np.testing.assert_array_equal(np.asarray(x), np.broadcast_to(np.asarray(x[:1]), x.shape))
    return x[0]


def random_grads(shapes: dict[str, tuple[int, ...]], n: int, steps: int, seed: int = 0) -> Any:
    """Normal gradients ``(n, steps, *shape)`` with a part in common to all."""
    rng = np.random.default_rng(seed)
    return {
        name: jnp.asarray(
            rng.normal(size=(1, 1, *shape)) + rng.normal(size=(n, steps, *shape)), jnp.float32
        )
        for name, shape in shapes.items()
    }


def collectives(compiled: str) -> list[tuple[str, str, int]]:
    """(operation, element type, number of values) of every collective in a compiled HLO text."""
    found = []
    for line in re.sub(r"/\*.*?\*/", "", compiled).splitlines():
        for op in (
            "all-reduce",
            "all-to-all",
            "all-gather",
            "reduce-scatter",
            "collective-permute",
        ):
            if f" {op}(" in line or f" {op}-start(" in line:
                result = line.split(" = ")[1].split(f" {op}")[0].strip("() ")
                for part in result.split("}, ") if "}, " in result else [result]:
                    kind, dims = part.strip().split("[")[0], part.split("[")[1].split("]")[0]
                    size = int(np.prod([int(d) for d in dims.split(",") if d], dtype=int))
                    found.append((op, kind, size))
    return found
