"""Reads the instructions of a compiled program from XLA's protocol-buffer message.

jaxlib lists a program's instructions, but not the groups of devices of a collective. HLO text
writes the groups in several ways, which change between versions. The message writes them as
numbered fields, and a field number keeps its meaning. The field numbers below are those of XLA's
``hlo.proto``.
"""

from __future__ import annotations

import collections
import json
import math
import re
from typing import Any, NamedTuple

import numpy as np

# XLA's collectives, without the -start and -done of asynchronous ones.
KINDS = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")

# XLA's element types, at the positions of their numbers. The first number in a name counts bits.
_NAMES = (
    "- pred s8 s16 s32 s64 u8 u16 u32 u64 f16 f32 f64 tuple opaque c64 bf16 token c128 f8e5m2 "
    "f8e4m3fn s4 u4 f8e4m3b11fnuz f8e5m2fnuz f8e4m3fnuz s2 u2 f8e4m3 f8e3m4 s1 u1 f4e2m1fn "
    "f8e8m0fnu"
)
_ELEMENTS = _NAMES.split(" ")
# The bytes of a field of fixed length, by wire type.
_FIXED_BYTES = {1: 8, 5: 4}


class ArrayType(NamedTuple):
    """Describes the type of one array in a program."""

    element: str  # XLA's name, such as "f32"
    values: int
    bytes: int


class Instruction(NamedTuple):
    """Describes one instruction of a computation."""

    opcode: str
    arrays: tuple[ArrayType, ...]  # its results
    operands: tuple[int, ...]  # ids of the instructions that compute its inputs
    called: tuple[int, ...]  # ids of its computations: a loop's body and condition, branches
    position: int  # get-tuple-element: index in the tuple; parameter: its number
    operation: str  # JAX's name of the operation, with its enclosing functions
    times: int  # how often a loop's body runs, if XLA knows it; else 1
    groups: np.ndarray | None  # collective: device numbers, one row for each group

    @property
    def kind(self) -> str | None:
        """Returns the kind of collective that this instruction runs or starts, or None."""
        kind = self.opcode.removesuffix("-start")
        if kind not in KINDS:
            return None
        return kind


class Computation(NamedTuple):
    """Lists instructions, each after the instructions that compute its inputs."""

    root: int  # id of the instruction that returns the computation's result
    instructions: dict[int, Instruction]  # by id


class Program(NamedTuple):
    """Holds the computations of a program, by id."""

    entry: int
    computations: dict[int, Computation]


def read_program(compiled: Any) -> Program:
    """Reads the instructions of a compiled step.

    Args:
      compiled: ``jax.jit(step).lower(...).compile()``.

    Raises:
      ValueError: If it is not a compiled program.
    """
    executable: Any = None
    if hasattr(compiled, "runtime_executable"):
        executable = compiled.runtime_executable()
    if not hasattr(executable, "hlo_modules"):
        raise ValueError(
            f"`compiled` must be a compiled program, got {type(compiled).__name__}. Pass "
            "jax.jit(step).lower(...).compile()."
        )
    (module,) = executable.hlo_modules()
    return read_message(module.as_serialized_hlo_module_proto())


class _Message:
    """Holds a decoded protocol-buffer message: the values of each field, by field number."""

    def __init__(self, encoded: memoryview):
        """Decodes integers; keeps texts and nested messages as bytes."""
        self._values: dict[int, list[Any]] = collections.defaultdict(list)
        position = 0
        while position < len(encoded):
            key, position = _varint(encoded, position)
            kind = key & 7  # wire type: 0 is an integer, 2 a length and bytes, 1 and 5 fixed
            value: Any = _FIXED_BYTES.get(kind)
            if value is None:
                value, position = _varint(encoded, position)
            if kind != 0:  # then `value` is the length in bytes
                end = position + value
                value = encoded[position:end]
                position = end
            self._values[key >> 3].append(value)

    def numbers(self, field: int) -> list[int]:
        """Returns the integers of a field, packed or not."""
        numbers = []
        for value in self._values[field]:
            if isinstance(value, int):
                numbers.append(value)
                continue
            position = 0
            while position < len(value):
                number, position = _varint(value, position)
                numbers.append(number)
        return numbers

    def number(self, field: int) -> int:
        """Returns the integer of a field; 0 if the message has no such field."""
        # A field occurs at most once, and an integer of 0 is not written at all.
        return sum(self.numbers(field))

    def text(self, field: int) -> str:
        """Returns the text of a field; an empty text if the message has no such field."""
        return b"".join(self._values[field]).decode()

    def messages(self, field: int) -> list[_Message]:
        """Returns the nested messages of a field."""
        return list(map(_Message, self._values[field]))


def _varint(encoded: memoryview, position: int) -> tuple[int, int]:
    """Reads a base-128 varint; returns its value and the position after it."""
    value = shift = 0
    while True:
        piece = encoded[position]
        position += 1
        value |= (piece & 127) << shift
        shift += 7
        if piece < 128:
            return value, position


