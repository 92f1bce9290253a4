"""``python -m torch_bridge``: inspects a PyTorch checkpoint, converts it to Flax and back."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import sys
from collections.abc import Sequence

from torch_bridge._base.errors import UnsafeCheckpoint
from torch_bridge._base.framework import not_installed
from torch_bridge._base.terminal import printable
from torch_bridge._cli import arguments
from torch_bridge._cli.convert import convert_to_flax, convert_to_torch
from torch_bridge._cli.inspect import inspect

OK = 0
UNUSABLE = 1
USAGE = 2
UNSAFE = 3
INTERRUPTED = 130  # the exit code that a shell gives after Ctrl-C
_COMMANDS = {"inspect": inspect, "to-flax": convert_to_flax, "to-torch": convert_to_torch}
# Argument of Python -> its option, if the option is not just the argument's name.
_AS_OPTIONS = {
    "rules": "--rule REGEX=PATH",
    "flatten": "--flatten REGEX=C,H,W",
    "unflatten": "--unflatten REGEX=C,H,W",
    "matrix_dims": None,  # has no option
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; prints an error as one message and returns the exit code."""
    options = arguments.parsed(argv)
    _return_freed_memory()
    try:
        arguments.read_files(options)
        _COMMANDS[options.command](options)
    except UnsafeCheckpoint as error:
        return _fail(error, UNSAFE)
    except ValueError as error:  # CheckpointMismatch, or an optimizer that optax does not have
        return _fail(error, UNUSABLE)
    except RecursionError:
        return _fail("the file nests its entries too deeply to be converted", UNUSABLE)
    except ModuleNotFoundError as error:
        return _fail(not_installed(error), USAGE)
    except argparse.ArgumentTypeError as error:  # an error in the user's own modules
        return _fail(error, USAGE)
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)
    except OSError as error:
        return _fail(f"{error.filename or ''}: {error.strerror or error}".lstrip(": "), UNUSABLE)
    return OK


def _return_freed_memory() -> None:
    """Makes glibc return the memory of freed arrays: by default it keeps those below 32 MiB."""
    mmap_threshold = -3  # M_MMAP_THRESHOLD of malloc.h
    with contextlib.suppress(OSError, AttributeError):  # other C libraries have no mallopt
        ctypes.CDLL(None).mallopt(mmap_threshold, 1 << 20)


def _fail(error: object, code: int) -> int:
    print(f"error: {printable(str(error), keep=chr(10))}", file=sys.stderr)
    names = getattr(error, "parameters", ())
    options = [_AS_OPTIONS.get(name, "--" + name.replace("_", "-")) for name in names]
    shown = ", ".join(filter(None, options))
    if shown:
        print(f"  on the command line: {shown}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
