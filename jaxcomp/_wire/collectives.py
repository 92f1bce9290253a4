"""The collectives of a compiled step: kind, bytes, mesh axes, how often, and what made them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jaxcomp._wire.hlo import parse, replica_groups

_KINDS = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a compiled program, as each device takes part in it."""

    kind: str  # all-reduce, all-gather, all-to-all, collective-permute or reduce-scatter
    arrays: tuple[tuple[str, int], ...]  # XLA's element type and the values of each result
    bytes: int  # of the larger of what goes in and what comes out, on one device, each time
    axes: tuple[str, ...]  # mesh axes along which it joins devices
    devices: int  # joined by it
    in_loop: bool
    times: int  # that it runs in a step, by the loops around it; 1 for those of unknown length
    in_branch: bool  # of a conditional
    operation: str  # JAX's name of what it was made for, with the functions around it

    @property
    def as_all_reduce(self) -> float:
        """Bytes of an all-reduce that would cost as much: half, for anything else than one."""
        return self.bytes if self.kind == "all-reduce" else self.bytes / 2

    def __str__(self) -> str:
        """A line of a list."""
        dtypes = "+".join(dict.fromkeys(dtype for dtype, _ in self.arrays))
        where = ", in one branch" * self.in_branch
        where += f", in a loop ({self.times} times)" * self.in_loop
        made = f", for {self.operation}" * bool(self.operation)
        return f"{self.kind} of {self.bytes:,} bytes of {dtypes} over {self.axes}{where}{made}"


def collectives(compiled: Any, *, mesh: Any = None) -> tuple[Collective, ...]:
    """Lists the collectives of a compiled step as XLA left them, in the order of the program.

    Every branch of a conditional is listed, and the body of a loop once, with its `times`.

    Args:
      compiled: ``jax.jit(step).lower(...).compile()``.
      mesh: The mesh whose axes the collectives are named by; None takes the one of the program's
        arguments and results.

    Returns:
      Every collective, with its bytes on one device.

    Raises:
      ValueError: If `compiled` is no compiled program, or `mesh` is missing.

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
    return tuple(_read(text, lambda: mesh_of(compiled) if mesh is None else mesh))


def mesh_of(compiled: Any) -> Any:
    """The largest mesh among the shardings of arguments and results.

    Raises:
      ValueError: If there is none.
    """
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    meshes = [x.mesh for x in shardings if isinstance(x, jax.sharding.NamedSharding)]
    if not meshes:
        raise ValueError("`mesh` is missing: no argument or result of the program names it.")
    return max(meshes, key=lambda mesh: mesh.size)


def _read(text: str, mesh: Callable[[], Any]) -> Iterator[Collective]:
    """The collectives of a program, found from its entry; one without any needs no mesh."""
    computations = parse(text)
    sizes = re.findall(r"(?:num_partitions|replica_count)=(\d+)", text[:10_000])
    everybody = [list(range(max(map(int, sizes), default=1)))]

    def of(name: str, in_loop: bool, in_branch: bool, times: int) -> Iterator[Collective]:
        for line in computations[name]:
            if (kind := line.opcode.removesuffix("-start")) in _KINDS:
                groups = replica_groups(line.attributes) or everybody
                devices, results = max(map(len, groups)), line.arrays
                if line.opcode != kind != "all-reduce":
                    # What starts yields its operands, its results, and here and there a context.
                    results = [x for x in results if x[0] != "u32"] or results
                    results = results[len(results) // 2 :]
                # What goes into a reduce-scatter is as large as what comes out on all devices.
                factor = devices if kind == "reduce-scatter" else 1
                yield Collective(
                    kind,
                    arrays=tuple((dtype, values) for dtype, values, _ in results),
                    bytes=factor * sum(size for *_, size in results),
                    axes=_axes(groups, mesh()),
                    devices=devices,
                    in_loop=in_loop,
                    times=times,
                    in_branch=in_branch,
                    operation="".join(re.findall(r'op_name="([^"]*)"', line.attributes)[:1]),
                )
            trips = int(found[1]) if (found := _TRIPS.search(line.attributes)) else 1
            for how, called in line.calls:
                if called in computations:
                    looped = in_loop or how in ("body", "condition")
                    chosen = in_branch or line.opcode == "conditional"
                    yield from of(called, looped, chosen, times * trips)

    return of(list(computations)[-1], False, False, 1)


def _axes(groups: list[list[int]], mesh: Any) -> tuple[str, ...]:
    """The axes of the mesh along which devices of one group differ."""
    sizes = dict(mesh.shape)
    places = [np.unravel_index(group, tuple(sizes.values())) for group in groups]
    return tuple(
        name for i, name in enumerate(sizes) if any(np.ptp(place[i]) > 0 for place in places)
    )
