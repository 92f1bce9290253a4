"""Reads the kernels of a program that XLA optimised for a GPU: their bytes and operations."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

# Names for a part of the memory, which cost nothing.
_FREE = (
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier",
    "partition-id", "replica-id",
)  # fmt: skip
_COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute")
_LINE = re.compile(r"\s+(?:ROOT )?%(?P<name>\S+) = (?P<type>\(.*?\)|\S+) (?P<opcode>[a-z0-9-]+)\(")
_ARRAY = re.compile(r"[a-z]+(\d*)\w*\[([\d,]*)\]")
_COMPUTATION = re.compile(r"(ENTRY )?%(\S+) \(.*\{$")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    type: str
    operands: list[str]
    line: str  # without its metadata

    @property
    def bytes(self) -> int:
        """Counts the bytes of a shape such as ``f32[2,3]{1,0}``, or of a tuple of shapes."""
        total = 0
        for bits, sizes in _ARRAY.findall(self.type):
            total += int(bits or 8) // 8 * math.prod(_numbers(sizes))
        return total

    @property
    def shape(self) -> list[int]:
        """Reads the sizes of the first array of the result."""
        match = _ARRAY.search(self.type)
        return _numbers(match[2]) if match else []

    def attribute(self, name: str) -> str:
        """Returns the text after `name=`; an empty string if there is none."""
        match = re.search(rf"\b{name}=%?(\{{[^}}]*\}}|[^,\s]+)", self.line)
        return match[1] if match else ""


Lines = dict[str, Instruction]  # of a computation, by name
Program = dict[str, Lines]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One launch of a GPU, or one call of a library, with a few launches."""

    name: str
    kind: str  # elementwise, copy, reduction, product, cholesky, triangular solve or collective
    bytes: int  # read and written
    plain_flops: int = 0  # of products in float32
    split_flops: int = 0  # of products of parts in 16 bits or TensorFloat-32, all parts together
    rank: int = 0  # of a factorisation or a solve: rows of one matrix
    operands: int = 0  # arrays that it reads
    strided: int = 0  # values of factors that neighbouring threads read `rank` apart
    in_branch: bool = False  # of a conditional's branch that ordinary steps do not take


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def kernels(text: str) -> list[Kernel]:
    """Lists the kernels of an optimised program in the order in which they are launched.

    A loop's body is listed as often as XLA knows that it runs. Both branches of a conditional are
    listed; the kernels of the longer branch are marked as `in_branch`.
    """
    program: Program = {}
    entry = current = ""
    for line in text.splitlines():
        header = _COMPUTATION.match(line)
        match = _LINE.match(line)
        if header:
            current = header[2]
            program[current] = {}
            if header[1]:
                entry = current
        elif match and current:
            name, type_, opcode = match.groups()
            if opcode != "while":  # whose number of turns is in its configuration
                line = re.sub(r", (metadata|backend_config|frontend_attributes)=.*", "", line)
            operands = re.findall(r"%([\w.#-]+)", line[match.end() :].split(")")[0])
            program[current][name] = Instruction(name, opcode, type_, operands, line)
    return list(_kernels_of(program, entry))


def _kernels_of(program: Program, computation: str) -> Iterator[Kernel]:
    lines = program[computation]
    for x in lines.values():
        if x.opcode in _FREE or x.opcode.endswith("-done"):
            continue
        if x.opcode == "conditional":
            names = re.findall(r"[\w.-]+", x.attribute("branch_computations"))
            names = names or [x.attribute(f"{case}_computation") for case in ("true", "false")]
            *others, longest = sorted((list(_kernels_of(program, name)) for name in names), key=len)
            for branch in others:
                yield from branch
            for kernel in longest:
                yield dataclasses.replace(kernel, in_branch=True)
        elif x.opcode == "while":
            count = re.search(r'known_trip_count"?[:=] ?{"n":"(\d+)"', x.line)
            for _ in range(int(count[1]) if count else 1):
                yield from _kernels_of(program, x.attribute("condition"))
                yield from _kernels_of(program, x.attribute("body"))
        elif x.opcode in ("call", "async-start"):
            yield from _kernels_of(program, x.attribute("to_apply") or x.attribute("calls"))
        else:
            yield _kernel(x, lines, program.get(x.attribute("calls"), {}))


