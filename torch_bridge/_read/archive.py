"""The zip archive that ``torch.save`` writes: its pickle, and the storages that belong to it."""

from __future__ import annotations

import io
import os
import pathlib
import struct
import zipfile
import zlib
from typing import Any

import numpy as np

from torch_bridge._read.evaluate import Values
from torch_bridge._read.globals import constructors, is_value
from torch_bridge._read.tensors import storage_reader
from torch_bridge._read.unpickle import STORAGE, unpickle
from torch_bridge._read.values import Budget, Malformed

_ZIP = (b"PK\x03\x04", b"PK\x05\x06")
_CHUNK = 1 << 20
_DIRECTORY_BYTES = 18  # of memory, for a byte of a zip directory: 800 for an entry of 46
_UNCOUNTED = 4 << 20  # what is not charged one by one
# What the standard library raises on a damaged archive.
_ZIP_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    NotImplementedError,  # a compression method that it does not have
    RuntimeError,  # an encrypted entry
    ValueError,
    OverflowError,
    LookupError,
    OSError,
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
            raise Malformed(_other_kind(head))
        budget = Budget.of_file(size, max_bytes)
        budget.claim(_UNCOUNTED if max_bytes is None else 0)
        try:
            charged = _Directory(file, budget)
            archive = zipfile.ZipFile(charged)  # type: ignore[arg-type] (it reads and seeks only)
            charged.budget = None
        except _ZIP_DAMAGE as error:
            raise Malformed("a damaged zip archive, cut short perhaps") from error
        with archive:
            entries, values = _Entries(archive, budget), Values(budget)
            callables = constructors(values, budget)
            allowed = lambda name: name in callables or is_value(name)  # noqa: E731
            tree = unpickle(entries.read("data.pkl"), allowed, budget)
            # No global may be the constructor of storages: its name has no module.
            values.constructors = callables | {STORAGE: storage_reader(entries.read)}
            return values.of(tree), budget


def _other_kind(head: bytes) -> str:
    """A sentence for each kind of file that people take for a checkpoint of torch's."""
    if not head:
        return "an empty file"
    if head[:2] == b"\x1f\x8b":
        return "a gzip file; unpack it first with gunzip"
    if head[257:262] == b"ustar":
        return "a tar archive, as of torch before 0.1.10 or of tar; unpack it, or save it anew"
    if head[8:9] == b"{":
        return "a safetensors file; load it with safetensors and save the dictionary by torch.save"
    if head[:1] == b"\x80":
        return (
            "a pickle, as torch wrote before 1.6; read it with torch.load(..., weights_only=True) "
            "and save it anew with torch.save"
        )
    return "a file that is no zip archive, which torch.save writes"


class _Directory:
    """A file that charges what is read of it, and what `zipfile` makes of that, to a budget."""

    def __init__(self, file: io.BufferedReader, budget: Budget) -> None:
        self.budget: Budget | None = budget
        self._file = file
        self.seek, self.tell, self.seekable = file.seek, file.tell, file.seekable

    def read(self, size: int = -1) -> bytes:
        if self.budget is not None:
            left = os.fstat(self._file.fileno()).st_size - self._file.tell()
            self.budget.claim(_DIRECTORY_BYTES * (left if size < 0 else min(size, left)))
        return self._file.read(size)


class _Entries:
    """The entries of one archive that is laid out as torch does, with their CRCs checked."""

    def __init__(self, archive: zipfile.ZipFile, budget: Budget) -> None:
        self._archive, self._budget = archive, budget
        names = archive.namelist()
        roots = [name[: -len("data.pkl")] for name in names if name.endswith("/data.pkl")]
        roots = [root for root in roots if root.count("/") == 1]
        if len(roots) != 1:
            raise Malformed("a zip archive without the one data.pkl that torch.save writes")
        if f"{roots[0]}constants.pkl" in names:
            raise Malformed("a TorchScript archive (torch.jit.save); save the state_dict instead")
        self._root = roots[0]
        if f"{self._root}byteorder" in names and self.read("byteorder").tobytes() != b"little":
            raise Malformed("tensors of a big-endian machine; load and save them on another")

    def read(self, name: str, nbytes: int | None = None) -> np.ndarray:
        """The bytes of an entry, uint8; `nbytes` is the size it must have, None for any."""
        info = self._archive.NameToInfo.get(self._root + name)
        if info is None:
            raise Malformed(f"an archive without its entry {name!r:.60}")
        if nbytes is not None and info.file_size != nbytes:
            raise Malformed(f"{info.file_size} bytes in {name!r:.60}, expected {nbytes}")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            # The header of an LZMA stream alone can ask for gigabytes.
            raise Malformed(f"compression method {info.compress_type} in {name!r:.60}")
        # Claimed before it is allocated: the directory of a bomb can promise any size.
        self._budget.claim(info.file_size)
        raw, filled = np.empty(info.file_size, np.uint8), 0
        try:
            with self._archive.open(info) as entry:
                while chunk := entry.read(_CHUNK):  # zipfile checks the CRC at the end
                    raw[filled : filled + len(chunk)] = np.frombuffer(chunk, np.uint8)
                    filled += len(chunk)
            if filled != raw.size:
                raise zipfile.BadZipFile("shorter than its directory says")
        except _ZIP_DAMAGE as error:
            raise Malformed(f"a damaged entry {name!r:.60} ({error!s:.100})") from error
        return raw
