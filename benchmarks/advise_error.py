"""How far the adviser's predictions are from what `benchmarks.cluster` measured.

    sudo python -m benchmarks.advise_error calibrate
    python -m benchmarks.advise_error compare benchmarks/results/cluster.json

`calibrate` measures what the model has to know of a machine: memory, compression, and an all-reduce
over links that are not limited, by processes that run as those of `benchmarks.cluster` do (a
network namespace, one core and the same allocator each). It needs root and iproute2, as the other
does. `compare` predicts each case of JAX from that and from the step without communication in the
same run; a link's bandwidth is its rate less the headers. Nothing is fitted to the cases predicted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxcomp
from benchmarks.cluster.job import ENVIRONMENT
from benchmarks.cluster.net import Network, NetworkUnavailable, check_available
from benchmarks.cluster.plan import UNLIMITED, Strategy, parse_rate, parse_strategy
from benchmarks.cluster.report import Case, figures_of
from benchmarks.common.arguments import command_line, listed, one_of
from benchmarks.common.models import FULL, MLP, TINY
from benchmarks.common.paths import RESULTS, ROOT
from benchmarks.common.tables import markdown

_RANKS = (1, 2, 4)
_PORT = 29_510
_SECONDS = 600
# Of a frame with the 9,000 bytes that the links pass: 52 are headers of IP and TCP, and Ethernet
# adds 14.
_NET_OF_HEADERS = (9_000 - 52) / (9_000 + 14)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = command_line("benchmarks.advise_error", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    calibrating = commands.add_parser("calibrate", help="measure the machine")
    calibrating.add_argument("--processes", type=int, default=2, metavar="N")
    calibrating.add_argument("--models", default="mlp,transformer")
    calibrating.add_argument("--tiny", action="store_true", help="to see whether it works here")
    comparing = commands.add_parser("compare", help="predictions beside measurements")
    comparing.add_argument("cluster", type=Path, metavar="CLUSTER_JSON")
    comparing.add_argument("--json", type=Path, metavar="FILE", help="write every case there too")
    for command in (calibrating, comparing):
        command.add_argument("--calibration", type=Path, metavar="FILE",
                             default=RESULTS / "calibration.json")  # fmt: skip
    if argv is None and sys.argv[1:2] == ["process"]:
        return process(*sys.argv[2:])
    options = parser.parse_args(argv)
    try:
        return calibrate(options) if options.command == "calibrate" else compare(options)
    except (NetworkUnavailable, OSError, ValueError) as error:
        print(f"advise_error: {error}", file=sys.stderr)
        return 1


def calibrate(options: argparse.Namespace) -> int:
    """One calibration for each model, written as JSON."""
    check_available()
    found = {}
    for model in listed("--models", options.models, one_of("--models", FULL)):
        found[model] = json.loads(_calibration(model, options.processes, options.tiny))
        print(f"{model}: {json.dumps(found[model])}", flush=True)
    options.calibration.parent.mkdir(parents=True, exist_ok=True)
    options.calibration.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def _calibration(model: str, processes: int, tiny: bool) -> str:
    """What the first of several processes has measured, as JSON."""
    cores = sorted(os.sched_getaffinity(0))
    with Network(processes) as network, tempfile.TemporaryDirectory() as folder:
        network.shape(UNLIMITED)
        result, log = Path(folder, "calibration.json"), Path(folder, "log")
        started = []
        try:
            for i in range(processes):
                own = [
                    sys.executable,
                    "-m",
                    "benchmarks.advise_error",
                    "process",
                    str(i),
                    str(processes),
                ]
                own += [network.addresses[0], model, str(int(tiny)), str(result)]
                command = network.command(i, cores[i % len(cores)], own)
                with log.open("ab") as said:  # gloo and XLA print what they like
                    started.append(
                        subprocess.Popen(
                            command,
                            stdout=said,
                            stderr=said,
                            cwd=ROOT,
                            env={**os.environ, **ENVIRONMENT},
                        )
                    )
            started[0].wait(_SECONDS)
        except subprocess.TimeoutExpired:
            raise ValueError(f"Measuring took more than {_SECONDS} s.") from None
        finally:
            for job in started:
                job.kill()
                job.wait()
        if not result.exists():
            raise ValueError(f"The measuring process failed.\n{log.read_text()[-2000:]}")
        return result.read_text()


def process(index: str, processes: str, address: str, model: str, tiny: str, result: str) -> int:
    """One of the processes that `calibrate` starts; the first one writes what was measured."""
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(f"{address}:{_PORT}", int(processes), int(index))
    found = jaxcomp.measure(parameters(model, tiny=bool(int(tiny))), ranks=_RANKS)
    if index == "0":
        Path(result).write_text(found.to_json())
    return 0


def parameters(model: str, *, tiny: bool) -> Any:
    """The shapes of one of `benchmarks.cluster`'s models."""
    from benchmarks.cluster.jax_trainer import FlaxMLP, FlaxTransformer

    sizes = (TINY if tiny else FULL)[model]
    if isinstance(sizes, MLP):
        module, example = FlaxMLP(sizes), jnp.zeros((1, sizes.widths[0]))
    else:
        module, example = FlaxTransformer(sizes), jnp.zeros((1, sizes.context), jnp.int32)
    return jax.eval_shape(module.init, jax.random.key(0), example)


