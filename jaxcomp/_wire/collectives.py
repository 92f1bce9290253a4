"""The collectives of a compiled step: kind, bytes, mesh axes, how often, and what made them.

The compiled program is read, because it is what runs: XLA merges, splits, widens and adds
collectives after everything that JAX can tell about a program.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxcomp._wire.program import Instruction, Program, read_program


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a compiled program, as each device takes part in it."""

    kind: str  # all-reduce, all-gather, all-to-all, collective-permute or reduce-scatter
    arrays: tuple[tuple[str, int], ...]  # XLA's element type and the values of each result
    bytes: int  # of the larger of what goes in and what comes out, on one device, each time
    axes: tuple[str, ...]  # mesh axes along which it joins devices
    in_loop: bool
    times: int  # that it runs in a step, by the loops around it; 1 for those of unknown length
    in_branch: bool  # of a conditional
    operation: str  # JAX's name of what it was made for, with the functions around it

    @property
    def as_all_reduce(self) -> float:
        """Bytes of an all-reduce that would cost as much: half, for anything else than one."""
        if self.kind == "all-reduce":
            return self.bytes
        return self.bytes / 2

    def __str__(self) -> str:
        """Returns a line of a list."""
        dtypes = "+".join(dict.fromkeys(dtype for dtype, _ in self.arrays))
        line = f"{self.kind} of {self.bytes:,} bytes of {dtypes} over {self.axes}"
        if self.in_branch:
            line += ", in one branch"
        if self.in_loop:
            line += f", in a loop ({self.times} times)"
        if self.operation:
            line += f", for {self.operation}"
        return line


def collectives(compiled: Any, *, mesh: Any = None) -> tuple[Collective, ...]:
    """Lists the collectives of a compiled step as XLA left them, in the order of the program.

    Every branch of a conditional is listed, and the body of a loop once, with its `times`. A step
    of `powersgd` has two all-reduces over the axis of the replicas, whatever the number of leaves;
    with integers as `comm_dtype` each of them becomes an all-to-all and an all-gather, four in all.
    The mean loss is one all-reduce of a scalar more, which XLA merges into another where it can.

    Args:
      compiled: ``jax.jit(step).lower(...).compile()``.
      mesh: The mesh whose axes the collectives are named by; None takes the one of the program's
        arguments and results.

    Returns:
      Every collective, with its bytes on one device.

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
    return collectives_of(read_program(compiled), lambda: mesh or mesh_of(compiled))


def mesh_of(compiled: Any) -> Any:
    """Returns the largest mesh among the shardings of arguments and results.

    Raises:
      ValueError: If there is none.
    """
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    meshes = [x.mesh for x in shardings if isinstance(x, jax.sharding.NamedSharding)]
    if not meshes:
        raise ValueError("`mesh` is missing: no argument or result of the program names it.")
    return max(meshes, key=lambda mesh: mesh.size)


def collectives_of(program: Program, mesh_of_program: Callable[[], Any]) -> tuple[Collective, ...]:
    """Lists the collectives that a program runs, in its order; those of every branch.

    Args:
      program: The program.
      mesh_of_program: Returns the mesh that names their axes; called for a collective only.
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
    return tuple(listed)


def _collective(
    instruction: Instruction, loops: tuple[int, ...], in_branch: bool, mesh: Any
) -> Collective:
    """Says what users want to know of an instruction, in loops that turn so often."""
    kind = str(instruction.kind)
    arrays = instruction.arrays
    if instruction.opcode != kind != "all-reduce":
        # What starts yields operands, results, here and there a context.
        data = tuple(array for array in arrays if array.element != "u32") or arrays
        arrays = data[len(data) // 2 :]
    size = sum(array.bytes for array in arrays)
    groups = instruction.groups
    if groups is None:
        groups = np.arange(mesh.size)[None]
    if kind == "reduce-scatter":
        size *= groups.shape[1]  # what goes in is as large as what comes out on all devices
    # Of each device its place along every axis.
    places = np.stack(np.unravel_index(groups, tuple(mesh.shape.values())))
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
