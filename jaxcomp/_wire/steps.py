"""Counts the training steps in one call of a program from its data flow.

A step differentiates a loss and sends the gradients. The next step differentiates the loss at
parameters that depend on the sent gradients. So on a path through the program, differentiated
instructions and collectives of the reducer alternate, and the longest such path has one pair for
each step: in a loop, unrolled, or one after the other. A reducer that runs on every micro-batch, or
twice in a row, sends several times without a new loss in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import jax

from jaxcomp._wire.collectives import Collective
from jaxcomp._wire.program import Instruction, Program

# Half-steps on the longest path to a value: even before the gradients are sent, odd after. The
# depth of a tuple is the list of its elements' depths.
_Depth: TypeAlias = "int | list[_Depth]"

# After this number of iterations of a loop, each further iteration adds as much as the last one.
_TURNS = 3
# Instructions whose one computation gets their operands; and those whose result is their operand.
_RUN_ONCE = ("fusion", "call", "async-start")
_UNCHANGED = ("opt-barrier", "copy", "copy-start", "copy-done", "async-done")


def count_steps(program: Program, listed: Sequence[Collective], sent: Collective) -> int:
    """Counts the training steps of a program, at least 1.

    Gradients that are written by hand cannot be recognised. So in a program without a
    differentiated loss every iteration of a loop counts as a step.

    Args:
      program: The program.
      listed: Its collectives.
      sent: The largest collective of the reducer; metrics send no array of its size.
    """
    # The reducer's collectives are recognised by their kind and by an array of a certain type and
    # size, which the collectives of metrics and of the loss do not have.
    largest = max(sent.arrays, key=lambda array: array[1])

    def through(computation: int, arguments: list[_Depth]) -> _Depth:
        """Returns the depth of a computation's result."""
        body = program.computations[computation]
        depths: dict[int, _Depth] = {}
        for name, instruction in body.instructions.items():
            operands = [depths[operand] for operand in instruction.operands]
            if instruction.opcode == "parameter":
                operands = arguments[instruction.position : instruction.position + 1]
            depths[name] = behind(instruction, operands)
        return depths[body.root]

    def behind(instruction: Instruction, operands: list[_Depth]) -> _Depth:
        """Returns the depth of an instruction's result; a parameter's value is its only operand."""
        opcode = instruction.opcode
        if opcode == "tuple":
            return operands
        if opcode == "while":
            return behind_loop(instruction, operands[0])
        if opcode == "conditional":
            results: list[_Depth] = []
            for branch, operand in zip(instruction.called, operands[1:], strict=True):
                results.append(through(branch, [operand]))
            if len(set(map(jax.tree.structure, results))) > 1:  # some do not know their parts
                return _highest(results)
            return jax.tree.map(lambda *depths: max(depths), *results)
        if opcode in _RUN_ONCE and instruction.called:
            return through(instruction.called[0], operands)
        if len(operands) == 1:
            (whole,) = operands
            if opcode == "get-tuple-element" and isinstance(whole, list):
                return whole[instruction.position]
            if opcode == "parameter" or opcode in _UNCHANGED:
                return whole
        depth = _highest(operands)
        arrays = [array[:2] for array in instruction.arrays]
        # To the next odd number: twice in a row without a loss in between counts once.
        if instruction.kind == sent.kind and largest in arrays:
            return depth + 1 - depth % 2
        if _is_differentiated(instruction):  # to the next even number
            return depth + depth % 2
        return depth

    def behind_loop(loop: Instruction, carried: _Depth) -> _Depth:
        """Returns the depths of a loop's carried values after its last iteration."""
        body = loop.called[0]
        before = carried
        turns = min(loop.times, _TURNS)
        for _ in range(turns):
            before = carried
            carried = through(body, [before])
        if loop.times == turns:
            return carried
        left = loop.times - turns
        return jax.tree.map(lambda old, new: new + left * (new - old), before, carried)

    for computation in program.computations.values():
        if any(map(_is_differentiated, computation.instructions.values())):
            return (_highest(through(program.entry, [])) + 1) // 2 or 1
    turns = 1  # of the longest loop that has the reducer's collective
    for other in listed:
        if other.kind == sent.kind and largest in other.arrays:
            turns = max(turns, other.times)
    return turns


def _is_differentiated(instruction: Instruction) -> bool:
    """Returns whether an instruction belongs to a loss's forward pass, or to its rematerialisation.

    The rest of a backward pass does not count, because XLA may have fused a residual into it.
    """
    name = instruction.operation
    return "jvp(" in name and ("transpose(" not in name or "rematted_computation" in name)


def _highest(depth: _Depth) -> int:
    return max(jax.tree.leaves(depth), default=0)
