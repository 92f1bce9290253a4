"""Times the counted updates on a GPU that is there, beside torch's hook and the bare copy.

The measurement is that of `benchmarks.overhead`: one device, nothing travels.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

# Reducers that it times, with the options of `benchmarks.overhead`.
TIMED = {
    "powersgd": [],
    "powersgd, gpu_kernels": ["--gpu-kernels"],
    "powersgd, alternating": ["--alternating"],
}
_ASK = "import jax; jax.devices('gpu')"


def gpu_found() -> bool:
    """Whether JAX finds a GPU; asked in a child, so that its memory is free for what is timed."""
    asked = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, check=False)
    return asked.returncode == 0


def times(
    trees: Sequence[str], ranks: Sequence[int], reducers: Sequence[str], device: str = "gpu"
) -> dict[tuple[str, str, int], dict[str, Any]]:
    """Seconds of the update, of torch's hook and of the floor by (tree, reducer, rank).

    Where torch is not installed, or has no GPU, its figures are missing. Reducers that are not in
    `TIMED` are left out.
    """
    # Draws pictures too, for which a machine that only compiles has no library.
    from benchmarks.overhead import __main__ as overhead

    found = {}
    for reducer in reducers:
        if reducer not in TIMED:
            continue
        arguments = ["--ranks", ",".join(map(str, ranks)), "--device", device, *TIMED[reducer]]
        given = overhead.parse(arguments)
        for tree in trees:
            cases, versions = _cases(overhead, given, tree)
            for case in cases:
                update, torch = case.get("jax"), case.get("torch")
                found[tree, reducer, case["rank"]] = {
                    "seconds": update and update["median"],
                    "torch_seconds": torch and torch["median"],
                    "floor_seconds": case.get("floor"),
                    "device": versions.get("device"),
                }
    return found


def _cases(overhead: Any, given: Any, tree: str) -> tuple[list[dict[str, Any]], dict[str, str]]:
    try:
        return overhead.cases_of(given, tree)
    except overhead.WorkerFailed as error:
        print(f"gpu_program: {error} Timed without torch.", file=sys.stderr)
        given.frameworks = ("jax",)
        return overhead.cases_of(given, tree)
