"""Runs a measurement in a separate process: JSON on its input, rows of JSON on its output."""

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
    """Runs a module in a separate process with a limit in seconds.

    Args:
      module: The name of the module, and its arguments.
      job: The module's input, which is sent as JSON.
      environment: Environment variables to add.
      limit: The limit in seconds; None for no limit.

    Returns:
      The rows that the module printed, its exit code and seconds, and the end of its standard error
      if the code is not 0.
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
