"""What tracing and compiling cost a process that does it all day, and how to pay less."""

import contextlib
import ctypes
import gc
import importlib
import inspect
import mmap
import threading
from pathlib import Path

import jax

from tests.helpers.runners import forget_programs

_GROWTH = 500 << 20
_left = 0
_contexts = threading.local()
# Tracing makes a million objects a second that its own reference counts free.
_OBJECTS_BEFORE_COLLECTION = 200_000


def save_time():
    """Collects garbage less often, and lowers programs in one MLIR context a thread.

    JAX makes a context with all dialects for every program, and drops it: 5 ms of the 14 that an
    array of a new shape costs. Where its function is another or gone, nothing is saved. To be
    called once.
    """
    gc.set_threshold(_OBJECTS_BEFORE_COLLECTION, 20, 50)
    mlir = importlib.import_module("jax._src.interpreters.mlir")
    make = getattr(mlir, "make_ir_context", None)
    if not make or inspect.signature(make).parameters:
        return

    def of_this_thread():
        local = _contexts  # another thread may forget meanwhile
        if not hasattr(local, "context"):
            local.context = make()
        return local.context

    mlir.make_ir_context = of_this_thread


def has_grown():
    """Returns whether much was compiled since programs were dropped last."""
    return resident() > _left + _GROWTH


def resident():
    """Bytes of this process in memory; 0 where the system does not say."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    return 0


def forget():
    """Drops all programs. What is needed again comes from the compilation cache."""
    global _left, _contexts
    forget_programs()
    _contexts = threading.local()  # types and locations stay in a context
    jax.clear_caches()
    gc.collect()
    # glibc keeps what was freed between what was not: half of it all.
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
    _left = resident()
