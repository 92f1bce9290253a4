"""The two containers torch has written: the zip archive (since 1.6) and the pickle chain before.

Both give the same thing: the value at the root of the file, with tensors as NumPy arrays.
"""

from __future__ import annotations

import io
import os
import pathlib
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from torch_bridge._read.globals import allow_list
from torch_bridge._read.tensors import STORAGES, UNTYPED, Budget, Storage, default_limit
from torch_bridge._read.unpickle import Machine
from torch_bridge._read.values import Global, Keys, Malformed

Progress = Callable[[int, int], None]

_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_PROTOCOL = 1001
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


def read_archive(
    path: pathlib.Path, max_bytes: int | None, progress: Progress | None
) -> tuple[Any, Budget]:
    """Read the value that ``torch.save`` wrote to `path`.

    Args:
      path: The file.
      max_bytes: The most bytes that reading it may take; None for three times the size of the
        file and 64 MiB more. torch stores tensors uncompressed, so that only a bomb needs more.
      progress: Called with bytes read and the size of the file.

    Returns:
      Plain containers, numbers, NumPy arrays and, for what has no plain form, `Global` tokens; and
      what is left to make of them.

    Raises:
      Malformed: Not a file of torch's, or a damaged one.
      Forbidden: It asks for a global that is not on the allow-list.
      OSError: The file cannot be opened.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        budget = Budget(default_limit(size) - _UNCOUNTED if max_bytes is None else max_bytes)
        # Each opcode takes a byte of a file that is not compressed; 100 000 tensors take 4 million.
        opcodes = min(20_000_000, 500_000 + size // 3)
        report = _Meter(size, progress)
        if size == 0:
            raise Malformed("an empty file where a torch.save archive was expected")
        head = file.read(512)
        _refuse_others(head)
        is_zip = head[:4] in (b"PK\x03\x04", b"PK\x05\x06")
        value = (_read_zip if is_zip else _read_legacy)(file, budget, opcodes, report)
    report.add(size)  # what was not needed counts as read
    return value, budget


def _refuse_others(head: bytes) -> None:
    """A sentence for each kind of file that people take for a checkpoint of torch's."""
    length, kind = int.from_bytes(head[:8], "little"), None
    if head[:2] == b"\x1f\x8b":
        kind = "a gzip file; unpack it first with gunzip"
    elif head[257:262] == b"ustar":
        kind = "a tar archive, as of torch before 0.1.10 or of tar; unpack it, or save it anew"
    elif head[8:9] == b"{" and 2 <= length < 1 << 40:
        kind = (
            "a safetensors file; load it with safetensors and save the dictionary with torch.save"
        )
    if kind is not None:
        raise Malformed(kind)


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


def _read_zip(file: io.BufferedReader, budget: Budget, opcodes: int, report: _Meter) -> Any:
    try:
        charged = _Directory(file, budget)
        archive = zipfile.ZipFile(charged)
        charged.budget = None
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

        keys = Keys()
        allowed, constructors = allow_list(budget, keys)
        stream = records.read_array("data.pkl", None)
        budget.claim(stream.size)
        machine = Machine(
            stream.tobytes(),
            allowed=allowed,
            reduce=constructors,
            persistent_load=persistent_load,
            charge=budget.claim,
            keys=keys,
            max_opcodes=opcodes,
        )
        del stream
        return machine.load()


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
    if not isinstance(key, tuple) or len(key) not in (5, 6) or not isinstance(key[0], str):
        raise Malformed("a reference to something that is no storage")
    if key[0] != "storage":
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


def _read_legacy(file: io.BufferedReader, budget: Budget, opcodes: int, report: _Meter) -> Any:
    """Magic number, protocol, system, value, storage keys, then the storages, one by one."""
    # Not mapped into memory: a file that is cut while it is read would end the process.
    budget.claim(report.total)
    file.seek(0)
    data = file.read(report.total)
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

    keys = Keys()
    allowed, constructors = allow_list(budget, keys)
    machine = Machine(
        data,
        allowed=allowed,
        reduce=constructors,
        persistent_load=persistent_load,
        charge=budget.claim,
        keys=keys,
        max_opcodes=opcodes,
    )
    try:
        magic, protocol, system = machine.load(), None, None
    except Malformed as error:
        raise Malformed("a file that torch.save did not write") from error
    if type(magic) is int and magic == _LEGACY_MAGIC:
        protocol, system = machine.load(), machine.load()
    known = type(protocol) is int and protocol == _LEGACY_PROTOCOL
    little = system.get("little_endian", True) if isinstance(system, dict) else None
    if not known or not isinstance(little, bool):
        raise Malformed("a file that torch.save did not write")
    value = machine.load()
    swap = little != (sys.byteorder == "little")
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
        storage.raw[:] = np.frombuffer(data, np.uint8, storage.raw.size, pos)
        _swapped(storage.raw, storage.dtype, swap)
        report.add(storage.raw.size)
        pos = end