def read_message(message: bytes) -> Program:
    """Reads a program from a serialized ``HloModuleProto``."""
    module = _Message(memoryview(message))
    computations = {}
    for computation in module.messages(3):
        instructions = {}
        for instruction in computation.messages(2):
            identity = instruction.number(35)
            instructions[identity] = _instruction(instruction)
        identity = computation.number(5)
        root = computation.number(6)
        computations[identity] = Computation(root, instructions)
    entry = module.number(6)
    return Program(entry, computations)


def _instruction(message: _Message) -> Instruction:
    """Reads one ``HloInstructionProto``."""
    opcode = message.text(2)
    called = message.numbers(38)
    if opcode.endswith(("-update", "-done")):
        called = []  # these would name again the computations of the -start
    times = 1
    backend_config = message.text(43)
    # Other backends may write another format there, so it is read only if it looks like JSON.
    if opcode == "while" and backend_config.startswith("{"):
        times = int(json.loads(backend_config).get("known_trip_count", {}).get("n", 1))
    groups = None
    if opcode.removesuffix("-start") in KINDS:
        groups = _device_groups(message)
    return Instruction(
        opcode,
        arrays=_arrays(message.messages(3)),
        operands=tuple(message.numbers(36)),
        called=tuple(called),
        # A tuple's index and a parameter's number are different fields; an instruction has one.
        position=message.number(13) or message.number(9),
        operation="".join(metadata.text(2) for metadata in message.messages(7)),  # at most one
        times=times,
        groups=groups,
    )


def _arrays(shapes: list[_Message]) -> tuple[ArrayType, ...]:
    """Lists the arrays in XLA shapes; a tuple's arrays follow one another."""
    arrays: list[ArrayType] = []
    for shape in shapes:
        number = shape.number(2)  # of the element type
        if number >= len(_ELEMENTS):
            raise ValueError(
                f"XLA's element type {number} is unknown, so its bytes cannot be counted. Use an "
                "older jaxlib, or a newer jaxcomp."
            )
        element = _ELEMENTS[number]
        if element in ("tuple", "opaque", "token"):
            arrays += _arrays(shape.messages(4))
            continue
        size = 8  # bits of a `pred`
        bits = re.search(r"\d+", element)
        if bits:
            size = int(bits[0])
        values = math.prod(shape.numbers(3))
        arrays.append(ArrayType(element, values, bytes=math.ceil(values * size / 8)))
    return tuple(arrays)


def _device_groups(instruction: _Message) -> np.ndarray | None:
    """Returns a collective's device numbers, a row for each group; None if it joins all devices.

    Raises:
      ValueError: If the groups are in an unknown form.
    """
    # Newer releases of XLA have fields for regular groups: counted and transposed, or along the
    # axes of a mesh. Others list pairs (permutations) or every group.
    for counted in instruction.messages(92):
        return _in_order(counted, 3).reshape(counted.number(1), counted.number(2))
    for along in instruction.messages(93):
        return _groups_along_axes(along)
    groups: list[Any] = []
    for pair in instruction.messages(52):
        groups.append((pair.number(1), pair.number(2)))
    device_lists = instruction.messages(87)
    for device_list in device_lists:
        for group in device_list.messages(1):
            groups.append(group.numbers(1))
    if groups:
        return np.array(groups)
    if device_lists:
        return None
    raise ValueError(
        "XLA lists the devices of a collective in an unknown form. Use an older jaxlib, or a newer "
        "jaxcomp."
    )


def _groups_along_axes(along: _Message) -> np.ndarray:
    """Returns the groups of devices along mesh axes, or along parts of axes."""
    (mesh,) = along.messages(1)
    sizes = [axis.number(2) for axis in mesh.messages(1)]
    devices = np.arange(math.prod(sizes))
    for order in mesh.messages(3):
        devices = _in_order(order, 1)
    # Every axis is split in three: before the joined part, the joined part, after it.
    cuts = [(1, 1, size) for size in sizes]
    for axis in along.messages(2):
        place = axis.number(1)
        cuts[place] = (1, sizes[place], 1)
        for part in axis.messages(2):
            before = part.number(1)
            joined = part.number(2)
            cuts[place] = (before, joined, sizes[place] // (before * joined))
    cut = devices.reshape(np.ravel(cuts))
    joined_axes = range(1, cut.ndim, 3)
    last = range(-len(cuts), 0)
    devices_of_a_group = math.prod(joined for _, joined, _ in cuts)
    return np.moveaxis(cut, joined_axes, last).reshape(-1, devices_of_a_group)


def _in_order(counted: _Message, field: int) -> np.ndarray:
    """Numbers devices in the shape of a field, and transposes as the next field says, if any."""
    shape = counted.numbers(field)
    devices = np.arange(math.prod(shape)).reshape(shape)
    return devices.transpose(counted.numbers(field + 1) or None)
