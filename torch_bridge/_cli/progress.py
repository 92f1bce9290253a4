"""Shows the current step of a long conversion in one line on a terminal."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator

SECONDS = 3.0  # a shorter conversion shows no bar


@contextlib.contextmanager
def steps(total: int) -> Iterator[Callable[[str], None]]:
    """Shows a progress bar on standard error after some seconds, if standard error is a terminal.

    Args:
      total: The number of steps.

    Yields:
      A function to call at the beginning of each step, with the text to show.
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
