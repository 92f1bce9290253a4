"""The kernels of a program that XLA optimised for a GPU: what each reads, writes and multiplies."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

# Names for a part of the memory, which cost nothing.
_FREE = frozenset(
    (
        "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all",
        "opt-barrier", "partition-id", "replica-id",
    )
)  # fmt: skip
_BYTES = {
    "pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4,
    "f32": 4, "s64": 8, "u64": 8, "f64": 8,
}  # fmt: skip
_COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute")
_LINE = re.compile(r"\s+(?:ROOT )?%(?P<name>\S+) = (?P<type>\(.*?\)|\S+) (?P<opcode>[a-z0-9-]+)\(")
_ARRAY = re.compile(r"([a-z]+\d*)\[([\d,]*)\]")
_HEADER = re.compile(r"(?:ENTRY )?%(\S+) \(.*\{$")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    type: str
    operands: tuple[str, ...]
    line: str  # without its metadata

    @property
    def bytes(self) -> int:
        """Bytes of the result."""
        return bytes_of(self.type)

    def attribute(self, name: str) -> str:
        """Returns what stands behind `name=`; an empty string where it does not."""
        match = re.search(rf"\b{name}=%?(\{{[^}}]*\}}|[^,\s]+)", self.line)
        return match[1] if match else ""

    def axes(self, name: str) -> list[int]:
        """Returns the numbers of an attribute such as ``lhs_contracting_dims={1}``."""
        match = re.search(rf"\b{name}={{([\d,]*)}}", self.line)
        return [int(n) for n in match[1].split(",") if n] if match else []


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What a GPU launches once, or a library with a few launches."""

    name: str
    kind: str  # elementwise, copy, reduction, product, cholesky, triangular solve or collective
    bytes: int  # read and written
    plain_flops: int = 0  # of products in float32
    split_flops: int = 0  # of products of parts in 16 bits or TensorFloat-32, all parts together
    rank: int = 0  # of a factorisation or a solve: rows of one matrix
    operands: int = 0  # arrays that it reads
    strided: int = 0  # values of factors that neighbouring threads read `rank` apart
    in_branch: bool = False  # of a conditional's branch that ordinary steps do not take


Program = dict[str, list[Instruction]]


def bytes_of(type_: str) -> int:
    """Counts the bytes of ``f32[2,3]{1,0}``, or of a tuple of such."""
    total = 0
    for element, sizes in _ARRAY.findall(type_):
        total += _BYTES.get(element, 4) * math.prod(_sizes(sizes))
    return total


def _sizes(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n]


def shape_of(type_: str) -> list[int]:
    """Reads the sizes of the first array in a type."""
    match = _ARRAY.search(type_)
    return _sizes(match[2]) if match else []


def read(text: str) -> tuple[Program, str]:
    """Reads the text of an optimised program.

    Returns:
      Its computations by name, and the name of the one that is run.
    """
    program: Program = {}
    entry = current = ""
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header:
            current = header[1]
            program[current] = []
            if line.startswith("ENTRY"):
                entry = current
            continue
        match = _LINE.match(line)
        if match and current:
            if match["opcode"] != "while":  # whose number of turns is in its configuration
                line = re.sub(r", (metadata|backend_config|frontend_attributes)=.*", "", line)
            arguments = line[match.end() :].split(")")[0]
            operands = tuple(re.findall(r"%([\w.#-]+)", arguments))
            program[current].append(
                Instruction(match["name"], match["opcode"], match["type"], operands, line)
            )
    return program, entry


def kernels(text: str) -> list[Kernel]:
    """Lists the kernels of an optimised program in the order in which they are launched.

    A loop's body is listed as often as XLA knows it to run. Of a conditional both branches are
    listed; the kernels of the one with more of them are marked as `in_branch`.
    """
    program, entry = read(text)
    return list(_kernels_of(program, entry))


def _kernels_of(program: Program, computation: str) -> Iterator[Kernel]:
    results = {x.name: x for x in program[computation]}
    for x in program[computation]:
        if x.opcode in _FREE or x.opcode.endswith("-done"):
            continue
        if x.opcode == "conditional":
            yield from _branches(program, x)
        elif x.opcode == "while":
            yield from _loop(program, x)
        elif x.opcode in ("call", "async-start"):
            yield from _kernels_of(program, x.attribute("to_apply") or x.attribute("calls"))
        else:
            yield _kernel(program, x, results)


def _branches(program: Program, x: Instruction) -> Iterator[Kernel]:
    names = [x.attribute("true_computation"), x.attribute("false_computation")]
    listed = re.search(r"branch_computations={([^}]*)}", x.line)
    if listed:
        names = re.findall(r"%([\w.-]+)", listed[1])
    branches = sorted((list(_kernels_of(program, name)) for name in names), key=len)
    for branch in branches[:-1]:
        yield from branch
    for kernel in branches[-1]:
        yield dataclasses.replace(kernel, in_branch=True)


