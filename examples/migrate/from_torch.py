"""Moves a training run from PyTorch DDP to JAX and back, and compares it with one that stayed.

    python examples/migrate/from_torch.py --out out/migration

Each run trains in PyTorch DDP with powerSGD_hook (2 processes over gloo), continues in JAX on 2
devices, and then continues in PyTorch again. The same run also stays in PyTorch for all steps. The
program prints the largest relative difference of the losses after each move, and that of a control.
The control is the run that stays, with weights moved by one rounding before every step after the
first move.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from plan import CASES, MOVES, STEPS, WORLD, Case

import jaxcomp
import torch_bridge

try:
    from models import FLAX_MODELS, flax_batch, flax_loss
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    sys.exit(
        'from_torch.py: this needs torch, which is not installed: pip install "jaxcomp[torch]"'
    )

# A run that moves has other rounding in every operation, the control once a step.
TIMES_CONTROL = 10


def torch_job(phase: str, folder: pathlib.Path) -> None:
    """Runs both ranks of the PyTorch part."""
    job = pathlib.Path(__file__).with_name("torch_job.py")
    ranks = [
        subprocess.Popen([sys.executable, str(job), phase, str(rank), str(folder)])
        for rank in range(WORLD)
    ]
    try:
        codes = [process.wait(timeout=900) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    if any(codes):
        raise SystemExit(f"error: the torch job {phase} failed with exit codes {codes}")


def mean_losses(run: str, folder: pathlib.Path) -> dict[str, np.ndarray]:
    """Reads the losses of all ranks; returns the mean loss of each step for every case."""
    by_rank = []
    for rank in range(WORLD):
        losses = json.loads((folder / f"{run}.{rank}.json").read_text())
        by_rank.append({name: np.array(values) for name, values in losses.items()})
    return jax.tree.map(lambda *ranks: np.mean(ranks, axis=0), *by_rank)


def continue_in_jax(case: Case, folder: pathlib.Path, mesh: Mesh) -> np.ndarray:
    """Trains from the first move to the second; writes a checkpoint and returns the losses."""
    checkpoint = torch_bridge.load(folder / f"{case.name}.to_jax.pt")
    module = FLAX_MODELS[case.model]()
    x = flax_batch(case.model, 0, 1)["x"]
    like = jax.eval_shape(module.init, jax.random.key(0), x)["params"]

    def apply(params: Any, x: Any) -> Any:
        return module.apply({"params": params}, x)

    run = torch_bridge.to_flax(checkpoint, like, apply=apply)
    params, tx, opt_state, _ = run
    loss_fn: Any = partial(flax_loss, module)
    # `tx` begins with the reducer, and `value_and_grad` returns its updates, not gradients.
    value_and_update = jaxcomp.value_and_grad(loss_fn, tx, mesh=mesh, axis_name="data")
    params = jax.device_put(params, NamedSharding(mesh, P()))
    state = value_and_update.restore(opt_state, params)

    @jax.jit
    def train(params: Any, state: Any, data: Any) -> Any:
        (loss, updates), state = value_and_update(state, params, data)
        return optax.apply_updates(params, updates), state, loss

    losses = []
    for step in range(*MOVES):
        params, state, loss = train(params, state, flax_batch(case.model, step, WORLD))
        losses.append(float(loss))
    params, state = jax.device_get((params, jaxcomp.consolidate(state)))
    path = folder / f"{case.name}.to_torch.pt"
    torch_bridge.to_torch(params, state, like=run, path=path)
    return np.array(losses)


def compare(
    cases: Sequence[Case], folder: pathlib.Path, mesh: Mesh
) -> dict[str, dict[str, np.ndarray]]:
    """Runs everything; returns the losses that stayed, that moved, and those of the control."""
    folder.mkdir(parents=True, exist_ok=True)
    for case in CASES:  # those of an earlier run
        (folder / case.name).unlink(missing_ok=True)
    for phase in ("FIRST", "LAST"):  # each runs in all processes
        (folder / f"{phase}.store").unlink(missing_ok=True)
    for case in cases:
        (folder / case.name).touch()
    print(f"PyTorch, {WORLD} processes: {len(cases)} runs of {STEPS} steps", flush=True)
    torch_job("FIRST", folder)
    stayed = mean_losses("FIRST", folder)
    control = mean_losses("CONTROL", folder)
    print(f"JAX, {WORLD} devices: steps {MOVES[0]} to {MOVES[1]}")
    middle = {case.name: continue_in_jax(case, folder, mesh) for case in cases}
    print(f"PyTorch again: steps {MOVES[1]} to {STEPS}")
    torch_job("LAST", folder)
    last = mean_losses("LAST", folder)
    runs = {}
    for name in middle:
        moved = np.concatenate([stayed[name][: MOVES[0]], middle[name], last[name]])
        runs[name] = {"stayed": stayed[name], "control": control[name], "moved": moved}
    return runs


def differences(losses: dict[str, np.ndarray], run: str) -> tuple[float, float]:
    """Returns the largest relative difference of losses after the first and the second move."""
    relative = np.abs(losses[run] - losses["stayed"]) / np.abs(losses["stayed"])
    return float(relative[MOVES[0] : MOVES[1]].max()), float(relative[MOVES[1] :].max())


def show(runs: dict[str, dict[str, np.ndarray]]) -> bool:
    """Prints the table; returns whether each run that moved is as close as its control."""
    print("First loss, last losses, and their largest difference after each move")
    names = ("first", "stayed", "moved", "in JAX", "control", "back", "control")
    print(f"{'':24}" + "".join(f"{name:>10}" for name in names))
    good = True
    for name, losses in runs.items():
        in_jax, back = differences(losses, "moved")
        control, later_control = differences(losses, "control")
        # A loss is itself rounded.
        unit = float(np.finfo(np.float32).eps)
        good &= in_jax <= TIMES_CONTROL * max(control, unit)
        good &= back <= TIMES_CONTROL * max(later_control, unit)
        ends = (losses["stayed"][0], losses["stayed"][-1], losses["moved"][-1])
        apart = (in_jax, control, back, later_control)
        numbers = "".join(f"{x:10.6f}" for x in ends) + "".join(f"{x:10.1e}" for x in apart)
        print(f"{name:24}{numbers}")
    verdict = "all" if good else "NOT all"
    print(f"{verdict} within {TIMES_CONTROL} times the difference of a run one rounding apart")
    return good


def main() -> int:
    """Runs, compares and prints; returns the exit code."""
    parser = argparse.ArgumentParser(description="Moves a run from PyTorch DDP to JAX and back.")
    out = pathlib.Path("out/migration")
    parser.add_argument("--out", type=pathlib.Path, default=out, help="default: %(default)s")
    parser.add_argument("--only", help="run the cases whose name contains this text")
    arguments = parser.parse_args()
    cases = [case for case in CASES if not arguments.only or arguments.only in case.name]
    if not cases:
        parser.error(f"--only: no case among {', '.join(case.name for case in CASES)}")
    jax.config.update("jax_num_cpu_devices", WORLD)
    folder = arguments.out.absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {arguments.out} cannot be a directory ({error.strerror})")
    mesh = jax.make_mesh((WORLD,), ("data",), devices=jax.devices()[:WORLD])
    runs = compare(cases, folder, mesh)
    good = show(runs)
    table = jax.tree.map(np.ndarray.tolist, runs)
    (folder / "losses.json").write_text(json.dumps(table))
    print(f"wrote {arguments.out / 'losses.json'}")
    return 0 if good else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("from_torch.py: interrupted")
