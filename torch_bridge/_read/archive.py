"""The two containers torch has written: the zip archive (since 1.6) and the pickle chain before.

Both give the same thing: the value at the root of the file, with tensors as NumPy arrays.
"""

from __future__ import annotations

import io
import mmap
import os
import pathlib
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from torch_bridge._read.globals import STORAGES, UNTYPED, Budget, Storage, allow_list
from torch_bridge._read.unpickle import Global, Machine, Malformed

Progress = Callable[[int, int], None]

_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_PROTOCOL = 1001
_CHUNK = 1 << 22
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


def read_archive(path: pathlib.Path, max_bytes: int | None, progress: Progress | None) -> Any:
    """Read the value that ``torch.save`` wrote to `path`.

    Args:
      path: The file.
      max_bytes: The most bytes that its arrays may take; None for four times the size of the
        file and 64 MiB more. torch stores tensors uncompressed, so that only a bomb needs more.
      progress: Called with bytes read and the size of the file.

    Returns:
      Plain containers, numbers, NumPy arrays and, for what has no plain form, `Global` tokens.

    Raises:
      Malformed: Not a file of torch's, or a damaged one.
      Forbidden: It asks for a global that is not on the allow-list.
      OSError: The file cannot be opened.
    """
    size = os.path.getsize(path)
    budget = Budget(4 * size + (64 << 20) if max_bytes is None else max_bytes)
    report = _Meter(size, progress)
    with path.open("rb") as file:
        if size == 0:
            raise Malformed("an empty file where a torch.save archive was expected")
        is_zip = file.read(4) in (b"PK\x03\x04", b"PK\x05\x06")
        value = (_read_zip if is_zip else _read_legacy)(file, budget, report)
    report.add(size)  # what was not needed counts as read
    return value


