"""Does a compiled step send what its reducer sends, and nothing else of that size?"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomp._base.leaves import floating_leaves, is_floating
from jaxcomp._base.typing import Array, PyTree
from jaxcomp._mesh.collectives import axis_tuple
from jaxcomp._reducers.reducer import Reducer
from jaxcomp._states.place import shard_state
from jaxcomp._training.data_parallel import data_parallel
from jaxcomp._wire.collectives import Collective, collectives, mesh_of

_SMALL = 1024  # bytes: losses and flags


def check(
    compiled: Any, reducer: Reducer, params: PyTree, *, mesh: Any = None, allow: int | None = None
) -> tuple[Collective, ...]:
    """Refuses a compiled step that sends more over the axis of the replicas than its reducer does.

    A `pmean` left in the step, gradients that differentiation has reduced already, and a reducer
    that runs twice all cost what compression was to save, and change no result that anybody would
    notice. They are in the compiled program, which is compared with one of the reducer alone, that
    is compiled for it. Every branch of a conditional counts; the body of a loop as often as the
    program says, else once.

    Args:
      compiled: ``jax.jit(step).lower(...).compile()``.
      reducer: The reducer of the step.
      params: The parameters, laid out as in the step, or their shapes.
      mesh: As for `collectives`.
      allow: Bytes that may cross besides what the reducer sends: losses, metrics, BatchNorm
        statistics. By default 1% of the gradients or half of what the reducer sends, whichever is
        less, and 1 kB at least.

    Returns:
      What the step sends, as from `collectives`.

    Raises:
      ValueError: If more crosses, or less than half of what the reducer sends. The message lists
        the largest collectives, and what JAX made them for.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomp
      >>> mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
      >>> reducer = jaxcomp.powersgd(rank=1, axis_name="data", start_step=0)
      >>> value_and_grad = jaxcomp.value_and_grad(
      ...     lambda w, x: jnp.mean((x @ w) ** 2), reducer, mesh=mesh)
      >>> w = jnp.ones((64, 64))
      >>> step = jax.jit(value_and_grad).lower(value_and_grad.init(w), w, jnp.ones((8, 64)))
      >>> sent = jaxcomp.check(step.compile(), reducer, w)
      >>> sum(x.bytes for x in sent if "data" in x.axes) < 64 * 64 * 4 / 30
      True
    """
    if not isinstance(reducer, Reducer):
        raise ValueError(
            f"`reducer` must be a jaxcomp reducer, got {type(reducer).__name__}. Pass the first "
            "link of the chain."
        )
    mesh = mesh_of(compiled) if mesh is None else mesh
    found, axes = collectives(compiled, mesh=mesh), axis_tuple(reducer.axis_name)
    alone = collectives(_alone(reducer, params, mesh), mesh=mesh)
    crossing, expected = ([x for x in xs if set(axes) & set(x.axes)] for xs in (found, alone))
    sent, wanted = (sum(x.times * x.as_all_reduce for x in xs) for xs in (crossing, expected))
    if allow is None:
        dense = sum(x.size * x.dtype.itemsize for x in floating_leaves(params))
        allow = int(max(_SMALL, min(dense / 100, wanted / 2)))
    # Beside other axes every device of a replica may send a share of what it has.
    others = math.prod(size for name, size in mesh.shape.items() if name not in axes)
    if wanted / others / 2 <= sent <= wanted + allow:
        return found
    largest = sorted(crossing, key=lambda x: -x.as_all_reduce * x.times)[:6]
    raise ValueError(
        f"The compiled step sends {sent:,.0f} bytes over {', '.join(axes)}, where {reducer!r} "
        f"sends {wanted:,.0f} and {allow:,} besides are allowed (allow=)."
        + "".join(f"\n  {x}" for x in largest)
    )


def _alone(reducer: Reducer, params: PyTree, mesh: Any) -> Any:
    """The reducer by itself, compiled for gradients that lie as the parameters do."""
    params = jax.tree.map(lambda x: x if is_floating(x) else None, params)

    def gradients(params: PyTree, x: Array) -> tuple[Array, PyTree]:
        return x.mean(), jax.tree.map(lambda p: p * x.mean().astype(p.dtype), params)

    def fresh(params: PyTree) -> PyTree:
        return shard_state(reducer.init(params), mesh, reducer.axis_name)

    replicas = math.prod(mesh.shape[name] for name in axis_tuple(reducer.axis_name))
    rows = jax.NamedSharding(mesh, jax.P(reducer.axis_name))  # shapes alone name no device
    examples = jax.ShapeDtypeStruct((replicas,), jnp.float32, sharding=rows)
    run = data_parallel(gradients, reducer, mesh=mesh)
    return jax.jit(run).lower(jax.eval_shape(fresh, params), params, examples).compile()
