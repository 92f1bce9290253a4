"""Files that are whole or not there at all, and what must not be opened as one."""

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
    """Opens a new file that takes the name `path` when the block ends, and goes if it fails.

    The bytes are on the disk before the name changes, so that a crash leaves the old file or the
    new one. The new file has the mode of the old one.

    Args:
      path: The file to replace; its folder must exist.

    Raises:
      OSError: The folder cannot be written to, or the disk is full; with the path.
    """
    # Not tempfile: that would make the file readable by its owner only. An exclusive name that
    # cannot be foreseen, so that nobody's link is followed and no other writer's file is taken.
    temporary = path.with_name(f".{path.name:.200}.{secrets.token_hex(8)}.tmp")
    with temporary.open("xb") as file:
        try:
            with contextlib.suppress(FileNotFoundError):  # what was private stays private
                os.fchmod(file.fileno(), path.stat().st_mode & 0o777)
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException as error:
            with contextlib.suppress(OSError):  # as it writes what is left
                file.close()
            temporary.unlink(missing_ok=True)
            if isinstance(error, OSError) and error.filename is None:
                error.filename = str(path)  # of a write the system does not say it
            raise
    with contextlib.suppress(OSError):  # not every file system lets a folder be synced
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def no_file(path: pathlib.Path) -> str | None:
    """Says what lies at `path` where it is no file, as a pipe would be waited for; else None.

    Raises:
      OSError: There is nothing.
    """
    mode = path.stat().st_mode
    if stat.S_ISREG(mode):
        return None
    return "a directory" if stat.S_ISDIR(mode) else "a pipe, a socket or a device"
