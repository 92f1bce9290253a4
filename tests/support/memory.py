"""What compiled programs hold, and how a test process gives it back."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
from pathlib import Path

import jax
from runners import forget_programs

_GROWTH = 500 << 20
_left = 0


def has_grown() -> bool:
    """Whether much was compiled since programs were dropped last."""
    return resident() > _left + _GROWTH


def resident() -> int:
    """Bytes of this process in memory; 0 where the system does not say."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    return 0


def forget() -> None:
    """Drops all programs. What is needed again comes from the compilation cache."""
    global _left
    forget_programs()
    jax.clear_caches()
    gc.collect()
    # glibc keeps what was freed between what was not: half of it all.
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
    _left = resident()
