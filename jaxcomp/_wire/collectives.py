"""The collectives of a compiled step: kind, bytes, mesh axes, how often, and what made them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any, TypeAlias

import jax
import numpy as np

from jaxcomp._wire.hlo import Instruction, arrays, parse, replica_groups

_KINDS = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
_Place: TypeAlias = tuple[bool, int, tuple[str, ...]]  # in a loop, how often, in which branches
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a compiled program, as each device takes part in it."""

    kind: str  # all-reduce, all-gather, all-to-all, collective-permute or reduce-scatter
    arrays: tuple[tuple[str, int], ...]  # XLA's element type and the values of each result
    bytes: int  # of the larger of what goes in and what comes out, on one device, each time
    axes: tuple[str, ...]  # mesh axes along which it joins devices; ("?",) without a mesh
    devices: int  # joined by it
    in_loop: bool
    times: int  # that it runs in a step, by the loops around it; 1 for those of unknown length
    branch: tuple[str, ...]  # "conditional/branch" around it, outermost first; () if it always runs
    operation: str  # JAX's name of what it was made for, with the functions around it

    @property
    def as_all_reduce(self) -> float:
        """Bytes of an all-reduce that would cost as much: half, for anything else than one."""
        return self.bytes if self.kind == "all-reduce" else self.bytes / 2

    def __str__(self) -> str:
        """A line of a list."""
        dtypes = "+".join(dict.fromkeys(dtype for dtype, _ in self.arrays))
        where = ", in one branch" * bool(self.branch)
        where += f", in a loop ({self.times} times)" * self.in_loop
        made = f", for {self.operation}" * bool(self.operation)
        return f"{self.kind} of {self.bytes:,} bytes of {dtypes} over {self.axes}{where}{made}"


def collectives(compiled: Any, *, mesh: Any = None) -> tuple[Collective, ...]:
    """Lists the collectives of a compiled step, as XLA left them.

    Every branch of a conditional is listed, and the body of a loop once, with its `times`.

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
    places = _places(computations)
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


def _places(computations: dict[str, list[Instruction]]) -> dict[str, _Place]:
    """Where each computation runs, from callers to what they call."""
    called = {name for lines in computations.values() for line in lines for _, name in line.calls}
    places: dict[str, _Place] = {
        name: (False, 1, ()) for name in computations if name not in called
    }
    waiting = list(places)
    while waiting:
        in_loop, times, branch = places[caller := waiting.pop()]
        for line in computations[caller]:
            trips = int(found[1]) if (found := _TRIPS.search(line.attributes)) else 1
            for how, name in line.calls:
                if name in computations and name not in places:
                    taken = (f"{line.name}/{name}",) * (line.opcode == "conditional")
                    looped = how in ("body", "condition")
                    places[name] = (in_loop or looped, times * trips, branch + taken)
                    waiting.append(name)
    return places
