"""Reads the zip archive that ``torch.save`` writes: a pickle and the storages of its tensors.

`load` calls `read_archive` for each file. The pickle is read by `unpickle`, the storages on demand,
when the pickle mentions them. A file may be hostile, so every allocation is claimed from a budget
first, also those that `zipfile` makes for the directory. Files of other kinds that users often pass
get a sentence that says what they are.
"""

from __future__ import annotations

import io
import os
import pathlib
import zipfile
from typing import Any

import numpy as np

from torch_bridge._read.globals import functions_of
from torch_bridge._read.tensors import storage_reader
from torch_bridge._read.unpickle import STORAGE, unpickle
from torch_bridge._read.values import Budget, Malformed

_ZIP = (b"PK\x03\x04", b"PK\x05\x06")
_CHUNK = 1 << 20
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_DIRECTORY_BYTES = 18  # memory for each byte of a zip directory: 800 for an entry of 46 bytes
_UNCOUNTED = 4 << 20  # bytes; small allocations that are not charged one by one
# Kinds of files that users take for a torch checkpoint: (position, bytes at that position, kind).
_OTHER_KINDS = (
    (0, b"\x1f\x8b", "a gzip file; unpack it first with gunzip"),
    (
        257,
        b"ustar",
        "a tar archive, made by tar or by torch before 0.1.10; unpack it, or save it again",
    ),
    (0, b"version https://git-lfs", "a pointer of Git LFS; get the file with git lfs pull"),
    (8, b"{", "a safetensors file; load it with safetensors and save the dictionary by torch.save"),
    (
        0,
        b"\x80",
        "a pickle, as torch wrote before 1.6; read it with torch.load(..., weights_only=True) and "
        "save it again with torch.save",
    ),
    (0, b"", "a file that is not a zip archive, as torch.save writes it"),
)


def read_archive(path: pathlib.Path, max_bytes: int | None) -> tuple[Any, Budget]:
    """Reads the value that ``torch.save`` wrote, and returns it with the budget that it used.

    The arguments are those of `torch_bridge.load`. The value consists of plain containers, numbers
    and NumPy arrays. In place of a dtype, a class or a function it has a `Global` with its name.

    Raises:
      Malformed: torch did not write the file, or the file is damaged.
      Forbidden: The file asks for a global that is not on the allow-list.
      OSError: The file cannot be opened.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        _refuse_other_kinds(file.read(512))
    budget = Budget(size, max_bytes)
    budget.claim(_UNCOUNTED if max_bytes is None else 0)
    with _Charged(path, size, budget) as file:
        try:
            archive = zipfile.ZipFile(file)
        except (Malformed, MemoryError):
            raise
        except Exception as error:  # zipfile raises errors of many classes for a damaged archive
            raise Malformed("a damaged zip archive, cut short perhaps") from error
        file.charges = False  # from here on each entry is claimed by its size
        with archive:
            entries = _Entries(archive, budget)
            functions = functions_of(budget)
            functions[STORAGE] = storage_reader(entries.read)
            return unpickle(entries.read("data.pkl"), functions, budget), budget


def _refuse_other_kinds(head: bytes) -> None:
    """Refuses a file that does not begin as a zip archive.

    Raises:
      Malformed: The file begins in another way; the message says what it seems to be.
    """
    if head[:4] in _ZIP:
        return
    if not head:
        raise Malformed("an empty file")
    for position, mark, kind in _OTHER_KINDS:
        if head[position:].startswith(mark):
            raise Malformed(kind)


class _Charged(io.BufferedReader):
    """A file that charges each read to the budget, since `zipfile` allocates for the directory.

    Attributes:
      charges: True until the directory is read; after that `_Entries` charges each entry.
    """

    def __init__(self, path: pathlib.Path, size: int, budget: Budget) -> None:
        super().__init__(io.FileIO(path))
        self._size = size
        self._budget = budget
        self.charges = True

    def read(self, size: int | None = -1, /) -> bytes:
        count = self._size if size is None or size < 0 else min(size, self._size)
        if self.charges:
            self._budget.claim(_DIRECTORY_BYTES * min(count, self._size - self.tell()))
        return super().read(count)


class _Entries:
    """The entries of an archive with the layout that torch writes.

    Raises:
      Malformed: The archive has another layout.
    """

    def __init__(self, archive: zipfile.ZipFile, budget: Budget) -> None:
        self._archive = archive
        self._budget = budget
        roots = []
        for name in archive.namelist():
            if name.endswith("/data.pkl") and name.count("/") == 1:
                roots.append(name.removesuffix("data.pkl"))
        if len(roots) != 1:
            raise Malformed(
                "a zip archive that torch.save did not write: it does not have exactly one data.pkl"
            )
        self._root = roots[0]
        if self._has("constants.pkl"):
            raise Malformed("a TorchScript archive (torch.jit.save); save the state_dict instead")
        # After torch.serialization.set_crc32_options(False) torch writes no checksums.
        self._has_sums = any(info.CRC for info in archive.infolist())
        if self._has("byteorder") and self.read("byteorder").tobytes() != b"little":
            raise Malformed(
                "tensors of a big-endian machine; load and save them on a little-endian one"
            )

    def _has(self, name: str) -> bool:
        return self._root + name in self._archive.NameToInfo

    def read(self, name: str, nbytes: int | None = None) -> np.ndarray:
        """Reads an entry and checks its checksum.

        Args:
          name: The entry's name without the archive's common folder.
          nbytes: The size that the entry must have, in bytes; None accepts any size.

        Returns:
          The entry's bytes, uint8, shape (nbytes,).

        Raises:
          Malformed: The entry is missing, has another size, or is damaged.
        """
        if not self._has(name):
            raise Malformed(f"an archive without its entry {name!r:.60}")
        info = self._archive.getinfo(self._root + name)
        if nbytes is not None and info.file_size != nbytes:
            raise Malformed(f"{info.file_size} bytes in {name!r:.60}, expected {nbytes}")
        if info.compress_type not in _METHODS:
            # The header of an LZMA stream alone can ask for gigabytes.
            raise Malformed(f"compression method {info.compress_type} in {name!r:.60}")
        # Claimed before the allocation, because a hostile directory can state any size.
        self._budget.claim(info.file_size)
        if not self._has_sums and hasattr(info, "CRC"):
            del info.CRC  # zipfile checks the CRC if the attribute exists
        raw = np.empty(info.file_size, np.uint8)
        filled = 0
        try:
            with self._archive.open(info) as entry:
                into = entry.readinto  # type: ignore[attr-defined] (missing in typeshed's IO)
                count = 1
                while count:  # once more after the last byte, when zipfile checks the CRC
                    count = into(raw.data[filled : filled + _CHUNK])
                    filled += count
            if filled != raw.size:
                raise zipfile.BadZipFile("shorter than its directory says")
        except MemoryError:
            raise
        except Exception as error:  # zipfile raises errors of many classes for a damaged entry
            raise Malformed(f"a damaged entry {name!r:.60} ({error!s:.100})") from error
        return raw
