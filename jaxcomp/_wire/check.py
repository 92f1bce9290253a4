"""Checks that a compiled program sends only what its reducers send, and small metrics.

A step that communicates too much gives the right losses and is only slow, so nothing but the
program shows it. `check` compiles each reducer alone on the same mesh and compares bytes, instead
of computing what should be sent: so it needs no model of how XLA merges, widens or splits
collectives. Users call it once, before a long run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcomp._base.checks import answers_other_names, check_int, check_number
from jaxcomp._base.leaves import checked_params, is_floating
from jaxcomp._base.stats import dense_stats
from jaxcomp._base.typing import Array, Axes, PyTree
from jaxcomp._mesh.collectives import axis_tuple
from jaxcomp._mesh.meshes import check_mesh_axes, replicas_on
from jaxcomp._reducers.allreduce import allreduce
from jaxcomp._reducers.reducer import Reducer, check_reducer
from jaxcomp._states.place import known_spec
from jaxcomp._training.data_parallel import data_parallel
from jaxcomp._wire.collectives import Collective, Collectives, collectives, mesh_of
from jaxcomp._wire.program import read_program
from jaxcomp._wire.steps import count_steps

_SMALL = 1024  # bytes: losses and flags
_HOW_TO_PASS = (
    "Pass the reducer that is in it: the first link of a chain, or for averages along two axes "
    "check(compiled, [first, second], [params, params]). For local SGD pass the reducer of its "
    "averages, jaxcomp.allreduce(axis_name=...) if it has none."
)


@answers_other_names
def check(
    compiled: Any,
    reducer: Reducer | Sequence[Reducer],
    params: PyTree,
    *,
    mesh: Any = None,
    allow: int | None = None,
    steps: int | Sequence[int | None] | None = None,
) -> Collectives:
    """Refuses a compiled program that sends more over the replicas' axis than its reducers do.

    Three mistakes cost as many bytes as compression saves, and change no result visibly: a `pmean`
    left in the step, gradients that differentiation has already reduced, and a reducer that runs
    twice. This function finds them: it compiles the reducer alone and compares the bytes of both
    programs. A gradient that the step does not use is sent with the others, so bytes do not show
    that it is missing. Every branch of a conditional counts. The body of a loop counts as many
    times as it runs, or once if the program does not say how often.

    Args:
      compiled: ``jax.jit(step).lower(...).compile()``.
      reducer: The reducer of the step. If one program trains several networks (a generator and a
        discriminator, an actor and a critic), a list of their reducers. For a chain of two levels,
        the reducer of one level, or a list of both.
      params: The parameters or their shapes, with the shardings of the step. If `reducer` is a
        list, the list of the networks' parameters.
      mesh: The mesh that names the axes; None takes the mesh of the program's arguments and
        results.
      allow: Bytes that a step may send in addition to the reducers' bytes: losses, metrics,
        BatchNorm statistics. None allows 1% of the gradients or half of the reducers' bytes,
        whichever is less, and at least 1 kB.
      steps: How many training steps one call of the program takes; a list if `reducer` is a list.
        None counts the steps, inside loops and outside: a new step begins where a loss is
        differentiated at parameters that the last sent gradients updated. A reducer that runs on
        every micro-batch is refused.

    Returns:
      All collectives of the program, as `collectives` lists them.

    Raises:
      ValueError: If the program sends more than the reducers' bytes and `allow`, or less than half
        of the reducers' bytes. The message lists the largest collectives with the JAX operations
        that they came from.

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
    networks = _networks(reducer, params, steps)
    if allow is not None:
        allow = check_number("allow", allow, 0)
    program = read_program(compiled)  # refuses what is not compiled
    if mesh is None:
        mesh = mesh_of(compiled)
    for each, _, _ in networks:
        check_mesh_axes(mesh, each.axis_name)
    listed = collectives(compiled, mesh=mesh)
    expected = []
    axes: dict[str, None] = {}
    for each, tree, count in networks:
        alone = _sent_alone(each, tree, listed, mesh)
        sent = _bytes(alone)
        extra = allow
        if extra is None:
            dense = dense_stats(tree).bytes_before
            # A forgotten pmean of all gradients must exceed it, and at high compression even half
            # of the reducer's bytes is little.
            extra = int(max(_SMALL, min(dense / 100, sent / 2)))
        if count is None:
            count = 1
            if alone:
                count = count_steps(program, listed, _largest(alone))
        expected.append(_Expected(count, count * sent, count * len(alone), count * extra))
        axes.update(dict.fromkeys(axis_tuple(each.axis_name)))
    crossing = _crossing(listed, axes)
    # On a mesh with other axes, each device of a replica may send only its share of the bytes.
    others = mesh.size // replicas_on(mesh, tuple(axes))
    _, right, _, allowed = np.sum(expected, axis=0)  # each field over all networks
    sent = _bytes(crossing)
    if right / others / 2 <= sent <= right + allowed:
        return listed

    reducers = " and ".join(repr(each) for each, _, _ in networks)
    raise ValueError(_difference(reducers, expected, axes, crossing))


class _Expected(NamedTuple):
    """Holds the traffic that one reducer should cause in one call of the program."""

    steps: int
    bytes: float  # of all-reduces of the same cost
    collectives: int
    allowed: float  # bytes in addition


