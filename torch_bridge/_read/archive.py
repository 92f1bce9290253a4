"""The zip archive that ``torch.save`` writes: its pickle, and the storages that belong to it."""

from __future__ import annotations

import os
import pathlib
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np

from torch_bridge._read.globals import functions_of
from torch_bridge._read.keys import Keys
from torch_bridge._read.tensors import storage_reader
from torch_bridge._read.unpickle import STORAGE, unpickle
from torch_bridge._read.values import Budget, Malformed

_ZIP = (b"PK\x03\x04", b"PK\x05\x06")
_CHUNK = 1 << 20
_DIRECTORY_SIZE = 5  # its place in what ends a zip file
_DIRECTORY_BYTES = 18  # of memory, for a byte of a zip directory: 800 for an entry of 46
_UNCOUNTED = 4 << 20  # what is not charged one by one
# Files that people take for a checkpoint of torch's: where which bytes are, and a sentence.
_OTHER_KINDS = (
    (0, b"\x1f\x8b", "a gzip file; unpack it first with gunzip"),
    (
        257,
        b"ustar",
        "a tar archive, as of torch before 0.1.10 or of tar; unpack it, or save it anew",
    ),
    (8, b"{", "a safetensors file; load it with safetensors and save the dictionary by torch.save"),
    (
        0,
        b"\x80",
        "a pickle, as torch wrote before 1.6; read it with torch.load(..., weights_only=True) and "
        "save it anew with torch.save",
    ),
    (0, b"", "a file that is no zip archive, which torch.save writes"),
)


def read_archive(path: pathlib.Path, max_bytes: int | None) -> tuple[Any, Budget]:
    """The value that ``torch.save`` wrote to `path`, and the budget that it was charged to.

    The arguments are those of `torch_bridge.load`. The value has plain containers, numbers, NumPy
    arrays and, for what has no plain form, `Global` tokens.

    Raises:
      Malformed: Not a file of torch's, or a damaged one.
      Forbidden: It asks for a global that is not on the allow-list.
      OSError: The file cannot be opened.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(512)
        if head[:4] not in _ZIP:
            other = (kind for at, mark, kind in _OTHER_KINDS if head[at:].startswith(mark))
            raise Malformed(next(other) if head else "an empty file")
        budget = Budget(size, max_bytes)
        budget.claim(_UNCOUNTED if max_bytes is None else 0)
        try:
            # What ZipFile asks for the size of the directory that it is about to read.
            if end := zipfile._EndRecData(file):  # type: ignore[attr-defined]
                budget.claim(_DIRECTORY_BYTES * min(end[_DIRECTORY_SIZE], size))
            archive = zipfile.ZipFile(file)
        except (Malformed, MemoryError):
            raise
        except Exception as error:  # whatever the standard library says of a damaged archive
            raise Malformed("a damaged zip archive, cut short perhaps") from error
        with archive:
            read, keys = _reader(archive, budget), Keys(budget)
            functions = functions_of(keys, budget) | {STORAGE: storage_reader(read)}
            return unpickle(read("data.pkl"), functions, keys, budget), budget


def _reader(archive: zipfile.ZipFile, budget: Budget) -> Callable[..., np.ndarray]:
    """What reads the entries of an archive that is laid out as torch does, their CRCs checked."""
    names = archive.namelist()
    roots = [name.removesuffix("data.pkl") for name in names if name.endswith("/data.pkl")]
    roots = [root for root in roots if root.count("/") == 1]
    if len(roots) != 1:
        raise Malformed("a zip archive without the one data.pkl that torch.save writes")
    root = roots[0]
    if f"{root}constants.pkl" in names:
        raise Malformed("a TorchScript archive (torch.jit.save); save the state_dict instead")

    def read(name: str, nbytes: int | None = None) -> np.ndarray:
        """The bytes of an entry, uint8; `nbytes` is the size it must have, None for any."""
        info = archive.NameToInfo.get(root + name)
        if info is None:
            raise Malformed(f"an archive without its entry {name!r:.60}")
        if nbytes is not None and info.file_size != nbytes:
            raise Malformed(f"{info.file_size} bytes in {name!r:.60}, expected {nbytes}")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            # The header of an LZMA stream alone can ask for gigabytes.
            raise Malformed(f"compression method {info.compress_type} in {name!r:.60}")
        # Claimed before it is allocated: the directory of a bomb can promise any size.
        budget.claim(info.file_size)
        raw, filled = np.empty(info.file_size, np.uint8), 0
        try:
            with archive.open(info) as entry:
                into = entry.readinto  # type: ignore[attr-defined] (which typeshed's IO has not)
                while count := into(raw.data[filled : filled + _CHUNK]):
                    filled += count  # zipfile checks the CRC at the end
            if filled != raw.size:
                raise zipfile.BadZipFile("shorter than its directory says")
        except MemoryError:
            raise
        except Exception as error:  # likewise
            raise Malformed(f"a damaged entry {name!r:.60} ({error!s:.100})") from error
        return raw

    if f"{root}byteorder" in names and read("byteorder").tobytes() != b"little":
        raise Malformed("tensors of a big-endian machine; load and save them on another")
    return read
