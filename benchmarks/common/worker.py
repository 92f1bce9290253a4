"""A process that measures one thing: a job on its standard input, rows of JSON on its output."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from benchmarks.common.paths import ROOT


def run_worker(
    module: list[str],
    job: Any,
    environment: Mapping[str, str],
    limit: float | None = None,
) -> dict[str, Any]:
    """Runs a module for so many seconds at most.

    Args:
      module: Its name, and its arguments.
      job: What it reads, as JSON.
      environment: Variables besides those that are there.
      limit: Seconds; None for as long as it takes.

    Returns:
      The rows that it printed until its end, its exit code and seconds; the end of what it said on
      standard error where the code is not 0.
    """
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as rows, tempfile.TemporaryFile("w+") as errors:
        try:
            code = subprocess.run(
                [sys.executable, "-m", *module],
                cwd=ROOT,
                env=os.environ | environment,
                input=json.dumps(job),
                stdout=rows,
                stderr=errors,
                text=True,
                timeout=limit,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            code = -signal.SIGKILL
        rows.seek(0)
        errors.seek(0)
        result: dict[str, Any] = {"code": code, "seconds": round(time.monotonic() - start, 1)}
        result["rows"] = [json.loads(line) for line in rows if line.startswith("{")]
        if code:
            result["errors"] = errors.read()[-3000:]
    return result
