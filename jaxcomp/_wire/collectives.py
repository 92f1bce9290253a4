"""Lists the collectives of a compiled step: kind, bytes, mesh axes, repetitions, JAX operation.

`check` compares such lists, and users print them to see what a step sends. This module reads the
compiled program and not the jaxpr, because XLA merges, splits, widens and adds collectives after
tracing. The program names devices by number; the mesh translates the groups of a collective to
axes.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxcomp._base.checks import answers_other_names
from jaxcomp._base.typing import Axes
from jaxcomp._mesh.meshes import check_mesh_axes
from jaxcomp._wire.program import Instruction, Program, read_program


@dataclasses.dataclass(frozen=True)
class Collective:
    """Describes one collective of a compiled program, as one device executes it."""

    kind: str  # all-reduce, all-gather, all-to-all, collective-permute or reduce-scatter
    arrays: tuple[tuple[str, int], ...]  # for each result: XLA's element type, number of values
    bytes: int  # the larger of input and output, on one device, for one run
    axes: Axes  # the mesh axes whose devices communicate
    in_loop: bool
    times: int  # runs in a step: product of the loop lengths (an unknown length is 1)
    in_branch: bool  # of a conditional
    operation: str  # JAX's name of the operation, with its enclosing functions

    @property
    def as_all_reduce(self) -> float:
        """Returns the bytes of an all-reduce of the same cost: half, for another kind."""
        if self.kind == "all-reduce":
            return self.bytes
        return self.bytes / 2

    def __str__(self) -> str:
        """Returns one line that describes the collective."""
        dtypes = "+".join(dict.fromkeys(dtype for dtype, _ in self.arrays))
        line = f"{self.kind} of {self.bytes:,} bytes of {dtypes} over {self.axes}"
        if self.in_branch:
            line += ", in one branch"
        if self.in_loop:
            line += f", in a loop ({self.times} times)"
        if self.operation:
            line += f", for {self.operation}"
        return line


class Collectives(tuple[Collective, ...]):
    """Holds the collectives of a program, in its order; ``print`` shows a line for each."""

    def __str__(self) -> str:
        """Returns a line for each collective, and the bytes over the same axes added up."""
        lines = list(map(str, self))
        sums: collections.Counter[Axes] = collections.Counter()
        for collective in self:
            sums[collective.axes] += collective.times * collective.bytes
        for axes, sent in sums.items():
            lines.append(f"in all {sent:,} bytes over {axes}")
        return "\n".join(lines) or "no collectives"


@answers_other_names
def collectives(compiled: Any, *, mesh: Any = None) -> Collectives:
    """Lists the collectives of a compiled step, in the order of the program.

    The list holds every branch of a conditional, and each collective in a loop once, with the
    number of its runs in `times`. A step of `powersgd` with ``start_step=0`` has two all-reduces
    over the axis of the replicas, whatever the number of leaves; else there is a third one, of the
    exact steps. With an integer `comm_dtype` each of them becomes an
    all-to-all and an all-gather, four collectives in all. The mean loss is one more all-reduce of a
    scalar, which XLA merges into another one if it can.

    Args:
      compiled: ``jax.jit(step).lower(...).compile()``.
      mesh: The mesh that names the axes; None takes the mesh of the program's arguments and
        results.

    Returns:
      A tuple of all collectives, with their bytes on one device. ``print`` shows a line for each.

    Raises:
      ValueError: If `compiled` is not a compiled program, or `mesh` is missing.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomp
      >>> mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
      >>> x = jax.device_put(jnp.ones((2, 100)), jax.NamedSharding(mesh, jax.P("data")))
      >>> def mean(x):
      ...     return jax.lax.pmean(x, "data")
      >>> mapped = jax.shard_map(mean, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P())
      >>> (found,) = jaxcomp.collectives(jax.jit(mapped).lower(x).compile())
      >>> found.kind, found.arrays, found.bytes, found.axes
      ('all-reduce', (('f32', 100),), 400, ('data',))
    """
    program = read_program(compiled)
    if mesh is not None:
        check_mesh_axes(mesh, ())
    return collectives_of(program, lambda: mesh or mesh_of(compiled))


def mesh_of(compiled: Any) -> Any:
    """Returns the largest mesh in the shardings of the program's arguments and results.

    Raises:
      ValueError: If no sharding has a mesh.
    """
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    meshes = [x.mesh for x in shardings if isinstance(x, jax.sharding.NamedSharding)]
    if not meshes:
        raise ValueError("`mesh` is missing: no argument or result of the program names it.")
    return max(meshes, key=lambda mesh: mesh.size)


def collectives_of(program: Program, mesh_of_program: Callable[[], Any]) -> Collectives:
    """Lists the collectives of a program in its order, with those of every branch.

    Args:
      program: The program.
      mesh_of_program: A function that returns the mesh that names the axes. It is called only if
        the program has a collective.
    """
    listed = []

    def visit(computation: int, loops: tuple[int, ...], in_branch: bool) -> None:
        for instruction in program.computations[computation].instructions.values():
            if instruction.kind is not None:
                listed.append(_collective(instruction, loops, in_branch, mesh_of_program()))
            around = loops
            if instruction.opcode == "while":
                around = (*loops, instruction.times)
            chosen = in_branch or instruction.opcode == "conditional"
            for called in instruction.called:
                visit(called, around, chosen)

    visit(program.entry, (), False)
    return Collectives(listed)


def _collective(
    instruction: Instruction, loops: tuple[int, ...], in_branch: bool, mesh: Any
) -> Collective:
    """Describes one instruction; `loops` are the lengths of the loops around it."""
    kind = str(instruction.kind)
    arrays = instruction.arrays
    if instruction.opcode != kind != "all-reduce":
        # The -start of an asynchronous collective returns operands, results, and sometimes a u32
        # context.
        data = tuple(array for array in arrays if array.element != "u32") or arrays
        arrays = data[len(data) // 2 :]
    size = sum(array.bytes for array in arrays)
    groups = instruction.groups
    if groups is None:  # all devices in one group
        groups = np.arange(mesh.size)[None]
    if kind == "reduce-scatter":
        size *= groups.shape[1]  # the input is as large as the outputs of all devices together
    # The index of each device along every mesh axis.
    places = np.stack(np.unravel_index(groups, tuple(mesh.shape.values())))
    # A collective is over the axes along which the devices of one group differ.
    differ = np.ptp(places, axis=2).any(axis=1)
    return Collective(
        kind,
        arrays=tuple(array[:2] for array in arrays),
        bytes=size,
        axes=tuple(itertools.compress(mesh.shape, differ)),
        in_loop=bool(loops),
        times=math.prod(loops),
        in_branch=in_branch,
        operation=instruction.operation,
    )
