"""The collectives of a compiled step: kind, bytes, mesh axes, and where in the sources they are."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from typing import Any

import jax
import numpy as np

from jaxcomp._wire.hlo import Instruction, instructions

# An all-reduce is as much as a reduce-scatter and an all-gather, in a ring and elsewhere.
_SHARE = {"all-reduce": 1.0}
_HALF = 0.5


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a compiled program, as each device takes part in it."""

    kind: str  # all-reduce, all-gather, all-to-all, collective-permute or reduce-scatter
    dtype: str  # XLA's name of the element type; several are joined by "+"
    bytes: int  # of the larger of what goes in and what comes out, on one device
    axes: tuple[str, ...]  # mesh axes along which it joins devices; ("?",) if it fits no mesh
    devices: int  # joined by it
    in_loop: bool
    branch: tuple[str, ...]  # the branches of conditionals that it stands in; () if it always runs
    operation: str  # JAX's name of what it was made for
    frames: tuple[tuple[str, int], ...]  # (file, line) of the calls that made it, innermost first

    @property
    def as_all_reduce(self) -> float:
        """Bytes of an all-reduce that would cost as much: half, for anything else than one."""
        return self.bytes * _SHARE.get(self.kind, _HALF)


@dataclasses.dataclass(frozen=True)
class Wire:
    """What a compiled program sends. Printed, it is a table."""

    collectives: tuple[Collective, ...]

    def over(self, axis: str) -> tuple[Collective, ...]:
        """The collectives that join devices along a mesh axis, alone or with others."""
        return tuple(x for x in self.collectives if axis in x.axes)

    @property
    def by_axis(self) -> dict[str, float]:
        """Bytes in terms of an all-reduce along each axis, summed over the whole program.

        Every branch of a conditional counts, and the body of a loop once.
        """
        names = sorted({name for x in self.collectives for name in x.axes})
        return {name: sum(x.as_all_reduce for x in self.over(name)) for name in names}

    def __str__(self) -> str:
        rows = [("collective", "dtype", "bytes", "axes", "runs")]
        rows += [
            (x.kind, x.dtype, f"{x.bytes:,}", ",".join(x.axes), _runs(x)) for x in self.collectives
        ]
        rows += [("total", "", f"{total:,.0f}", name, "") for name, total in self.by_axis.items()]
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        lines = []
        for row in rows:
            cells = [
                cell.rjust(width) if i == 2 else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            lines.append("  ".join(cells).rstrip())
        return "\n".join(lines)


def wire(compiled: Any, *, mesh: Any = None) -> Wire:
    """Lists the collectives of a compiled step, as XLA left them.

    Args:
      compiled: ``jax.jit(step).lower(...).compile()``.
      mesh: The mesh whose axes the collectives are named by; None takes the one of the program's
        arguments and results.

    Returns:
      A `Wire`: every collective with its bytes on one device, and their sums by mesh axis.

    Raises:
      ValueError: If `compiled` is no compiled program.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomp
      >>> mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
      >>> x = jax.device_put(jnp.ones((2, 100)), jax.NamedSharding(mesh, jax.P("data")))
      >>> def mean(x):
      ...     return jax.lax.pmean(x, "data")
      >>> mapped = jax.shard_map(mean, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P())
      >>> print(jaxcomp.wire(jax.jit(mapped).lower(x).compile()))
      collective  dtype  bytes  axes  runs
      all-reduce  f32      400  data  always
      total                400  data
    """
    text = getattr(compiled, "as_text", lambda: None)()
    if not isinstance(text, str) or not text.startswith("HloModule"):
        raise ValueError(
            f"`compiled` must be a compiled program, got {type(compiled).__name__}. Pass "
            "jax.jit(step).lower(...).compile()."
        )
    mesh = _mesh_of(compiled) if mesh is None else mesh
    axes = _Axes(mesh, text)
    return Wire(tuple(_collective(found, axes) for found in instructions(text)))


def _collective(found: Instruction, axes: _Axes) -> Collective:
    groups = axes.everybody if found.groups is None else found.groups
    size = max(len(group) for group in groups)
    bits = sum(_bits(kind) * math.prod(shape) for kind, shape in found.arrays)
    # What goes into a reduce-scatter is as large as what comes out on all devices.
    factor = size if found.kind == "reduce-scatter" else 1
    return Collective(
        kind=found.kind,
        dtype="+".join(dict.fromkeys(kind for kind, _ in found.arrays)),
        bytes=-(-bits // 8) * factor,
        axes=axes.of(groups),
        devices=size,
        in_loop=found.in_loop,
        branch=found.branch,
        operation=found.operation,
        frames=found.frames,
    )


class _Axes:
    """Mesh axes by the groups of devices that a collective along them joins."""

    def __init__(self, mesh: Any, text: str):
        sizes = dict(mesh.shape) if mesh is not None else {}
        count = math.prod(sizes.values())
        devices = np.arange(count).reshape(tuple(sizes.values()))
        partitions = re.search(r"num_partitions=(\d+)", text[:10_000])
        replicas = re.search(r"replica_count=(\d+)", text[:10_000])
        number = max(int(x[1]) if x else 1 for x in (partitions, replicas))
        self.everybody = [list(range(number))]
        self._known: dict[frozenset[frozenset[int]], tuple[str, ...]] = {}
        names = [name for name, size in sizes.items() if size > 1]
        for n in range(len(names), 0, -1):
            for chosen in itertools.combinations(names, n):
                places = [list(sizes).index(name) for name in chosen]
                groups = np.moveaxis(devices, places, range(-n, 0))
                groups = groups.reshape(-1, math.prod(sizes[name] for name in chosen))
                self._known[_unordered(groups.tolist())] = chosen

    def of(self, groups: list[list[int]]) -> tuple[str, ...]:
        """The axes that a collective joins; for pairs of a permutation those that they stay in."""
        if found := self._known.get(_unordered(groups)):
            return found
        if all(len(group) == 1 for group in groups):
            return ()
        within = [
            (len(axes), axes)
            for known, axes in self._known.items()
            if all(any(set(group) <= other for other in known) for group in groups)
        ]
        return min(within)[1] if within else ("?",)


def _unordered(groups: list[list[int]]) -> frozenset[frozenset[int]]:
    return frozenset(frozenset(group) for group in groups)


def _mesh_of(compiled: Any) -> Any:
    """The largest mesh among the shardings of arguments and results; None if there is none."""
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    meshes = [x.mesh for x in shardings if isinstance(x, jax.sharding.NamedSharding)]
    return max(meshes, key=lambda mesh: mesh.size, default=None)


def _bits(kind: str) -> int:
    """Of one element: pred is a byte, and the others begin with a letter and their bits."""
    found = re.match(r"[a-z]+(\d+)", kind)
    return int(found[1]) if found else 8


def _runs(x: Collective) -> str:
    when = "in one branch" if x.branch else "always"
    return f"{when}, in a loop" if x.in_loop else when
