"""Runs the traced program of a Flax model, and watches what it applies each of its leaves to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from torch_bridge._base.schema import EXTREMES
from torch_bridge._pairing.pairs import Path

Leaves: TypeAlias = frozenset[Path]
# Operations that run another program once, with their own operands.
_CALLS = frozenset(
    {"jit", "pjit", "remat2", "checkpoint", "closed_call", "core_call"}
    | {"custom_jvp_call", "custom_vjp_call"}  # with rules of differentiation
)


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
        jaxpr = self._program.jaxpr
        values = dict(zip(jaxpr.constvars, map(_Value, self._program.consts), strict=True))
        values.update(zip(jaxpr.invars, map(_Value, arguments), strict=True))
        for variable, path in zip(jaxpr.invars, self._paths, strict=False):
            itself = frozenset({path})
            values[variable] = _Value(values[variable].array, itself, itself)

        def value_of(variable: Any) -> _Value:
            if is_variable(variable):
                return values[variable]
            return _Value(variable.val)

        extremes = {}
        for equation in operations(jaxpr, values, _Value):
            operands = list(map(value_of, equation.invars))
            made_of = self._add(operands, extremes)
            sources = frozenset().union(*[operand.sources for operand in operands])
            arrays = equation.primitive.bind(
                *[operand.array for operand in operands], **equation.params
            )
            if not equation.primitive.multiple_results:
                arrays = [arrays]
            for variable, array in zip(equation.outvars, arrays, strict=True):
                values[variable] = _Value(array, made_of, sources)
        return [value_of(variable).array for variable in jaxpr.outvars], extremes

    def _add(self, operands: Sequence[_Value], extremes: dict[Path, jax.Array]) -> Leaves:
        """Adds what an operation applies leaves to; returns the leaves of which it is made."""
        made_of = frozenset().union(*[operand.made_of for operand in operands])
        others = []
        for operand in operands:
            if not operand.made_of and jnp.ndim(operand.array) > 0:
                others.append(operand)
        if not others:
            return made_of
        other = others[0]
        for path in made_of:
            if path not in extremes and jnp.issubdtype(other.array.dtype, jnp.number):
                extremes[path] = _extremes(other.array)
                self._sources[path] = other.sources
        return frozenset()


def operations(
    jaxpr: core.Jaxpr, values: dict[Any, Any], constant: Callable[[Any], Any] | None = None
) -> Iterator[Any]:
    """Yields the operations of a program in order, with those of the programs that it calls.

    Args:
      jaxpr: The program.
      values: Variable -> its value. The variables of called programs are added here; the caller
        adds the results of operations. A variable need not have a value.
      constant: Makes a value of a constant, so that all variables have values. A loop is then one
        operation. Without `constant`, the operations inside of loops are yielded, too.
    """
    for equation in jaxpr.eqns:
        called = []
        if constant is None or equation.primitive.name in _CALLS:
            for program in jax.tree.leaves(tuple(equation.params.values())):
                if isinstance(getattr(program, "jaxpr", program), core.Jaxpr):
                    called.append(program)
        for program in called:
            inner = getattr(program, "jaxpr", program)
            if constant:
                constants = map(constant, getattr(program, "consts", ()))
                values.update(zip(inner.constvars, constants, strict=True))
            arguments = equation.invars[len(equation.invars) - len(inner.invars) :]
            _hand_on(values, arguments, inner.invars, constant)
            yield from operations(inner, values, constant)
            _hand_on(values, inner.outvars, equation.outvars, constant)
        if not called:
            yield equation


def _hand_on(
    values: dict[Any, Any],
    outer: Sequence[Any],
    inner: Sequence[Any],
    constant: Callable[[Any], Any] | None,
) -> None:
    """Gives each variable of `inner` the value of its variable, or constant, of `outer`."""
    for one, other in zip(outer, inner, strict=False):
        values.pop(other, None)
        if not is_variable(one):
            if constant:
                values[other] = constant(one.val)
        elif one in values:
            values[other] = values[one]


def is_variable(value: Any) -> bool:
    """Returns whether an operand is a variable, and not a constant."""
    return isinstance(value, core.Var)


def _extremes(array: jax.Array) -> jax.Array:
    """Returns the largest and the smallest values, as the file has them of torch's arrays."""
    flat = array.astype(jnp.float32).ravel()
    count = min(EXTREMES, flat.size)
    ends = [jax.lax.top_k(flat, count)[0], -jax.lax.top_k(-flat, count)[0]]
    return jnp.concatenate([jnp.pad(end, (0, EXTREMES - count)) for end in ends])
