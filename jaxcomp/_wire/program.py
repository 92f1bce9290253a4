"""The instructions of a compiled program, read from the message in which XLA hands it out.

jaxlib lists a program's instructions, but not which devices one of them joins. The text says that
in several ways that change from version to version; the message (a protocol buffer) says it in
numbers, and a number keeps its meaning. Fields that are not named here are skipped.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NamedTuple, TypeAlias

import numpy as np

# XLA's collectives, without the -start and -done of asynchronous ones.
KINDS = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")

# The fields of a message by their numbers; a field that is repeated has several values.
Fields: TypeAlias = dict[int, list[Any]]

# Numbers of the fields that are read, by message.
_MODULE_COMPUTATIONS = 3
_MODULE_ENTRY = 6
_COMPUTATION_INSTRUCTIONS = 2
_COMPUTATION_ID = 5
_COMPUTATION_ROOT = 6
_OPCODE = 2
_SHAPE = 3
_METADATA = 7
_METADATA_NAME = 2
_TUPLE_INDEX = 13
_ID = 35
_OPERANDS = 36
_CALLED = 38
_BACKEND_CONFIG = 43
_GROUPS = 49
_PAIRS = 52
_DEVICE_LIST = 87
_COUNTED_DEVICES = 92
_MESH_AXES = 93
_SHAPE_ELEMENT = 2
_SHAPE_DIMENSIONS = 3
_SHAPE_PARTS = 4

# Element types by XLA's numbers. The first number in a name is that of its bits.
_NAMES = (
    "- pred s8 s16 s32 s64 u8 u16 u32 u64 f16 f32 f64 tuple opaque c64 bf16 token c128 f8e5m2 "
    "f8e4m3fn s4 u4 f8e4m3b11fnuz f8e5m2fnuz f8e4m3fnuz s2 u2 f8e4m3 f8e3m4 s1 u1 f4e2m1fn "
    "f8e8m0fnu"
)
_ELEMENTS = _NAMES.split(" ")


class ArrayType(NamedTuple):
    """The type of one array in a program."""

    element: str  # XLA's name, such as "f32"
    values: int
    bytes: int


class Instruction(NamedTuple):
    """One instruction of a computation."""

    opcode: str
    arrays: tuple[ArrayType, ...]  # its results
    operands: tuple[int, ...]  # the instructions that they are made of, by id
    called: tuple[int, ...]  # computations that it runs: a loop's body and condition, branches
    element: int  # of a get-tuple-element: which one
    operation: str  # JAX's name of what it was made for, with the functions around it
    times: int  # how often a loop's body runs, where XLA knows; else 1
    groups: np.ndarray | None  # of a collective: devices that it joins, a row for each group

    @property
    def kind(self) -> str | None:
        """Returns the collective that this does or begins; None for everything else."""
        kind = self.opcode.removesuffix("-start")
        return kind if kind in KINDS else None


class Computation(NamedTuple):
    """A body of instructions, each behind those that it needs."""

    root: int  # the instruction whose result is the computation's
    instructions: dict[int, Instruction]  # by id


class Program(NamedTuple):
    """The computations of a program, by id."""

    entry: int
    computations: dict[int, Computation]


def read_program(compiled: Any) -> Program:
    """Reads a compiled step.

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


def read_message(message: bytes) -> Program:
    """Reads a program from XLA's message, an ``HloModuleProto``."""
    module = _fields(memoryview(message))
    computations = {}
    for part in module[_MODULE_COMPUTATIONS]:
        computation = _fields(part)
        instructions = {}
        for line in computation[_COMPUTATION_INSTRUCTIONS]:
            fields = _fields(line)
            instructions[_number(fields, _ID)] = _instruction(fields)
        root = _number(computation, _COMPUTATION_ROOT)
        computations[_number(computation, _COMPUTATION_ID)] = Computation(root, instructions)
    return Program(_number(module, _MODULE_ENTRY), computations)


def _instruction(fields: Fields) -> Instruction:
    """Reads one instruction."""
    opcode = _text(fields, _OPCODE)
    groups = None
    if opcode.removesuffix("-start") in KINDS:
        groups = _device_groups(fields)
    called = _numbers(fields, _CALLED)
    if opcode.endswith(("-update", "-done")):
        called = ()  # they name what the -start runs
    shape = _fields(fields[_SHAPE][0])
    operation = ""
    if _METADATA in fields:
        operation = _text(_fields(fields[_METADATA][0]), _METADATA_NAME)
    return Instruction(
        opcode,
        arrays=tuple(_arrays(shape)),
        operands=_numbers(fields, _OPERANDS),
        called=called,
        element=_number(fields, _TUPLE_INDEX),
        operation=operation,
        times=_trips(fields) if opcode == "while" else 1,
        groups=groups,
    )


def _arrays(shape: Fields) -> list[ArrayType]:
    """Lists the arrays of a shape; those of a tuple one after the other."""
    number = _number(shape, _SHAPE_ELEMENT)
    if number >= len(_ELEMENTS):
        raise ValueError(
            f"XLA's element type {number} is not known here, so its bytes cannot be counted. "
            "Take an older jaxlib, or a newer jaxcomp."
        )
    element = _ELEMENTS[number]
    if element == "tuple":
        arrays = []
        for part in shape.get(_SHAPE_PARTS, ()):
            arrays += _arrays(_fields(part))
        return arrays
    if element in ("opaque", "token"):
        return []
    bits = re.search(r"\d+", element)
    size = int(bits[0]) if bits else 8  # a truth value takes a byte
    values = math.prod(_numbers(shape, _SHAPE_DIMENSIONS))
    return [ArrayType(element, values, bytes=math.ceil(values * size / 8))]


