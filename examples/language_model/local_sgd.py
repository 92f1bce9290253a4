"""Compares local SGD and DiLoCo with data parallel: held-out loss and bytes.

It trains the language model of train.py, at a size for a CPU, six times on the same data. Your own
training script needs two parts of it: `local_step`, an ordinary training step for one device, and
`STRATEGIES`, which says how replicas synchronise.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import lm
import numpy as np
import optax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from train import Parser, local_devices
from training import AXIS, UsageError, adamw

import jaxcomp

HEADS = 4
Tree = Any
# (parameters, state, batches of all steps of the round) -> (parameters, state, losses)
Round = Callable[[Tree, Tree, jax.Array], tuple[Tree, Tree, jax.Array]]


@dataclass(frozen=True)
class Config:
    """Sizes of a run."""

    replicas: int = 4
    steps: int = 512
    batch_size: int = 32  # sequences in a step, over all replicas
    learning_rate: float = 3e-3  # the highest, of AdamW
    layers: int = 2
    width: int = 64
    context: int = 64
    eval_every: int = 64  # steps, a multiple of 32
    eval_sequences: int = 512
    seed: int = 0


class Phase(NamedTuple):
    """A part of a run; replicas synchronise in one way during it."""

    steps: int  # in one call of `run`
    run: Round
    begin: Callable[[Tree, Tree], Tree]  # (parameters, optimizer state) -> state
    bytes_per_step: float


class Strategy(NamedTuple):
    """The name in the table, and the phases of a run, each with its first step."""

    name: str
    phases: Callable[[Config, Tree], list[tuple[int, Phase]]]


def local_step(
    model: lm.Transformer, optimizer: Any, params: Tree, state: Tree, batch: jax.Array
) -> tuple[Tree, Tree, jax.Array]:
    """Takes an ordinary training step on one device."""
    loss, grads = jax.value_and_grad(partial(lm.loss_fn, model))(params, batch)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


def model_of(config: Config) -> lm.Transformer:
    """Makes the language model."""
    return lm.Transformer(lm.ModelConfig(config.layers, config.width, HEADS, config.context))


def data_parallel(config: Config, params: Tree, steps: int = 8) -> Phase:
    """Averages gradients in every step; a call takes several steps, as in the other phases."""
    optimizer = adamw(config.learning_rate, config.steps)
    mean = jaxcomp.allreduce(axis_name=AXIS)
    value_and_grad = jaxcomp.local_value_and_grad(partial(lm.loss_fn, model_of(config)), AXIS)

    def run(params: Tree, state: Tree, batches: jax.Array) -> tuple[Tree, Tree, jax.Array]:
        def one(carry: Any, batch: jax.Array) -> Any:
            params, state = carry
            loss, grads = value_and_grad(params, batch)
            grads, _ = mean.update(grads, optax.EmptyState())
            updates, state = optimizer.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), loss

        (params, state), losses = jax.lax.scan(one, (params, state), batches)
        return params, state, losses

    return Phase(steps, run, lambda params, state: state, mean.bytes(params).bytes_after)


def local(
    config: Config, params: Tree, steps: int, rank: int | None = None, **options: Any
) -> Phase:
    """Takes local steps, then averages once; `options` are those of `jaxcomp.local_sgd_round`."""
    optimizer = adamw(config.learning_rate, config.steps)
    if rank is not None:
        options["reducer"] = jaxcomp.powersgd(rank, axis_name=AXIS, start_step=0)
    step = partial(local_step, model_of(config), optimizer)
    run = jaxcomp.local_sgd_round(step, sync_every=steps, axis_name=AXIS, **options)
    return Phase(steps, run, run.init, run.bytes(params).bytes_after)


def post_local(config: Config, params: Tree) -> list[tuple[int, Phase]]:
    """Trains data parallel for the first quarter of the steps, then with local SGD."""
    start = config.steps // 4 // 8 * 8
    return [(0, data_parallel(config, params)), (start, local(config, params, 8))]


NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)  # DiLoCo's
# The residual arrives some rounds late, and a high momentum overshoots with it.
PLAIN = optax.sgd(0.7)

STRATEGIES = (
    Strategy("data parallel", lambda c, p: [(0, data_parallel(c, p))]),
    Strategy("local SGD, H=8", lambda c, p: [(0, local(c, p, 8))]),
    Strategy("post-local SGD, H=8", post_local),
    Strategy("DiLoCo, H=32", lambda c, p: [(0, local(c, p, 32, outer=NESTEROV))]),
    Strategy("DiLoCo, H=32, rank 4", lambda c, p: [(0, local(c, p, 32, rank=4, outer=NESTEROV))]),
    Strategy("rank 4, outer SGD", lambda c, p: [(0, local(c, p, 32, rank=4, outer=PLAIN))]),
)


class Point(NamedTuple):
    """The results of one evaluation."""

    step: int
    held_out: float  # nats per byte
    bytes_sent: float  # by each replica, since step 0


def train(strategy: Strategy, config: Config, corpus: lm.Corpus, mesh: Mesh) -> Iterator[Point]:
    """Trains once, from the same parameters on the same data as every other strategy."""
    params = lm.init_params(model_of(config), config.seed)
    state: Tree = adamw(config.learning_rate, config.steps).init(params)
    evaluate = jax.jit(partial(lm.loss_fn, model_of(config)))
    held_out = lm.held_out_batches(
        corpus.held_out, count=4, size=config.eval_sequences // 4, context=config.context
    )
    draw = partial(
        lm.training_batch,
        corpus.train,
        seed=config.seed,
        size=config.batch_size,
        context=config.context,
    )
    phases = strategy.phases(config, params)
    sent = 0.0
    ends = [first for first, _ in phases[1:]]
    ends.append(config.steps)
    for (first, phase), end in zip(phases, ends, strict=True):
        state = phase.begin(params, state)
        specs = jaxcomp.state_specs(state, AXIS)
        state = jaxcomp.shard_state(state, mesh, AXIS)
        mapped = jax.jit(
            jax.shard_map(
                lambda p, s, b, run=phase.run: run(p, s, b)[:2],
                mesh=mesh,
                in_specs=(P(), specs, P(None, AXIS)),
                out_specs=(P(), specs),
            )
        )
        for step in range(first, end, phase.steps):
            batches = np.stack([draw(index) for index in range(step, step + phase.steps)])
            params, state = jax.block_until_ready(mapped(params, state, batches))
            sent += phase.bytes_per_step * phase.steps
            done = step + phase.steps
            if done % config.eval_every == 0:
                one = jax.device_get(params)  # the same on every replica between rounds
                loss = float(np.mean([evaluate(one, batch) for batch in held_out]))
                yield Point(done, loss, sent)


def plot(path: Path, runs: dict[str, list[Point]], config: Config) -> None:
    """Draws held-out loss against steps, and against bytes."""
    import pictures  # imports matplotlib, which a run of hours should need only at its end

    colours = (
        pictures.INK,
        pictures.BLUE,
        pictures.SKY,
        pictures.GREEN,
        pictures.ORANGE,
        pictures.PURPLE,
    )
    curves = []
    for (name, points), colour in zip(runs.items(), colours, strict=False):
        steps, held_out, bytes_sent = zip(*points, strict=True)
        curves.append(pictures.Curve(name, "", colour, steps, held_out, bytes_sent))
    pictures.draw(path, curves, config.replicas)


def table(runs: dict[str, list[Point]], config: Config) -> str:
    """Writes the results as a Markdown table."""
    exact = runs[STRATEGIES[0].name][-1]
    lines = ["| | held-out loss | excess | bytes per step | fewer |", "|---|---|---|---|---|"]
    for name, (*_, end) in runs.items():
        excess = end.held_out / exact.held_out - 1
        fewer = exact.bytes_sent / end.bytes_sent
        sent = f"{end.bytes_sent / config.steps:,.0f} | {fewer:.0f}x"
        lines.append(f"| {name} | {end.held_out:.3f} | {excess:+.1%} | {sent} |")
    return "\n".join(lines)


def command_line() -> tuple[Config, Path, list[Any]]:
    """Reads and checks the options: the sizes, the picture, the devices."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in asdict(Config()).items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=type(value), default=value, help="(default: %(default)s)")
    parser.add_argument("--plot", type=Path, default=Path("local_sgd.png"), help="the picture")
    arguments = vars(parser.parse_args())
    picture = arguments.pop("plot")
    config = Config(**arguments)
    for name, value in arguments.items():
        if value < 0 or (value == 0 and name != "seed"):
            parser.error(f"--{name.replace('_', '-')} must be positive")
    if config.width % HEADS:
        parser.error(f"--width must be a multiple of {HEADS}, the heads")
    if picture.is_dir() or not picture.absolute().parent.is_dir():  # check now, not after an hour
        parser.error(f"cannot write to {picture}: give a file in an existing directory")
    if config.steps % 32 or config.eval_every % 32 or config.steps % config.eval_every:
        parser.error("--eval-every must be a multiple of 32, and --steps one of --eval-every")
    if config.batch_size % config.replicas:
        parser.error("--batch-size must be a multiple of --replicas")
    try:
        return config, picture, local_devices(config.replicas)
    except UsageError as error:
        parser.error(str(error))


def main() -> int:
    """Trains with every strategy, prints and draws."""
    config, picture, devices = command_line()
    mesh = Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))
    corpus = lm.load_corpus()
    runs: dict[str, list[Point]] = {}
    for strategy in STRATEGIES:
        began = time.monotonic()
        runs[strategy.name] = []
        for point in train(strategy, config, corpus, mesh):
            runs[strategy.name].append(point)
            print(
                f"{strategy.name:22} step {point.step:5}  held-out {point.held_out:.4f}  "
                f"{point.bytes_sent / 1e6:8.2f} MB  {time.monotonic() - began:5.0f} s",
                flush=True,
            )
    print(f"\n{table(runs, config)}\n")
    plot(picture, runs, config)
    print(f"picture: {picture}, curves: {picture.with_suffix('.json')}")
    curves = {}
    for name, points in runs.items():
        curves[name] = [point._asdict() for point in points]
    content = {"config": asdict(config), "runs": curves}
    picture.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("local_sgd.py: interrupted")
