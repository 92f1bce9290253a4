"""Reads and appends finished runs, one JSON line each, and describes where they were made.

A line omits the setting and the machine if they equal those of the line before.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Run = dict[str, Any]  # what a line says, and what a table is made of
_COMMON = ("config", "about")


def read_runs(path: Path) -> list[Run]:
    """Reads the finished runs from a file of JSON lines; returns none if there is no file.

    A line that a kill cut off is left out.
    """
    runs: list[Run] = []
    if not path.exists():
        return runs
    run: Run = {}
    for line in path.read_text().splitlines():
        common = {name: run[name] for name in _COMMON if name in run}
        with contextlib.suppress(json.JSONDecodeError):
            run = common | json.loads(line)
            runs.append(run)
    return runs


def append_run(path: Path, run: Run) -> None:
    """Appends a finished run on a new line, also after a line that was cut off."""
    path.parent.mkdir(parents=True, exist_ok=True)
    last = (read_runs(path) or [{}])[-1]
    different = run.copy()
    for name in _COMMON:
        if name in last and last[name] == run.get(name):
            del different[name]
    cut_off = path.exists() and not path.read_bytes().endswith(b"\n")
    with path.open("a") as file:
        file.write("\n" * cut_off + json.dumps(different, separators=(",", ":")) + "\n")


def made_on(runs: Sequence[Run]) -> str:
    """Writes when and with which machines and versions runs were made."""
    several: dict[str, dict[str, None]] = {}  # by name, each once
    for run in runs:
        machine = run["about"]["machine"]
        cpu = re.sub(r"cpu (family \d+, model \d+), stepping \d+", r"\1", machine["cpu"])
        for name, value in ({"cpu": cpu} | machine["versions"]).items():
            several.setdefault(name, {})[value] = None
    written = {name: " or ".join(values) for name, values in several.items()}
    cpus = written.pop("cpu")
    versions = ", ".join(f"{name} {numbers}" for name, numbers in written.items())
    dates = sorted(run["about"]["date"][:10] for run in runs)
    when = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    return f"{len(runs)} runs, {when}, {cpus}; {versions}."