def _trips(fields: Fields) -> int:
    """Returns how often a loop runs, if XLA has found it out, else 1."""
    config = _text(fields, _BACKEND_CONFIG)
    if not config.startswith("{"):
        return 1
    known = json.loads(config).get("known_trip_count", {})
    return int(known.get("n", 1))


def _device_groups(fields: Fields) -> np.ndarray | None:
    """Reads which devices a collective joins, by their number in the mesh; None for all of them.

    Raises:
      ValueError: If they are in a form that is not known.
    """
    if _COUNTED_DEVICES in fields:
        return _counted_groups(_fields(fields[_COUNTED_DEVICES][0]))
    if _MESH_AXES in fields:
        return _groups_along_axes(_fields(fields[_MESH_AXES][0]))
    groups = []
    for pair in map(_fields, fields.get(_PAIRS, [])):
        groups.append((_number(pair, 1), _number(pair, 2)))
    listed = fields.get(_GROUPS, [])
    if _DEVICE_LIST in fields:
        listed = _fields(fields[_DEVICE_LIST][0]).get(1, [])
    for group in map(_fields, listed):
        groups.append(_numbers(group, 1))
    if groups:
        return np.array(groups)
    if _DEVICE_LIST in fields:
        return None
    raise ValueError(
        f"XLA says in a form unknown here which devices an {_text(fields, _OPCODE)} joins: the "
        f"message has the fields {sorted(fields)}. Take an older jaxlib, or a newer jaxcomp."
    )


def _counted_groups(fields: Fields) -> np.ndarray:
    """Reads groups of devices that are counted in a shape, whose axes are then put in an order."""
    devices = _in_order(_numbers(fields, 3), _numbers(fields, 4))
    return devices.reshape(_number(fields, 1), _number(fields, 2))


def _groups_along_axes(fields: Fields) -> np.ndarray:
    """Reads groups of devices along axes of a mesh, or along parts of axes."""
    mesh = _fields(fields[1][0])
    sizes = [_number(_fields(axis), 2) for axis in mesh[1]]
    devices = np.arange(math.prod(sizes))
    if 3 in mesh:
        order = _fields(mesh[3][0])
        devices = _in_order(_numbers(order, 1), _numbers(order, 2))

    # Every axis is cut in three: what is before the part that is joined, the part, the rest.
    cuts = [(1, 1, size) for size in sizes]
    for axis in map(_fields, fields.get(2, [])):
        number = _number(axis, 1)
        cuts[number] = (1, sizes[number], 1)
        for part in map(_fields, axis.get(2, [])):
            before = _number(part, 1)
            joined = _number(part, 2)
            cuts[number] = (before, joined, sizes[number] // (before * joined))
    devices = devices.reshape(np.ravel(cuts))
    parts = range(1, devices.ndim, 3)
    devices = np.moveaxis(devices, parts, range(-len(parts), 0))
    width = math.prod(joined for _, joined, _ in cuts)
    return devices.reshape(-1, width)


def _in_order(shape: tuple[int, ...], order: tuple[int, ...]) -> np.ndarray:
    """Counts devices in a shape and puts its axes in another order, if there is one."""
    devices = np.arange(math.prod(shape)).reshape(shape)
    if order:
        devices = devices.transpose(order)
    return devices


def _fields(message: memoryview) -> Fields:
    """Takes a message apart: every field is its number, how it is written, and its value."""
    fields: Fields = {}
    position = 0
    while position < len(message):
        key, position = _varint(message, position)
        number, written = key >> 3, key & 7
        if written == 0:
            value, position = _varint(message, position)
        elif written == 2:
            length, position = _varint(message, position)
            value = message[position : position + length]
            position += length
        else:
            length = 8 if written == 1 else 4
            value = message[position : position + length]
            position += length
        fields.setdefault(number, []).append(value)
    return fields


def _varint(message: memoryview, position: int) -> tuple[int, int]:
    """Reads an integer in pieces of seven bits, the last without its eighth; and where it ends."""
    value = shift = 0
    while True:
        piece = message[position]
        position += 1
        value |= (piece & 127) << shift
        shift += 7
        if piece < 128:
            return value, position


def _number(fields: Fields, number: int) -> int:
    """Returns an integer field; one that is not there is 0."""
    return fields.get(number, [0])[0]


def _numbers(fields: Fields, number: int) -> tuple[int, ...]:
    """Returns a repeated integer field, whose values may be packed into one."""
    values: list[int] = []
    for value in fields.get(number, ()):
        if isinstance(value, int):
            values.append(value)
            continue
        position = 0
        while position < len(value):
            unpacked, position = _varint(value, position)
            values.append(unpacked)
    return tuple(values)


def _text(fields: Fields, number: int) -> str:
    """Returns a field of characters; one that is not there is empty."""
    return bytes(fields.get(number, [b""])[0]).decode()
