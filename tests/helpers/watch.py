"""What reading a file does: the events of Python's audit hooks, processor time and memory."""

import sys
import time
import tracemalloc
from typing import NamedTuple

# What reading a file must never cause.
FORBIDDEN = {
    "import", "compile", "exec", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.remove",
    "os.rename", "os.mkdir", "subprocess.Popen", "shutil.rmtree", "socket.connect", "ctypes.dlopen",
    "pickle.find_class",
}  # fmt: skip
_SEEN = []  # a list while something is watched


class Cost(NamedTuple):
    error: Exception | None  # what it raised
    executed: list[str]  # events that no file may cause
    seconds: float  # of a processor
    peak: int  # bytes of memory, where it was traced


def _hook(event, arguments):
    # The C library of the process itself is asked to return freed memory.
    if _SEEN and event in FORBIDDEN and arguments != (None,):
        _SEEN[-1].append(f"{event} {arguments!r:.100}")


sys.addaudithook(_hook)  # which nothing removes


def watched(call, *, memory=True):
    """Calls it, and says what it did; tracing memory takes most of the time."""
    error = None
    if memory:
        tracemalloc.start()
    _SEEN.append([])
    start = time.process_time()
    try:
        call()
    except Exception as raised:
        error = raised
    took, executed = time.process_time() - start, _SEEN.pop()
    peak = tracemalloc.get_traced_memory()[1]  # 0 where nothing is traced
    tracemalloc.stop()
    return Cost(error, executed, took, peak)
