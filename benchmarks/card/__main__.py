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
JSON is written after every row.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
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


def torch_job(device: str, small: bool) -> str:
    """Returns what torch's worker reads from its standard input."""
    shapes = torch_layout(gpt2(2, 64) if small else gpt2(12, 768))
    job = {"shapes": shapes, "ranks": _TORCH_RANKS, "platform": device}
    job["steps"] = 3 if small else 20
    job["warmup"] = 1 if small else 5
    return json.dumps(job)


def started(part: str, arguments: argparse.Namespace, errors: Any) -> subprocess.Popen[str]:
    """Starts the process of a part."""
    command = [sys.executable, "-m", _MODULE, "--run-part", part]
    command += ["--devices", str(arguments.devices)]
    if arguments.small:
        command.append("--small")
    if arguments.quick:
        command.append("--quick")
    if part == "torch":
        command = [sys.executable, "-m", "benchmarks.overhead.torch_worker"]
    platforms = "cpu"
    if arguments.device == "gpu":
        platforms = "cuda,cpu" if part == "forms" else "cuda"
    environment = os.environ | {
        "JAX_PLATFORMS": platforms,
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    if arguments.device == "cpu" and part == "devices":
        environment["JAX_NUM_CPU_DEVICES"] = str(arguments.devices)
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
    )
    assert process.stdin is not None
    process.stdin.write(torch_job(arguments.device, arguments.small) if part == "torch" else "")
    process.stdin.close()
    return process


def rows_of(process: subprocess.Popen[str], seconds: float) -> Iterator[dict[str, Any]]:
    """Yields the rows that a process prints, and ends it when its time is over."""
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put("")

    threading.Thread(target=read, daemon=True).start()
    end = time.monotonic() + seconds
    while True:
        try:
            line = lines.get(timeout=max(0.1, end - time.monotonic()))
        except queue.Empty:
            process.kill()
            return
        if not line:
            return
        if line.startswith("{"):
            yield json.loads(line)


def run_part(part: str, arguments: argparse.Namespace, content: dict[str, Any]) -> None:
    """Runs a part in a process, and writes `content` with its rows after each of them."""
    full, quick = LIMITS[part]
    limit = quick if arguments.quick else full
    if arguments.device == "cpu":
        limit *= 10  # nobody waits for a card where there is none
    result: dict[str, Any] = {"rows": [], "limit_s": limit}
    content["parts"][part] = result
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as errors:
        process = started(part, arguments, errors)
        for row in rows_of(process, limit):
            result["rows"].append(row)
            write(arguments.out, content)
        result["code"] = process.wait()
        result["seconds"] = round(time.monotonic() - start, 1)
        if result["code"]:
            errors.seek(0)
            result["errors"] = errors.read()[-3000:]
    write(arguments.out, content)


def write(path: Path, content: dict[str, Any]) -> None:
    """Writes the JSON in one step, so that no reader sees half of it."""
    beside = path.with_suffix(".partial")
    beside.write_text(json.dumps(content, indent=1) + "\n")
    beside.replace(path)


def summary(content: dict[str, Any]) -> str:
    """Returns what a person wants to know first, as Markdown."""
    parts = content["parts"]
    rows = [row for part in parts.values() for row in part["rows"]]
    text = [updates_table(rows), steps_table(rows)]
    judged = [row for row in rows if "right" in row]
    right = [row for row in judged if row["right"]]
    text.append(f"{len(right)} of {len(judged)} forms, steps and sets of replicas are right.")
    for row in judged:
        if not row["right"]:
            text.append(f"Wrong: {json.dumps(row)}")
    for name, part in parts.items():
        if part.get("code"):
            text.append(f"{name} ended with {part['code']} after {part['seconds']} s.")
    return "\n\n".join(line for line in text if line)


def updates_table(rows: list[dict[str, Any]]) -> str:
    """Returns updates beside torch's hook and a kernel that moves seven words; empty without."""
    seven = 0.0
    torch_ms = {}
    updates = []
    for row in rows:
        if row.get("kind") == "copies":
            seven = row["seven_words_ms"]
        elif row.get("kind") == "update" and "seconds" in row:
            torch_ms[row["rank"]] = 1e3 * sorted(row["seconds"])[len(row["seconds"]) // 2]
        elif row.get("kind") == "update":
            updates.append(row)
    if not updates:
        return ""
    table = []
    for row in updates:
        options = "".join(f", {value}" for value in row["options"].values())
        hook = torch_ms.get(row["rank"])
        line = [f"{row['rank']}{options}", f"{row['queued_ms']:.2f}", f"{row['waited_ms']:.2f}"]
        line.append(f"{hook:.1f}" if hook else "")
        line.append(f"{row['queued_ms'] / seven:.1f}" if seven else "")
        line.append(f"{row['launches']:.0f}")
        line.append("" if row["temporary"] is None else f"{row['temporary']:.2f}")
        line.append(f"{row['compile_s']:.0f}")
        table.append(line)
    header = ("rank", "queued, ms", "waited, ms", "torch's hook, ms", "queued / seven words",
              "launches", "temporary / gradients", "compiled in, s")  # fmt: skip
    return markdown(header, table)


def steps_table(rows: list[dict[str, Any]]) -> str:
    """Returns whole training steps; empty without."""
    table = []
    for row in rows:
        if row.get("kind") == "step":
            time_ms = f"{row['queued_ms']:.1f}"
            table.append([row["reducer"], str(row["devices"]), time_ms, f"{row['compile_s']:.0f}"])
    if not table:
        return ""
    return markdown(("reducer", "devices", "step, ms", "compiled in, s"), table)


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
    arguments = parser().parse_args(argv)
    if arguments.run_part:
        options = (arguments.small, arguments.quick, arguments.devices)
        for row in run_here(arguments.run_part, *options):
            print(json.dumps(row), flush=True)
        return 0
    content: dict[str, Any] = {"machine": describe(_MODULE, ["jax", "numpy"]), "parts": {}}
    for part in LIMITS:
        alone = part == "devices" and arguments.devices == 1
        if part in arguments.parts and not alone:
            run_part(part, arguments, content)
    print(summary(content))
    parts = content["parts"].values()
    wrong = [row for part in parts for row in part["rows"] if not row.get("right", True)]
    return int(bool(wrong) or any(part["code"] for part in parts))


if __name__ == "__main__":
    call(main)
