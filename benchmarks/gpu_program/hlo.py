"""The text of a compiled XLA program as data: computations, and instructions with operands."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

_BITS = {"pred": 8, "bf16": 16, "c64": 64, "c128": 128}
_ARRAY = re.compile(r"([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%([\w.-]+) = (.*)")
_HEADER = re.compile(r"(ENTRY )?%([\w.-]+) \(.*\) -> .* \{")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    shape: str  # such as `f32[8,4]{1,0}`, or a tuple of such in parentheses
    opcode: str
    operands: tuple[str, ...]  # names
    attributes: str  # all that follows the operands
    argument: str  # what stands between the parentheses: for a parameter, its number
    root: bool

    @property
    def bytes(self) -> int:
        """Bytes of the result; all of them, for a tuple."""
        return sum(size for _, _, size in arrays(self.shape))

    def called(self, attribute: str) -> list[str]:
        """Names of the computations under an attribute: one, or several in braces."""
        found = re.search(rf"\b{attribute}=(\{{[^}}]*\}}|%[\w.-]+)", self.attributes)
        return re.findall(r"%([\w.-]+)", found[1]) if found else []


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions in the order in which they run, if the program is scheduled."""

    name: str
    instructions: tuple[Instruction, ...]

    @property
    def root(self) -> Instruction:
        """The one whose result is the computation's."""
        return next(x for x in self.instructions if x.root)

    @property
    def asynchronous(self) -> Iterator[tuple[int, int]]:
        """Places of what starts something and of the done that waits for it."""
        for i, start in enumerate(self.instructions):
            if start.opcode.endswith("-start"):
                done = (j for j, x in enumerate(self.instructions) if start.name in x.operands)
                yield i, next(done)


@dataclasses.dataclass(frozen=True)
class Module:
    """All computations of a program by their names."""

    computations: dict[str, Computation]
    entry: Computation


def arrays(shape: str) -> Iterator[tuple[str, int, int]]:
    """Dtype, number of values and bytes of every array in a shape or a tuple of shapes."""
    for dtype, dims in _ARRAY.findall(shape):
        digits = re.search(r"\d+", dtype)
        bits = _BITS.get(dtype) or (int(digits[0]) if digits else 0)
        values = math.prod(int(n) for n in dims.split(",") if n)
        yield dtype, values, values * bits // 8


def parse(text: str) -> Module:
    """A program from what `compiled.as_text()` gives.

    Raises:
      ValueError: If the text holds no entry computation.
    """
    computations: dict[str, Computation] = {}
    entry, header, lines = "", None, []
    for line in text.splitlines():
        if header is None:
            header = _HEADER.match(line)
        elif line.startswith("}"):
            computations[header[2]] = Computation(header[2], tuple(lines))
            entry = header[2] if header[1] else entry
            header, lines = None, []
        elif found := _INSTRUCTION.match(line):
            lines.append(_instruction(found[2], found[3], bool(found[1])))
    if not entry:
        raise ValueError("The text is no HLO module: it has no ENTRY computation.")
    return Module(computations, computations[entry])


def _instruction(name: str, rest: str, root: bool) -> Instruction:
    shape, rest = _until_closed(rest) if rest.startswith("(") else rest.split(" ", 1)
    opcode, rest = rest.strip().split("(", 1)
    inside, attributes = _until_closed("(" + rest)
    operands = tuple(re.findall(r"%([\w.-]+)", inside))
    return Instruction(name, shape, opcode, operands, attributes, inside[1:-1], root)


def _until_closed(text: str) -> tuple[str, str]:
    """`text`, which begins with a parenthesis, cut behind the one that closes it."""
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return text[: i + 1], text[i + 1 :]
    raise ValueError(f"A parenthesis is not closed: {text[:80]}")