def compare(options: argparse.Namespace) -> int:
    """Prints every case, and the median error."""
    run = json.loads(options.cluster.read_text())
    try:
        stored = json.loads(options.calibration.read_text())
    except FileNotFoundError:
        raise ValueError(
            f"{options.calibration} is missing: make it with `benchmarks.advise_error calibrate`."
        ) from None
    calibrations = {
        name: jaxcomp.Calibration.from_json(json.dumps(x)) for name, x in stored.items()
    }
    rows = errors(run, calibrations)
    if not rows:
        raise ValueError(f"{options.cluster} holds no cases of JAX that can be predicted.")
    cells = [
        (
            *(row[name] for name in ("model", "rate", "strategy")),
            *(f"{row[name] * 1e3:,.1f} ms" for name in ("measured", "predicted")),
            f"{row['error']:+.1%}",
        )
        for row in rows
    ]
    print(markdown(("model", "rate", "strategy", "measured", "predicted", "error"), cells, left=3))
    sizes = np.abs([row["error"] for row in rows])
    print(
        f"\n{len(rows)} cases: median error {statistics.median(sizes):.1%}, nine in ten below "
        f"{np.quantile(sizes, 0.9):.1%}, largest {sizes.max():.1%}."
    )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


def errors(
    run: dict[str, Any], calibrations: dict[str, jaxcomp.Calibration]
) -> list[dict[str, Any]]:
    """Measured and predicted seconds per step, and the relative error, of every case of JAX."""
    cases = [Case(**case) for case in run["cases"] if case["framework"] == "jax"]
    figures = {(c.model, c.rate, c.strategy): figures_of(c).median for c in cases}
    rows = []
    for (model, rate, name), measured in figures.items():
        strategy, alone = parse_strategy(name), figures.get((model, rate, "none"))
        if alone is None or model not in calibrations or _name(strategy) is None:
            continue
        tree = parameters(model, tiny=run["settings"]["tiny"])
        processes = run["settings"]["processes"]
        predicted = predict(tree, processes, rate, strategy, alone, calibrations[model]).step_time
        error = predicted / measured - 1
        rows.append(
            {"model": model, "rate": rate, "strategy": name, "measured": measured,
             "predicted": predicted, "error": error}
        )  # fmt: skip
    return rows


def predict(
    tree: Any,
    processes: int,
    rate: str,
    strategy: Strategy,
    alone: float,
    constants: jaxcomp.Calibration,
) -> jaxcomp.Prediction:
    """What the adviser says of a case.

    Args:
      tree: The parameters.
      processes: Number of replicas.
      rate: Of the links.
      strategy: Of the case.
      alone: Seconds of the step without communication.
      constants: From `calibrate`.
    """
    bits = parse_rate(rate).bits_per_second
    # Without a rate, the link is the one that was measured.
    bandwidth = None if bits is None else bits / 8 * _NET_OF_HEADERS
    local = strategy.kind == "local-sgd"
    advice = jaxcomp.advise(
        tree,
        workers=processes,
        step_time=alone,
        backward_overlap=0,  # nothing overlaps on CPU
        ranks=[strategy.number] if strategy.number and not local else None,
        sync_every=strategy.number if local else 8,
        bandwidth=bandwidth,
        latency=None if bits is None else 0.0,  # these links have none
        comm_dtype=strategy.comm_dtype,
        calibration=constants,
    )
    return next(p for p in advice.predictions if p.name == _name(strategy))


def _name(strategy: Strategy) -> str | None:
    """What the adviser calls it; None where it has no figure, as for rounds that are compressed."""
    if strategy.every > 1:
        return None
    wire = f" {strategy.comm_dtype}" if strategy.comm_dtype else ""
    names = {
        "allreduce": "all-reduce float32",
        "fp16": "all-reduce float16",
        "powersgd": f"powersgd rank {strategy.number}{wire}",
        "one-sided": f"one-sided rank {strategy.number}{wire}",
        "local-sgd": f"local SGD H={strategy.number}",
        "int8": "int8",
    }
    return names.get(strategy.kind)


if __name__ == "__main__":
    sys.exit(main())
