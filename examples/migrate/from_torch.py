"""Move a training run from PyTorch DDP to JAX and back, and compare it with one that never moved.

    python examples/migrate/from_torch.py --out out/migration

Each run trains in PyTorch DDP with powerSGD_hook (2 processes over gloo), is saved, goes on in JAX
on 2 devices, is saved, and goes on in PyTorch. Beside it the same run stays in PyTorch throughout.
Prints the largest relative difference of the losses after each move and draws them.
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
from models import FLAX_MODELS, flax_batch, flax_loss
from plan import CASES, MOVES, STEPS, WORLD, Case
from rich.console import Console
from rich.table import Table

import torch_bridge

sys.path.append(str(pathlib.Path(__file__).parents[1] / "language_model"))
from data_parallel import ShardMap, local_devices, new_state

TOLERANCE = 1e-4


def torch_job(phase: str, folder: pathlib.Path) -> dict[str, np.ndarray]:
    """Run both ranks of the torch half; the mean loss per step of every case."""
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
    losses = [json.loads((folder / f"{phase}.{rank}.json").read_text()) for rank in range(WORLD)]
    return {name: np.mean([each[name] for each in losses], axis=0) for name in losses[0]}


def continue_in_jax(case: Case, folder: pathlib.Path, devices: Sequence[Any]) -> np.ndarray:
    """From the first move to the second; leaves a checkpoint for torch and returns the losses."""
    checkpoint = torch_bridge.load(folder / f"{case.name}.to_jax.pt")
    module = FLAX_MODELS[case.model]()
    like = jax.eval_shape(module.init, jax.random.key(0), flax_batch(case.model, 0, 1)["x"])[
        "params"
    ]

    params, tx, opt_state, _ = torch_bridge.to_flax(checkpoint, like)
    state = new_state(module, params, tx).replace(opt_state=opt_state)
    loss_fn: Any = partial(flax_loss, module)
    parallel = ShardMap(loss_fn, devices)
    state = parallel.place(state)
    losses = []
    for step in range(*MOVES):
        data: Any = flax_batch(case.model, step, WORLD)
        state, loss = parallel.train(state, data)
        losses.append(float(np.mean(loss)))
    state, _ = parallel.consolidated(state)
    path = folder / f"{case.name}.to_torch.pt"
    torch_bridge.to_torch(state.params, state.opt_state, like=checkpoint, path=path)
    return np.array(losses)


def compare(
    cases: Sequence[Case], folder: pathlib.Path, devices: Sequence[Any], console: Console
) -> dict[str, dict[str, np.ndarray]]:
    """Run everything; per case the losses of the run that stayed and of the one that moved."""
    folder.mkdir(parents=True, exist_ok=True)
    # What an earlier run left, and nothing else that may be there.
    left = [f"{case.name}{end}" for case in CASES for end in ("", ".to_jax.pt", ".to_torch.pt")]
    for phase in ("FIRST", "LAST"):
        left += [f"{phase}.store", *(f"{phase}.{rank}.json" for rank in range(WORLD))]
    for name in left:
        (folder / name).unlink(missing_ok=True)
    for case in cases:
        (folder / case.name).touch()
    console.print(f"PyTorch, {WORLD} processes: {len(cases)} runs of {STEPS} steps")
    stayed = torch_job("FIRST", folder)
    console.print(f"JAX, {WORLD} devices: steps {MOVES[0]} to {MOVES[1]}")
    middle = {case.name: continue_in_jax(case, folder, devices) for case in cases}
    console.print(f"PyTorch again: steps {MOVES[1]} to {STEPS}")
    last = torch_job("LAST", folder)
    return {
        case.name: {
            "stayed": stayed[case.name],
            "moved": np.concatenate(
                [stayed[case.name][: MOVES[0]], middle[case.name], last[case.name]]
            ),
        }
        for case in cases
    }


def differences(losses: dict[str, np.ndarray]) -> tuple[float, float]:
    """The largest relative difference of the losses after the first and after the second move."""
    relative = np.abs(losses["moved"] - losses["stayed"]) / np.abs(losses["stayed"])
    return float(relative[MOVES[0] : MOVES[1]].max()), float(relative[MOVES[1] :].max())


def show(runs: dict[str, dict[str, np.ndarray]], console: Console) -> bool:
    """Print the table; whether every run stayed within the tolerance."""
    table = Table(title="First loss, last losses, and how far they are apart after each move")
    for title in ("run", "first", "stayed", "moved", "in JAX", "back"):
        table.add_column(title, justify="left" if title == "run" else "right", no_wrap=True)
    good = True
    for name, losses in runs.items():
        in_jax, back = differences(losses)
        good &= max(in_jax, back) < TOLERANCE
        ends = (losses["stayed"][0], losses["stayed"][-1], losses["moved"][-1])
        table.add_row(name, *(f"{loss:.6f}" for loss in ends), f"{in_jax:.1e}", f"{back:.1e}")
    console.print(table)
    verdict = "all" if good else "NOT all"
    console.print(f"largest relative differences, {verdict} below {TOLERANCE:.0e}")
    return good


def plot(runs: dict[str, dict[str, np.ndarray]], path: pathlib.Path) -> None:
    """Draws the losses of every second run, those of the higher rank: more would be too small."""
    import pictures

    shown = list(runs.items())[1::2] or list(runs.items())
    figure, axes = pictures.panels(len(shown), 3 * len(shown), 2.9, share_y=False)
    for axis, (name, losses) in zip(axes, shown, strict=True):
        axis.axvspan(*MOVES, color=pictures.BLUE, alpha=0.08, linewidth=0)
        axis.text(
            sum(MOVES) / 2, 0.97, "in JAX", transform=axis.get_xaxis_transform(), ha="center",
            va="top", color=pictures.BLUE, fontsize=8.5,
        )  # fmt: skip
        axis.plot(losses["stayed"], color=pictures.SKY, alpha=0.5, linewidth=5)
        axis.plot(losses["moved"], color=pictures.INK, linewidth=1.2)
        axis.set(xlabel="step", title=name)
    axes[0].set_ylabel("loss")
    for y, said, colour in (
        (0.16, "stayed in PyTorch", pictures.SKY),
        (0.05, "moved", pictures.INK),
    ):
        axes[0].text(0.04, y, said, transform=axes[0].transAxes, color=colour, fontsize=8.5)
    pictures.save(figure, path)


def main() -> int:
    """Run, compare, print and draw."""
    parser = argparse.ArgumentParser(description="Move a run from PyTorch DDP to JAX and back.")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out/migration"))
    parser.add_argument("--only", help="run the cases whose name contains this text")
    arguments = parser.parse_args()
    cases = [case for case in CASES if not arguments.only or arguments.only in case.name]
    if not cases:
        parser.error(f"--only: no case among {', '.join(case.name for case in CASES)}")
    console, folder = Console(), arguments.out.absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {arguments.out} cannot be a directory ({error.strerror})")
    runs = compare(cases, folder, local_devices(WORLD), console)
    good = show(runs, console)
    plot(runs, folder / "losses.png")
    table = {
        name: {key: value.tolist() for key, value in losses.items()}
        for name, losses in runs.items()
    }
    (folder / "losses.json").write_text(json.dumps(table))
    console.print(f"wrote {arguments.out / 'losses.png'} and losses.json")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
