"""Writes files completely or not at all, and detects paths that are not regular files.

`save_checkpoint` and the command line write through `replacing`, because the file that they replace
is often the only copy of a run. Readers ask `no_file` first, since a path that a user passed may be
a folder or a pipe.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import secrets
import stat
from collections.abc import Iterator
from typing import BinaryIO


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[BinaryIO]:
    """Opens a new file that replaces `path` when the block ends, and is deleted if the block fails.

    The bytes are on the disk before the name changes, so a crash leaves the old file or the new
    file, and both are complete. The new file has the mode of the old file.

    Args:
      path: The file to replace; its folder must exist.

    Raises:
      OSError: The folder cannot be written to, or the disk is full; the error has the path.
    """
    # tempfile would make the file readable by its owner only. The random name and mode "x" make
    # sure that no link is followed and that no other process's file is overwritten.
    temporary = path.with_name(f".{path.name:.200}.{secrets.token_hex(8)}.tmp")
    with temporary.open("xb") as file:
        try:
            with contextlib.suppress(FileNotFoundError):  # a private file stays private
                os.fchmod(file.fileno(), path.stat().st_mode & 0o777)
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException as error:
            with contextlib.suppress(OSError):  # close writes the rest of the buffer
                file.close()
            temporary.unlink(missing_ok=True)
            if isinstance(error, OSError) and error.filename is None:
                error.filename = str(path)  # the system does not name the file of a failed write
            raise
    with contextlib.suppress(OSError):  # not every file system lets a folder be synced
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextlib.contextmanager
def new_folder(path: pathlib.Path) -> Iterator[None]:
    """Makes a folder with its parents; if the block fails, removes those that were not there."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for folder in missing:
            with contextlib.suppress(OSError):  # another process has written into it
                folder.rmdir()
        raise


def no_file(path: pathlib.Path) -> str | None:
    """Returns what `path` is if it is not a regular file, and None if it is one.

    Reading a pipe would wait for ever.

    Raises:
      OSError: Nothing exists at `path`.
    """
    mode = path.stat().st_mode
    if stat.S_ISREG(mode):
        return None
    return "a directory" if stat.S_ISDIR(mode) else "a pipe, a socket or a device"
