"""What is tried on the problem, and what of it in ordinary training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import jaxcomp
from benchmarks.counterexample.problem import AXIS

# (what is there, a random factor of as large columns, updates so far) -> what to use
Change = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


@dataclass(frozen=True)
class Case:
    """An option, or something made of the library's parts.

    Attributes:
      label: As the table has it.
      build: The reducer, of a rank and with `powersgd`'s arguments.
      more: Added to the rank.
      train: Whether to train the language model with it.
    """

    label: str
    build: Callable[..., Any]
    more: int = 0
    train: bool = False


def powersgd(rank: int, **options: Any) -> Any:
    """`jaxcomp.powersgd` from the first step on, for matrices of any size."""
    given = {"start_step": 0, "min_compression_rate": 1.0, **options}
    return jaxcomp.powersgd(rank, axis_name=AXIS, **given)


def changed(change: Change) -> Callable[..., Any]:
    """`powersgd` with another right factor in front of each update.

    Factors are replicated, and so is what is drawn: every replica makes the same change, and
    nothing more is sent.
    """

    def build(rank: int, **options: Any) -> Any:
        inner = powersgd(rank, **options)

        def reduce(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
            factors, treedef = jax.tree.flatten(state.q)
            for i, q in enumerate(factors):
                key = jax.random.key(1, impl="threefry2x32")
                key = jax.random.fold_in(jax.random.fold_in(key, i), state.count)
                drawn = jax.random.normal(key, q.shape, q.dtype) / q.shape[-2] ** 0.5
                drawn *= jnp.linalg.norm(q, axis=-2, keepdims=True)
                factors[i] = change(q, drawn, state.count)
            changed = state._replace(q=treedef.unflatten(factors))
            return inner.reduce(updates, changed, params, **extra)

        return jaxcomp.Reducer(inner.init, reduce, AXIS, count_bytes=inner.count_bytes)

    return build


def refreshed(every: int) -> Callable[..., Any]:
    """A new right factor every so many updates."""
    return changed(lambda q, drawn, count: jnp.where(count % every == 0, drawn, q))


def stirred(share: float) -> Callable[..., Any]:
    """A random factor added in every update, so many times as large as each column."""
    return changed(lambda q, drawn, count: q + share * drawn)


def one_fresh(rank: int, **options: Any) -> Any:
    """A new last column in every update; the others start warm."""
    return changed(lambda q, drawn, count: q.at[..., -1].set(drawn[..., -1]))(rank, **options)


def exact_every(every: int) -> Callable[..., Any]:
    """An exact average every so many updates, which leaves the residual as it is."""

    def build(rank: int) -> Any:
        inner, exact = powersgd(rank), jaxcomp.allreduce(axis_name=AXIS)

        def reduce(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
            result = inner.reduce(updates, state, params, **extra)
            mean = exact.reduce(updates, exact.init(updates)).updates
            now, stay = state.count % every == 0, state._replace(count=result.state.count)
            choose = lambda x, y: jax.tree.map(lambda a, b: jnp.where(now, a, b), x, y)  # noqa: E731
            return result._replace(
                updates=choose(mean, result.updates), state=choose(stay, result.state)
            )

        return jaxcomp.Reducer(inner.init, reduce, AXIS)

    return build


CASES = {
    "allreduce": Case("exact average", lambda rank: jaxcomp.allreduce(axis_name=AXIS)),
    "default": Case("PowerSGD", powersgd, train=True),
    "feedback": Case("`error_feedback=False`", lambda r: powersgd(r, error_feedback=False)),
    "eps": Case("`eps=1e-2`", lambda r: powersgd(r, eps=1e-2)),
    "alternating": Case("`alternating=True`", lambda r: powersgd(r, alternating=True)),
    "start": Case("`start_step=100`", lambda r: powersgd(r, start_step=100)),
    "every": Case("`feedback_every=10`", lambda r: powersgd(r, feedback_every=10)),
    "decay": Case("`error_decay=0.9`", lambda r: powersgd(r, error_decay=0.9)),
    "int8": Case('`comm_dtype="int8"`', lambda r: powersgd(r, comm_dtype="int8")),
    "rank-int8": Case(
        'one rank more, `comm_dtype="int8"`', lambda r: powersgd(r, comm_dtype="int8"), 1
    ),
    "rank": Case("one rank more", powersgd, 1),
    "cold": Case(
        "`warm_start=False`", lambda r, **k: powersgd(r, warm_start=False, **k), train=True
    ),
    "cold-int8": Case(
        '`warm_start=False, comm_dtype="int8"`',
        lambda r: powersgd(r, warm_start=False, comm_dtype="int8"),
    ),
    "exact-10": Case("an exact average every 10 updates", exact_every(10)),
    "refresh-100": Case("a fresh factor every 100 updates", refreshed(100)),
    "refresh-10": Case("a fresh factor every 10 updates", refreshed(10), train=True),
    "stir-0.5": Case("50% of a random factor added", stirred(0.5), train=True),
    "one-fresh": Case("one fresh column, the others warm", one_fresh, train=True),
}
