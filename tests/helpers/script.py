"""Another Python, which is expected to end well, and what is waited for meanwhile."""

import os
import subprocess
import sys
import time


def python(*arguments, executable=sys.executable, cwd=None, **environment):
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


def wait_for(condition, running=lambda: True, seconds=200, said=lambda: None):
    """Returns when the condition holds; fails, with what was said, if nothing runs, or too late."""
    end = time.monotonic() + seconds
    while not condition():
        assert running(), said()
        assert time.monotonic() < end, said()
        time.sleep(0.02)
