"""A GPU on trial: is every form right there, and what do updates and training steps cost?

    python -m benchmarks.card                          # one card; at most nine minutes
    python -m benchmarks.card --quick                  # at most three minutes
    python -m benchmarks.card --devices 8              # several cards of one machine as well
    python -m benchmarks.card --device cpu --small     # that it runs, without a GPU

Parts, the most valuable first; choose some with --parts:
    updates  one update of `powersgd` at ranks 1 to 216 on GPT-2 small's gradients, beside copies
             of two and seven words for each value, with a profile by class of kernel
    forms    every form of every reducer, four steps of ordinary and hard gradients: GPU against CPU
    torch    torch's `powerSGD_hook` with world size 1 on the same gradients
    step     a whole training step of GPT-2 small with no reducer, with ranks 4, 32 and 128, with
             factors in int6, and with `allreduce`
    devices  with --devices: replicas equal bit for bit, bytes sent, times on 2, 4 and 8 cards

Each part is a process of its own with a limit in seconds: one that breaks the driver's context
costs itself alone. They run one after the other, and nothing compiles beside what is timed. The
JSON is written after every part; beside it each row stands in a file as soon as it is there.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common.arguments import at_least, call, command_line, listed, one_of
from benchmarks.common.machine import describe
from benchmarks.common.paths import ROOT
from benchmarks.common.tables import markdown
from benchmarks.overhead.trees import gpt2, torch_layout

# Seconds of each part on a GPU: in full, and quick.
LIMITS = {
    "updates": (190, 70),
    "forms": (130, 40),
    "torch": (50, 25),
    "step": (160, 45),
    "devices": (300, 100),
}
_TORCH_RANKS = (4, 32, 128)
_MODULE = "benchmarks.card"


def run_here(part: str, small: bool, quick: bool, devices: int) -> Iterator[dict[str, Any]]:
    """Yields the rows of a part, in the process that was started for it."""
    import jax

    platforms = {"platform": jax.default_backend(), "device": jax.devices()[0].device_kind}
    yield {"kind": "device", "jax": jax.__version__, **platforms, "number": len(jax.devices())}
    module = importlib.import_module(f"{_MODULE}.{part}")
    yield from module.rows(small, quick, devices)


def run_part(part: str, options: argparse.Namespace) -> dict[str, Any]:
    """Runs a part in a process of its own, which has so many seconds; returns its rows."""
    full, quick = LIMITS[part]
    limit = quick if options.quick else full
    platforms = "cuda,cpu" if part == "forms" else "cuda"
    if options.device == "cpu":
        limit *= 10  # nobody waits for a card where there is none
        platforms = "cpu"
    environment = os.environ | {
        "JAX_PLATFORMS": platforms,
        "JAX_NUM_CPU_DEVICES": str(options.devices),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    command = [sys.executable, "-m", _MODULE, "--run-part", part]
    command += ["--devices", str(options.devices)]
    command += [f"--{name}" for name in ("small", "quick") if getattr(options, name)]
    job = ""
    if part == "torch":
        command = [sys.executable, "-m", "benchmarks.overhead.torch_worker"]
        job = torch_job(options.device, options.small)
    return limited(command, job, environment, options.out.with_suffix(f".{part}.jsonl"), limit)


def limited(
    command: list[str], job: str, environment: dict[str, str], out: Path, limit: float
) -> dict[str, Any]:
    """Runs a command for so many seconds at most; `out` has each row as soon as it is printed."""
    start = time.monotonic()
    with out.open("w+") as rows, tempfile.TemporaryFile("w+") as errors:
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                input=job,
                stdout=rows,
                stderr=errors,
                text=True,
                timeout=limit,
                check=False,
            )
            code = done.returncode
        except subprocess.TimeoutExpired:
            code = -signal.SIGKILL
        rows.seek(0)
        errors.seek(0)
        result: dict[str, Any] = {"limit_s": limit, "code": code}
        result["seconds"] = round(time.monotonic() - start, 1)
        result["rows"] = [json.loads(line) for line in rows if line.startswith("{")]
        if code:
            result["errors"] = errors.read()[-3000:]
    return result


def torch_job(device: str, small: bool) -> str:
    """Returns what torch's worker reads from its standard input."""
    job: dict[str, Any] = {"ranks": _TORCH_RANKS, "platform": device}
    job["shapes"] = torch_layout(gpt2(2, 64) if small else gpt2(12, 768))
    job["steps"] = 3 if small else 20
    job["warmup"] = 1 if small else 5
    return json.dumps(job)


