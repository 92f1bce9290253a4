"""One line on a terminal that says what a long conversion is at."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator

SECONDS = 3.0  # what is done sooner needs no line


@contextlib.contextmanager
def steps(total: int) -> Iterator[Callable[[str], None]]:
    """Shows a bar of so many steps on standard error, if that is a terminal, after some seconds.

    Yields:
      What to call as each step begins, with what it does.
    """
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console
    from rich.progress import Progress

    bar = Progress(console=Console(stderr=True), transient=True)
    task = bar.add_task("", total=total, completed=-1)

    def begin(text: str) -> None:
        bar.update(task, description=text, advance=1)

    timer = threading.Timer(SECONDS, bar.start)
    timer.daemon = True
    timer.start()
    try:
        yield begin
    finally:
        timer.cancel()
        timer.join()
        bar.stop()
