"""Starts the processes of a training job with a user's arguments, and reads their output."""

import contextlib
import io
import multiprocessing
import os
import resource
import signal
import socket
import sys
import time

import jax
import pytest

from tests.helpers.paths import LANGUAGE_MODEL
from tests.helpers.script import wait_for

# Each process is forked from one that has imported the slow modules and computed nothing.
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["orbax.checkpoint", "flax.linen", "optax"])


def _run(said, arguments, environment, largest_file):
    file = os.open(said, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(environment)
    if largest_file:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    sys.path.insert(0, str(LANGUAGE_MODEL))
    sys.argv = ["train.py", *arguments]
    import train

    sys.exit(train.main())


def in_this_process(module, *arguments):
    """Calls ``main()`` of an example with these arguments, and returns its output as text."""
    printed = io.StringIO()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(sys, "argv", [f"{module.__name__}.py", *map(str, arguments)])
        patch.setenv("COLUMNS", "200")
        with jax.numpy_dtype_promotion("standard"):  # the user's default
            assert not module.main()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    return printed.getvalue()


class Job:
    """Several processes of examples/language_model/train.py; the context ends them on exit."""

    def __init__(
        self, processes, directory, *arguments, scheduler=None, each=(), largest_file=None
    ):
        """Starts the processes, whose output goes to files in `directory`.

        `each` has further arguments for each process. `scheduler` returns a process's environment
        variables, as a cluster's scheduler sets them; without it, flags name the other processes.
        No process can write a file of more than `largest_file` bytes.
        """
        self._said = [directory / f"said{index}.txt" for index in range(processes)]
        self.processes = []
        with socket.create_server(("127.0.0.1", 0)) as free:
            where = f"127.0.0.1:{free.getsockname()[1]}"
        for index, said in enumerate(self._said):
            flags = [str(argument) for argument in arguments]
            if each:
                flags += each[index]
            environment = {}
            if scheduler:
                environment = scheduler(index)
                flags += ["--distributed"]
            elif processes > 1:
                flags += ["--coordinator", where, "--processes", str(processes)]
                flags += ["--process-id", str(index)]
            said.touch()
            run = (str(said), flags, environment, largest_file)
            process = _FORKS.Process(target=_run, args=run)
            process.start()
            self.processes.append(process)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for process in self.processes:
            process.kill()
            process.join()

    def said(self, index=0):
        return self._said[index].read_text()

    def signal(self, number, index=0):
        os.kill(self.processes[index].pid, number)

    def wait_until(self, condition, seconds=300):
        wait_for(
            condition,
            running=lambda: any(process.is_alive() for process in self.processes),
            seconds=seconds,
            said=lambda: [path.read_text()[-1000:] for path in self._said],
        )

    def codes(self, seconds=300):
        """Waits for the processes; returns their exit codes, with None for one that still runs."""
        end = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.1, end - time.monotonic()))
        return [process.exitcode for process in self.processes]
