"""Shows what compression costs and saves: trains one small language model with several strategies.

It trains the same model on the same data with an exact all-reduce and with PowerSGD. PowerSGD sends
the same bytes in three ways: rank 4 in float32, five times that rank with 6-bit factors, and 6-bit
factors whose ranks follow the spectrum of the gradients. It runs data parallel over CPU devices (or
GPUs), prints a table and five lines, and writes the curves as a picture and as JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import optax
import pictures
from jax.sharding import AxisType, Mesh
from rich.console import Console
from rich.progress import track
from train import Parser, local_devices, readable
from training import AXIS, Record, Run, RunConfig, UsageError

import jaxcomp

# Small enough for two CPU cores.
CONFIG = RunConfig(layers=2, width=128, context=64, batch_size=16, steps=600)
NARROW = 5  # times the rank, with a fifth of the bytes per value, scales included
GOAL = 20.0  # times fewer bytes, for ranks by spectrum
# The exact run, the ranks from the lowest, then a higher rank in int6, then ranks by spectrum.
PLAIN = (pictures.BLUE, pictures.SKY, pictures.OCHRE, pictures.GREEN)


@dataclass
class Result:
    """Holds the results of one strategy.

    Attributes:
      name: The name in the table and the picture.
      steps: The steps at which the held-out loss was evaluated.
      held_out: The losses at these steps, in nats per byte.
      bytes_sent: The bytes that each replica sent up to these steps.
      bytes_step: The bytes that each replica sent in the last step.
      seconds: The time of the whole run, compilation and evaluations included.
      excess: The last held-out loss, relative to the exact run: 0.02 is 2% worse.
      ratio: How many times fewer bytes than the exact run.
    """

    name: str
    steps: list[int]
    held_out: list[float]
    bytes_sent: list[float]
    bytes_step: float
    seconds: float
    excess: float = 0.0
    ratio: float = 1.0

    def against(self) -> str:
        """Compares with the exact run, in words."""
        direction = "higher" if self.excess >= 0 else "lower"
        return f"{self.ratio:.1f} times fewer bytes, loss {abs(self.excess):.1%} {direction}"


def progress(records: Iterable[Record], name: str, steps: int) -> Iterable[Record]:
    """Shows the progress of a run in a terminal; writes nothing to a file."""
    console = Console(stderr=True)
    if not console.is_terminal:
        return records
    return track(records, name, total=steps, console=console, transient=True)


def train(name: str, config: RunConfig, mesh: Mesh, ranks: Any = None) -> tuple[Result, Any]:
    """Runs one strategy; returns its result, and Adam's momentum after a quarter of the steps."""
    run = Run(config, mesh, ranks=ranks)
    evaluated = []
    record = None
    momentum = None
    for record in progress(run.steps(), name, config.steps):
        if record.held_out is not None:
            evaluated.append(record)
        if config.strategy == "allreduce" and record.step == max(1, config.steps // 4):
            momentum = optax.tree.get(run.consolidated().opt_state, "mu")
    assert record is not None  # `RunConfig.check` asks for at least one step
    line = f"{name:23} step {record.step:5}  {evaluated[-1].held_out:.3f}  {record.seconds:4.0f} s"
    share = run.carried()
    if share is not None:
        line += f", the factors carried {share:.0%} in the last step"
    print(line, flush=True)
    result = Result(
        name,
        steps=[r.step for r in evaluated],
        held_out=[r.held_out for r in evaluated],
        bytes_sent=[r.bytes_sent for r in evaluated],
        bytes_step=record.bytes_step,
        seconds=record.seconds,
    )
    return result, momentum


def train_all(runs: dict[str, RunConfig], mesh: Mesh) -> list[Result]:
    """Trains the exact run, the compressed runs, and the last one again with ranks by spectrum."""
    results = []
    momentum = None
    for name, config in runs.items():
        result, early_momentum = train(name, config, mesh)
        results.append(result)
        if momentum is None:
            momentum = early_momentum  # of the exact run, which comes first
    exact = results[0]
    # Send no more bytes than equal ranks do; for a small model those may be more than GOAL.
    ratio = min(GOAL, exact.bytes_step / results[-1].bytes_step)
    last = list(runs.values())[-1]
    try:
        ranks = jaxcomp.ranks_by_spectrum(momentum, ratio=ratio, comm_dtype=last.comm_dtype)
    except ValueError as error:
        raise UsageError(f"--width {last.width} is too small for ranks by spectrum") from error
    by_spectrum, _ = train("ranks by spectrum, int6", last, mesh, ranks)
    results.append(by_spectrum)
    for result in results:
        result.excess = result.held_out[-1] / exact.held_out[-1] - 1
        result.ratio = exact.bytes_sent[-1] / result.bytes_sent[-1]
    return results


def table(results: list[Result]) -> str:
    """Writes held-out loss and bytes per replica as a table in Markdown."""
    lines = [
        f"| {'strategy':23} |   loss | excess |  a step | fewer |   time |",
        f"|{'-' * 25}|-------:|-------:|--------:|------:|-------:|",
    ]
    exact = results[0]
    for r in results:
        excess = ""
        ratio = ""
        if r is not exact:
            excess = f"{r.excess:+.1%}"
            ratio = f"{r.ratio:.1f}x"
        lines.append(
            f"| {r.name:23} | {r.held_out[-1]:.4f} | {excess:>6} | {readable(r.bytes_step):>7} | "
            f"{ratio:>5} | {r.seconds:4.0f} s |"
        )
    return "\n".join(lines)


def conclusions(results: list[Result], folder: Path) -> list[str]:
    """Writes the results of the table as five lines."""
    exact, plain, *_, narrow, by_spectrum = results
    return [
        f"The exact average sends {readable(exact.bytes_step)} per step and replica and ends at "
        f"{exact.held_out[-1]:.3f} nats per byte.",
        f"{plain.name}: {plain.against()}.",
        f"{narrow.name} factors: {narrow.against()}.",
        "Ranks by the spectrum of the exact run's gradients, int6 factors: "
        f"{by_spectrum.against()}.",
        f"No network is in the way here: ask `python -m jaxcomp advise` what yours would save. "
        f"Curves: {folder / 'demo.png'}",
    ]


def save(folder: Path, config: RunConfig, replicas: int, results: list[Result]) -> None:
    """Writes all measurements as JSON, and draws them."""
    versions = {name: version(name) for name in ("jax", "flax", "optax", "jaxcomp")}
    versions["python"] = platform.python_version()
    content = {
        "config": asdict(config) | {"replicas": replicas},
        "versions": versions,
        "results": [asdict(result) for result in results],
    }
    (folder / "demo.json").write_text(json.dumps(content, indent=1) + "\n")
    plain = [PLAIN[i % len(PLAIN)] for i in range(len(results) - 3)]
    colours = [pictures.INK, *plain, pictures.PURPLE, pictures.ORANGE]
    curves = []
    for r, colour in zip(results, colours, strict=True):
        by_step = f"{r.name}: {r.excess:+.1%}"
        by_bytes = f"{r.ratio:.1f}x fewer"
        if r is results[0]:
            by_step = f"{r.name}: exact"
            by_bytes = ""
        curves.append(pictures.Curve(by_step, by_bytes, colour, r.steps, r.held_out, r.bytes_sent))
    pictures.draw(folder / "demo.png", curves, replicas)


def parser() -> Parser:
    """Makes the command line."""
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shown = " (default: %(default)s)"
    p.add_argument("--output", type=Path, default=Path("out"), help="directory to write to" + shown)
    p.add_argument("--steps", type=int, default=CONFIG.steps, help="length of each run" + shown)
    p.add_argument("--ranks", type=int, nargs="+", default=[4], help="ranks of PowerSGD" + shown)
    p.add_argument("--devices", type=int, default=4, help="number of replicas" + shown)
    p.add_argument("--width", type=int, default=CONFIG.width, help="width of the model" + shown)
    p.add_argument("--seed", type=int, default=CONFIG.seed, help="seed of model and data" + shown)
    return p


def run(arguments: argparse.Namespace) -> None:
    """Trains all runs, compares and prints their results, and writes the files."""
    config = replace(
        CONFIG,
        strategy="allreduce",
        steps=arguments.steps,
        width=arguments.width,
        seed=arguments.seed,
        eval_every=max(1, arguments.steps // 12),
    )
    powersgd = replace(config, strategy="powersgd")
    runs = {"all-reduce": config}
    for rank in arguments.ranks:
        runs[f"PowerSGD rank {rank}"] = replace(powersgd, rank=rank)
    best = NARROW * max(arguments.ranks)
    runs[f"PowerSGD rank {best}, int6"] = replace(powersgd, rank=best, comm_dtype="int6")
    if min(arguments.ranks) <= 0 or arguments.devices <= 0:
        raise UsageError("--ranks and --devices must be positive")
    for each in runs.values():
        each.check()
    if config.batch_size % arguments.devices:
        raise UsageError(f"--devices must divide {config.batch_size}, the sequences of a step")
    try:
        arguments.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"{error.strerror}: {error.filename}"
        raise UsageError(f"--output {arguments.output} cannot be a directory ({reason})") from error
    mesh = Mesh(local_devices(arguments.devices), (AXIS,), axis_types=(AxisType.Auto,))
    print(f"{len(runs) + 1} runs of {config.steps} steps, {mesh.size} replicas each", flush=True)
    results = train_all(runs, mesh)
    print(f"\n{table(results)}\n")
    print(*conclusions(results, arguments.output), sep="\n")
    save(arguments.output, config, mesh.size, results)


def main() -> int:
    """Runs the command line; returns the exit code."""
    p = parser()
    arguments = p.parse_args()
    try:
        run(arguments)
    except UsageError as error:
        p.error(str(error))
    except KeyboardInterrupt:
        print(f"{p.prog}: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
