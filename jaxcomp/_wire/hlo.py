"""Collectives in the text of a compiled program, in the forms that XLA of jax 0.10 to 0.12 writes.

The text is read because it is what runs: XLA merges, splits, widens and adds collectives after
everything that JAX can tell about a program.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

KINDS = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")

_COLLECTIVE = re.compile(
    rf"^\s*(?:ROOT )?%?[\w.-]+ = (.*?) ({'|'.join(KINDS)})(-start)?\((.*?)\)(?:, (.*))?$"
)
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\) -> .* \{$")
_CALLED = re.compile(
    r"(body|condition|to_apply|calls|true_computation|false_computation|branch_computations"
    r"|called_computations)=(?:\{([^}]*)\}|(%?[\w.-]+))"
)
_BRANCHES = ("true_computation", "false_computation", "branch_computations")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,<=]*)\]")
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}")
_RANGE = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? "
    r"\{('[^}]*')\}"
)
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_SOURCE = re.compile(r'source_file="([^"]*)" source_line=(\d+)')
_OPERATION = re.compile(r'op_name="([^"]*)"')


class Instruction(NamedTuple):
    """One collective of the program."""

    kind: str  # one of KINDS
    arrays: tuple[tuple[str, tuple[int, ...]], ...]  # element type and shape of what it yields
    operation: str  # JAX's name of the operation it was made for, with the functions around it
    groups: list[list[int]] | None  # the devices it joins; None: all
    in_loop: bool
    branch: tuple[str, ...]  # the branches of conditionals that it stands in, outermost first
    frames: tuple[tuple[str, int], ...]  # (file, line) of the calls that made it, innermost first


def instructions(text: str) -> list[Instruction]:
    """Every collective of a compiled program, in the order of the text.

    Args:
      text: ``compiled.as_text()``.

    Raises:
      ValueError: If replica groups are written in a form that is unknown here.
    """
    text = re.sub(r"/\*.*?\*/", "", text)
    computations = _computations(text)
    places = _places(computations)
    stacks = _Stacks(text)
    found = []
    for name, lines in computations.items():
        for line in lines:
            if match := _COLLECTIVE.match(line):
                in_loop, branch = places.get(name, (False, ()))
                operation = _OPERATION.search(line)
                found.append(
                    Instruction(
                        match[2],
                        _arrays(match[1], match[2], started=bool(match[3])),
                        operation[1] if operation else "",
                        replica_groups(line),
                        in_loop,
                        branch,
                        stacks.of(line),
                    )
                )
    return found


def replica_groups(line: str) -> list[list[int]] | None:
    """The groups of devices that one collective joins, by number; None for all of them.

    Args:
      line: With ``replica_groups`` as a list, ``{{0,4},{1,5}}``; as a range that is reshaped and
        turned, ``[2,2]<=[2,2]T(1,0)``; or as axes of a mesh, ``mesh['slow'=2,'fast'=4] {'slow'}``.
        Pairs of a permutation count too.

    Raises:
      ValueError: If they are in another form.
    """
    if found := _LISTED.search(line):
        return [_numbers(group) for group in re.findall(r"\{([\d, ]*)\}", found[1])]
    if found := _RANGE.search(line):
        groups, dims, turned = (_numbers(part or "") for part in found.groups())
        return _turned(dims, turned).reshape(groups).tolist()
    if found := _MESH.search(line):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", found[1])}
        joined = [list(sizes).index(name) for name in re.findall(r"'([^']*)'", found[4])]
        dims, turned = _numbers(found[2] or ""), _numbers(found[3] or "")
        devices = _turned(dims or list(sizes.values()), turned).reshape(*sizes.values())
        groups = np.moveaxis(devices, joined, range(-len(joined), 0))
        return groups.reshape(-1, math.prod(devices.shape[axis] for axis in joined)).tolist()
    if "replica_groups={}" in line or "replica_groups" not in line:
        return None
    raise ValueError(f"XLA writes replica groups in a form unknown here: {line.strip()[:300]}")


def _turned(dims: list[int], order: list[int]) -> np.ndarray:
    devices = np.arange(math.prod(dims)).reshape(dims)
    return np.transpose(devices, order) if order else devices


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part.strip()]


def _arrays(result: str, kind: str, started: bool) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Element types and shapes of a result, which may be a tuple."""
    arrays = [(t, tuple(_numbers(dims.replace("<=", "")))) for t, dims in _ARRAY.findall(result)]
    if started and kind != "all-reduce":
        # An asynchronous start yields its operands, its results, and here and there a context.
        half = [x for x in arrays if x[0] != "u32"] or arrays
        arrays = half[len(half) // 2 :]
    return tuple(arrays)


def _computations(text: str) -> dict[str, list[str]]:
    """The lines of each computation, by its name."""
    computations: dict[str, list[str]] = {}
    current: list[str] | None = None
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            current = computations.setdefault(match[1], [])
        elif line.startswith("}"):
            current = None
        elif current is not None:
            current.append(line)
    return computations


def _calls(lines: list[str]) -> Iterator[tuple[str, bool, str | None]]:
    """(computation, whether in a loop, which branch of which conditional) of what is called."""
    for number, line in enumerate(lines):
        for how, several, one in _CALLED.findall(line):
            for place, name in enumerate((several or one).split(",")):
                which = place if how == "branch_computations" else how
                branch = f"{number}.{which}" if how in _BRANCHES else None
                yield name.strip().lstrip("%"), how in ("body", "condition"), branch


def _places(computations: dict[str, list[str]]) -> dict[str, tuple[bool, tuple[str, ...]]]:
    """For each computation, whether it runs in a loop and in which branches."""
    called = {name for lines in computations.values() for name, _, _ in _calls(lines)}
    places: dict[str, tuple[bool, tuple[str, ...]]] = {
        name: (False, ()) for name in computations if name not in called
    }
    waiting = list(places)
    while waiting:
        caller = waiting.pop()
        in_loop, branch = places[caller]
        for name, loops, taken in _calls(computations[caller]):
            if name in computations and name not in places:
                inner = (*branch, f"{caller}:{taken}") if taken else branch
                places[name] = (in_loop or loops, inner)
                waiting.append(name)
    return places


class _Stacks:
    """Where in the sources an instruction comes from; the program has a table of calls."""

    def __init__(self, text: str):
        self._files = dict(re.findall(r'^(\d+) "(.*)"$', _section(text, "FileNames"), re.M))
        locations = _section(text, "FileLocations")
        self._lines = {
            key: (self._files.get(file, ""), int(line))
            for key, file, line in re.findall(
                r"^(\d+) \{file_name_id=(\d+) .*? line=(\d+)", locations, re.M
            )
        }
        frames = re.findall(
            r"^(\d+) \{file_location_id=(\d+) parent_frame_id=(\d+)",
            _section(text, "StackFrames"),
            re.M,
        )
        self._frames = {key: (location, str(int(parent) - 1)) for key, location, parent in frames}

    def of(self, line: str) -> tuple[tuple[str, int], ...]:
        """(file, line) of each call, innermost first; empty where the program does not say."""
        if found := _SOURCE.search(line):
            return ((found[1], int(found[2])),)
        found = _FRAME.search(line)
        key, calls = found[1] if found else "", []
        while key in self._frames and len(calls) < len(self._frames):
            location, key = self._frames[key]
            calls.append(self._lines.get(location, ("", 0)))
        return tuple(calls)


def _section(text: str, title: str) -> str:
    """One of the tables at the head of a program."""
    found = re.search(rf"^{title}\n(.*?)(?:\n\n|\Z)", text, re.M | re.S)
    return found[1] if found else ""
