"""The instructions of a compiled program, read from the message in which XLA hands it out.

jaxlib lists a program's instructions, but not which devices one of them joins. The text says that
in several ways that change from version to version; the message (a protocol buffer) says it in
numbers, and a number keeps its meaning. Fields that are not named here are skipped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
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

# Element types by XLA's numbers: name and bits.
_ELEMENTS = {
    1: ("pred", 8), 2: ("s8", 8), 3: ("s16", 16), 4: ("s32", 32), 5: ("s64", 64),
    6: ("u8", 8), 7: ("u16", 16), 8: ("u32", 32), 9: ("u64", 64), 10: ("f16", 16),
    11: ("f32", 32), 12: ("f64", 64), 15: ("c64", 64), 16: ("bf16", 16), 18: ("c128", 128),
    19: ("f8e5m2", 8), 20: ("f8e4m3fn", 8), 21: ("s4", 4), 22: ("u4", 4),
    23: ("f8e4m3b11fnuz", 8), 24: ("f8e5m2fnuz", 8), 25: ("f8e4m3fnuz", 8), 26: ("s2", 2),
    27: ("u2", 2), 28: ("f8e4m3", 8), 29: ("f8e3m4", 8), 30: ("s1", 1), 31: ("u1", 1),
    32: ("f4e2m1fn", 4), 33: ("f8e8m0fnu", 8),
}  # fmt: skip
_TUPLE = 13
_NOT_ARRAYS = (14, 17)  # opaque values and tokens


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
        """The collective that this does or begins; None for everything else."""
        kind = self.opcode.removesuffix("-start")
        return kind if kind in KINDS else None


class Computation(NamedTuple):
    """A body of instructions, in the order in which they were scheduled."""

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
    operation = ""
    if _METADATA in fields:
        operation = _text(_fields(fields[_METADATA][0]), _METADATA_NAME)
    return Instruction(
        opcode,
        arrays=tuple(_arrays(_fields(fields[_SHAPE][0]))),
        operands=_numbers(fields, _OPERANDS),
        called=called,
        element=_number(fields, _TUPLE_INDEX),
        operation=operation,
        times=_trips(fields) if opcode == "while" else 1,
        groups=groups,
    )


def _arrays(shape: Fields) -> Iterator[ArrayType]:
    """Lists the arrays of a shape; those of a tuple one after the other."""
    element = _number(shape, _SHAPE_ELEMENT)
    if element == _TUPLE:
        for part in shape.get(_SHAPE_PARTS, ()):
            yield from _arrays(_fields(part))
    elif element in _ELEMENTS:
        name, bits = _ELEMENTS[element]
        values = math.prod(_numbers(shape, _SHAPE_DIMENSIONS))
        yield ArrayType(name, values, bytes=math.ceil(values * bits / 8))
    elif element not in _NOT_ARRAYS:
        raise ValueError(
            f"XLA's element type {element} is not known here, so its bytes cannot be counted. "
            "Take an older jaxlib, or a newer jaxcomp."
        )


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
    if _PAIRS in fields:
        return np.array([_pair(_fields(pair)) for pair in fields[_PAIRS]])
    if _COUNTED_DEVICES in fields:
        return _counted_groups(_fields(fields[_COUNTED_DEVICES][0]))
    if _MESH_AXES in fields:
        return _groups_along_axes(_fields(fields[_MESH_AXES][0]))
    groups = fields.get(_GROUPS, [])
    if _DEVICE_LIST in fields:
        groups = groups + _fields(fields[_DEVICE_LIST][0]).get(1, [])
    elif not groups:
        raise ValueError(
            f"XLA says in a form unknown here which devices an {_text(fields, _OPCODE)} joins: the "
            f"message has the fields {sorted(fields)}. Take an older jaxlib, or a newer jaxcomp."
        )
    if not groups:
        return None
    return np.array([_numbers(_fields(group), 1) for group in groups])


def _pair(fields: Fields) -> tuple[int, int]:
    """Returns the device that sends and the one that receives."""
    return _number(fields, 1), _number(fields, 2)


def _counted_groups(fields: Fields) -> np.ndarray:
    """Reads groups of devices that are counted in a shape, whose axes are then put in an order."""
    devices = _in_order(_numbers(fields, 3), _numbers(fields, 4))
    return devices.reshape(_number(fields, 1), _number(fields, 2))


def _groups_along_axes(fields: Fields) -> np.ndarray:
    """Reads groups of devices along axes of a mesh, or along parts of axes."""
    mesh = _fields(fields[1][0])
    sizes = [_number(_fields(axis), 2) for axis in mesh[1]]
    order = _fields(mesh[3][0]) if 3 in mesh else {}
    devices = _in_order(_numbers(order, 1) or sizes, _numbers(order, 2))

    # Every axis is cut in three, of which a part of it takes the middle.
    shape: list[int] = []
    joined: list[int] = []
    parts = {_number(axis, 1): axis for axis in map(_fields, fields.get(2, ()))}
    for number, size in enumerate(sizes):
        before, middle = 1, 1
        if number in parts:
            middle = size
            joined.append(len(shape) + 1)
            if 2 in parts[number]:
                part = _fields(parts[number][2][0])
                before = _number(part, 1)
                middle = _number(part, 2)
        shape += [before, middle, size // (before * middle)]
    devices = devices.reshape(shape)
    last = np.moveaxis(devices, joined, range(-len(joined), 0))
    return last.reshape(-1, math.prod(shape[axis] for axis in joined))


def _in_order(shape: tuple[int, ...] | list[int], order: tuple[int, ...]) -> np.ndarray:
    """Counts devices in a shape and puts its axes in another order, if there is one."""
    devices = np.arange(math.prod(shape)).reshape(shape)
    return devices.transpose(order) if order else devices


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