def _kernel(x: Instruction, lines: Lines, body: Lines) -> Kernel:
    """Reads one kernel.

    Args:
      x: The kernel's instruction.
      lines: The lines of the computation with the instruction.
      body: The lines of the computation that it fuses.
    """
    operands = [lines[name] for name in x.operands if name in lines]
    moved = x.bytes + _read_by(operands, body)
    target = x.attribute("custom_call_target")
    if x.opcode.removesuffix("-start") in _COLLECTIVES:
        return Kernel(x.name, "collective", moved)
    if "potrf" in target or "triangularSolve" in target:
        kind = "cholesky" if "potrf" in target else "triangular solve"
        return Kernel(x.name, kind, moved, rank=x.shape[-1])
    if "matmul" in target or "gemm" in target:
        sizes = math.prod(math.prod(y.shape) for y in (x, *operands[:2]))
        # The product of the three sizes is (batch * m * n * k)^2 * batch.
        flops = 2 * math.isqrt(sizes // max(1, math.prod(x.shape[:-2])))
        return Kernel(x.name, "product", x.bytes + sum(y.bytes for y in operands), flops)
    opcodes = {line.opcode for line in (*body.values(), x)}
    if "dot" in opcodes:
        plain = split = 0
        for line in (*body.values(), x):
            if line.opcode == "dot":
                # The products of parts in 16 bits that one of float32 stands for.
                parts = re.search(r"algorithm=\w*_x(\d)", line.line)
                flops = _flops(line, lines | body)
                plain += 0 if parts else flops
                split += flops * int(parts[1]) if parts else 0
        return Kernel(x.name, "product", moved, plain, split)
    if x.attribute("kind") == "kInput" or "reduce" in opcodes - {x.opcode}:
        return Kernel(x.name, "reduction", moved, operands=len(operands))
    if x.opcode.startswith("copy"):
        return Kernel(x.name, "copy", moved)
    strided = _strided_reads(body)
    return Kernel(x.name, "elementwise", moved, operands=len(operands), strided=strided)


def _read_by(operands: list[Instruction], body: Lines) -> int:
    """Counts the bytes that a kernel reads; of a sliced operand it counts only the slices."""
    total = sum(operand.bytes for operand in operands)
    for line in body.values():
        if line.opcode == "parameter":
            (number,) = _numbers(line.line[line.line.index("parameter(") :])[:1]
            if number < len(operands):
                total -= max(0, operands[number].bytes - _used(line, body))
    return total


def _used(line: Instruction, body: Lines) -> int:
    """Counts the bytes of a value that a fused computation reads."""
    total = 0
    for user in body.values():
        if line.name in user.operands:
            if user.opcode in ("slice", "dynamic-slice", "gather"):
                total += user.bytes
            elif user.opcode == "bitcast":
                total += _used(user, body)
            else:
                return line.bytes
    return total


def _strided_reads(body: Lines) -> int:
    """Counts reads of factors ``(n, r)`` where a column is broadcast along the last axis.

    Each value of the result reads one value, and its neighbours' values are `r` apart in memory.
    """
    columns = {}
    for x in body.values():
        if x.opcode == "broadcast" and _numbers(x.attribute("dimensions")) == [len(x.shape) - 1]:
            column = _source(body.get(x.operands[0]), body, {"bitcast": 0})
            if column is not None and column.opcode == "slice":
                factor = body.get(column.operands[0])
                if factor is not None and factor.shape[-1] > column.shape[-1]:
                    source = _source(factor, body, {"bitcast": 0, "select": 1})
                    columns[source.name, column.attribute("slice")] = math.prod(x.shape)
    return sum(columns.values())


def _source(line: Any, body: Lines, through: dict[str, int]) -> Any:
    """Returns the source of a value, through some opcodes and one operand of each."""
    following = line
    while following is not None and following.opcode in through:
        line = following
        following = body.get(line.operands[through[line.opcode]])
    return following or line


def _flops(dot: Instruction, lines: Lines) -> int:
    """Counts the operations of a product."""
    contracted = 1
    if dot.operands[0] in lines:
        shape = lines[dot.operands[0]].shape
        for axis in _numbers(dot.attribute("lhs_contracting_dims")):
            contracted *= shape[axis]
    return 2 * contracted * math.prod(dot.shape)
