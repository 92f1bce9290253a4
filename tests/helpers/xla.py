"""How XLA compiles the tests: quickly, except where the assertion is about the optimised program.

Compilation is nearly all of the suite's time, and most of it goes into optimising code that runs
for a millisecond. What is asserted about values holds for any correct compiler; what is asserted
about the program itself, its collectives and memory, uses `users_program`, and `optimised` what is
asserted about bits and numbers that are none.
"""

import importlib.metadata
import os

# Passes over the program as a whole, which decide about collectives, stay as they are. The emitters
# of fusions take two thirds of the time and 130 MB; jaxlib 0.12 knows no others. A module in one
# piece takes three quarters of the time of one in 32.
_QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_parallel_codegen_split_count": 1,
    "xla_cpu_use_fusion_emitters": False,
}
_USERS_PROGRAM = {"xla_cpu_use_fusion_emitters": True}
if tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2])) >= (0, 12):
    del _QUICK["xla_cpu_use_fusion_emitters"], _USERS_PROGRAM["xla_cpu_use_fusion_emitters"]
_OPTIMISED = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}


def compile_quickly(cache):
    """To be called before JAX starts; processes that the tests start inherit it.

    Args:
      cache: A directory of this test process and its children, who write into it one at a time:
        JAX may read what another process has written half.
    """
    flags = [f"--{name}={str(value).lower()}" for name, value in _QUICK.items()]
    os.environ["XLA_FLAGS"] = " ".join([*flags, os.environ.get("XLA_FLAGS", "")])
    os.environ["JAX_COMPILATION_CACHE_DIR"] = cache
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"


def users_program(lowered):
    """The program that a user gets, in text and memory; its machine code is not optimised."""
    return lowered.compile(compiler_options=_USERS_PROGRAM)


def optimised(lowered):
    """The executable that a user gets."""
    return lowered.compile(compiler_options=_USERS_PROGRAM | _OPTIMISED)
