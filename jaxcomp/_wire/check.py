"""Does a compiled step send what its reducer sends, and nothing else of that size?"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxcomp._base.typing import PyTree
from jaxcomp._mesh import collectives
from jaxcomp._mesh.axes import axis_tuple
from jaxcomp._reducers.contract import Reducer
from jaxcomp._wire.wire import Collective, Wire, wire

_PACKAGE = pathlib.Path(collectives.__file__).parents[1]
# Every collective of the package is made in one file of it.
_OWN = pathlib.Path(collectives.__file__)
_SMALL = 1024  # bytes: losses and flags
_FAR = 1_000_000_000  # a step after all exact ones, an even one
_DOUBLED = 1.5  # times what one reducer sends


def check(
    compiled: Any, reducer: Reducer, params: PyTree, *, mesh: Any = None, allow: int | None = None
) -> Wire:
    """Refuses a compiled step that sends more over the axis of the replicas than its reducer does.

    A `pmean` left in the step, gradients that differentiation has reduced already, and a reducer
    that runs twice all cost what compression was to save, and change no result that anybody would
    notice. They are in the compiled program.

    Args:
      compiled: ``jax.jit(step).lower(...).compile()``.
      reducer: The reducer of the step.
      params: The parameters, laid out as in the step, or their shapes.
      mesh: As for `wire`.
      allow: Bytes that may cross besides what the reducer sends: losses, metrics, BatchNorm
        statistics. By default 1% of the gradients, and 1 kB at least.

    Returns:
      What the step sends, as from `wire`.

    Raises:
      ValueError: If more crosses, or nothing does. The message names the collectives, the lines of
        the sources that made them, and which of the three causes it is, where that can be told.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomp
      >>> mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
      >>> reducer = jaxcomp.powersgd(rank=1, axis_name="data", start_step=0)
      >>> value_and_grad = jaxcomp.value_and_grad(
      ...     lambda w, x: jnp.mean((x @ w) ** 2), reducer, mesh=mesh)
      >>> w = jnp.ones((64, 64))
      >>> step = jax.jit(value_and_grad).lower(value_and_grad.init(w), w, jnp.ones((8, 64)))
      >>> sent = jaxcomp.check(step.compile(), reducer, w)
      >>> sum(x.bytes for x in sent.over("data")) < 64 * 64 * 4 / 30
      True
    """
    found = wire(compiled, mesh=mesh)
    if getattr(reducer, "axis_name", None) is None:
        raise ValueError(
            f"`reducer` must be a jaxcomp reducer, got {type(reducer).__name__}. Pass the first "
            "link of the chain."
        )
    axes = set(axis_tuple(reducer.axis_name))
    crossing = [x for x in found.collectives if set(x.axes) & axes or x.axes == ("?",)]
    replicas = max((x.devices for x in crossing if set(x.axes) <= axes), default=1)
    first, later = (
        max(_local_bytes(reducer, params, replicas, step) for step in steps)
        for steps in ((0,), (_FAR, _FAR + 1))
    )
    plain = sum(_size(leaf) for leaf in jax.tree.leaves(params))
    beside = _SMALL if allow is None else allow  # what this package itself averages besides
    allow = max(_SMALL, plain // 100) if allow is None else allow

    own = [x for x in crossing if _is_own(x)]
    others = [x for x in crossing if not _is_own(x)]
    problems = []
    if sum(x.as_all_reduce for x in others) > allow:
        problems.append(_foreign(others, allow))
    # Before `start_step` a step takes another branch; both are in the program.
    expected = later + (first if first > later else 0)
    if (sent := _longest_path(own)) > _DOUBLED * expected + beside:
        problems.append(
            f"The reducers in it send {sent:,.0f} bytes where {reducer!r} sends {expected:,}: a "
            "reducer runs twice. Keep it in value_and_grad or in the optimizer's chain, not in "
            "both; or, if value_and_grad averages auxiliary output of that size, pass allow=."
            f"{_listed(own)}"
        )
    elif later > beside and sent == 0:
        problems.append(
            f"No reducer sends anything over {tuple(axes)}: {reducer!r} is not in this step."
        )
    if problems:
        raise ValueError(
            f"The compiled step sends over {', '.join(sorted(axes))} what it should not.\n"
            + "\n".join(problems)
        )
    return found


def _local_bytes(reducer: Reducer, params: PyTree, replicas: int, step: int) -> int:
    """What one device sends: of a leaf that is sharded, a share."""
    stats = reducer.bytes(params, replicas=replicas, step=step)
    leaves = [x for x in jax.tree.leaves(params) if np.issubdtype(x.dtype, np.inexact)]
    if len(stats.leaves) != len(leaves):
        return stats.bytes_after
    return math.ceil(
        sum(x.bytes_after * _share(leaf) for x, leaf in zip(stats.leaves, leaves, strict=True))
    )


def _share(leaf: Any) -> float:
    """The part of a leaf that one device holds."""
    sharding = getattr(leaf, "sharding", None)
    if sharding is None or not leaf.size:
        return 1.0
    return math.prod(sharding.shard_shape(leaf.shape)) / leaf.size


def _size(leaf: Any) -> int:
    return math.prod(leaf.shape) * leaf.dtype.itemsize


def _is_own(x: Collective) -> bool:
    """Whether this package made it."""
    return any(pathlib.Path(file) == _OWN for file, _ in x.frames)


def _meant(x: Collective) -> float:
    """Bytes of an all-reduce that would cost as much, on a backend that has bfloat16 on the wire.

    XLA's CPU backend has not; a reducer counts what it sends elsewhere.
    """
    return x.as_all_reduce / (2 if collectives.WIDENED in x.operation else 1)


def _longest_path(own: Sequence[Collective]) -> float:
    """Bytes of what can run in one step: of the branches of a conditional, the one with most."""
    always = sum(_meant(x) for x in own if not x.branch)
    inner: dict[str, dict[str, list[Collective]]] = {}
    for x in own:
        if x.branch:
            conditional, _, branch = x.branch[0].rpartition(".")
            rest = dataclasses.replace(x, branch=x.branch[1:])
            inner.setdefault(conditional, {}).setdefault(branch, []).append(rest)
    return always + sum(
        max(_longest_path(found) for found in branches.values()) for branches in inner.values()
    )


def _foreign(others: Sequence[Collective], allow: int) -> str:
    """What crosses besides the reducer, and why, as far as its name tells."""
    largest = max(others, key=lambda x: x.as_all_reduce)
    total = sum(x.as_all_reduce for x in others)
    if "transpose(" in largest.operation:
        cause = (
            "Differentiation made it: the gradients were reduced before the reducer saw them. Take "
            "them with jaxcomp.value_and_grad or jaxcomp.local_value_and_grad."
        )
    elif any(name in largest.operation.rpartition("/")[2] for name in ("psum", "pmean")):
        cause = "A pmean or psum was left in the step: take it out, the reducer averages."
    else:
        cause = "It is no reducer's: an array may be sharded over the axis of the replicas."
    return f"{total:,.0f} bytes cross besides the reducer, more than {allow:,}. {cause}" + _listed(
        sorted(others, key=lambda x: -x.as_all_reduce)
    )


def _listed(collectives: Sequence[Collective]) -> str:
    lines = [
        f"\n  {x.kind} of {x.bytes:,} bytes of {x.dtype} over {', '.join(x.axes)}, for "
        f"{x.operation or 'an operation without a name'}{_line(x)}"
        for x in collectives[:4]
    ]
    more = len(collectives) - 4
    return "".join(lines) + (f"\n  and {more} more" if more > 0 else "")


def _line(x: Collective) -> str:
    """The innermost line of the sources outside of this package."""
    calls = [(file, line) for file, line in x.frames if _PACKAGE not in pathlib.Path(file).parents]
    return f", {calls[0][0]}:{calls[0][1]}" if calls else ""
