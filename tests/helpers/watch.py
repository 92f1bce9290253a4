"""Measures the reading of a file: events of Python's audit hooks, processor time and memory."""

import sys
import time
import tracemalloc
from typing import NamedTuple

# Audit events that reading a file must never cause.
FORBIDDEN = {
    "import", "compile", "exec", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.remove",
    "os.rename", "os.mkdir", "subprocess.Popen", "shutil.rmtree", "socket.connect", "ctypes.dlopen",
    "pickle.find_class",
}  # fmt: skip
_SEEN = []  # holds one list of events while `watched` runs


class Cost(NamedTuple):
    error: Exception | None  # the error that the call raised
    executed: list[str]  # the forbidden events
    seconds: float  # processor time
    peak: int  # the most bytes of memory, or 0 if memory was not traced


def _hook(event, arguments):
    # `torch_bridge` opens the process's own C library, as None, to return freed memory.
    if _SEEN and event in FORBIDDEN and arguments != (None,):
        _SEEN[-1].append(f"{event} {arguments!r:.100}")


sys.addaudithook(_hook)  # stays until the process ends


def watched(call, *, memory=True):
    """Calls `call` and returns its cost; tracing memory takes most of the time."""
    error = None
    if memory:
        tracemalloc.start()
    _SEEN.append([])
    start = time.process_time()
    try:
        call()
    except Exception as raised:
        error = raised
    took = time.process_time() - start
    executed = _SEEN.pop()
    peak = tracemalloc.get_traced_memory()[1]  # 0 if memory is not traced
    tracemalloc.stop()
    return Cost(error, executed, took, peak)
