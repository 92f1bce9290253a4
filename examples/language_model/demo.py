"""What compression costs and saves: one small language model, trained with several strategies.

The same model, data and seeds with an exact all-reduce and with PowerSGD. The bytes of rank 4 are
spent in three ways: as they are, on five times the rank with 6-bit factors, and with 6-bit factors
whose ranks follow the gradients' spectrum. Data parallel over CPU devices (or GPUs). Prints a table
and five lines, and writes the curves as a picture and as JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from data_parallel import Device, local_devices
from demo_plot import plot
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from train import Parser, readable
from training import Run, RunConfig, UsageError

import jaxcomp

# Small enough for two CPU cores.
CONFIG = RunConfig(
    layers=2,
    width=128,
    heads=4,
    context=64,
    batch_size=16,
    steps=600,
    learning_rate=2e-3,
    start_step=0,
)
NARROW = 5  # times the rank, in a fifth of the bytes for each value, scales included
GOAL = 20.0  # times fewer bytes, of the ranks by spectrum
CLOSE, SAVED = 0.02, 10.0  # a mark for at most 2% more loss at 10 times fewer bytes


@dataclass(frozen=True)
class Result:
    """What one strategy gave.

    Attributes:
      name: For the table and the picture.
      steps: Where the held-out loss was evaluated.
      held_out: The losses there, in nats per byte.
      bytes_sent: Bytes per replica sent up to there.
      bytes_step: Bytes per replica of the last step.
      seconds: Of the whole run, compilation and evaluations included.
    """

    name: str
    steps: list[int]
    held_out: list[float]
    bytes_sent: list[float]
    bytes_step: float
    seconds: float


@dataclass(frozen=True)
class Comparison:
    """A result beside the uncompressed one.

    Attributes:
      result: The result.
      excess: Relative excess of the final held-out loss: 0.02 is 2% worse.
      ratio: How many times fewer bytes; of a step, and of the whole run.
    """

    result: Result
    excess: float
    ratio: float

    @property
    def marked(self) -> bool:
        """Nearly the uncompressed loss for far fewer bytes."""
        return self.excess <= CLOSE and self.ratio >= SAVED


def train(
    name: str, config: RunConfig, devices: list[Device], progress: Progress, ranks: Any = None
) -> tuple[Result, Any]:
    """Runs one strategy; its result, and Adam's first moment after a quarter of the steps."""
    task = progress.add_task(name, total=config.steps, loss="compiling")
    records, record, momentum = [], None, None
    training = Run(config, devices, ranks=ranks)
    for record in training.steps():
        if record.held_out is not None:
            records.append(record)
            progress.update(task, loss=f"held-out {record.held_out:.3f}")
        progress.update(task, completed=record.step)
        if config.strategy == "allreduce" and record.step == max(1, config.steps // 4):
            momentum = training.momentum()
    assert record is not None  # `RunConfig.check` asks for at least one step
    result = Result(
        name=name,
        steps=[r.step for r in records],
        held_out=[r.held_out for r in records],
        bytes_sent=[r.bytes_sent for r in records],
        bytes_step=record.bytes_step,
        seconds=record.seconds,
    )
    return result, momentum


def train_all(
    runs: dict[str, RunConfig], devices: list[Device], progress: Progress
) -> list[Result]:
    """The exact run, the others, and the last of them again with ranks by spectrum."""
    names = list(runs)
    exact, momentum = train(names[0], runs[names[0]], devices, progress)
    results = [exact, *(train(name, runs[name], devices, progress)[0] for name in names[1:])]
    # No more bytes than the same rank everywhere, which a small model may have to send more of.
    ratio = min(GOAL, exact.bytes_step / results[-1].bytes_step)
    last = runs[names[-1]]
    try:
        ranks = jaxcomp.ranks_by_spectrum(momentum, ratio=ratio, comm_dtype=last.comm_dtype)
    except ValueError as error:
        raise UsageError(f"--width {last.width} is too small for ranks by spectrum") from error
    return [*results, train("ranks by spectrum, int6", last, devices, progress, ranks)[0]]


def compare(results: list[Result]) -> list[Comparison]:
    """Sets every result beside the first, the uncompressed one."""
    base = results[0]
    return [
        Comparison(
            result=r,
            excess=r.held_out[-1] / base.held_out[-1] - 1,
            ratio=base.bytes_sent[-1] / r.bytes_sent[-1],
        )
        for r in results
    ]


def table(rows: list[Comparison]) -> Table:
    """The result for a terminal."""
    shown = Table(
        title="Held-out loss (nats per byte) and bytes per replica",
        caption="✓ within 2% of the exact average's loss at 10x fewer bytes",
        box=SIMPLE,  # frames would take the room that the names need in 80 columns
        pad_edge=False,
    )
    shown.add_column("strategy", no_wrap=True)
    for heading in ("loss", "excess", "a step", "fewer", "time"):
        shown.add_column(heading, justify="right")
    for index, row in enumerate(rows):
        r = row.result
        excess, ratio = (f"{row.excess:+.1%}", f"{row.ratio:.1f}x") if index else ("", "")
        shown.add_row(
            r.name + " ✓" * row.marked,
            f"{r.held_out[-1]:.4f}",
            excess,
            readable(r.bytes_step),
            ratio,
            f"{r.seconds:.0f} s",
            style="bold" if row.marked else "",
        )
    return shown


def conclusions(rows: list[Comparison], folder: Path) -> list[str]:
    """The table in five lines."""
    exact, plain, narrow, last = rows[0].result, rows[1], rows[-2], rows[-1]
    return [
        f"The exact average sends {readable(exact.bytes_step)} per step and replica and ends at "
        f"{exact.held_out[-1]:.3f} nats per byte.",
        f"{plain.result.name}: {_against(plain)}.",
        f"{narrow.result.name} factors: {_against(narrow)}.",
        f"Ranks by the spectrum of the exact run's gradients, int6 factors: {_against(last)}.",
        f"No network is in the way here: ask `python -m jaxcomp advise` what yours would save. "
        f"Curves: {folder / 'demo.png'}",
    ]


def _against(row: Comparison) -> str:
    direction = "higher" if row.excess >= 0 else "lower"
    return f"{row.ratio:.1f} times fewer bytes, loss {abs(row.excess):.1%} {direction}"


def save(path: Path, config: RunConfig, replicas: int, rows: list[Comparison]) -> None:
    """Writes everything that was measured as JSON."""
    packages = ("jax", "flax", "optax", "jaxcomp")
    content = {
        "config": asdict(config) | {"replicas": replicas},
        "versions": {name: version(name) for name in packages}
        | {"python": platform.python_version()},
        "results": [
            asdict(row.result) | {"excess": row.excess, "ratio": row.ratio} for row in rows
        ],
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def parser() -> Parser:
    """The command line."""
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shown = " (default: %(default)s)"
    p.add_argument("--output", type=Path, default=Path("out"), help="directory to write to" + shown)
    p.add_argument("--steps", type=int, default=CONFIG.steps, help="length of each run" + shown)
    p.add_argument("--ranks", type=int, nargs="+", default=[4], help="of PowerSGD" + shown)
    p.add_argument("--devices", type=int, default=4, help="number of replicas" + shown)
    p.add_argument("--width", type=int, default=CONFIG.width, help="of the model" + shown)
    p.add_argument("--seed", type=int, default=CONFIG.seed, help="of model and data" + shown)
    return p


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Trains, compares, prints and writes."""
    config = replace(
        CONFIG,
        strategy="allreduce",
        steps=arguments.steps,
        width=arguments.width,
        seed=arguments.seed,
        eval_every=max(1, arguments.steps // 12),
    )
    runs = {"all-reduce": config} | {
        f"PowerSGD rank {rank}": replace(config, strategy="powersgd", rank=rank)
        for rank in arguments.ranks
    }
    best = NARROW * max(arguments.ranks)
    narrow = replace(config, strategy="powersgd", rank=best, comm_dtype="int6")
    runs[f"PowerSGD rank {best}, int6"] = narrow
    if min(arguments.ranks) <= 0 or arguments.devices <= 0:
        raise UsageError("--ranks and --devices must be positive")
    for each in runs.values():
        each.check()
    if config.batch_size % arguments.devices:
        raise UsageError(f"--devices must divide {config.batch_size}, the sequences of a step")
    try:
        arguments.output.mkdir(parents=True, exist_ok=True)
        devices = local_devices(arguments.devices)
    except OSError as error:
        reason = f"{error.strerror}: {error.filename}"
        raise UsageError(f"--output {arguments.output} cannot be a directory ({reason})") from error
    except ValueError as error:
        raise UsageError(str(error)) from error

    console.print(f"{len(runs) + 1} runs of {config.steps} steps, {len(devices)} replicas each")
    columns = (TextColumn("{task.description:23}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TextColumn("{task.fields[loss]}"), TimeElapsedColumn(), console=console
    ) as progress:
        rows = compare(train_all(runs, devices, progress))

    console.print(table(rows))
    for line in conclusions(rows, arguments.output):
        console.print(line, highlight=False, soft_wrap=True)
    save(arguments.output / "demo.json", config, len(devices), rows)
    plot(arguments.output / "demo.png", rows, len(devices))


def main() -> int:
    """The command line's entry point."""
    p = parser()
    arguments = p.parse_args()
    try:
        run(arguments, Console())
    except UsageError as error:
        p.error(str(error))
    except KeyboardInterrupt:
        print(f"{p.prog}: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
