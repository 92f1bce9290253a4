"""Runs a script as Python would, with a compilation cache that every process of a job writes.

    python -m benchmarks.faults.program train_multihost.py --steps 100 ...

JAX lets only process 0 write it, and what the others compile has other keys: in a job that is
started again, all but the first compile everything anew, for half a minute of a core each.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def main() -> None:
    """The script is the first argument, and its own are the rest."""
    compiler: Any = importlib.import_module("jax._src.compiler")
    # What it asks this for is whether it is the one that writes.
    compiler.distributed = SimpleNamespace(global_state=SimpleNamespace(process_id=0, client=None))
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
