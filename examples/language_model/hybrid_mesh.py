"""PowerSGD between hosts, sharded weights within each: a 2 x 4 mesh of 8 CPU devices.

The axis "slow" stands for the network between two hosts, and "fast" for the links within one host.
Only "slow" is manual in `jax.shard_map`: jaxcomp compresses over it. The compiler handles "fast",
and shards the weights over it (tensor or FSDP parallelism). With --mode replicated the weights are
not sharded; gradients are then averaged exactly over "fast", and compressed over "slow".
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from lm import ModelConfig, Transformer, init_params, load_corpus, loss_fn, training_batch
from train import Parser

import jaxcomp

SLOW = "slow"
FAST = "fast"
MODES = ("tensor", "fsdp", "replicated")

# Megatron's tensor parallelism: the kernel before the nonlinearity is split by columns, the kernel
# after it by rows, so that each half of a block needs one sum over the fast axis.
BY_COLUMNS = ("qkv", "mlp_in", "output")
BY_ROWS = ("attention_out", "mlp_out")


def weight_spec(mode: str, fast_devices: int, path: Any, leaf: jax.Array) -> P:
    """Returns the PartitionSpec of one parameter over the fast axis."""
    if mode == "fsdp":
        axis = int(np.argmax(leaf.shape))
        if leaf.shape[axis] % fast_devices:
            return P()
        spec: list[str | None] = [None] * leaf.ndim
        spec[axis] = FAST
        return P(*spec)
    names = {key.key for key in path}
    if mode == "tensor" and names & set(BY_COLUMNS):
        return P(None, FAST)
    if mode == "tensor" and names & set(BY_ROWS):
        return P(FAST, None)
    return P()


def sharded_params(model: Transformer, mesh: Mesh, mode: str) -> Any:
    """Makes the initial parameters, sharded over the fast axis and replicated over the slow one."""

    def placed(path: Any, leaf: jax.Array) -> jax.Array:
        spec = weight_spec(mode, mesh.shape[FAST], path, leaf)
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    return jax.tree_util.tree_map_with_path(placed, init_params(model, seed=0))


def make_step(model: Transformer, tx: Any, mesh: Mesh, params: Any, state: Any, mode: str) -> Any:
    """Makes the training step: (params, state, tokens) -> (params, state, losses).

    With sharded weights only the slow axis is manual. With replicated weights both axes are manual,
    and `tx` begins with an exact average over the fast axis.
    """
    axes = (SLOW, FAST) if mode == "replicated" else SLOW

    def step(params: Any, state: Any, tokens: jax.Array) -> Any:
        value_and_grad = jaxcomp.local_value_and_grad(partial(loss_fn, model), axes)
        loss, grads = value_and_grad(params, tokens)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss[None]

    specs = jaxcomp.state_specs(state, SLOW)
    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(P(), specs, P(axes)),
        out_specs=(P(), specs, P(axes)),
        axis_names={SLOW, FAST} if mode == "replicated" else {SLOW},
    )
    # Outputs get the shardings of the inputs. The compiler might choose others, and would then
    # compile the second step again.
    shardings = jax.tree.map(lambda x: x.sharding, (params, state))
    return jax.jit(mapped, donate_argnums=(0, 1), out_shardings=(*shardings, None))


def slow_bytes(compiled: Any, mesh: Mesh) -> int:
    """Adds the bytes of the all-reduces between hosts in a compiled program, per device."""
    total = 0
    for collective in jaxcomp.collectives(compiled, mesh=mesh):
        if SLOW in collective.axes and collective.kind == "all-reduce":
            total += collective.bytes
    return total


def main() -> None:
    """Trains, and prints the bytes and the losses."""
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--mode", choices=MODES, default="tensor", help="default: %(default)s")
    p.add_argument("--rank", type=int, default=4, help="rank; 0 for no compression (default: 4)")
    p.add_argument("--steps", type=int, default=30, help="default: %(default)s")
    p.add_argument("--width", type=int, default=128, help="default: %(default)s")
    arguments = p.parse_args()
    if arguments.rank < 0 or arguments.steps <= 0:
        p.error("--steps must be positive, and --rank positive or 0")
    if arguments.width <= 0 or arguments.width % 16:
        p.error("--width must be a multiple of 16: 4 heads on each of 4 devices")

    jax.config.update("jax_num_cpu_devices", 8)
    if len(jax.devices()) < 8:
        p.error(f"needs 8 devices, found {len(jax.devices())}; JAX_PLATFORMS=cpu makes them")
    automatic = (AxisType.Auto, AxisType.Auto)
    mesh = jax.make_mesh((2, 4), (SLOW, FAST), axis_types=automatic, devices=jax.devices()[:8])
    model = Transformer(ModelConfig(layers=2, width=arguments.width, heads=4, context=64))
    params = sharded_params(model, mesh, arguments.mode)

    reducer = jaxcomp.allreduce(axis_name=SLOW)
    if arguments.rank:
        reducer = jaxcomp.powersgd(arguments.rank, axis_name=SLOW, start_step=0)
    if arguments.mode == "replicated":
        reducer = optax.chain(jaxcomp.allreduce(axis_name=FAST), reducer)
    tx = optax.chain(reducer, optax.clip_by_global_norm(1.0), optax.adamw(3e-3))
    state = jaxcomp.shard_state(tx.init(params), mesh, SLOW)
    step = make_step(model, tx, mesh, params, state, arguments.mode)

    text = load_corpus().train
    rows = NamedSharding(mesh, P((SLOW, FAST)))

    def batch(index: int) -> jax.Array:
        tokens = training_batch(text, index, seed=0, size=16, context=64)
        return jax.device_put(tokens, rows)

    step = step.lower(params, state, batch(0)).compile()
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    sent = slow_bytes(step, mesh)
    print(f"{size:,} parameters; bytes between hosts, per device and step: {sent:,}", flush=True)
    for index in range(arguments.steps):
        params, state, losses = step(params, state, batch(index))
        if index % 10 == 9 or index + 1 == arguments.steps:
            print(f"step {index + 1:4}  loss {np.mean(jax.device_get(losses)):.3f}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("hybrid_mesh.py: interrupted")
