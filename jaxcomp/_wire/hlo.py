"""The text of a compiled program as data, in the forms that XLA of jax 0.10 to 0.12 writes.

The text is read because it is what runs: XLA merges, splits, widens and adds collectives after
everything that JAX can tell about a program.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

import numpy as np

_COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([a-z][\w-]*)\((.*)$")
_CALL = re.compile(r"(body|condition|to_apply|calls|\w+_computations?)=(?:\{([^}]*)\}|(%?[\w.-]+))")
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,<=]*)\]")
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}")
_TURNED = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"  # devices counted in a shape, its axes then in an order
_RANGE = re.compile(rf"replica_groups=\[([\d,]+)\]<={_TURNED}")
_MESH = re.compile(
    rf"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\({_TURNED}\))? \{{('[^}}]*')\}}"
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

    @property
    def arrays(self) -> list[tuple[str, int, int]]:
        """Element type, number of values and bytes of every array in the shape."""
        found: list[tuple[str, int, int]] = []
        for dtype, bits, dims in _ARRAY.findall(self.shape):
            values = math.prod(_numbers(dims.replace("<=", "")))
            found.append((dtype, values, -(-values * int(bits or 8) // 8)))  # pred is a byte
        return found


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
        sizes, joined, (dims, order) = _numbers(found[1]), [1], found.group(2, 3)
    elif found := _MESH.search(attributes):
        axes = dict(re.findall(r"'([^']*)'=(\d+)", found[1]))
        joined = [list(axes).index(name) for name in re.findall(r"'([^']*)'", found[4])]
        sizes, (dims, order) = [int(size) for size in axes.values()], found.group(2, 3)
    elif "replica_groups={}" in attributes or "replica_groups" not in attributes:
        return None
    else:
        raise ValueError(f"XLA writes replica groups in a form unknown here: {attributes[:300]}")
    shape = _numbers(dims) if dims else sizes
    devices = np.arange(math.prod(shape)).reshape(shape)
    devices = devices.transpose(_numbers(order) if order else range(len(shape))).reshape(sizes)
    last = np.moveaxis(devices, joined, range(-len(joined), 0))
    return last.reshape(-1, math.prod(sizes[i] for i in joined)).tolist()


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part.strip()]
