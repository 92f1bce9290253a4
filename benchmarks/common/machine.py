"""Describes where a benchmark ran, and makes settings equal between runs."""

from __future__ import annotations

import datetime
import os
import platform
import re
import shlex
import sys
import time
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

# glibc gives large blocks back to the system and faults them in again on every step, which costs
# JAX and torch alike tens of milliseconds with 40 MB of gradients. These settings keep the memory.
# The single arena is for JAX: blocks of more than 64 MiB fit into none of those of its threads.
ALLOCATOR = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "4000000000",
    "MALLOC_TRIM_THRESHOLD_": "8000000000",
    "MALLOC_TOP_PAD_": "100000000",
}
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def describe(program: str, packages: Iterable[str]) -> dict[str, Any]:
    """Returns how, where, when and with which versions a program runs."""
    versions = {"Python": platform.python_version()}
    for package in packages:
        versions[package] = version(package)
    return {
        "command": shlex.join(["python", "-m", program, *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": {
            "cpu": _cpu(),
            "cores": len(os.sched_getaffinity(0)),
            "kernel": platform.release(),
            "busy_cores_at_start": busy_cores(),
            "versions": versions,
        },
    }


def busy_cores(seconds: float = 0.5) -> float:
    """Counts the cores that other programs use, on average over the next seconds.

    The load average would also count programs that ended minutes ago.
    """

    def ticks() -> np.ndarray:
        first = Path("/proc/stat").read_text().partition("\n")[0]
        return np.array(first.split()[1:9], float)

    before = ticks()
    time.sleep(seconds)
    passed = ticks() - before
    idle = passed[3] + passed[4]  # idle, and waiting for a disk
    return float((os.cpu_count() or 1) * (1 - idle / max(1, passed.sum())))


def sentence(machine: Mapping[str, Any]) -> str:
    """Writes the result of `describe` as a sentence beside a figure."""
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    return f"{machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}; {versions}."


def _cpu() -> str:
    """Reads make and model. Virtual machines hide the name ("AMD EPYC"), but not its numbers."""
    first = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0]
    fields = dict(re.findall(r"^(.*?)\s*: (.*)$", first, re.MULTILINE))
    if "model name" not in fields:
        return platform.machine()
    numbers = [f"{x} {fields[x]}" for x in ("cpu family", "model", "stepping") if x in fields]
    return f"{fields['model name']} ({', '.join(numbers)})"
