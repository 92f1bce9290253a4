"""What a Flax model does with its leaves and inputs, from its traced program.

The program shows in which order the model uses its leaves, which maps it flattens, and which axes
it divides into parts. A run of the program also shows what the model applies its leaves to.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from torch_bridge._base.schema import EXTREMES
from torch_bridge._pairing.kinds import without_ones
from torch_bridge._pairing.pairs import Path, Shape

Leaves: TypeAlias = frozenset[Path]
# Operations whose result is still the same leaf.
_VIEWS = frozenset(
    {"reshape", "transpose", "convert_element_type", "broadcast_in_dim", "squeeze", "rev", "copy"}
)
_PARTS = (2, 3)  # numbers of parts of a packed layer: (gate, value), (query, key, value)
_MOST_PARTS = 5  # the same if the model cuts its outputs, as for the gates of a cell, or in Mamba
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


class Trace:
    """What a Flax model does with inputs in one order of their axes.

    Attributes:
      inputs: The inputs.
      positions: Path of a leaf -> its position in the order in which the model uses leaves.
      upward: Paths of the kernels that the model uses in a ConvTranspose with a stride.
      feature_maps: (number of values, number of channels) of each map that the model flattens or
        unflattens.
      splits: The axes that the model divides into a few parts: (length, ratio of the parts).
    """

    def __init__(
        self,
        inputs: tuple[np.ndarray, ...],
        program: core.ClosedJaxpr | None,
        paths: Iterable[Path],
    ) -> None:
        """Reads the traced program of a model.

        Args:
          inputs: The inputs with which the model was traced.
          program: The program; None if the model cannot be traced, which then shows nothing.
          paths: The paths of all leaves, in the order of the program's arguments.
        """
        self.inputs = inputs
        self.positions = dict.fromkeys(paths, math.inf)  # unused leaves come last
        self.upward: set[Path] = set()
        self.feature_maps: dict[tuple[int, int], None] = {}  # a set that keeps its order
        self.splits = set()
        self._program = program
        self._sources: dict[Path, Leaves] = {}  # of the arrays that leaves are applied to
        if program:
            self._read(program)
            self._run = jax.jit(functools.partial(self._watched, program))

    def _read(self, program: core.ClosedJaxpr) -> None:
        """Finds what the operations of the program do with leaves and with shapes."""
        leaves = dict(zip(program.jaxpr.invars, self.positions, strict=False))
        cuts = {}  # (array, axis) -> where the parts that the model takes start and end
        for place, equation in enumerate(_operations(program.jaxpr, leaves)):
            name = equation.primitive.name
            options = equation.params
            result = equation.outvars[0]
            used = list(filter(None, map(leaves.get, filter(_is_variable, equation.invars))))
            leaves.pop(result, None)
            if used and name in _VIEWS:
                leaves[result] = used[0]
                continue
            for path in used:
                self.positions[path] = min(self.positions[path], place)
            if max(options.get("lhs_dilation", ()), default=1) > 1:
                self.upward.update(used)
            if name == "reshape":
                before = equation.invars[0].aval.shape
                self._add_merged(before, result.aval.shape)
                self._add_divided(before, result.aval.shape)
            elif name == "split":
                length = equation.invars[0].aval.shape[options["axis"]]
                self._add_split(length, options["sizes"])
            elif name == "slice":
                whole = equation.invars[0]
                ends = zip(options["start_indices"], options["limit_indices"], strict=True)
                for axis, (start, stop) in enumerate(ends):
                    cuts.setdefault((whole, axis), set()).update((start, stop))
            elif name == "dot_general":  # the kernel may have several input or output axes
                kernel = equation.invars[1].aval.shape
                contracted = options["dimension_numbers"][0][1]
                for sizes in (np.take(kernel, contracted), np.delete(kernel, contracted)):
                    self._add_divided([math.prod(sizes.tolist())], sizes.tolist())
        for (whole, axis), places in cuts.items():
            length = whole.aval.shape[axis]
            sizes = np.diff(sorted({0, *places, length})).tolist()
            self._add_split(length, sizes)
            for size in sizes:  # the model may cut the rest of the axis later
                if length % size == 0 and length // size in _PARTS:
                    self._add_split(length, [size] * (length // size))

    def _add_merged(self, wide: Sequence[int], narrow: Sequence[int]) -> Shape:
        """Adds the map whose axes become the last axis; returns their lengths, or ()."""
        sizes = without_ones(wide)
        last = (without_ones(narrow) or (0,))[-1]
        for cut in range(len(sizes) - 1):
            if math.prod(sizes[cut:]) == last:
                self.feature_maps[last, sizes[-1]] = None
                return sizes[cut:]
        return ()

    def _add_divided(self, narrow: Sequence[int], wide: Sequence[int]) -> None:
        """Adds the map into which the last axis is divided, and each axis of a few parts."""
        sizes = self._add_merged(wide, narrow)
        for size in sizes:
            if size in _PARTS:
                self.splits.add((math.prod(sizes), (1,) * size))

    def _add_split(self, length: int, sizes: Sequence[int]) -> None:
        """Adds an axis that the model divides into a few parts."""
        if 1 < len(sizes) <= _MOST_PARTS and min(sizes) > 0:
            unit = math.gcd(*sizes)
            self.splits.add((length, tuple(size // unit for size in sizes)))

    def can_run(self) -> bool:
        """Returns whether the program can be computed one operation after the other."""
        if self._program is None:
            return False
        try:
            jax.eval_shape(self._run, *self._program.in_avals)
        except Exception:  # an operation of the user's own, or of another release of JAX
            return False
        return True

    def run(self, params: Any) -> tuple[list[jax.Array], dict[Path, Use]]:
        """Runs the program.

        Args:
          params: The leaves, in the tree of the model.

        Returns:
          The outputs. And path of a leaf -> its first use; leaves that are used inside of a loop
          are left out.
        """
        outputs, extremes = self._run(*jax.tree.leaves((params, self.inputs)))
        uses = {}
        for path, values in extremes.items():
            uses[path] = Use(np.asarray(values), self._sources[path])
        return outputs, uses

    def _watched(
        self, program: core.ClosedJaxpr, *arguments: Any
    ) -> tuple[list[jax.Array], dict[Path, jax.Array]]:
        """Computes the outputs, and the extremes of what each leaf is first applied to."""
        jaxpr = program.jaxpr
        values = dict(zip(jaxpr.constvars, map(_Value, program.consts), strict=True))
        values.update(zip(jaxpr.invars, map(_Value, arguments), strict=True))
        for variable, path in zip(jaxpr.invars, self.positions, strict=False):
            itself = frozenset({path})
            values[variable] = _Value(values[variable].array, itself, itself)

        def value_of(variable: Any) -> _Value:
            if _is_variable(variable):
                return values[variable]
            return _Value(variable.val)

        extremes = {}
        for equation in _operations(jaxpr, values, _Value):
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
        is_ordered = jnp.issubdtype(other.array.dtype, jnp.number)  # neither a key nor complex
        is_ordered &= not jnp.iscomplexobj(other.array)
        for path in made_of:
            if path not in extremes and is_ordered:
                extremes[path] = _extremes(other.array)
                self._sources[path] = other.sources
        return frozenset()


def _operations(
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
            yield from _operations(inner, values, constant)
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
        if not _is_variable(one):
            if constant:
                values[other] = constant(one.val)
        elif one in values:
            values[other] = values[one]


def _is_variable(value: Any) -> bool:
    """Returns whether an operand is a variable, and not a constant."""
    return isinstance(value, core.Var)


def _extremes(array: jax.Array) -> jax.Array:
    """Returns the largest and the smallest values, as the file has them of torch's arrays."""
    flat = array.astype(jnp.float32).ravel()
    count = min(EXTREMES, flat.size)
    ends = [jax.lax.top_k(flat, count)[0], -jax.lax.top_k(-flat, count)[0]]
    return jnp.concatenate([jnp.pad(end, (0, EXTREMES - count)) for end in ends])
