"""The collectives of a compiled step: kind, bytes, mesh axes, and where they come from."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Iterator
from typing import Any, TypeAlias

import jax
import numpy as np

from jaxcomp._wire.hlo import Instruction, arrays, parse, replica_groups

_KINDS = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
_Places: TypeAlias = dict[str, tuple[bool, tuple[str, ...]]]  # (in a loop, in which branches)
_FRAME = r"stack_frame_id=(\d+)"
_PACKAGE = str(pathlib.Path(__file__).parents[1])


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a compiled program, as each device takes part in it."""

    kind: str  # all-reduce, all-gather, all-to-all, collective-permute or reduce-scatter
    arrays: tuple[tuple[str, int], ...]  # XLA's element type and the values of each result
    bytes: int  # of the larger of what goes in and what comes out, on one device
    axes: tuple[str, ...]  # mesh axes along which it joins devices; ("?",) without a mesh
    devices: int  # joined by it
    in_loop: bool
    branch: tuple[str, ...]  # "conditional/branch" around it, outermost first; () if it always runs
    operation: str  # JAX's name of what it was made for, with the functions around it
    source: str  # file:line that made it; "" where the program does not say

    @property
    def as_all_reduce(self) -> float:
        """Bytes of an all-reduce that would cost as much: half, for anything else than one."""
        return self.bytes if self.kind == "all-reduce" else self.bytes / 2

    def __str__(self) -> str:
        """A line of a list."""
        dtypes = "+".join(dict.fromkeys(dtype for dtype, _ in self.arrays))
        where = ", in one branch" * bool(self.branch) + ", in a loop" * self.in_loop
        made = f", for {self.operation}" * bool(self.operation) + f", {self.source}".rstrip(", ")
        return f"{self.kind} of {self.bytes:,} bytes of {dtypes} over {self.axes}{where}{made}"


def collectives(compiled: Any, *, mesh: Any = None) -> tuple[Collective, ...]:
    """Lists the collectives of a compiled step, as XLA left them.

    Every branch of a conditional is listed, and the body of a loop once.

    Args:
      compiled: ``jax.jit(step).lower(...).compile()``.
      mesh: The mesh whose axes the collectives are named by; None takes the one of the program's
        arguments and results.

    Returns:
      Every collective, with its bytes on one device.

    Raises:
      ValueError: If `compiled` is no compiled program.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomp
      >>> mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
      >>> x = jax.device_put(jnp.ones((2, 100)), jax.NamedSharding(mesh, jax.P("data")))
      >>> def mean(x):
      ...     return jax.lax.pmean(x, "data")
      >>> mapped = jax.shard_map(mean, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P())
      >>> (found,) = jaxcomp.collectives(jax.jit(mapped).lower(x).compile())
      >>> found.kind, found.arrays, found.bytes, found.axes
      ('all-reduce', (('f32', 100),), 400, ('data',))
    """
    text = getattr(compiled, "as_text", lambda: None)()
    if not isinstance(text, str) or not text.startswith("HloModule"):
        raise ValueError(
            f"`compiled` must be a compiled program, got {type(compiled).__name__}. Pass "
            "jax.jit(step).lower(...).compile()."
        )
    return tuple(read(text, mesh_of(compiled) if mesh is None else mesh))


def mesh_of(compiled: Any) -> Any:
    """The largest mesh among the shardings of arguments and results; None if there is none."""
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    meshes = [x.mesh for x in shardings if isinstance(x, jax.sharding.NamedSharding)]
    return max(meshes, key=lambda mesh: mesh.size, default=None)


def read(text: str, mesh: Any = None) -> Iterator[Collective]:
    """The collectives in the text of a program, in its order."""
    computations = parse(text)
    places, sources = _places(computations), _sources(text)
    sizes = re.findall(r"(?:num_partitions|replica_count)=(\d+)", text[:10_000])
    everybody = [list(range(max(map(int, sizes), default=1)))]
    for name, lines in computations.items():
        for line in lines:
            if (kind := line.opcode.removesuffix("-start")) not in _KINDS:
                continue
            groups = replica_groups(line.attributes) or everybody
            devices, results = max(map(len, groups)), _results(line, kind)
            # What goes into a reduce-scatter is as large as what comes out on all devices.
            factor = devices if kind == "reduce-scatter" else 1
            yield Collective(
                kind,
                tuple((dtype, values) for dtype, values, _ in results),
                factor * sum(size for *_, size in results),
                _axes(groups, mesh),
                devices,
                *places[name],
                "".join(re.findall(r'op_name="([^"]*)"', line.attributes)[:1]),
                "".join(sources.get(x, "") for x in re.findall(_FRAME, line.attributes)[:1]),
            )


def _results(line: Instruction, kind: str) -> list[tuple[str, int, int]]:
    """Element type, values and bytes of each result."""
    found = list(arrays(line.shape))
    if line.opcode == kind or kind == "all-reduce":
        return found
    # An asynchronous start yields its operands, its results, and here and there a context.
    half = [x for x in found if x[0] != "u32"] or found
    return half[len(half) // 2 :]


def _axes(groups: list[list[int]], mesh: Any) -> tuple[str, ...]:
    """The axes of the mesh along which devices of one group differ."""
    if mesh is None:
        return ("?",)
    sizes = dict(mesh.shape)
    places = [np.unravel_index(group, tuple(sizes.values())) for group in groups]
    return tuple(
        name for i, name in enumerate(sizes) if any(np.ptp(place[i]) > 0 for place in places)
    )


def _places(computations: dict[str, list[Instruction]]) -> _Places:
    """Where each computation runs."""
    called = {name for lines in computations.values() for line in lines for _, name in line.calls}
    places: _Places = {name: (False, ()) for name in computations if name not in called}
    waiting = list(places)
    while waiting:  # from callers to what they call
        in_loop, branch = places[caller := waiting.pop()]
        for line in computations[caller]:
            for how, name in line.calls:
                if name in computations and name not in places:
                    taken = (f"{line.name}/{name}",) * (line.opcode == "conditional")
                    places[name] = (in_loop or how in ("body", "condition"), branch + taken)
                    waiting.append(name)
    return places


def _sources(text: str) -> dict[str, str]:
    """For each frame of the table of calls, its innermost file:line outside of this package."""

    def table(title: str, row: str) -> list[Any]:
        found = re.search(rf"^{title}\n(.*?)(?:\n\n|\Z)", text, re.M | re.S)
        return re.findall(rf"^(\d+) {row}", found[1], re.M) if found else []

    files = dict(table("FileNames", r'"(.*)"'))
    locations = table("FileLocations", r"\{file_name_id=(\d+) .*? line=(\d+)")
    lines = {key: f"{files.get(file, '?')}:{line}" for key, file, line in locations}
    sources = dict[str, str]()
    # A frame comes after its parent, whose number is given one too large.
    for key, at, parent in table("StackFrames", r"\{file_location_id=(\d+) parent_frame_id=(\d+)"):
        line = lines.get(at, "")
        inner = line.startswith(_PACKAGE)
        sources[key] = sources.get(str(int(parent) - 1), line) if inner else line
    return sources
