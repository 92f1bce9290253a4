"""Runs the traced program of a Flax model, and watches what it applies each of its leaves to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from torch_bridge._base.schema import EXTREMES
from torch_bridge._pairing.pairs import Path

Leaves: TypeAlias = frozenset[Path]
# Operations that run another program once, with their own operands.
_CALLS = ("jit", "pjit", "remat2", "checkpoint", "closed_call", "core_call")
_CALLS_WITH_RULES = ("custom_jvp_call", "custom_vjp_call")  # of differentiation


class _Value(NamedTuple):
    """The value of a variable.

    Attributes:
      array: The value.
      made_of: The leaves of which alone it is made; none if it also depends on inputs.
      sources: All leaves on which it depends.
    """

    array: Any
    made_of: Leaves = frozenset()
    sources: Leaves = frozenset()


class Use(NamedTuple):
    """The first use of a leaf.

    Attributes:
      extremes: The largest and the smallest values of the array that the leaf is applied to.
      sources: The leaves on which this array depends.
    """

    extremes: np.ndarray
    sources: Leaves


class Watch:
    """A Flax model that also returns the first use of each of its leaves."""

    def __init__(self, program: core.ClosedJaxpr, paths: Iterable[Path]) -> None:
        """Prepares the runs.

        Args:
          program: The traced program.
          paths: The paths of all leaves, in the order of the program's arguments.
        """
        self._sources: dict[Path, Leaves] = {}
        self._program = program
        self._paths = list(paths)
        self._run = jax.jit(self._watched)

    def can_run(self) -> bool:
        """Returns whether the program can be computed one operation after the other."""
        try:
            jax.eval_shape(self._watched, *self._program.in_avals)
        except Exception:  # an operation of the user's own, or of another release of JAX
            return False
        return True

    def run(self, arguments: Sequence[Any]) -> tuple[list[jax.Array], dict[Path, Use]]:
        """Runs the model.

        Args:
          arguments: The leaves and the inputs, in the order of the program's arguments.

        Returns:
          The outputs. And path of a leaf -> its first use; leaves that are used inside of a loop
          are left out.
        """
        outputs, extremes = self._run(*arguments)
        uses = {}
        for path, values in extremes.items():
            uses[path] = Use(np.asarray(values), self._sources[path])
        return outputs, uses

    def _watched(self, *arguments: Any) -> tuple[list[jax.Array], dict[Path, jax.Array]]:
        values = list(map(_Value, arguments))
        for place, path in enumerate(self._paths):
            itself = frozenset({path})
            values[place] = _Value(arguments[place], itself, itself)
        extremes = {}
        outputs = self._compute(self._program, values, extremes)
        return [value.array for value in outputs], extremes

    def _compute(
        self,
        program: core.ClosedJaxpr,
        arguments: Sequence[_Value],
        extremes: dict[Path, jax.Array],
    ) -> list[_Value]:
        """Computes a program and returns its outputs.

        Args:
          program: The program.
          arguments: Its arguments.
          extremes: Receives the extremes of what each leaf is first applied to.
        """
        jaxpr = program.jaxpr
        values = dict(zip(jaxpr.constvars, map(_Value, program.consts), strict=True))
        values.update(zip(jaxpr.invars, arguments, strict=True))

        def value_of(variable: Any) -> _Value:
            if isinstance(variable, core.Literal):
                return _Value(variable.val)
            return values[variable]

        for equation in jaxpr.eqns:
            operands = list(map(value_of, equation.invars))
            called = _called(equation)
            if called:
                results = self._compute(called, operands, extremes)
            else:
                held = []
                for operand, variable in zip(operands, equation.invars, strict=True):
                    if not isinstance(variable, core.Literal):
                        held.append(operand)
                made_of = self._add(held, extremes)
                sources = frozenset().union(*[operand.sources for operand in operands])
                arrays = _results(equation, [operand.array for operand in operands])
                results = [_Value(array, made_of, sources) for array in arrays]
            values.update(zip(equation.outvars, results, strict=True))
        return list(map(value_of, jaxpr.outvars))

    def _add(self, operands: Sequence[_Value], extremes: dict[Path, jax.Array]) -> Leaves:
        """Adds what an operation applies leaves to; returns the leaves of which it is made."""
        made_of = frozenset().union(*[operand.made_of for operand in operands])
        others = []
        for operand in operands:
            if not operand.made_of and operand.array.ndim > 0:
                others.append(operand)
        if not others:
            return made_of
        other = others[0]
        for path in made_of:
            if path not in extremes and jnp.issubdtype(other.array.dtype, jnp.number):
                extremes[path] = _extremes(other.array)
                self._sources[path] = other.sources
        return frozenset()


def _called(equation: core.JaxprEqn) -> core.ClosedJaxpr | None:
    """Returns the program that an operation runs once; None for all other operations."""
    if equation.primitive.name not in (*_CALLS, *_CALLS_WITH_RULES):
        return None
    for name in ("jaxpr", "call_jaxpr"):
        program = equation.params.get(name)
        if isinstance(program, core.Jaxpr):
            return core.ClosedJaxpr(program, ())
        if program is not None:
            return program
    return None


def _results(equation: core.JaxprEqn, arrays: Sequence[Any]) -> Sequence[Any]:
    """Computes one operation."""
    results = equation.primitive.bind(*arrays, **equation.params)
    if equation.primitive.multiple_results:
        return results
    return [results]


def _extremes(array: jax.Array) -> jax.Array:
    """Returns the largest and the smallest values, as the file has them of torch's arrays."""
    flat = array.astype(jnp.float32).ravel()
    count = min(EXTREMES, flat.size)
    ends = [jax.lax.top_k(flat, count)[0], -jax.lax.top_k(-flat, count)[0]]
    return jnp.concatenate([jnp.pad(end, (0, EXTREMES - count)) for end in ends])
