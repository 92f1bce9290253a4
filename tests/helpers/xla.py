"""How XLA compiles the tests: quickly, except where the assertion is about the optimised program.

Compilation is nearly all of the suite's time, and most of it goes into optimising code that runs
for a millisecond. What is asserted about values holds for any correct compiler; what is asserted
about the program itself, its collectives and memory, uses `users_program`, and `optimised` what is
asserted about bits and numbers that are none.
"""

import os
import re
import subprocess
import sys

# Passes over the program as a whole, which decide about collectives, stay as they are. The emitters
# of fusions take two thirds of the time and 130 MB. A module in one piece takes three quarters of
# the time of one in 32.
_EMITTERS = "xla_cpu_use_fusion_emitters"  # jaxlib 0.11 knows no others
_QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_parallel_codegen_split_count": 1,
    _EMITTERS: False,
}
_OPTIMISED = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}

# What jaxlib does before anything is compiled: it reads XLA_FLAGS.
_START = "from jaxlib import xla_client; xla_client.make_cpu_client()"


def compile_quickly(cache):
    """Sets how XLA compiles in this process and in those that tests start; before JAX starts.

    Flags that this jaxlib does not know are left out: with one of them it would end the process,
    and what it says of it would be lost.

    Args:
      cache: A directory of this test process and its children, who write into it one at a time:
        JAX may read what another process has written half.

    Raises:
      SystemExit: jaxlib does not know a flag that was in XLA_FLAGS before, or does not start.
    """
    os.environ["JAX_COMPILATION_CACHE_DIR"] = cache
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    if "PYTEST_XDIST_WORKER" in os.environ:
        return  # it has the flags of the process that started it
    before = os.environ.get("XLA_FLAGS", "")
    flags = [f"--{name}={str(value).lower()}" for name, value in _QUICK.items()]
    unknown = _unknown_flags([*flags, before])
    wrong = [flag for flag in before.split() if flag in unknown]
    if wrong:
        sys.exit(f"this jaxlib does not know {' '.join(wrong)}: take it out of XLA_FLAGS")
    known = [flag for flag in flags if flag not in unknown]
    os.environ["XLA_FLAGS"] = " ".join([*known, before])


def _unknown_flags(flags):
    """Asks jaxlib in a process of its own, which it ends at the first unknown flag."""
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
    """Returns what undoes the flags that change the program, as far as jaxlib knows them."""
    if f"--{_EMITTERS}=" in os.environ.get("XLA_FLAGS", ""):
        return {_EMITTERS: True}
    return {}


def users_program(lowered):
    """Compiles what a user gets, in text and memory; its machine code is not optimised."""
    return lowered.compile(compiler_options=_users_options())


def optimised(lowered):
    """Compiles the executable that a user gets."""
    return lowered.compile(compiler_options=_users_options() | _OPTIMISED)