def _loop(program: Program, x: Instruction) -> Iterator[Kernel]:
    count = re.search(r'known_trip_count"?[:=] ?{"n":"(\d+)"', x.line)
    for _ in range(int(count[1]) if count else 1):
        yield from _kernels_of(program, x.attribute("condition"))
        yield from _kernels_of(program, x.attribute("body"))


def _kernel(program: Program, x: Instruction, results: dict[str, Instruction]) -> Kernel:
    operands = [results[name] for name in x.operands if name in results]
    body = program.get(x.attribute("calls"), [])
    moved = x.bytes + _read_by(operands, body)
    target = x.attribute("custom_call_target").strip('"')
    if x.opcode.removesuffix("-start") in _COLLECTIVES:
        return Kernel(x.name, "collective", moved)
    if "potrf" in target or "triangularSolve" in target:
        kind = "cholesky" if "potrf" in target else "triangular solve"
        return Kernel(x.name, kind, moved, rank=shape_of(x.type)[-1])
    if "matmul" in target or "gemm" in target:
        flops = _flops_of_library_call(x, operands)
        return Kernel(x.name, "product", x.bytes + sum(o.bytes for o in operands), flops)
    dots = [line for line in [*body, x] if line.opcode == "dot"]
    if dots:
        plain = split = 0
        for dot in dots:
            flops, parts = _flops(dot, {line.name: line for line in body} | results)
            plain += 0 if parts else flops
            split += flops * parts
        return Kernel(x.name, "product", moved, plain, split)
    if x.attribute("kind") == "kInput" or any(line.opcode == "reduce" for line in body):
        return Kernel(x.name, "reduction", moved, operands=len(operands))
    if x.opcode.startswith("copy"):
        return Kernel(x.name, "copy", moved)
    strided = _strided_reads(body)
    return Kernel(x.name, "elementwise", moved, operands=len(operands), strided=strided)


def _read_by(operands: list[Instruction], body: list[Instruction]) -> int:
    """Counts the bytes that a kernel reads: of an operand that it only slices, the slices."""
    parameters = {}
    for line in body:
        if line.opcode == "parameter":
            number = re.search(r"parameter\((\d+)\)", line.line)
            parameters[int(number[1]) if number else 0] = line
    total = 0
    for number, operand in enumerate(operands):
        line = parameters.get(number)
        total += operand.bytes if line is None else min(operand.bytes, _used(line, body))
    return total


def _strided_reads(body: list[Instruction]) -> int:
    """Counts the values of factors ``(n, r)`` of which a column is spread along the last axis.

    Each value of the result needs one, and those of its neighbours are `r` apart in memory.
    """
    lines = {x.name: x for x in body}
    columns = {}
    for x in body:
        shape = shape_of(x.type)
        if x.opcode != "broadcast" or x.axes("dimensions") != [len(shape) - 1]:
            continue
        source = lines.get(x.operands[0])
        while source is not None and source.opcode == "bitcast":
            source = lines.get(source.operands[0])
        if source is not None and source.opcode == "slice":
            factor = lines.get(source.operands[0])
            if factor is not None and shape_of(factor.type)[-1] > shape_of(source.type)[-1]:
                columns[_root(factor, lines), source.attribute("slice")] = math.prod(shape)
    return sum(columns.values())


def _root(line: Instruction, lines: dict[str, Instruction]) -> str:
    """Returns the name of the parameter that a value is taken from."""
    while line.opcode in ("bitcast", "select"):
        following = lines.get(line.operands[1 if line.opcode == "select" else 0])
        if following is None:
            break
        line = following
    return line.name


def _used(line: Instruction, body: list[Instruction]) -> int:
    """Counts the bytes of a value that what follows in a fused computation reads."""
    users = [x for x in body if line.name in x.operands]
    total = 0
    for user in users:
        if user.opcode in ("slice", "dynamic-slice", "gather"):
            total += user.bytes
        elif user.opcode == "bitcast":
            total += _used(user, body)
        else:
            return line.bytes
    return total


def _flops(dot: Instruction, results: dict[str, Instruction]) -> tuple[int, int]:
    """Counts the operations of a product, and the products of parts that it stands for."""
    contracted = 1
    if dot.operands[0] in results:
        shape = shape_of(results[dot.operands[0]].type)
        for axis in dot.axes("lhs_contracting_dims"):
            contracted *= shape[axis]
    flops = 2 * contracted * math.prod(shape_of(dot.type))
    parts = re.search(r"algorithm=\w*_x(\d)", dot.line)
    return flops, int(parts[1]) if parts else 0


def _flops_of_library_call(x: Instruction, operands: list[Instruction]) -> int:
    first, second = (math.prod(shape_of(operand.type)) for operand in operands[:2])
    result = math.prod(shape_of(x.type))
    # The product of the three sizes is (batch * m * n * k)^2 * batch.
    batch = math.prod(shape_of(x.type)[:-2])
    return 2 * math.isqrt(first * second * result // max(batch, 1))
