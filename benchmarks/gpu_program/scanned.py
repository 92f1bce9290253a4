"""What travels behind the backward pass of layers in a scan, on GPUs that are not there.

    python -m benchmarks.gpu_program.scanned
    python -m benchmarks.gpu_program.scanned --alternating --link 10gbit

Compiles a training step of GPT-2 small whose blocks are in `jaxcomp.scan_layers`, for eight GPUs,
and says of every all-reduce in the backward scan how many kernels of a layer's backward pass run
between its start and its end; with a link, once more as XLA schedules it after a profile taken over
that link. Installs nothing; see `python -m benchmarks.gpu_program --help`.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import jax
import optax

import jaxcomp
from benchmarks.common.arguments import command_line
from benchmarks.gpu_program.count import FREE
from benchmarks.gpu_program.hlo import Computation, Instruction, Module, parse
from benchmarks.gpu_program.profile import profile
from benchmarks.gpu_program.schedule import (
    DEVICES,
    Schedule,
    add_options,
    beside,
    checked_options,
    informed,
)
from benchmarks.gpu_program.target import AXIS
from benchmarks.gpu_program.training_step import block, loss_around, lower, parameters

# Stands in the names of what `jaxcomp.scan_layers` computes the gradient of a layer with.
BACKWARD = "layer_backward"


def stacked(blocks: int) -> Any:
    """Shapes of the model of `training_step` with its blocks in one part."""
    tree = parameters(1)
    one = tree.pop("block_0")
    layers = jax.tree.map(lambda x: jax.ShapeDtypeStruct((blocks, *x.shape), x.dtype), one)
    return tree | {"layers": layers}


def lowered(reducer: jaxcomp.Reducer, blocks: int, mesh: jax.sharding.Mesh) -> Any:
    """The step with SGD, parameters and state donated."""
    layers = jaxcomp.scan_layers(block, reducer)

    def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
        return loss_around(lambda x: layers(params["layers"], x), params, tokens)

    value_and_grad, optimizer = layers.value_and_grad(loss_fn, "layers"), optax.sgd(0.1)

    def step(params: Any, state: Any, tokens: jax.Array) -> Any:
        (_, grads), state = value_and_grad(state, params, tokens)
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
        return optax.apply_updates(params, updates), state

    params = stacked(blocks)
    return lower(step, params, jax.eval_shape(value_and_grad.init, params), mesh)


def lowered_behind(reducer: jaxcomp.Reducer, blocks: int, mesh: jax.sharding.Mesh) -> Any:
    """The same with `jax.lax.scan` and `jax.checkpoint`, and the reducer behind them."""
    params, tx = stacked(blocks), optax.chain(reducer, optax.sgd(0.1))
    saved = jax.checkpoint(block)

    def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
        def layers(x: jax.Array) -> jax.Array:
            return jax.lax.scan(lambda x, p: (saved(p, x), None), x, params["layers"])[0]

        return loss_around(layers, params, tokens)

    def step(params: Any, state: Any, tokens: jax.Array) -> Any:
        _, grads = jaxcomp.local_value_and_grad(loss_fn, AXIS)(params, tokens)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return lower(step, params, jax.eval_shape(tx.init, params), mesh)


def read(module: Module) -> list[Schedule]:
    """The all-reduces of each backward scan, and the kernels of a layer's backward pass in it.

    Raises:
      ValueError: If there is no such scan.
    """
    return [beside(body, _is_backward) for body in backward_scans(module)]


def backward_scans(module: Module) -> list[Computation]:
    """The bodies of the loops with a layer's backward pass and an all-reduce.

    Raises:
      ValueError: If there is none.
    """
    bodies = sorted({name for x in module.computations.values() for name in _bodies(x)})
    found = [module.computations[name] for name in bodies]
    found = [x for x in found if (y := beside(x, _is_backward)).transfers and y.backward]
    if not found:
        raise ValueError("No loop of the program holds a backward pass and an all-reduce.")
    return found


def _bodies(computation: Computation) -> Iterator[str]:
    for x in computation.instructions:
        if x.opcode == "while":
            yield from x.called("body")


def _is_backward(x: Instruction) -> bool:
    """Whether it is a kernel of what computes the gradient of one layer."""
    return x.opcode not in FREE and BACKWARD in x.attributes


def options(argv: list[str] | None) -> argparse.Namespace:
    """The arguments, checked, and with them the mesh."""
    parser = command_line("benchmarks.gpu_program.scanned", __doc__)
    add = parser.add_argument
    add("--alternating", action="store_true", help="one-sided steps")
    add("--behind", action="store_true", help="a plain scan, with the reducer behind it")
    add_options(parser)
    return checked_options(parser, argv, blocks=3, rank=1)


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    given = options(argv)
    reducer = jaxcomp.powersgd(
        given.rank,
        axis_name=AXIS,
        start_step=0,
        alternating=given.alternating,
        stacked="layers" if given.behind else (),
        gpu_kernels=given.gpu_kernels,
    )
    make = lowered_behind if given.behind else lowered
    program = make(reducer, given.blocks, given.mesh)
    compiled = program.compile()
    module = parse(compiled.as_text())
    print(f"jaxlib {version('jaxlib')}, {given.target}, {reducer!r}")
    print(f"{compiled.memory_analysis().temp_size_in_bytes / 2**20:,.0f} MiB of temporary memory")
    if given.behind:
        print(f"{len(beside(module.entry, _is_backward).transfers)} all-reduces behind the scan")
        return
    _show(read(module))
    if given.link is not None:
        print(f"\nAfter a profile over {given.link.shown} links:")
        text = "".join(
            profile(
                dataclasses.replace(module, entry=computation),
                given.target,
                DEVICES,
                given.link.bits_per_second,
                given.latency,
            )
            for computation in (module.entry, *backward_scans(module))
        )
        _show(read(parse(informed(program, text).as_text())))


def _show(schedules: list[Schedule]) -> None:
    for schedule in schedules:
        print(f"\nOne turn of the backward scan: {schedule}")


if __name__ == "__main__":
    main()
