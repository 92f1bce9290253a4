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

# By message: the fields that are read, by their numbers, each with a name and what it holds: an
# integer, a list of integers, a text, or messages of other fields.
Fields: TypeAlias = dict[int, tuple[str, Any]]

_ORDER: Fields = {1: ("shape", list), 2: ("order", list)}
_MESH: Fields = {1: ("axes", {2: ("size", int)}), 3: ("order", _ORDER)}
_PART: Fields = {1: ("before", int), 2: ("joined", int)}
_GROUP: Fields = {1: ("devices", list)}
_SHAPE: Fields = {2: ("element", int), 3: ("dimensions", list)}
_SHAPE[4] = ("parts", _SHAPE)
_INSTRUCTION: Fields = {
    2: ("opcode", str),
    3: ("shape", _SHAPE),
    7: ("metadata", {2: ("operation", str)}),
    9: ("parameter", int),
    13: ("tuple_index", int),
    35: ("id", int),
    36: ("operands", list),
    38: ("called", list),
    43: ("backend_config", str),
    49: ("groups", _GROUP),
    52: ("pairs", {1: ("source", int), 2: ("target", int)}),
    87: ("device_list", {1: ("groups", _GROUP)}),
    92: (
        "counted",
        {1: ("groups", int), 2: ("width", int), 3: ("shape", list), 4: ("order", list)},
    ),
    93: ("along", {1: ("mesh", _MESH), 2: ("axes", {1: ("axis", int), 2: ("parts", _PART)})}),
}
_MODULE: Fields = {
    3: ("computations", {2: ("instructions", _INSTRUCTION), 5: ("id", int), 6: ("root", int)}),
    6: ("entry", int),
}

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
    position: int  # of a get-tuple-element: which one; of a parameter: its number
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
    module = _decoded(memoryview(message), _MODULE)
    computations = {}
    for computation in module["computations"]:
        instructions = {}
        for fields in computation["instructions"]:
            instructions[fields["id"]] = _instruction(fields)
        computations[computation["id"]] = Computation(computation["root"], instructions)
    return Program(module["entry"], computations)


def _instruction(fields: dict[str, Any]) -> Instruction:
    """Returns an instruction of which the fields are known."""
    opcode = fields["opcode"]
    called = fields["called"]
    if opcode.endswith(("-update", "-done")):
        called = ()  # they name what the -start runs
    arrays: list[ArrayType] = []
    for shape in fields["shape"]:
        arrays += _arrays(shape)
    config = fields["backend_config"]
    times = 1
    if opcode == "while" and config.startswith("{"):
        times = int(json.loads(config).get("known_trip_count", {}).get("n", 1))
    groups = None
    if opcode.removesuffix("-start") in KINDS:
        groups = _device_groups(fields)
    return Instruction(
        opcode,
        arrays=tuple(arrays),
        operands=tuple(fields["operands"]),
        called=tuple(called),
        position=fields["tuple_index"] or fields["parameter"],
        operation="".join(metadata["operation"] for metadata in fields["metadata"]),
        times=times,
        groups=groups,
    )


def _arrays(shape: dict[str, Any]) -> list[ArrayType]:
    """Lists the arrays of a shape; those of a tuple one after the other."""
    if shape["element"] >= len(_ELEMENTS):
        raise ValueError(
            f"XLA's element type {shape['element']} is not known here, so its bytes cannot be "
            "counted. Take an older jaxlib, or a newer jaxcomp."
        )
    element = _ELEMENTS[shape["element"]]
    if element in ("tuple", "opaque", "token"):
        arrays = []
        for part in shape["parts"]:
            arrays += _arrays(part)
        return arrays
    bits = re.search(r"\d+", element)
    size = int(bits[0]) if bits else 8  # a truth value takes a byte
    values = math.prod(shape["dimensions"])
    return [ArrayType(element, values, bytes=math.ceil(values * size / 8))]


def _device_groups(fields: dict[str, Any]) -> np.ndarray | None:
    """Returns which devices a collective joins, by their number in the mesh; None for all of them.

    Raises:
      ValueError: If they are in a form that is not known.
    """
    for counted in fields["counted"]:
        return _in_order(counted).reshape(counted["groups"], counted["width"])
    for along in fields["along"]:
        return _groups_along_axes(along)
    groups = [(pair["source"], pair["target"]) for pair in fields["pairs"]]
    listed = fields["groups"]
    for device_list in fields["device_list"]:
        listed = device_list["groups"]
    groups += [group["devices"] for group in listed]
    if groups:
        return np.array(groups)
    if fields["device_list"]:
        return None
    raise ValueError(
        f"XLA says in a form unknown here which devices an {fields['opcode']} joins. Take an older "
        "jaxlib, or a newer jaxcomp."
    )


def _groups_along_axes(along: dict[str, Any]) -> np.ndarray:
    """Returns groups of devices along axes of a mesh, or along parts of axes."""
    (mesh,) = along["mesh"]
    sizes = [axis["size"] for axis in mesh["axes"]]
    devices = np.arange(math.prod(sizes))
    for order in mesh["order"]:
        devices = _in_order(order)
    # Every axis is cut in three: what is before the part that is joined, the part, the rest.
    cuts = [(1, 1, size) for size in sizes]
    for axis in along["axes"]:
        size = sizes[axis["axis"]]
        cuts[axis["axis"]] = (1, size, 1)
        for part in axis["parts"]:
            before = part["before"]
            joined = part["joined"]
            cuts[axis["axis"]] = (before, joined, size // (before * joined))
    devices = devices.reshape(np.ravel(cuts))
    parts = range(1, devices.ndim, 3)
    devices = np.moveaxis(devices, parts, range(-len(parts), 0))
    return devices.reshape(-1, math.prod(joined for _, joined, _ in cuts))


def _in_order(counted: dict[str, Any]) -> np.ndarray:
    """Counts devices in a shape and puts its axes in another order, if there is one."""
    devices = np.arange(math.prod(counted["shape"])).reshape(counted["shape"])
    return devices.transpose(counted["order"] or None)


def _decoded(message: memoryview, fields: Fields) -> dict[str, Any]:
    """Takes a message apart; a field that is not there is 0, or empty."""
    values: dict[str, Any] = {}
    for name, kind in fields.values():
        values[name] = kind() if isinstance(kind, type) else []
    position = 0
    while position < len(message):
        key, position = _varint(message, position)
        value: Any = None
        if key & 7 == 0:
            value, position = _varint(message, position)
        else:
            size = 8 if key & 7 == 1 else 4
            if key & 7 == 2:
                size, position = _varint(message, position)
            value = message[position : position + size]
            position += size
        name, kind = fields.get(key >> 3, ("", None))
        if kind is int:
            values[name] = value
        elif kind is str:
            values[name] = bytes(value).decode()
        elif kind is list:
            values[name] += [value] if isinstance(value, int) else _varints(value)
        elif kind is not None:
            values[name].append(_decoded(value, kind))
    return values


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


def _varints(message: memoryview) -> list[int]:
    """Reads integers that are packed one behind the other."""
    values = []
    position = 0
    while position < len(message):
        value, position = _varint(message, position)
        values.append(value)
    return values