class _Meter:
    """Adds up the bytes read and passes the sum on."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.total = total
        self.done = 0
        self._progress = progress

    def add(self, count: int) -> None:
        self.done = min(self.done + count, self.total)
        if self._progress is not None:
            self._progress(self.done, self.total)


# --- zip ------------------------------------------------------------------------------------


def _read_zip(file: io.BufferedReader, budget: Budget, report: _Meter) -> Any:
    try:
        archive = zipfile.ZipFile(file)
    except _ZIP_DAMAGE as error:
        raise Malformed("a damaged zip archive, cut short perhaps") from error
    with archive:
        root = _root(archive)
        records = _Records(archive, root, budget, report)
        swap = _byte_order(records) != sys.byteorder
        storages: dict[str, Storage] = {}

        def persistent_load(key: Any) -> Storage:
            dtype, name, numel = _storage_key(key)
            if name not in storages:
                nbytes = numel * dtype.itemsize
                raw = records.read_array(f"data/{name}", nbytes)
                storages[name] = Storage(_swapped(raw, dtype, swap), dtype)
            found = storages[name]
            if found.dtype != dtype or found.raw.size != numel * dtype.itemsize:
                raise Malformed("one storage with two sizes or types")
            return found

        allowed, constructors = allow_list(budget)
        stream = records.read_array("data.pkl", None).tobytes()
        machine = Machine(
            stream,
            allowed=allowed,
            reduce=constructors,
            persistent_load=persistent_load,
            charge=budget.claim,
        )
        return machine.load()


def _root(archive: zipfile.ZipFile) -> str:
    names = archive.namelist()
    roots = [name[: -len("data.pkl")] for name in names if name.endswith("/data.pkl")]
    roots = [root for root in roots if root.count("/") == 1]
    if len(roots) != 1:
        raise Malformed("a zip archive without the one data.pkl that torch.save writes")
    if f"{roots[0]}constants.pkl" in names:
        raise Malformed("a TorchScript archive (torch.jit.save); save the state_dict instead")
    return roots[0]


class _Records:
    """The entries of one archive, each read once, with its CRC checked."""

    def __init__(self, archive: zipfile.ZipFile, root: str, budget: Budget, report: _Meter) -> None:
        self._archive = archive
        self._root = root
        self._budget = budget
        self._report = report

    def has(self, name: str) -> bool:
        return self._root + name in self._archive.NameToInfo

    def read_array(self, name: str, nbytes: int | None) -> np.ndarray:
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
        try:
            return self._fill(info)
        except _ZIP_DAMAGE as error:
            raise Malformed(f"a damaged entry {name!r:.60} ({error!s:.100})") from error

    def _fill(self, info: zipfile.ZipInfo) -> np.ndarray:
        raw = np.empty(info.file_size, np.uint8)
        filled = 0
        with self._archive.open(info) as entry:
            while chunk := entry.read(_CHUNK):  # zipfile checks the CRC at the end
                if filled + len(chunk) > raw.size:
                    raise zipfile.BadZipFile("longer than its directory says")
                raw[filled : filled + len(chunk)] = np.frombuffer(chunk, np.uint8)
                filled += len(chunk)
                self._report.add(len(chunk))
        if filled != raw.size:
            raise zipfile.BadZipFile("shorter than its directory says")
        return raw


def _byte_order(records: _Records) -> str:
    if not records.has("byteorder"):
        return "little"  # torch before 2.0, which ran on such machines only
    order = records.read_array("byteorder", None).tobytes()
    if order not in (b"little", b"big"):
        raise Malformed("a byte order that is neither little nor big")
    return order.decode()


def _storage_key(key: Any) -> tuple[np.dtype, str, int]:
    """Check a persistent id: ``('storage', type, key, location, numel)``."""
    if not isinstance(key, tuple) or len(key) not in (5, 6) or key[0] != "storage":
        raise Malformed("a reference to something that is no storage")
    kind, name, numel = key[1], key[2], key[4]
    if not isinstance(kind, Global) or kind.name not in STORAGES:
        raise Malformed("a storage of an unknown type")
    if not isinstance(name, str) or type(numel) is not int or not 0 <= numel < 2**62:
        raise Malformed("a storage whose key or size is unreadable")
    return STORAGES[kind.name], name, numel


def _swapped(raw: np.ndarray, dtype: np.dtype, swap: bool) -> np.ndarray:
    if not swap or dtype.itemsize == 1:
        if swap and dtype is UNTYPED:
            raise Malformed("an untyped storage from a machine of the other byte order")
        return raw
    width = dtype.itemsize // 2 if dtype.kind == "c" else dtype.itemsize
    return raw.view(f"u{width}").byteswap(inplace=True).view(np.uint8)


# --- before torch 1.6 -------------------------------------------------------------------------


def _read_legacy(file: io.BufferedReader, budget: Budget, report: _Meter) -> Any:
    """Magic number, protocol, system, value, storage keys, then the storages, one by one."""
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        storages: dict[str, Storage] = {}

        def persistent_load(key: Any) -> Storage:
            dtype, name, numel = _storage_key(key)
            if len(key) == 6 and key[5] is not None:
                raise Malformed("a storage that is a view of another; save it with torch >= 1.6")
            if name not in storages:
                if numel * dtype.itemsize > len(data):
                    raise Malformed("a storage that is larger than the file")
                budget.claim(numel * dtype.itemsize)
                raw = np.zeros(numel * dtype.itemsize, np.uint8)
                storages[name] = Storage(raw, dtype)
            return storages[name]

        allowed, constructors = allow_list(budget)
        machine = Machine(
            data,
            allowed=allowed,
            reduce=constructors,
            persistent_load=persistent_load,
            charge=budget.claim,
        )
        try:
            magic, protocol, system = machine.load(), None, None
        except Malformed as error:
            raise Malformed("a file that torch.save did not write") from error
        if magic == _LEGACY_MAGIC:
            protocol, system = machine.load(), machine.load()
        if protocol != _LEGACY_PROTOCOL or not isinstance(system, dict):
            raise Malformed("a file that torch.save did not write")
        value = machine.load()
        swap = bool(system.get("little_endian", True)) != (sys.byteorder == "little")
        _fill_legacy(machine, storages, swap, report)
        return value


def _fill_legacy(
    machine: Machine, storages: dict[str, Storage], swap: bool, report: _Meter
) -> None:
    keys, data = machine.load(), machine.data
    named = isinstance(keys, list) and all(isinstance(key, str) for key in keys)
    if not named or set(keys) != set(storages):
        raise Malformed("a list of storages that does not match the tensors")
    pos = machine.pos
    for key in keys:
        storage = storages[key]
        numel = int.from_bytes(data[pos : pos + 8], "little")
        pos += 8
        end = pos + storage.raw.size
        if numel * storage.dtype.itemsize != storage.raw.size or end > len(data):
            raise Malformed("storages that are cut short")
        storage.raw[:] = np.frombuffer(data[pos:end], np.uint8)
        _swapped(storage.raw, storage.dtype, swap)
        report.add(storage.raw.size)
        pos = end
