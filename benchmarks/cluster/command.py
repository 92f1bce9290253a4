"""Signals and exit codes of the two commands that measure over links."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from benchmarks.cluster.job import JobFailed
from benchmarks.cluster.net import NetworkUnavailable, check_available

# Exit codes; 2 is argparse's, for wrong arguments.
EXIT_FAILED = 1
EXIT_UNAVAILABLE = 3
PACKAGES = {"jax": ("jax", "flax", "optax"), "torch": ("torch",)}


def over_links(program: str, work: Callable[[], None]) -> int:
    """Runs an action that starts processes on a network; returns the exit code."""
    try:
        check_available()
        _on_signals(_interrupt)
        work()
    except NetworkUnavailable as error:
        print(f"{program}: {error}", file=sys.stderr)
        return EXIT_UNAVAILABLE
    except JobFailed as error:
        print(f"{program}: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print(f"{program}: interrupted; processes and namespaces are gone.", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


def _on_signals(handler: Any) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)


def _interrupt(*_: Any) -> NoReturn:
    """Ends the run; further signals must not interrupt the cleanup."""
    _on_signals(signal.SIG_IGN)
    raise KeyboardInterrupt
