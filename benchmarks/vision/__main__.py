"""Loss and accuracy of a small ResNet under SGD with momentum, for several ways to send gradients.

    python -m benchmarks.vision              # what is missing, then the table
    python -m benchmarks.vision --report     # the table in docs/convergence.md anew

The exact run is trained at four learning rates; all strategies then have the best of them. The
images are scikit-learn's digits, cluttered (`task` says how). Replicas are simulated on one device,
and bytes are counted, as in `benchmarks.convergence`.

Every finished run is appended to benchmarks/results/vision.jsonl and not made again: stop the
command whenever you like and start it again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.common.arguments import check_runs, command_line
from benchmarks.common.machine import describe
from benchmarks.common.paths import RESULTS
from benchmarks.common.runs import append_run, read_runs
from benchmarks.common.tables import write_page
from benchmarks.vision.report import PAGE, REFERENCE, best_rate, paged
from benchmarks.vision.settings import RATES, STRATEGIES, bytes_sent, reducer
from benchmarks.vision.training import Config, Trainer

PACKAGES = ("jax", "flax", "optax", "scikit-learn")
OUT = RESULTS / "vision.jsonl"


def study(path: Path, config: Config, seeds: int) -> None:
    """Makes what is missing: the learning rates, then the strategies, seed by seed."""
    for rate in RATES:
        train(path, config, REFERENCE, rate, [0])
    rate = best_rate(read_runs(path), config)
    for several in (range(1), range(seeds)):
        for name in STRATEGIES:
            train(path, config, name, rate, several)


def train(path: Path, config: Config, name: str, rate: float, seeds: Sequence[int]) -> None:
    """The runs of a strategy that are not in the file yet."""
    there = {
        run["seed"]
        for run in read_runs(path)
        if (run["strategy"], run["rate"], run["config"]) == (name, rate, asdict(config))
    }
    missing = [seed for seed in seeds if seed not in there]
    if not missing:
        return
    trainer = Trainer(config, reducer(name, config, rate), rate)
    for seed in missing:
        curve, seconds = trainer.run(seed)
        run = {
            "strategy": name,
            "rate": rate,
            "seed": seed,
            "curve": curve,
            "bytes": bytes_sent(name, config, rate) * config.steps,
            "seconds": round(seconds, 1),
            "config": asdict(config),
            "about": describe("benchmarks.vision", PACKAGES),
        }
        append_run(path, run)
        _, loss, accuracy = curve[-1]
        print(f"{name:26} {rate:g} {seed} {loss:.4f} {accuracy:.4f} {seconds:.0f} s", flush=True)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments, checked."""
    parser = command_line("benchmarks.vision", __doc__)
    shown = " (default: %(default)s)"
    parser.add_argument("--seeds", type=int, default=3, help="of each strategy" + shown)
    parser.add_argument("--steps", type=int, default=Config.steps, help="of each run" + shown)
    parser.add_argument("--out", type=Path, default=OUT, help="the runs" + shown)
    parser.add_argument("--report", action="store_true", help="only write the table anew")
    given = parser.parse_args(argv)
    check_runs(parser, given, Config.eval_every)
    return given


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    given = parse(argv)
    config = Config(steps=given.steps)
    if not given.report:
        study(given.out, config, given.seeds)
    if given.out == OUT:
        finished = read_runs(OUT)
        return write_page("benchmarks.vision", PAGE, lambda page: paged(page, finished, config))
    return 0


if __name__ == "__main__":
    sys.exit(main())
