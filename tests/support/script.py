"""Another Python, which is expected to end well."""

from __future__ import annotations

import os
import subprocess
import sys


def python(*arguments: object, executable=sys.executable, cwd=None, **environment: str) -> str:
    """Runs it with such arguments, and returns what it prints."""
    done = subprocess.run(
        [executable, *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