def _difference(
    reducers: str,
    expected: Sequence[_Expected],
    axes: Iterable[str],
    crossing: Sequence[Collective],
) -> str:
    """Says how much more or less a program sends than its reducers, and what may be the cause."""
    _, right, calls, allowed = np.sum(expected, axis=0)
    sent = _bytes(crossing)
    lines = [
        f"The compiled step sends {sent:,.0f} bytes over {', '.join(axes)}, but a step with "
        f"{reducers} sends {right:,.0f}, and {allowed:,.0f} more are allowed (allow=)."
    ]
    times = 0
    if right:
        times = round(sent / right)
    # Small metrics make the bytes of a repeated reducer no exact multiple.
    whole = abs(sent - times * right) < 0.1 * right
    called = sum(collective.times for collective in crossing)
    if times > 1 and whole and called >= times * calls:
        steps: Any = [times * each.steps for each in expected]
        if len(steps) == 1:
            (steps,) = steps
        lines.append(
            f"  That is {times} times as much. If the reducer runs on every micro-batch, run it "
            f"once, on the mean of the micro-batches' gradients. If one call takes {steps} "
            f"training steps, pass steps={steps}."
        )
    elif sent > right and len(expected) == 1:
        lines.append("  If it trains other networks too, pass lists of reducers and parameters.")
    largest = sorted(crossing, key=lambda collective: -collective.times * collective.as_all_reduce)
    for collective in largest[:6]:
        lines.append(f"  {collective}")
    return "\n".join(lines)


def _networks(reducer: Any, params: Any, steps: Any) -> list[tuple[Reducer, PyTree, int | None]]:
    """Returns the reducer, parameters and steps of each network; each argument may be a list.

    Raises:
      ValueError: If the lists have different lengths, or an argument is unusable.
    """
    if type(reducer) not in (list, tuple):  # a reducer is a named tuple
        reducer = [reducer]
        params = [params]
    if not isinstance(steps, (list, tuple)):
        steps = [steps] * len(reducer)
    lists = (reducer, params, steps)
    if not isinstance(params, (list, tuple)) or len(set(map(len, lists))) > 1:
        raise ValueError(
            f"`reducer` is a list of {len(reducer)}, so `params` must be a list of the same "
            "length, and so must `steps` if it is a list. Got params of type "
            f"{type(params).__name__} and steps={steps}. Pass check(compiled, [first, second], "
            "[params, others])."
        )
    for each, tree, count in zip(*lists, strict=True):
        check_reducer(each, _HOW_TO_PASS)
        checked_params("params", tree)
        if count is not None:
            check_int("steps", count, 1)
    return list(zip(*lists, strict=True))


def _bytes(listed: Iterable[Collective]) -> float:
    """Returns how many bytes all-reduces would send at the cost of these collectives."""
    return sum(collective.times * collective.as_all_reduce for collective in listed)


def _crossing(listed: Iterable[Collective], axes: Iterable[str]) -> list[Collective]:
    """Returns the collectives that join devices along one of the axes."""
    crossing = []
    for collective in listed:
        if set(axes) & set(collective.axes):
            crossing.append(collective)
    return crossing


def _largest(alone: Iterable[Collective]) -> Collective:
    return max(alone, key=lambda collective: collective.bytes)


def _sent_alone(
    reducer: Reducer, params: PyTree, listed: Sequence[Collective], mesh: Any
) -> Sequence[Collective]:
    """Compiles a reducer alone and returns its collectives over its axes.

    Beside an axis of the mesh that the step maps too, as for an exact average before the reducer,
    each device sends whole factors. Beside another axis it may send its share of them. The program
    does not say which axes it maps, but such an average is one of its collectives. So this tries
    the axes of each, until it finds the reducer's largest array.
    """
    axes = axis_tuple(reducer.axis_name)
    sharded = set(axes)
    for leaf in jax.tree.leaves(params):
        sharded.update(jax.tree.leaves(tuple(known_spec(leaf, mesh))))
    beside = []
    for name, size in mesh.shape.items():
        if size > 1 and name not in sharded:
            beside.append(name)
    # Also the shardings of the gradients.
    params = jax.tree.map(lambda leaf: leaf if is_floating(leaf) else None, params)

    def gradients(params: PyTree, x: Array) -> tuple[Array, PyTree]:
        # They depend on the examples: gradients that are equal everywhere would be refused.
        scale = x.mean()
        return scale, jax.tree.map(lambda leaf: leaf * scale.astype(leaf.dtype), params)

    def compiled_behind(mapped: Axes) -> Any:
        """Compiles the reducer behind an exact average over the axes `mapped`."""
        chain: Any = reducer
        if mapped:
            chain = optax.chain(allreduce(axis_name=mapped), reducer)
        rows = jax.NamedSharding(mesh, jax.P(mapped + axes))  # names the devices
        shape = (replicas_on(mesh, mapped + axes),)
        examples = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=rows)
        run = data_parallel(gradients, chain, mesh=mesh, axis_name=mapped + axes)
        state = jax.eval_shape(run.init, params)
        lowered = jax.jit(run).lower(state, params, examples)
        return lowered.compile()

    averaged: dict[Axes, None] = {(): None}  # first without an average before the reducer
    for collective in listed:
        if set(collective.axes) <= set(beside):
            averaged[collective.axes] = None
    tried = []
    for mapped in averaged:
        alone = _crossing(collectives(compiled_behind(mapped), mesh=mesh), axes)
        tried.append(alone)
        if not alone:  # one replica sends nothing
            return alone
        for collective in _crossing(listed, axes):
            if set(_largest(alone).arrays) <= set(collective.arrays):
                return alone
    return tried[0]  # none fits; the usual case makes the clearest error
