"""The text of a compiled program as data, in the forms that XLA of jax 0.10 to 0.12 writes.

The text is read because it is what runs: XLA merges, splits, widens and adds collectives after
everything that JAX can tell about a program.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

_COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([a-z][\w-]*)\((.*)$")
_CALL = re.compile(
    r"(body|condition|to_apply|calls|true_computation|false_computation|branch_computations"
    r"|called_computations)=(?:\{([^}]*)\}|(%?[\w.-]+))"
)
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,<=]*)\]")
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}")
_RANGE = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? "
    r"\{('[^}]*')\}"
)


class Instruction(NamedTuple):
    """One line of a computation."""

    name: str
    shape: str  # such as `f32[8,4]{1,0}`, or a tuple of such in parentheses
    opcode: str
    attributes: str  # all that follows, operands too

    @property
    def calls(self) -> list[tuple[str, str]]:
        """(attribute, computation) of what it calls: a body, the branches of a conditional."""
        return [
            (how, name.strip().lstrip("%"))
            for how, several, one in _CALL.findall(self.attributes)
            for name in (several or one).split(",")
        ]


def parse(text: str) -> dict[str, list[Instruction]]:
    """The computations of a program by their names, the entry last, from ``compiled.as_text()``.

    Raises:
      ValueError: If there are none.
    """
    computations: dict[str, list[Instruction]] = {}
    current: list[Instruction] = []
    for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
        if found := _INSTRUCTION.match(line):
            current.append(Instruction(*found.groups()))
        elif found := _COMPUTATION.match(line):
            current = computations.setdefault(found[1], [])
    if not computations:
        raise ValueError("The text is no HLO module: it has no ENTRY computation.")
    return computations


def arrays(shape: str) -> Iterator[tuple[str, int, int]]:
    """Element type, number of values and bytes of every array in a shape or a tuple of shapes."""
    for dtype, dims in _ARRAY.findall(shape):
        values, bits = math.prod(_numbers(dims.replace("<=", ""))), re.search(r"\d+", dtype)
        yield dtype, values, -(-values * (int(bits[0]) if bits else 8) // 8)  # pred is a byte


def replica_groups(attributes: str) -> list[list[int]] | None:
    """The groups of devices that one collective joins, by number; None for all of them.

    Args:
      attributes: With ``replica_groups`` as a list, ``{{0,4},{1,5}}``; as a range that is reshaped
        and turned, ``[2,2]<=[2,2]T(1,0)``; or as axes of a mesh, ``mesh['slow'=2,'fast'=4]
        {'slow'}``. Pairs of a permutation count too.

    Raises:
      ValueError: If they are in another form.
    """
    if found := _LISTED.search(attributes):
        return [_numbers(group) for group in re.findall(r"\{([\d, ]*)\}", found[1])]
    if found := _RANGE.search(attributes):
        groups, dims, turned = map(_numbers, found.groups(""))
        return _turned(dims, turned).reshape(groups).tolist()
    if found := _MESH.search(attributes):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", found[1])}
        joined = [list(sizes).index(name) for name in re.findall(r"'([^']*)'", found[4])]
        dims, turned = _numbers(found[2] or ""), _numbers(found[3] or "")
        devices = _turned(dims or list(sizes.values()), turned).reshape(*sizes.values())
        last = np.moveaxis(devices, joined, range(-len(joined), 0))
        return last.reshape(-1, math.prod(last.shape[-len(joined) :])).tolist()
    if "replica_groups={}" in attributes or "replica_groups" not in attributes:
        return None
    raise ValueError(f"XLA writes replica groups in a form unknown here: {attributes[:300]}")


def _turned(dims: list[int], order: list[int]) -> np.ndarray:
    return np.arange(math.prod(dims)).reshape(dims).transpose(order or range(len(dims)))


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part.strip()]
