"""Makes XLA compile the tests quickly, except where a test is about the optimised program.

Compilation takes nearly all of the suite's time, and most of that goes into optimising code that
runs for a millisecond. Assertions about values hold with any correct compiler. Assertions about the
program itself, its collectives and memory, use `users_program`. Assertions about exact bits and NaN
use `optimised`.
"""

import os
import re
import subprocess
import sys

# Passes over the whole program, which decide about collectives, are not changed. The emitters of
# fusions take two thirds of the time and 130 MB. A module in one part takes three quarters of the
# time of a module in 32 parts.
_EMITTERS = "xla_cpu_use_fusion_emitters"  # jaxlib 0.11 has no other emitters
_QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_parallel_codegen_split_count": 1,
    _EMITTERS: False,
}
_OPTIMISED = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}

# Makes jaxlib read XLA_FLAGS, without compiling anything.
_START = "from jaxlib import xla_client; xla_client.make_cpu_client()"


def compile_quickly(cache):
    """Sets XLA's flags for this process and for those that tests start; call it before JAX starts.

    Flags that this jaxlib does not know are left out, because an unknown flag would end the process
    and its message would be lost.

    Args:
      cache: A directory for this test process and its children, of which only one writes at a time,
        because JAX may read a file that another process has written in part.

    Raises:
      SystemExit: jaxlib does not know a flag that was in XLA_FLAGS before, or does not start.
    """
    os.environ["JAX_COMPILATION_CACHE_DIR"] = cache
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    if "PYTEST_XDIST_WORKER" in os.environ:
        return  # a worker inherits the flags of the process that started it
    before = os.environ.get("XLA_FLAGS", "")
    flags = [f"--{name}={str(value).lower()}" for name, value in _QUICK.items()]
    unknown = _unknown_flags([*flags, before])
    wrong = [flag for flag in before.split() if flag in unknown]
    if wrong:
        sys.exit(f"this jaxlib does not know {' '.join(wrong)}: take it out of XLA_FLAGS")
    known = [flag for flag in flags if flag not in unknown]
    os.environ["XLA_FLAGS"] = " ".join([*known, before])


def _unknown_flags(flags):
    """Returns the flags that jaxlib does not know, from a process that an unknown flag ends."""
    environment = {**os.environ, "XLA_FLAGS": " ".join(flags)}
    command = [sys.executable, "-c", _START]
    started = subprocess.run(command, env=environment, capture_output=True, text=True)
    unknown = re.search(r"Unknown flags? in XLA_FLAGS: (.*)", started.stderr)
    if unknown:
        return unknown[1].split()
    if started.returncode:
        lines = started.stderr.strip().splitlines() or [f"exit code {started.returncode}"]
        sys.exit(f"jaxlib does not start with XLA_FLAGS={environment['XLA_FLAGS']}: {lines[-1]}")
    return []


def _users_options():
    """Returns the options that undo those quick flags that change the program, if they are set."""
    if f"--{_EMITTERS}=" in os.environ.get("XLA_FLAGS", ""):
        return {_EMITTERS: True}
    return {}


def users_program(lowered):
    """Compiles a program with the user's text and memory, but without optimised machine code."""
    return lowered.compile(compiler_options=_users_options())


def optimised(lowered):
    """Compiles a program exactly as for a user."""
    return lowered.compile(compiler_options=_users_options() | _OPTIMISED)
