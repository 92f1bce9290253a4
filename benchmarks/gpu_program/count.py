"""What a compiled GPU program does, counted: kernels, memory traffic, library calls, collectives.

Traffic is what kernels read and write in the GPU's memory, each operand of a kernel read once. A
kernel that slices reads the slice, one that updates a slice in place writes the slice. What a
collective moves is told apart, as bytes on the wire; nothing is known of what stays in a cache.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable

from benchmarks.gpu_program.hlo import Computation, Instruction, Module, arrays

# These cost nothing: names for a part of the memory.
FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "opt-barrier",
    "partition-id",
    "replica-id",
}
_COLLECTIVE = re.compile(
    r"(all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(-start)?$"
)
TRITON = "__gpu$xla.gpu.triton"  # a kernel written with Pallas, compiled into the program


@dataclasses.dataclass
class Counts:
    """Of one run of the program; in a conditional, of the branch that moves the most."""

    kernels: float = 0
    bytes_moved: float = 0
    library_calls: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    collectives: list[dict[str, object]] = dataclasses.field(default_factory=list)

    def add(self, other: Counts, times: int = 1) -> None:
        """Adds what a computation does that runs so many times."""
        self.kernels += times * other.kernels
        self.bytes_moved += times * other.bytes_moved
        for name, number in other.library_calls.items():
            self.library_calls[name] += times * number
        self.collectives += times * other.collectives


def count(module: Module, computation: Computation | None = None) -> Counts:
    """Counts of a computation with all that it calls; by default of the whole program."""
    computation = computation or module.entry
    sizes = {x.name: x.bytes for x in computation.instructions}
    counts = Counts()
    for x in computation.instructions:
        counts.add(_count_one(module, computation, x, sizes))
    return counts


def beside_collectives(module: Module) -> list[tuple[str, float]]:
    """Each asynchronous collective of the entry computation, and the kernels that run beside it.

    That is, those between its start and its done in the order in which the program is scheduled,
    a loop's as often as it turns.
    """
    scheduled = module.entry.instructions
    sizes = {x.name: x.bytes for x in scheduled}
    found = []
    for i, done in module.entry.asynchronous:
        sent = _count_one(module, module.entry, scheduled[i], sizes).collectives
        between = [_count_one(module, module.entry, x, sizes) for x in scheduled[i + 1 : done]]
        if sent:
            found.append((str(sent[0]["kind"]), sum(counts.kernels for counts in between)))
    return found


def _count_one(
    module: Module, computation: Computation, x: Instruction, sizes: dict[str, int]
) -> Counts:
    """Counts of one instruction of a computation with all that it calls."""
    counts = Counts()
    if x.opcode in FREE or x.opcode.endswith("-done"):
        return counts
    if found := _COLLECTIVE.match(x.opcode):
        counts.collectives += _collective(found[1], computation, x)
    elif x.opcode == "while":
        trips = re.search(r'known_trip_count":\{"n":"(\d+)"', x.attributes)
        body = count(module, module.computations[x.called("body")[0]])
        condition = count(module, module.computations[x.called("condition")[0]])
        body.add(condition)
        counts.add(body, int(trips[1]) if trips else 1)
    elif x.opcode == "conditional":
        names = x.called("branch_computations") or [
            *x.called("true_computation"),
            *x.called("false_computation"),
        ]
        branches = [count(module, module.computations[name]) for name in names]
        counts.add(max(branches, key=lambda branch: branch.bytes_moved))
    elif x.opcode in ("call", "async-start"):
        name = (x.called("to_apply") or x.called("calls"))[0]
        counts.add(count(module, module.computations[name]))
    else:
        counts.kernels += 1
        counts.bytes_moved += kernel_bytes(module, x, sizes)
        target = re.search(r'custom_call_target="([^"]+)"', x.attributes)
        if target and target[1] != TRITON:
            counts.library_calls[target[1]] += 1
    return counts


def kernel_bytes(module: Module, kernel: Instruction, sizes: dict[str, int]) -> int:
    """Bytes that one kernel reads and writes; `sizes` has those of its operands."""
    if kernel.opcode == "fusion":
        return _fusion_bytes(module.computations[kernel.called("calls")[0]], kernel)
    read = sum(sizes[name] for name in dict.fromkeys(kernel.operands))
    if kernel.opcode == "dynamic-update-slice":
        return 2 * sizes[kernel.operands[1]]
    if kernel.opcode in ("slice", "dynamic-slice"):
        return 2 * kernel.bytes
    if kernel.opcode == "copy-start":
        return 2 * read
    written = kernel.bytes
    if kernel.opcode == "custom-call":
        # A library's workspace is part of its result, as bytes.
        written -= sum(size for dtype, _, size in arrays(kernel.shape) if dtype == "s8")
        read -= sum(sizes[kernel.operands[i]] for i in _unread(kernel))
    return read + written


def _unread(kernel: Instruction) -> set[int]:
    """Operands that a Pallas kernel only reads in a case that never happens in good health.

    Its name says so: ``..._unread_4_9`` for the operands from 4 up to 8.
    """
    found = re.search(r"_unread_(\d+)_(\d+)", kernel.attributes)
    return set(range(int(found[1]), int(found[2]))) if found else set()


def _fusion_bytes(fused: Computation, kernel: Instruction) -> int:
    by_name = {x.name: x for x in fused.instructions}
    root = fused.root
    outputs = [by_name[name] for name in root.operands] if root.opcode == "tuple" else [root]
    needed: dict[str, int] = collections.defaultdict(int)
    read: dict[str, int] = collections.defaultdict(int)
    in_place, total = set(), 0
    for output in outputs:
        source = _behind_bitcasts(by_name, output)
        target = by_name[source.operands[0]] if source.opcode == "dynamic-update-slice" else None
        if target is not None and _behind_bitcasts(by_name, target).opcode == "parameter":
            in_place.add(source.name)
            total += by_name[source.operands[1]].bytes
        else:
            total += output.bytes
        needed[output.name] = output.bytes
    for x in reversed(fused.instructions):
        wanted = min(needed[x.name], x.bytes)
        if x.opcode == "parameter":
            # One operand may come in twice, and is read once.
            name = kernel.operands[int(x.argument)]
            read[name] = min(read[name] + wanted, x.bytes)
        elif x.opcode != "tuple" and wanted:
            for i, name in enumerate(x.operands):
                needed[name] += _needed(x, i, by_name[name].bytes, wanted, x.name in in_place)
    return total + sum(read.values())


def _needed(x: Instruction, operand: int, whole: int, wanted: int, in_place: bool) -> int:
    """Bytes of an operand behind so many wanted bytes of a result."""
    if x.opcode == "dynamic-update-slice" and operand == 0:
        return 0 if in_place else wanted
    first_only: dict[str, Callable[[], int]] = {
        "slice": lambda: wanted,
        "dynamic-slice": lambda: wanted,
        "gather": lambda: wanted,
    }
    if x.opcode in first_only and operand == 0:
        return first_only[x.opcode]()
    if x.opcode in ("reduce", "dot", "broadcast", "concatenate", "pad", "reverse", "custom-call"):
        return whole
    # Elementwise, bitcasts, transposes: as large a part of the operand as of the result.
    return whole * wanted // x.bytes if x.bytes else whole


def _behind_bitcasts(by_name: dict[str, Instruction], x: Instruction) -> Instruction:
    while x.opcode == "bitcast":
        x = by_name[x.operands[0]]
    return x


def _collective(kind: str, computation: Computation, x: Instruction) -> list[dict[str, object]]:
    """Dtype and bytes of what this device puts in, one entry for every dtype."""
    by_name = {y.name: y for y in computation.instructions}
    found: dict[str, int] = collections.defaultdict(int)
    for name in x.operands:
        for dtype, _, size in arrays(by_name[name].shape):
            found[dtype] += size
    return [{"kind": kind, "dtype": dtype, "bytes": size} for dtype, size in found.items()]
