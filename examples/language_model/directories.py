"""The files of a run's checkpoints: whose they are, and whether they are what was written."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

_LOCK_SECONDS = 10  # the lock of a process that was killed goes with it
_SEAL = "checksums"


class CheckpointError(Exception):
    """A checkpoint directory that cannot be used as asked; the message is one sentence."""


class Unusable(Exception):
    """A checkpoint that is damaged, cut off, or not one of this program."""


def saved_steps(directory: Path) -> Iterator[int]:
    """Of complete checkpoints; one being written has another name."""
    if directory.is_dir():
        names = [path.name for path in directory.iterdir() if path.name.isdecimal()]
        yield from (int(name) for name in names if name == str(int(name)))  # 030 is none of ours


def locked(directory: Path) -> IO[str]:
    """Makes the directory this run's own until the process ends, however it ends.

    Raises:
      CheckpointError: It is another run's; the message says which process has it.
    """
    try:
        directory.mkdir(exist_ok=True)
        # Inside it, so that every path that leads here finds the same one.
        lock = (directory / ".lock").open("a+")
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be written to: {error.strerror}") from error
    end = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if time.monotonic() > end:
                with lock:
                    lock.seek(0)
                    holder = lock.read().strip()
                raise CheckpointError(
                    f"{directory} is in use by another run ({holder}); end that one, or choose "
                    "another directory"
                ) from error
            time.sleep(0.2)
    with contextlib.suppress(OSError):  # who it is does not matter on a full disk
        lock.truncate(0)
        print(f"process {os.getpid()} on {socket.gethostname()}", file=lock, flush=True)
    for left in directory.glob("*.orbax-checkpoint-tmp*"):  # by a run that was killed
        shutil.rmtree(left, ignore_errors=True)
    return lock


def seal(checkpoint: Path) -> None:
    """Writes the checksums of all files beside them, and before these their own."""
    text = json.dumps(_checksums(checkpoint)).encode()
    (checkpoint / _SEAL).write_bytes(b"%d\n%b" % (zlib.crc32(text), text))


def check_seal(checkpoint: Path) -> None:
    """Compares the files with their checksums, before any parser sees them.

    Tensorstore, which orbax reads leaves with, answers for every leaf, and prints a stack trace
    for each answer that arrives after orbax has given up because of the first that is damaged.

    Raises:
      Unusable: Naming the files, whose paths name the leaves, or saying that there is no seal.
    """
    try:
        own, _, text = (checkpoint / _SEAL).read_bytes().partition(b"\n")
        if own != b"%d" % zlib.crc32(text):
            raise Unusable(f"it is damaged: {_SEAL} is not what was saved")
        sealed = json.loads(text)
        found = _checksums(checkpoint, *sealed)
    except FileNotFoundError as error:
        missing = os.path.relpath(error.filename, checkpoint)
        raise Unusable(f"it is cut off, or not one of this program: {missing} is missing") from None
    except OSError as error:
        raise Unusable(f"it cannot be read: {error}") from error
    if wrong := [name for name in sealed if found[name] != sealed[name]]:
        some = ", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
        raise Unusable(f"it is damaged: {some} {'are' if wrong[1:] else 'is'} not what was saved")


def _checksums(checkpoint: Path, *names: str) -> dict[str, int]:
    """By path; of the files named, or of all in folders: orbax writes again beside these."""
    paths = [checkpoint / name for name in names] or sorted(checkpoint.glob("*/**/*"))
    return {
        path.relative_to(checkpoint).as_posix(): zlib.crc32(path.read_bytes())
        for path in paths
        if names or path.is_file()
    }
