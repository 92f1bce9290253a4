"""Runs another Python process that must succeed, and waits for conditions."""

import os
import subprocess
import sys
import time


def python(*arguments, executable=sys.executable, cwd=None, **environment):
    """Runs Python with these arguments; returns its output, and fails if its exit code is not 0."""
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


def wait_for(condition, running=lambda: True, seconds=200, said=lambda: None):
    """Waits until `condition` holds; fails with `said()` if nothing runs, or after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert running(), said()
        assert time.monotonic() < end, said()
        time.sleep(0.02)
