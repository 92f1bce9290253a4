"""What travels behind the backward pass: a training step's schedule on GPUs that are not there.

    python -m benchmarks.gpu_program.schedule --buckets 4
    python -m benchmarks.gpu_program.schedule --buckets 4 --link 10gbit

Compiles a training step of GPT-2 small with `powersgd(buckets=...)` for eight GPUs and says of
every all-reduce where it starts and ends, and how many kernels of the backward pass run meanwhile.
With a link, once more as XLA schedules it after a profile that was taken over that link.
Installs nothing; see `python -m benchmarks.gpu_program --help`.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import jaxcomp
from benchmarks.cluster.plan import Rate, parse_rate
from benchmarks.common.arguments import at_least, command_line
from benchmarks.gpu_program.count import FREE
from benchmarks.gpu_program.hlo import Computation, Instruction, Module, parse
from benchmarks.gpu_program.profile import OPTION, profile
from benchmarks.gpu_program.target import AXIS, TARGETS, mesh_of
from benchmarks.gpu_program.training_step import lowered

DEVICES = 8


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One asynchronous all-reduce in the order of the program."""

    bytes: int
    begins_after: int  # kernels of the backward pass
    ends_after: int


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The backward pass and what crosses beside it."""

    backward: int  # kernels
    transfers: list[Transfer]

    def __str__(self) -> str:
        lines = [
            f"{self.backward} kernels in the backward pass",
            "",
            "    bytes  starts  ends  behind",
        ]
        for x in self.transfers:
            begin, end = x.begins_after / self.backward, x.ends_after / self.backward
            behind = x.ends_after - x.begins_after
            lines.append(f"{x.bytes:>9,}  {begin:>6.0%}  {end:>4.0%}  {behind} kernels")
        return "\n".join(lines)


def read(module: Module) -> Schedule:
    """The all-reduces of a scheduled program, and the kernels of its backward pass."""
    return beside(module.entry, _is_backward)


def beside(computation: Computation, counted: Callable[[Instruction], bool]) -> Schedule:
    """The all-reduces of one computation, and the kernels of the backward pass in it."""
    scheduled = computation.instructions
    seen = list(itertools.accumulate(map(counted, scheduled)))
    transfers = [
        Transfer(scheduled[done].bytes, seen[start], seen[done])
        for start, done in sorted(computation.asynchronous, key=lambda places: places[1])
        if scheduled[start].opcode == "all-reduce-start"
    ]
    return Schedule(seen[-1], transfers)


def _is_backward(x: Instruction) -> bool:
    """Whether JAX made this kernel from the transpose of the model."""
    moves = x.opcode in FREE or x.opcode.startswith("all-reduce-")
    return not moves and "transpose(jvp" in x.attributes


def options(argv: list[str] | None) -> argparse.Namespace:
    """The arguments, checked, and with them the mesh."""
    parser = command_line("benchmarks.gpu_program.schedule", __doc__)
    parser.add_argument(
        "--buckets", type=int, default=4, metavar="N", help="(default: %(default)s)"
    )
    add_options(parser)
    return checked_options(parser, argv, buckets=1, blocks=1, rank=1)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of every command that compiles a training step for its schedule."""
    add, shown = parser.add_argument, "(default: %(default)s)"
    add("--blocks", type=int, default=12, metavar="N", help=shown)
    add("--rank", type=int, default=4, metavar="R", help=shown)
    add("--gpu-kernels", action="store_true", help="`powersgd(gpu_kernels=True)`")
    add("--link", metavar="RATE", help="between neighbours, such as 10gbit")
    add("--latency", type=float, default=20e-6, metavar="S", help="of the link, in s " + shown)
    add("--target", choices=TARGETS, default="h200", help=shown)


def checked_options(
    parser: argparse.ArgumentParser, argv: list[str] | None, **least: int
) -> argparse.Namespace:
    """What was given, with numbers of at least so much, the link as a rate, and a mesh."""
    given = parser.parse_args(argv)
    try:
        for name, number in least.items():
            at_least(f"--{name}", getattr(given, name), number)
        given.link = given.link and limited(parse_rate(given.link))
        if not 0 <= given.latency < math.inf:
            raise ValueError(f"`--latency` must be a number of seconds, got {given.latency}.")
        given.mesh = mesh_of(given.target, DEVICES)
    except (ValueError, RuntimeError) as error:
        parser.error(str(error).replace("--rates", "--link"))
    return given


def limited(rate: Rate) -> Rate:
    """A rate that is a number.

    Raises:
      ValueError: If it is not.
    """
    if rate.bits_per_second is None:
        raise ValueError("`--link` must be a rate such as 10gbit; leave it out for XLA's own.")
    return rate


def informed(lowered: Any, text: str) -> Any:
    """The program compiled with a profile."""
    with tempfile.NamedTemporaryFile("w", suffix=".pbtxt") as file:
        file.write(text)
        file.flush()
        return lowered.compile(compiler_options={OPTION: file.name})


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    given = options(argv)
    reducer = jaxcomp.powersgd(
        given.rank,
        axis_name=AXIS,
        start_step=0,
        buckets=given.buckets,
        gpu_kernels=given.gpu_kernels,
    )
    program = lowered(reducer, given.blocks, given.mesh)
    module = parse(program.compile().as_text())
    print(f"jaxlib {version('jaxlib')}, {given.target}, {reducer!r}\n{read(module)}")
    if given.link is None:
        return
    text = profile(module, given.target, DEVICES, given.link.bits_per_second, given.latency)
    after = informed(program, text)
    print(f"\nAfter a profile over {given.link.shown} links:\n{read(parse(after.as_text()))}")


if __name__ == "__main__":
    main()
