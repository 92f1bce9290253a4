"""Does a compiled step send what its reducer sends, and nothing else of that size?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jaxcomp._base.leaves import floating_leaves
from jaxcomp._base.stats import LeafStats
from jaxcomp._base.typing import PyTree
from jaxcomp._mesh.axes import axis_tuple
from jaxcomp._mesh.collectives import WIDENED
from jaxcomp._reducers.reducer import Reducer
from jaxcomp._wire.collectives import Collective, collectives, mesh_of

_SMALL = 1024  # bytes: losses and flags
_LATER = 1_000_000_000  # an even step after all exact ones


def check(
    compiled: Any, reducer: Reducer, params: PyTree, *, mesh: Any = None, allow: int | None = None
) -> tuple[Collective, ...]:
    """Refuses a compiled step that sends more over the axis of the replicas than its reducer does.

    A `pmean` left in the step, gradients that differentiation has reduced already, and a reducer
    that runs twice all cost what compression was to save, and change no result that anybody would
    notice. They are in the compiled program. Of the branches of a conditional the one that sends
    most counts; the body of a loop as often as the program says, else once.

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
    found = collectives(compiled, mesh=mesh)
    axes = axis_tuple(reducer.axis_name)
    crossing = [x for x in found if set(axes) & set(x.axes)]
    sizes = dict(mesh.shape) if mesh is not None else {}
    replicas = math.prod(sizes.get(name, 1) for name in axes)
    integers = any(dtype in ("s8", "u8") for x in crossing for dtype, _ in x.arrays)
    first, *turns = (  # ACP-SGD's factors take turns
        _on_one_device(reducer.bytes(params, replicas=replicas, step=step).leaves, params, integers)
        for step in (0, _LATER, _LATER + 1)
    )
    # Before `start_step` a step takes another branch, of a conditional of its own.
    expected = max(turns) + (first if first > max(turns) else 0)
    if allow is None:
        dense = sum(x.size * x.dtype.itemsize * _share(x) for x in floating_leaves(params))
        allow = max(_SMALL, min(int(dense) // 100, expected // 2))
    # Beside other axes every device of a replica may send a share of what it has.
    least = min(turns) / max(1, math.prod(sizes.values()) // replicas)
    if least / 2 <= _in_one_step(crossing) <= expected + allow:
        return found
    largest = sorted(crossing, key=lambda x: -x.as_all_reduce * x.times)[:6]
    raise ValueError(
        f"The compiled step sends {_in_one_step(crossing):,.0f} bytes over {', '.join(axes)}, "
        f"where {reducer!r} sends {expected:,} and {allow:,} besides are allowed (allow=)."
        + "".join(f"\n  {x}" for x in largest)
    )


def _on_one_device(stats: Sequence[LeafStats], params: PyTree, integers: bool) -> int:
    """The most that one device sends: of a leaf that is sharded, a share, but whole integers."""
    leaves = floating_leaves(params)
    if len(stats) != len(leaves):
        return sum(x.bytes_after for x in stats)
    sent = (
        x.bytes_after * (1 if integers and x.ratio > 1 else _share(leaf))
        for x, leaf in zip(stats, leaves, strict=True)
    )
    return math.ceil(sum(sent))


def _share(leaf: Any) -> float:
    """The part of a leaf that one device holds."""
    sharding = getattr(leaf, "sharding", None)
    if sharding is None or not leaf.size:
        return 1.0
    return math.prod(sharding.shard_shape(leaf.shape)) / leaf.size


def _in_one_step(found: Sequence[Collective], depth: int = 0) -> float:
    """Bytes of what can run in one step, in terms of all-reduces on a backend with bfloat16.

    XLA's CPU backend sends it as float32; a reducer counts what it sends elsewhere.
    """
    always = 0.0
    branches: dict[str, list[Collective]] = {}
    for x in found:
        if len(x.branch) == depth:
            always += x.times * x.as_all_reduce / (2 if WIDENED in x.operation else 1)
        else:
            branches.setdefault(x.branch[depth], []).append(x)
    most: dict[str, float] = {}  # of the branches of each conditional
    for branch, inside in branches.items():
        conditional = branch.partition("/")[0]
        most[conditional] = max(most.get(conditional, 0.0), _in_one_step(inside, depth + 1))
    return always + sum(most.values())
