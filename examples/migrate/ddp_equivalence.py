"""Compares three ways to the same weights: n devices, accumulation on one device, torch's DDP.

All three read the same samples in the same order. Device k of n reads every n-th sample of a
permutation, as with torch's DistributedSampler. The single device reads the batches of all devices
one after the other, and updates after n of them. The program prints the final weights side by side,
without torch's column if torch is not installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxcomp
import torch_bridge

AXIS = "data"
SAMPLES, FEATURES, HIDDEN, CLASSES = 500, 20, 32, 5
BATCH, EPOCHS, SEED = 16, 3, 0
RATE, MOMENTUM = 0.1, 0.9
# The three ways add the same numbers in different orders. A control, whose first weights differ by
# one rounding, shows how far such runs diverge. The three ways differ by rounding in every step.
TIMES_CONTROL = 10

Weights = dict[str, np.ndarray]


def make_data() -> tuple[np.ndarray, np.ndarray]:
    """Draws samples around class centres, float32 (n, features), and their classes, int32 (n,)."""
    rng = np.random.default_rng(SEED)
    classes = rng.integers(0, CLASSES, SAMPLES).astype(np.int32)
    centres = rng.normal(size=(CLASSES, FEATURES))
    return (centres[classes] + rng.normal(size=(SAMPLES, FEATURES))).astype(np.float32), classes


def initial_weights() -> Weights:
    """Draws the weights of two dense layers, in JAX's layout: kernels are (in, out)."""
    rng = np.random.default_rng(SEED + 1)
    shapes = {
        "hidden/kernel": (FEATURES, HIDDEN),
        "hidden/bias": (HIDDEN,),
        "output/kernel": (HIDDEN, CLASSES),
        "output/bias": (CLASSES,),
    }
    return {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}


