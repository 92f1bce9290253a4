"""The collectives of a compiled step: kind, bytes, mesh axes, how often, and what made them.

The text of the compiled program is read, in the forms of jax 0.10 to 0.12, because it is what runs:
XLA merges, splits, widens and adds collectives after everything that JAX can tell about a program.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

KINDS = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
_COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?[\w.-]+ = (\(.*?\)|\S+) ([a-z][\w-]*)\((.*)$")
_CALL = re.compile(r"(body|condition|to_apply|calls|\w+_computations?)=(?:\{([^}]*)\}|(%?[\w.-]+))")
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,<=]*)\]")
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}")
_ORDER = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"  # devices counted in a shape, its axes then in an order
_RANGE = re.compile(rf"replica_groups=\[([\d,]+)\]<={_ORDER}")
_MESH = re.compile(
    rf"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\({_ORDER}\))? \{{('[^}}]*')\}}"
)


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a compiled program, as each device takes part in it."""

    kind: str  # all-reduce, all-gather, all-to-all, collective-permute or reduce-scatter
    arrays: tuple[tuple[str, int], ...]  # XLA's element type and the values of each result
    bytes: int  # of the larger of what goes in and what comes out, on one device, each time
    axes: tuple[str, ...]  # mesh axes along which it joins devices
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


class Instruction(NamedTuple):
    """One line of a computation."""

    shape: str  # such as `f32[8,4]{1,0}`, or a tuple of such in parentheses
    opcode: str
    attributes: str  # all that follows, operands too

    @property
    def calls(self) -> list[tuple[str, str]]:
        """(attribute, computation) of what it calls: a body, the branches of a conditional."""
        return [
            (how, name.strip().lstrip("%"))
            for how, several, one in _CALL.findall(self.attributes)
            for name in (several or one).split(",")
        ]

    @property
    def times(self) -> int:
        """How often a loop's body runs, where XLA knows; else 1."""
        found = re.search(r'"known_trip_count":\{"n":"(\d+)"', self.attributes)
        return int(found[1]) if found else 1


def parse(text: str) -> dict[str, list[Instruction]]:
    """The computations of a compiled program by their names, the entry last.

    Raises:
      ValueError: If there are none.
    """
    computations: dict[str, list[Instruction]] = {}
    current: list[Instruction] = []
    for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
        if found := _INSTRUCTION.match(line):
            current.append(Instruction(*found.groups()))
        elif found := _COMPUTATION.match(line):
            current = computations.setdefault(found[1], [])
    if not computations:
        raise ValueError("The text is no HLO module: it has no ENTRY computation.")
    return computations


def _read(text: str, mesh: Callable[[], Any]) -> Iterator[Collective]:
    """The collectives of a program, found from its entry; one without any needs no mesh."""
    computations = parse(text)
    sizes = re.findall(r"(?:num_partitions|replica_count)=(\d+)", text[:10_000])
    everybody = np.arange(max(map(int, sizes), default=1))[None]

    def of(name: str, in_loop: bool, in_branch: bool, times: int) -> Iterator[Collective]:
        for line in computations[name]:
            if (kind := line.opcode.removesuffix("-start")) in KINDS:
                groups, arrays = _replica_groups(line.attributes, everybody), _arrays(line.shape)
                if line.opcode != kind != "all-reduce":
                    # What starts yields its operands, its results, and here and there a context.
                    arrays = [x for x in arrays if x[0] != "u32"] or arrays
                    arrays = arrays[len(arrays) // 2 :]
                # What goes into a reduce-scatter is as large as what comes out on all devices.
                factor = len(groups[0]) if kind == "reduce-scatter" else 1
                yield Collective(
                    kind,
                    arrays=tuple((dtype, values) for dtype, values, _ in arrays),
                    bytes=factor * sum(size for *_, size in arrays),
                    axes=_axes(groups, mesh()),
                    in_loop=in_loop,
                    times=times,
                    in_branch=in_branch,
                    operation="".join(re.findall(r'op_name="([^"]*)"', line.attributes)[:1]),
                )
            for how, called in line.calls:
                if called in computations:
                    looped = in_loop or how in ("body", "condition")
                    chosen = in_branch or line.opcode == "conditional"
                    yield from of(called, looped, chosen, times * line.times)

    return of(list(computations)[-1], False, False, 1)


def _arrays(shape: str) -> list[tuple[str, int, int]]:
    """Element type, number of values and bytes of every array in a shape."""
    values = [
        (dtype, bits, math.prod(_numbers(dims.replace("<=", ""))))
        for dtype, bits, dims in _ARRAY.findall(shape)
    ]
    return [(dtype, n, -(-n * int(bits or 8) // 8)) for dtype, bits, n in values]  # pred: a byte


def _replica_groups(attributes: str, everybody: np.ndarray) -> Any:
    """The devices that one collective joins, by number, a row for each group.

    They are written as a list, ``{{0,4},{1,5}}``, as pairs of a permutation; as a range that is
    reshaped and transposed, ``[2,2]<=[2,2]T(1,0)``; or as axes of a mesh, ``mesh['slow'=2,'fast'=4]
    {'slow'}``.

    Raises:
      ValueError: If they are in another form.
    """
    if found := _LISTED.search(attributes):
        return [_numbers(group) for group in re.findall(r"\{([\d, ]*)\}", found[1])]
    if found := _RANGE.search(attributes):
        sizes, joined, (dims, order) = _numbers(found[1]), [1], found.group(2, 3)
    elif found := _MESH.search(attributes):
        axes = dict(re.findall(r"'([^']*)'=(\d+)", found[1]))
        joined = [list(axes).index(name) for name in re.findall(r"'([^']*)'", found[4])]
        sizes, (dims, order) = [int(size) for size in axes.values()], found.group(2, 3)
    elif "replica_groups={}" in attributes or "replica_groups" not in attributes:
        return everybody
    else:
        raise ValueError(f"XLA writes replica groups in a form unknown here: {attributes[:300]}")
    shape = _numbers(dims) if dims else sizes
    devices = np.arange(math.prod(shape)).reshape(shape)
    devices = devices.transpose(_numbers(order) if order else range(len(shape))).reshape(sizes)
    last = np.moveaxis(devices, joined, range(-len(joined), 0))
    return last.reshape(-1, math.prod(sizes[i] for i in joined))


def _axes(groups: Any, mesh: Any) -> tuple[str, ...]:
    """The axes of the mesh along which devices of one group differ."""
    sizes = dict(mesh.shape)
    places = [np.unravel_index(group, tuple(sizes.values())) for group in groups]
    return tuple(
        name for i, name in enumerate(sizes) if any(np.ptp(place[i]) > 0 for place in places)
    )


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part.strip()]
