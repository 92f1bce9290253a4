"""Which kernels XLA schedules beside the collectives of a round of Streaming DiLoCo, for GPUs.

    python -m benchmarks.gpu_program.overlap
    python -m benchmarks.gpu_program.overlap --sync-every 32 --fragments 4 --delay 7 --rank 4

Compiles `jaxcomp.local_sgd_round` around ten layers of 1000 x 1000 with Adam, DiLoCo outside, for
eight GPUs on a machine without one, and reads the schedule: the kernels between the start and the
done of each collective. They say what can be hidden, and nothing of time.

Installs nothing. It needs an environment of its own, 5.6 GB: pip install "jax[cuda12]" optax.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxcomp
from benchmarks.common.arguments import at_least, command_line
from benchmarks.gpu_program.count import beside_collectives, count
from benchmarks.gpu_program.hlo import parse
from benchmarks.gpu_program.target import (
    AXIS,
    NEEDED,
    TARGETS,
    compiler_found,
    mesh_of,
    placed,
)
from benchmarks.overhead.trees import TREES


def options(argv: list[str] | None) -> argparse.Namespace:
    """The arguments, checked."""
    parser = command_line("benchmarks.gpu_program.overlap", __doc__)
    add = parser.add_argument
    add("--sync-every", type=int, default=8, metavar="H", help="(default: %(default)s)")
    add("--fragments", type=int, default=1, metavar="N", help="(default: %(default)s)")
    add("--delay", type=int, default=3, metavar="TAU", help="(default: %(default)s)")
    add("--rank", type=int, metavar="R", help="of PowerSGD; without it the average is exact")
    add("--target", choices=TARGETS, default="h200", help="(default: %(default)s)")
    add("--devices", type=int, default=8, metavar="N", help="(default: %(default)s)")
    given = parser.parse_args(argv)
    try:
        at_least("--devices", given.devices, 2)
        make_round(given)
    except ValueError as error:
        parser.error(str(error))
    return given


def make_round(given: argparse.Namespace) -> jaxcomp.LocalSGDRound:
    """The round that is compiled."""
    optimizer = optax.adam(1e-3)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for kernel in params.values():
            x = jax.nn.relu(x @ kernel)
        return jnp.mean(x**2)

    def step(params: Any, state: Any, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    reducer = given.rank and jaxcomp.powersgd(given.rank, axis_name=AXIS, start_step=0)
    return jaxcomp.local_sgd_round(
        step,
        sync_every=given.sync_every,
        axis_name=AXIS,
        inner_init=optimizer.init,
        outer=optax.sgd(0.7, momentum=0.9, nesterov=True),
        reducer=reducer or None,
        fragments=given.fragments,
        fragment_sync_delay=given.delay,
    )


def scheduled(given: argparse.Namespace) -> str:
    """The optimised program of a round, in the order in which it runs."""
    mesh, run = mesh_of(given.target, given.devices), make_round(given)
    params = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in TREES["mlp"]().items()
    }
    state = jax.eval_shape(run.init, params)
    specs = jaxcomp.state_specs(state, AXIS)

    mapped = jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(jax.P(), specs, jax.P(None, AXIS)),
        out_specs=(jax.P(), specs, jax.P(AXIS)),
    )
    rows = jax.ShapeDtypeStruct((given.sync_every, 64, 1000), jnp.float32)
    arguments = (
        placed(params, jax.P(), mesh),
        placed(state, specs, mesh),
        placed(rows, jax.P(None, AXIS), mesh),
    )
    return jax.jit(mapped).lower(*arguments).compile().as_text() or ""


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    given = options(argv)
    if not compiler_found():
        print(f"gpu_program.overlap: {NEEDED}", file=sys.stderr)
        return 1
    module = parse(scheduled(given))
    print(f"{make_round(given)}\n{count(module).kernels:.0f} kernels in the round")
    for kind, kernels in beside_collectives(module):
        print(f"{kind}: {kernels:.0f} kernels between its start and its done")
    return 0


if __name__ == "__main__":
    sys.exit(main())
