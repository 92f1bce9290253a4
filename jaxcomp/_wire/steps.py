"""Counts the training steps in one call of a program, by what is made of what.

A step differentiates a loss and sends the gradients, and the next one differentiates the loss at
parameters that came of what was sent. So the longest path through a program that goes by turns
through a differentiated instruction and a collective of the reducer has as many turns as there are
steps: in a loop, unrolled, or one after the other. A reducer that runs on every micro-batch, or
twice in a row, sends something that was sent before, but there is no new loss in between.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeAlias

import jax

from jaxcomp._wire.collectives import Collective
from jaxcomp._wire.program import Instruction, Program

# Half-steps on the longest path to a value: even before its gradients are sent, odd behind. A tuple
# has a list of them.
_Depth: TypeAlias = "int | list[_Depth]"

# After so many turns of a loop each further turn adds as much as the last.
_TURNS = 3
_RUN_ONCE = ("fusion", "call", "async-start")
_UNCHANGED = ("opt-barrier", "copy", "copy-start", "copy-done", "async-done")


def count_steps(program: Program, listed: Sequence[Collective], sent: Collective) -> int:
    """Counts the steps of a program, 1 at least.

    Gradients that are written by hand are not told from anything else: in a program without any
    differentiated loss every turn of a loop counts.

    Args:
      program: The program.
      listed: Its collectives.
      sent: The largest collective of the reducer, as others are not.
    """
    largest = max(sent.arrays, key=lambda array: array[1])
    for computation in program.computations.values():
        if any(map(_is_differentiated, computation.instructions.values())):
            paths = _Paths(program, sent.kind, largest)
            return (_highest(paths.through(program.entry, [])) + 1) // 2 or 1
    turns = 1
    for other in listed:
        if other.kind == sent.kind and largest in other.arrays:
            turns = max(turns, other.times)
    return turns


@dataclasses.dataclass
class _Paths:
    """Follows the values of a program.

    The collectives of the reducer are of one kind and have an array of one type and size, which
    those of metrics, and of the loss itself, have not.
    """

    program: Program
    kind: str
    array: tuple[str, int]

    def through(self, computation: int, arguments: list[_Depth]) -> _Depth:
        """Returns the depth of a computation's result."""
        body = self.program.computations[computation]
        depths: dict[int, _Depth] = {}
        for name, instruction in body.instructions.items():
            operands = [depths[operand] for operand in instruction.operands]
            if instruction.opcode == "parameter":
                operands = arguments[instruction.position : instruction.position + 1]
            depths[name] = self._behind(instruction, operands)
        return depths[body.root]

    def _behind(self, instruction: Instruction, operands: list[_Depth]) -> _Depth:
        """Returns the depth of an instruction's result; `operands` of a parameter are its value."""
        opcode = instruction.opcode
        if opcode == "tuple":
            return operands
        if opcode == "while":
            return self._behind_loop(instruction, operands[0])
        if opcode == "conditional":
            results: list[_Depth] = []
            for branch, operand in zip(instruction.called, operands[1:], strict=True):
                results.append(self.through(branch, [operand]))
            return _merged(results)
        if opcode in _RUN_ONCE and instruction.called:
            return self.through(instruction.called[0], operands)
        if len(operands) == 1:
            (whole,) = operands
            if opcode == "get-tuple-element" and isinstance(whole, list):
                return whole[instruction.position]
            if opcode == "parameter" or opcode in _UNCHANGED:
                return whole
        depth = _highest(operands)
        arrays = [array[:2] for array in instruction.arrays]
        if instruction.kind == self.kind and self.array in arrays:
            return depth + 1 - depth % 2
        if _is_differentiated(instruction):
            return depth + depth % 2
        return depth

    def _behind_loop(self, loop: Instruction, carried: _Depth) -> _Depth:
        """Returns the depths of what a loop carries after its last turn."""
        body = loop.called[0]
        before = carried
        turns = min(loop.times, _TURNS)
        for _ in range(turns):
            before = carried
            carried = self.through(body, [before])
        if loop.times == turns:
            return carried
        left = loop.times - turns
        return jax.tree.map(lambda old, new: new + left * (new - old), before, carried)


def _is_differentiated(instruction: Instruction) -> bool:
    """Tells whether it is of the forward pass of a loss, also if a backward pass repeats it.

    The rest of a backward pass does not count: a residual may have become a part of it.
    """
    name = instruction.operation
    return "jvp(" in name and ("transpose(" not in name or "rematted_computation" in name)


def _highest(depth: _Depth) -> int:
    return max(jax.tree.leaves(depth), default=0)


def _merged(results: list[_Depth]) -> _Depth:
    """Returns the greater depth of each part of the results of several branches."""
    for result in results:
        if not isinstance(result, list):
            return _highest(results)
    merged: list[_Depth] = []
    for parts in zip(*results, strict=True):  # pyright: ignore[reportArgumentType]
        merged.append(_merged(list(parts)))
    return merged
