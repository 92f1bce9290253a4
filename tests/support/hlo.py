"""The collectives of a compiled program, as jaxcomp.wire reads them."""

from __future__ import annotations

import math
from typing import Any

import jax
from xla import users_program

from jaxcomp._wire.hlo import Instruction, instructions

BYTES = {"f32": 4, "u32": 4, "f16": 2, "bf16": 2, "s8": 1, "u8": 1}
Sent = tuple[str, str, int]


def text(function: Any, *arguments: Any) -> str:
    """The program that a user gets of a function, which may be jitted already."""
    jitted = function if hasattr(function, "lower") else jax.jit(function)
    return users_program(jitted.lower(*arguments)).as_text()


def collectives(compiled: str) -> list[Sent]:
    """(operation, element type, number of values) of every result of every collective."""
    return [sent for found in instructions(compiled) for sent in results(found)]


def results(found: Instruction) -> list[Sent]:
    return [(found.kind, dtype, math.prod(shape)) for dtype, shape in found.arrays]


def unconditional(compiled: str) -> list[Sent]:
    """Of the collectives that run in every step: those that no conditional chooses."""
    return [x for found in instructions(compiled) if not found.branch for x in results(found)]


def once(compiled: str) -> list[Sent]:
    """Of the collectives that stand in no loop."""
    return [x for found in instructions(compiled) if not found.in_loop for x in results(found)]


def by_branch(compiled: str) -> dict[tuple[str, ...], list[Sent]]:
    """The collectives of each branch of the conditionals."""
    branches: dict[tuple[str, ...], list[Sent]] = {}
    for found in instructions(compiled):
        branches.setdefault(found.branch, []).extend(results(found))
    return branches


def sent_bytes(found: list[Sent]) -> int:
    return sum(BYTES[dtype] * values for _, dtype, values in found)