def summary(content: dict[str, Any]) -> str:
    """Returns what a person wants to know first, as Markdown."""
    parts = content["parts"]
    rows = [row for part in parts.values() for row in part["rows"]]
    text = [updates_table(rows), steps_table(rows)]
    judged = [row for row in rows if "right" in row]
    wrong = [row for row in judged if not row["right"]]
    right = len(judged) - len(wrong)
    text.append(f"{right} of {len(judged)} forms, steps and sets of replicas are right.")
    text += [f"Wrong: {json.dumps(row)}" for row in wrong]
    for name, part in parts.items():
        if part["code"]:
            text.append(f"{name} ended with {part['code']} after {part['seconds']} s.")
    return "\n\n".join(filter(None, text))


def updates_table(rows: list[dict[str, Any]]) -> str:
    """Returns updates beside torch's hook and a kernel that moves seven words; empty without."""
    seven = math.nan
    torch_ms = {}
    table = []
    for row in rows:
        if row.get("kind") == "copies":
            seven = row["seven_words_ms"]
        elif row.get("kind") == "update" and "seconds" in row:
            torch_ms[row["rank"]] = 1e3 * statistics.median_high(row["seconds"])
    for row in rows:
        if row.get("kind") != "update" or "seconds" in row:
            continue
        options = "".join(f", {value}" for value in row["options"].values())
        line = [f"{row['rank']}{options}", f"{row['queued_ms']:.2f}", f"{row['waited_ms']:.2f}"]
        line.append(f"{torch_ms.get(row['rank'], math.nan):.1f}")
        line.append(f"{row['queued_ms'] / seven:.1f}")
        line.append(f"{row['launches']:.0f}")
        line.append(f"{row['temporary']:.2f}")
        line.append(f"{row['compile_s']:.0f}")
        table.append(["" if cell == "nan" else cell for cell in line])
    header = ("rank", "queued, ms", "waited, ms", "torch's hook, ms", "queued / seven words",
              "launches", "temporary / gradients", "compiled in, s")  # fmt: skip
    return markdown(header, table) if table else ""


def steps_table(rows: list[dict[str, Any]]) -> str:
    """Returns whole training steps; empty without."""
    table = []
    for row in rows:
        if row.get("kind") == "step":
            time_ms = f"{row['queued_ms']:.1f}"
            table.append([row["reducer"], str(row["devices"]), time_ms, f"{row['compile_s']:.0f}"])
    header = ("reducer", "devices", "step, ms", "compiled in, s")
    return markdown(header, table) if table else ""


def parser() -> argparse.ArgumentParser:
    """Makes the command line."""
    p = command_line(_MODULE, __doc__)
    add = p.add_argument
    add("--out", type=Path, default=Path("card.json"), help="the JSON")
    add("--parts", type=listed(one_of(LIMITS)), default=",".join(LIMITS), help="some, by commas")
    add("--device", choices=["gpu", "cpu"], default="gpu")
    add("--devices", type=at_least(int, 1), default=1, help="cards to use")
    add("--quick", action="store_true", help="fewer ranks, forms and reducers")
    add("--small", action="store_true", help="tiny sizes, to see that it runs")
    add("--run-part", help=argparse.SUPPRESS)
    return p


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns 1 if a form is wrong or a part did not end well."""
    options = parser().parse_args(argv)
    if options.run_part:
        for row in run_here(options.run_part, options.small, options.quick, options.devices):
            print(json.dumps(row), flush=True)
        return 0
    content: dict[str, Any] = {"machine": describe(_MODULE, ["jax", "numpy"]), "parts": {}}
    failed = False
    for part in LIMITS:
        alone = part == "devices" and options.devices == 1
        if part in options.parts and not alone:
            result = run_part(part, options)
            content["parts"][part] = result
            options.out.write_text(json.dumps(content, indent=1) + "\n")
            right = [row.get("right", True) for row in result["rows"]]
            failed |= bool(result["code"]) or not all(right)
    print(summary(content))
    return int(failed)


if __name__ == "__main__":
    call(main)