def loss_fn(weights: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns the mean cross-entropy."""
    hidden = jnp.tanh(x @ weights["hidden/kernel"] + weights["hidden/bias"])
    logits = hidden @ weights["output/kernel"] + weights["output/bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def batches(n: int) -> Iterator[list[np.ndarray]]:
    """Yields, for every step, the sample indices of the batch of each of n devices."""
    for epoch in range(EPOCHS):
        shards = [
            torch_bridge.sharded_indices(SAMPLES, n, k, seed=SEED, epoch=epoch) for k in range(n)
        ]
        for start in range(0, len(shards[0]), BATCH):
            yield [shard[start : start + BATCH] for shard in shards]


def one_rounding_apart(weights: Weights) -> Weights:
    """Moves every weight to the next number above or below it."""
    rng = np.random.default_rng(SEED)
    moved = {}
    for name, values in weights.items():
        up = rng.random(values.shape) < 0.5
        moved[name] = np.nextafter(values, np.where(up, np.float32(np.inf), np.float32(-np.inf)))
    return moved


def on_devices(n: int, weights: Any = None) -> Weights:
    """Trains data parallel: the gradients of n devices are averaged in every step."""
    x, y = make_data()
    tx = optax.chain(jaxcomp.allreduce(axis_name=AXIS), optax.sgd(RATE, MOMENTUM))
    mesh = jax.make_mesh((n,), (AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:n])

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(P(), P(), P(AXIS), P(AXIS)), out_specs=(P(), P()))
    def step(weights: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
        _, grads = jaxcomp.local_value_and_grad(loss_fn, AXIS)(weights, x, y)
        updates, state = tx.update(grads, state, weights)
        return optax.apply_updates(weights, updates), state

    weights = jax.tree.map(jnp.asarray, initial_weights() if weights is None else weights)
    state = tx.init(weights)
    for shards in batches(n):
        together = np.concatenate(shards)  # shard_map gives each device its own part of it
        weights, state = step(weights, state, x[together], y[together])
    return jax.device_get(weights)


def accumulating(n: int) -> Weights:
    """Trains on one device: n batches, one after the other, make one update."""
    x, y = make_data()
    tx = jaxcomp.accumulate(optax.sgd(RATE, MOMENTUM), every_k=n)

    @jax.jit
    def step(weights: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
        updates, state = tx.update(jax.grad(loss_fn)(weights, x, y), state, weights)
        return optax.apply_updates(weights, updates), state

    weights: Any = jax.tree.map(jnp.asarray, initial_weights())
    state = tx.init(weights)
    for shards in batches(n):
        for own in shards:
            weights, state = step(weights, state, x[own], y[own])
    return jax.device_get(weights)


def torch_process(rank: int, n: int, folder: Path) -> None:
    """Runs one process of the torch run; the first writes the weights to `folder`."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=n)
    model = torch.nn.Sequential(
        torch.nn.Linear(FEATURES, HIDDEN), torch.nn.Tanh(), torch.nn.Linear(HIDDEN, CLASSES)
    )
    start = initial_weights()
    for parameter, value in zip(model.parameters(), start.values(), strict=True):
        parameter.data.copy_(torch.from_numpy(value.T))  # torch's kernels are (out, in)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=RATE, momentum=MOMENTUM)
    x, y = make_data()
    data = TensorDataset(torch.from_numpy(x), torch.from_numpy(y).long())
    sampler = DistributedSampler(data, seed=SEED)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for inputs, classes in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(ddp(inputs), classes).backward()
            optimizer.step()
    if rank == 0:
        for name, parameter in zip(start, model.parameters(), strict=True):
            start[name] = parameter.detach().numpy().T
        np.savez(folder / "weights.npz", **start)  # pyright: ignore[reportArgumentType]
    dist.barrier()
    dist.destroy_process_group()


def in_torch(n: int) -> Weights:
    """Trains the same model with DistributedDataParallel, in n processes over gloo."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--devices", str(n), "--torch-folder", folder]
        processes = [subprocess.Popen([*command, "--torch-rank", str(rank)]) for rank in range(n)]
        try:
            for process in processes:
                if process.wait(timeout=300):
                    sys.exit("a torch process failed")
        finally:
            for process in processes:
                process.kill()
        return dict(np.load(Path(folder) / "weights.npz"))


def largest_difference(weights: Weights, others: Weights) -> float:
    """Returns the largest difference of two weights, in units of the largest weight."""
    scale = max(np.abs(leaf).max() for leaf in others.values())
    differences = [np.abs(weights[leaf] - others[leaf]).max() for leaf in others]
    return float(max(differences) / scale)


def report(columns: dict[str, Weights], control: Weights) -> bool:
    """Prints the first weights of each leaf side by side. Returns whether all agree."""
    first = next(iter(columns.values()))
    print(f"{'three weights of':<18}" + "".join(f"{name:>34}" for name in columns))
    for leaf in first:
        line = f"{leaf:<18}"
        for weights in columns.values():
            numbers = "{:+11.7f}{:+11.7f}{:+11.7f}".format(*weights[leaf].flat)
            line += f"{numbers:>34}"
        print(line)
    worst = 0.0
    for name, weights in list(columns.items())[1:]:
        difference = largest_difference(weights, first)
        worst = max(worst, difference)
        print(f"largest difference to {name}: {difference:.1e} of the largest weight")
    apart = largest_difference(control, first)
    print(f"largest difference to a run that begins one rounding apart: {apart:.1e}")
    return worst <= TIMES_CONTROL * apart


def main() -> int:
    """Runs the command line; returns the exit code."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument(
        "--devices", type=int, default=4, help="number n of devices (default: %(default)s)"
    )
    parser.add_argument("--torch-rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--torch-folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.devices < 1:
        parser.error("--devices must be positive")
    if arguments.torch_rank is not None:
        torch_process(arguments.torch_rank, arguments.devices, arguments.torch_folder)
        return 0
    jax.config.update("jax_num_cpu_devices", arguments.devices)
    if len(jax.devices()) < arguments.devices:
        parser.error(f"--devices {arguments.devices}, and only {len(jax.devices())} were found")

    n = arguments.devices
    columns = {f"{n} devices": on_devices(n), f"1 device, {n} batches a step": accumulating(n)}
    if importlib.util.find_spec("torch"):
        columns[f"torch DDP, {n} processes"] = in_torch(n)
    print(f"{SAMPLES} samples, {EPOCHS} epochs, {len(list(batches(n)))} updates\n")
    control = on_devices(n, one_rounding_apart(initial_weights()))
    return 0 if report(columns, control) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("ddp_equivalence.py: interrupted")
