"""Measures updates and training steps on a GPU, and checks every form of the reducers there.

    python -m benchmarks.card                          # one card; at most nine minutes
    python -m benchmarks.card --quick                  # at most three minutes
    python -m benchmarks.card --devices 8              # several cards of one machine as well
    python -m benchmarks.card --device cpu --small     # try the command without a GPU

The parts, the most useful first; choose some with --parts:
    updates  one update of `powersgd` at ranks 1 to 216 on GPT-2 small's gradients, beside copies
             of two and seven words for each value, with a profile by class of kernel
    forms    every form of every reducer, four steps of ordinary and hard gradients: GPU against CPU
    torch    torch's `powerSGD_hook` with world size 1 on the same gradients
    step     a whole training step of a transformer of GPT-2 small's sizes, 163 million parameters:
             with no reducer, with ranks 4, 32 and 128, with factors in int6, and with `allreduce`
    devices  with --devices: replicas equal bit for bit, bytes sent, times on 2, 4 and 8 cards

Each part is a separate process with a limit in seconds, so a part that breaks the driver's context
does not stop the others. The parts run one after the other, and nothing compiles while a program is
timed. The JSON is written after every part, with all rows that the part printed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import statistics
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from benchmarks.common.arguments import at_least, call, command_line, listed, one_of
from benchmarks.common.machine import describe
from benchmarks.common.runs import Run
from benchmarks.common.tables import markdown
from benchmarks.common.worker import run_worker
from benchmarks.overhead.trees import gpt2, torch_layout

# Seconds of each part on a GPU: in full, and quick.
LIMITS = {
    "updates": (190, 70),
    "forms": (130, 40),
    "torch": (50, 25),
    "step": (160, 45),
    "devices": (300, 100),
}
_MODULE = "benchmarks.card"


def run_here(part: str, small: bool, quick: bool, devices: int) -> Iterator[Run]:
    """Yields the rows of a part; runs in that part's own process."""
    import jax

    platforms = {"platform": jax.default_backend(), "device": jax.devices()[0].device_kind}
    yield {"kind": "device", "jax": jax.__version__, **platforms, "number": len(jax.devices())}
    module = importlib.import_module(f"{_MODULE}.{part}")
    yield from module.rows(small, quick, devices)


def run_part(part: str, options: argparse.Namespace) -> Run:
    """Runs a part in a separate process with a limit in seconds; returns its rows."""
    limit = LIMITS[part][options.quick]
    platforms = "cuda,cpu" if part == "forms" else "cuda"
    if options.device == "cpu":
        limit *= 10  # nobody waits for a card where there is none
        platforms = "cpu"
    environment = {
        "JAX_PLATFORMS": platforms,
        "JAX_NUM_CPU_DEVICES": str(options.devices),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    module = [_MODULE, "--run-part", part, "--devices", str(options.devices)]
    module += ["--small"] * options.small + ["--quick"] * options.quick
    job: Run = {}
    if part == "torch":
        module = ["benchmarks.overhead.torch_worker"]
        job = {"ranks": (4, 32, 128), "device": options.device.replace("gpu", "cuda")}
        job["shapes"] = torch_layout(gpt2(2, 64) if options.small else gpt2(12, 768))
        job["steps"] = 3 if options.small else 20
        job["warmup"] = 1 if options.small else 5
    return run_worker(module, job, environment, limit)


def summary(parts: dict[str, Run]) -> str:
    """Returns the most important results as Markdown."""
    rows: list[Run] = []
    failures = []
    for name, part in parts.items():
        rows += part["rows"]
        if part["code"]:
            failures.append(f"{name} ended with {part['code']} after {part['seconds']} s.")
    judged = Counter()
    for row in rows:
        if "right" in row:
            judged[row["right"]] += 1
            if not row["right"]:
                failures.append(f"Wrong: {json.dumps(row)}")
    right = f"{judged[True]} of {judged.total()} forms, steps and sets of replicas are right."
    return "\n\n".join([*updates_table(rows), *steps_table(rows), right, *failures])


def updates_table(rows: list[Run]) -> Iterator[str]:
    """Yields a table of updates, torch's hook and a kernel that moves seven words, if measured."""
    seven = math.nan
    torch_ms = {}
    table = []
    for row in rows:
        if row["kind"] == "copies":
            seven = row["seven_words_ms"]
        elif row["kind"] == "update" and "seconds" in row:
            torch_ms[row["rank"]] = f"{1e3 * statistics.median_high(row['seconds']):.1f}"
    for row in rows:
        if row["kind"] == "update" and "queued_ms" in row:
            line = [
                ", ".join([str(row["rank"]), *map(str, row["options"].values())]),
                f"{row['queued_ms']:.2f}",
                f"{row['waited_ms']:.2f}",
                torch_ms.get(row["rank"], ""),
                f"{row['queued_ms'] / seven:.1f}",
                f"{row['launches']:.0f}",
                f"{row['temporary']:.2f}",
                f"{row['compile_s']:.0f}",
            ]
            table.append(line)
    header = ("rank", "queued, ms", "waited, ms", "torch's hook, ms", "queued / seven words",
              "launches", "temporary / gradients", "compiled in, s")  # fmt: skip
    if table:
        yield markdown(header, table)


def steps_table(rows: list[Run]) -> Iterator[str]:
    """Yields a table of whole training steps, if measured."""
    table = []
    for row in rows:
        if row["kind"] == "step":
            times = [f"{row['queued_ms']:.1f}", f"{row['compile_s']:.0f}"]
            table.append([row["reducer"], str(row["devices"]), *times])
    if table:
        yield markdown(("reducer", "devices", "step, ms", "compiled in, s"), table)


def parser() -> argparse.ArgumentParser:
    """Makes the command line."""
    p = command_line(_MODULE, __doc__)
    add = p.add_argument
    add("--out", type=Path, default=Path("card.json"), help="the JSON file")
    add("--parts", type=listed(one_of(LIMITS)), default=",".join(LIMITS), help="by commas")
    add("--device", choices=["gpu", "cpu"], default="gpu", help="device")
    add("--devices", type=at_least(int, 1), default=1, help="cards to use")
    add("--quick", action="store_true", help="fewer ranks, forms and reducers")
    add("--small", action="store_true", help="tiny sizes, to try the command")
    add("--run-part", help=argparse.SUPPRESS)
    return p


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns 1 if a form is wrong or a part failed."""
    options = parser().parse_args(argv)
    if options.run_part:
        for row in run_here(options.run_part, options.small, options.quick, options.devices):
            print(json.dumps(row), flush=True)
        return 0
    parts: dict[str, Run] = {}
    content = {"machine": describe(_MODULE, ["jax", "numpy"]), "parts": parts}
    failed = False
    for part in LIMITS:
        if part in options.parts and (part != "devices" or options.devices > 1):
            result = run_part(part, options)
            parts[part] = result
            options.out.write_text(json.dumps(content, indent=1) + "\n")
            right = all(row.get("right", True) for row in result["rows"])
            failed |= bool(result["code"]) or not right
    print(summary(parts))
    return int(failed)


if __name__ == "__main__":
    call(main)
