"""Runs an Optax transformation on several replicas under each of JAX's three mappings.

One step is compiled and called for every step; each of these runs also asserts that its state keeps
structure, shapes and dtypes, so that one compilation serves every step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh
from leaves import zeros_of_one
from xla import optimised as as_users_get_it

import jaxcomp

MAPPINGS = ("vmap", "pmap", "shard_map")
AXIS = "data"


def mesh_of(n: int, axis: str = AXIS) -> Mesh:
    return jax.make_mesh((n,), (axis,), axis_types=(AxisType.Auto,), devices=jax.devices()[:n])


def sharded(mesh: Mesh | int, function: Any, in_specs: Any, out_specs: Any, **options: Any) -> Any:
    """A jitted `jax.shard_map` over a mesh, or over AXIS of so many devices."""
    mesh = mesh_of(mesh) if isinstance(mesh, int) else mesh
    specs = {"in_specs": in_specs, "out_specs": out_specs}
    return jax.jit(jax.shard_map(function, mesh=mesh, **specs, **options))


def first(tree: Any) -> Any:
    """This replica's entry of arrays with a leading axis of length 1."""
    return jax.tree.map(lambda x: x[0], tree)


def stack(tree: Any, n: int) -> Any:
    """What a script gets from flax.jax_utils.replicate."""
    return jax.tree.map(lambda x: np.broadcast_to(x, (n, *np.shape(x))), jax.device_get(tree))


def spread(tree: Any, n: int) -> Any:
    """Arrays ``(n, ...)``, one entry on each device: placed as the outputs of pmap are."""
    return jax.device_put(tree, jax.NamedSharding(mesh_of(n), jax.P(AXIS)))


def steps_of(grads: Any) -> list[Any]:
    """Trees of ``(n, *shape)`` from one of ``(n, steps, *shape)``."""
    grads = jax.device_get(grads)
    count = jax.tree.leaves(grads)[0].shape[1]
    return [jax.tree.map(lambda g, t=t: np.asarray(g[:, t]), grads) for t in range(count)]


def simulate(
    mapping: str,
    tx: Any,
    grads: Any,
    state: Any = None,
    params: Any = None,
    *,
    optimised: bool = False,
    **extra: Any,
) -> Any:
    """Feeds recorded local gradients to `tx`, step by step, in one compiled program.

    Args:
      mapping: One of MAPPINGS. shard_map runs with check_vma=True, outputs leave through P().
      tx: The transformation, mapped over AXIS.
      grads: Tree of ``(n, steps, *shape)``.
      state: A consolidated state; None for the initial one.
      params: Replicated parameters, if the transformation wants them.
      optimised: Whether to compile as for a user, not as for a test.
      **extra: Extra arguments of every update.

    Returns:
      Outputs ``(steps, *shape)``, asserted to be equal on all replicas, and the final state with
      per-replica leaves as ``(n, *shape)``; both in NumPy.
    """
    n = jax.tree.leaves(grads)[0].shape[0]
    state = tx.init(zeros_of_one(grads)) if state is None else state
    specs = jaxcomp.state_specs(state, AXIS) if mapping == "shard_map" else None
    axes = jaxcomp.state_axes(state)
    if mapping == "shard_map":
        state = jaxcomp.shard_state(state, mesh_of(n), AXIS)
    elif mapping == "pmap":
        state, params, extra = spread(stack((state, params, extra), n), n)
    else:
        state = stack(state, n)
    run, outputs = None, []
    for g in steps_of(grads):
        arguments = (g, state, params, extra)
        run = run or _compiled(mapping, tx, n, specs, arguments, optimised)
        output, new = run(*arguments)
        assert types_of(new) == types_of(state)
        state = new
        outputs.append(jax.device_get(output))
    state = jax.device_get(state)
    if mapping == "shard_map":
        return _stacked(outputs), state
    outputs = [jax.tree.map(_replicated, x) for x in outputs]
    flags = jax.tree.leaves(axes, is_leaf=lambda x: x is None)
    leaves, treedef = jax.tree.flatten(state)
    shared = [x if own == 0 else _replicated(x) for x, own in zip(leaves, flags, strict=True)]
    return _stacked(outputs), treedef.unflatten(shared)


def _stacked(outputs: list[Any]) -> Any:
    return jax.tree.map(lambda *x: np.stack(x), *outputs)


def _replicated(x: np.ndarray) -> np.ndarray:
    np.testing.assert_array_equal(x, np.broadcast_to(x[:1], x.shape))
    return x[0]


def types_of(tree: Any) -> tuple[Any, ...]:
    """Structure, shapes and dtypes, to compare."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, *((np.shape(x), str(jax.dtypes.result_type(x))) for x in leaves)


_programs: dict[Any, Any] = {}


def forget_programs() -> None:
    _programs.clear()


def _compiled(
    mapping: str, tx: Any, n: int, specs: Any, arguments: Any, optimised: bool
) -> Callable[..., Any]:
    """The executable of one step; the same one for the same transformation and shapes."""
    key = (mapping, tx, n, optimised, types_of(arguments))
    if key not in _programs:
        mapped = _mapped(mapping, tx, n, specs)
        if mapping == "pmap":  # whose executables want the arguments of the shard_map inside
            assert not optimised
            _programs[key] = mapped
        else:
            lowered = mapped.lower(*arguments)
            _programs[key] = as_users_get_it(lowered) if optimised else lowered.compile()
    return _programs[key]


def _mapped(mapping: str, tx: Any, n: int, specs: Any) -> Any:
    def step(grads: Any, state: Any, params: Any, extra: Any) -> Any:
        return tx.update(grads, state, params, **extra)

    if mapping == "shard_map":
        local = lambda grads, *rest: step(first(grads), *rest)  # noqa: E731
        return sharded(n, local, (jax.P(AXIS), specs, jax.P(), jax.P()), (jax.P(), specs))
    if mapping == "pmap":
        return jax.pmap(step, axis_name=AXIS, devices=jax.devices()[:n])
    return jax.jit(jax.vmap(step, axis_name=AXIS, in_axes=(0, 0, None, None)))


def lower_update(
    tx: Any, params: Any, n: int, mapping: str = "shard_map", platforms: Any = None, **extra: Any
) -> Any:
    """One update of `n` replicas, lowered for gradients ``(n, *shape)`` that nobody has to make."""
    abstract = lambda x: jax.ShapeDtypeStruct((n, *x.shape), x.dtype)  # noqa: E731
    params = jax.eval_shape(lambda: params)
    grads, state = jax.tree.map(abstract, params), jax.eval_shape(tx.init, params)
    specs = jaxcomp.state_specs(state, AXIS) if mapping == "shard_map" else None
    state = placed(state, specs, n) if specs else jax.tree.map(abstract, state)
    mapped = _mapped(mapping, tx, n, specs)
    if platforms:
        return mapped.trace(grads, state, None, extra).lower(lowering_platforms=platforms)
    return mapped.lower(grads, state, None, extra)


def placed(state: Any, specs: Any, n: int) -> Any:
    """The shapes of a state after shard_state: a per-replica array has an axis of replicas."""
    tiled = lambda x: jax.ShapeDtypeStruct((n, *x.shape), x.dtype)  # noqa: E731
    return jax.tree.map(lambda x, s: tiled(x) if s == jax.P(AXIS) else x, state, specs)
