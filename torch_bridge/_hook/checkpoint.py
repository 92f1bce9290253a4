"""`load`: files that torch wrote, as one `Checkpoint` of NumPy arrays."""

from __future__ import annotations

import collections
import dataclasses
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from torch_bridge._base.errors import CheckpointMismatch, UnsafeCheckpoint
from torch_bridge._base.schema import (
    PowerSGDRecord,
    RandomStateRecord,
    SchemaError,
    bucket_arrays,
    is_slots,
    record_from_slots,
)
from torch_bridge._base.tensors import storage_key
from torch_bridge._hook.buckets import BucketLayout
from torch_bridge._hook.entries import unwrapped
from torch_bridge._read.archive import read_archive
from torch_bridge._read.unpickle import Forbidden, Malformed, brief

FORMAT = "torch_bridge.checkpoint"
VERSION = 1
_MAX_RANKS = 1 << 14
_MAX_BUFFERS = 1 << 20
_MODEL_KEYS = ("state_dict", "model_state_dict", "model")
_HOOK_KEYS = ("comm_hook_state", "powersgd_state", "hook_state")
_OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict", "optim")
_EXPECTED = (
    "a torch.save file with {'state_dict', 'comm_hook_state'}, a PowerSGDState, its "
    "__getstate__() dictionary, a state_dict, or what torch_bridge.save_checkpoint writes"
)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """What `load` read, as NumPy arrays.

    Attributes:
      model: parameter or buffer name -> array, in the order of the ``state_dict``, without
        ``module.`` prefixes; empty if the files hold the hook state only.
      powersgd: one record per rank, in the order of the files; empty without hook state.
      optimizer: the optimizer's ``state_dict()``, or None.
      layout: the bucket layout, if the file holds one.
      extra: every other entry of the (first) file, such as ``epoch``.
      world_size: number of ranks of the run, if the file says it.
    """

    model: dict[str, np.ndarray]
    powersgd: tuple[PowerSGDRecord, ...] = ()
    optimizer: dict[str, Any] | None = None
    layout: BucketLayout | None = None
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    world_size: int | None = None

    @property
    def missing_ranks(self) -> bool:
        """Whether ranks' errors are known to be missing, or nothing says that none is."""
        return self.world_size is None or len(self.powersgd) < self.world_size

    @property
    def aliases(self) -> dict[str, str]:
        """Tied tensors: further name -> the first name of the same memory."""
        first: dict[Any, str] = {}
        tied = {}
        for name, array in self.model.items():
            key = storage_key(array)
            if key is not None and first.setdefault(key, name) != name:
                tied[name] = first[key]
        return tied


def load(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    max_bytes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Checkpoint:
    """Read a PyTorch checkpoint without executing anything from it and without importing torch.

    Reads what ``torch.save`` writes since 1.6 (zip) and before (pickle chain): the documented
    ``{'state_dict', 'comm_hook', 'comm_hook_state'}``, the ``PowerSGDState`` itself, its
    ``__getstate__()`` dictionary, a bare ``state_dict``, and files of `save_checkpoint`. CUDA
    tensors need no GPU; no process group is needed.

    Args:
      paths: one file, or one per rank. Several files must agree in everything but their errors,
        and are taken for all ranks of the run.
      max_bytes: the most bytes that the tensors of one file may unpack to; None for four times the
        size of the file and 64 MiB more. torch does not compress, so that only a decompression
        bomb (or an archive that was compressed again) needs more.
      progress: called with (bytes read, bytes in all) over all files.

    Returns:
      The checkpoint; tensors that shared memory in torch still do.

    Raises:
      CheckpointMismatch: a file is damaged, cut short or of another kind, or files disagree.
      UnsafeCheckpoint: a file asks for a global that is not on the allow-list; it is named.
      OSError: a file cannot be opened.

    Example:
      >>> checkpoint = load("checkpoint.pt")  # doctest: +SKIP
      >>> checkpoint.powersgd[0].iter  # doctest: +SKIP
      1200
    """
    single = isinstance(paths, str | os.PathLike)
    files = [pathlib.Path(path) for path in ([paths] if single else paths)]
    if not files:
        raise CheckpointMismatch("load() needs at least one file, got an empty list of paths.")
    total, before = sum(os.path.getsize(file) for file in files), 0
    parts = []
    for file in files:

        def report(done: int, _: int, before: int = before) -> None:
            if progress is not None:
                progress(before + done, total)

        parts.append(_interpret(file, _read(file, max_bytes, report)))
        before += os.path.getsize(file)
    return parts[0] if single or len(parts) == 1 else _merge(files, parts)


def _read(file: pathlib.Path, max_bytes: int | None, progress: Callable[[int, int], None]) -> Any:
    try:
        return read_archive(file, max_bytes, progress)
    except Forbidden as error:
        raise UnsafeCheckpoint(
            f"{file} asks for {error.name}, which is not on the allow-list; nothing was executed. "
            f"Save tensors, numbers, strings and containers of them, and read that file."
        ) from error
    except (Malformed, SchemaError) as error:
        raise CheckpointMismatch(
            f"{file} cannot be read: found {error}. Expected {_EXPECTED}, complete and undamaged."
        ) from error


def _interpret(file: pathlib.Path, value: Any) -> Checkpoint:
    """Find model, hook state, optimizer and the rest in the value at the root of a file."""
    if not isinstance(value, dict):
        raise CheckpointMismatch(f"{file} holds a {type(value).__name__}. Expected {_EXPECTED}.")
    try:
        if value.get("format") == FORMAT:
            return _own_format(value)
        if is_slots(value):
            return Checkpoint({}, (record_from_slots(value),))
        return _documented(value)
    except SchemaError as error:
        raise CheckpointMismatch(f"{file}: {error}. Expected {_EXPECTED}.") from error


def _documented(value: dict[Any, Any]) -> Checkpoint:
    rest = dict(value)
    hook = _take(rest, _HOOK_KEYS)
    if hook is not None and not is_slots(hook):
        raise SchemaError("`comm_hook_state` is no PowerSGDState")
    model = _take(rest, _MODEL_KEYS)
    # A list of them is kept as it is, in `extra`.
    named = [name for name in _OPTIMIZER_KEYS if isinstance(rest.get(name), dict)]
    optimizer = rest.pop(named[0]) if named else None
    if model is None and hook is None:
        model, rest = rest, {}
    if model is not None and not _is_state_dict(model):
        raise SchemaError("it has no state_dict (name -> tensor) and no `comm_hook_state`")
    layout = rest.pop("layout", None)
    return Checkpoint(
        model=_unwrapped(model or {}),
        powersgd=() if hook is None else (record_from_slots(hook),),
        optimizer=optimizer,
        layout=BucketLayout.from_json(layout) if isinstance(layout, str) else None,
        extra={str(key): entry for key, entry in rest.items()},
        world_size=_world_size(rest.get("world_size")),
    )


def _own_format(value: dict[str, Any]) -> Checkpoint:
    if value.get("version") != VERSION:
        raise SchemaError(
            f"format version {brief(value.get('version'))}, this release reads {VERSION}"
        )
    hook, errors, optimizer = value.get("powersgd"), value.get("errors"), value.get("optimizer")
    if hook is not None and not isinstance(hook, dict):
        raise SchemaError("`powersgd` is no dictionary")
    if not isinstance(errors, list | tuple) or not _is_state_dict(value.get("state_dict")):
        raise SchemaError("`errors` or `state_dict` is missing")
    if optimizer is not None and not isinstance(optimizer, dict):
        raise SchemaError("`optimizer` is no state_dict")
    records = [] if hook is None else _records(hook, errors)
    layout, extra = value.get("layout"), value.get("extra", {})
    return Checkpoint(
        model=_unwrapped(value["state_dict"]),
        powersgd=tuple(records),
        optimizer=optimizer,
        layout=BucketLayout.from_json(layout) if isinstance(layout, str) else None,
        extra=dict(extra) if isinstance(extra, dict) else {},
        world_size=_world_size(value.get("world_size")),
    )


def _records(hook: dict[str, Any], errors: Sequence[Any]) -> list[PowerSGDRecord]:
    """One record per rank: what all ranks share, and each one's error."""
    if not 1 <= len(errors) <= _MAX_RANKS or not all(isinstance(e, dict) for e in errors):
        raise SchemaError(f"`errors` must have a dictionary for each of 1 to {_MAX_RANKS} ranks")
    if any(error.keys() != errors[0].keys() for error in errors):
        raise SchemaError("`errors` of the ranks have different buckets")
    if len(errors) * len(errors[0]) > _MAX_BUFFERS:
        raise SchemaError(f"`errors` hold more than {_MAX_BUFFERS} tensors")
    slots = {**hook, "rng": _plain_rng(hook.get("rng"))}
    first = record_from_slots({**slots, "error_dict": errors[0]})
    records = [first]
    for error in errors[1:]:
        arrays = bucket_arrays("error_dict", error)
        records.append(dataclasses.replace(first, error_dict=arrays))
    if any(_sizes(record) != _sizes(first) for record in records):
        raise SchemaError("`errors` of the ranks have different sizes")
    return records


def _sizes(record: PowerSGDRecord) -> dict[int, int]:
    return {bucket: error.size for bucket, error in record.error_dict.items()}


def _plain_rng(value: Any) -> RandomStateRecord | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise SchemaError("`rng` is no dictionary of plain values")
    names = ("key", "pos", "has_gauss", "cached_gaussian")
    try:
        return RandomStateRecord(*(value[name] for name in names))
    except SchemaError:
        raise
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise SchemaError(f"`rng` must hold {', '.join(names)}") from error


def _take(mapping: dict[Any, Any], names: Sequence[str]) -> Any:
    for name in names:
        if mapping.get(name) is not None:
            return mapping.pop(name)
    return None


def _is_state_dict(value: Any) -> bool:
    # get_extra_state() may put anything beside the tensors, so one tensor is enough.
    return isinstance(value, dict) and (
        not value or any(isinstance(entry, np.ndarray) for entry in value.values())
    )


def _unwrapped(model: Mapping[Any, Any]) -> dict[str, np.ndarray]:
    arrays = {str(key): entry for key, entry in model.items() if isinstance(entry, np.ndarray)}
    return dict(zip(unwrapped(list(arrays)), arrays.values(), strict=True))


def _world_size(value: Any) -> int | None:
    plain = isinstance(value, int) and not isinstance(value, bool)
    return value if plain and 0 < value <= _MAX_RANKS else None


def _merge(files: Sequence[pathlib.Path], parts: Sequence[Checkpoint]) -> Checkpoint:
    """One checkpoint out of one file per rank, after checking that they belong together."""
    first = next((part for part in parts if part.model), parts[0])
    wrong = []
    for file, part in zip(files, parts, strict=True):
        wrong += [f"{file}: {line}" for line in _differences(parts[0], first, part)]
    wrong += _wrong_number(files, first.world_size)
    if wrong:
        raise CheckpointMismatch(
            "The files are not the ranks of one run at one step. Pass the files that all ranks "
            "wrote at the same iteration.",
            mis_shaped=wrong,
        )
    layouts = [part.layout for part in parts if part.layout is not None]
    return dataclasses.replace(
        first,
        powersgd=tuple(part.powersgd[0] for part in parts),
        layout=layouts[0] if layouts else None,
        world_size=first.world_size or len(parts),
    )


def _wrong_number(files: Sequence[pathlib.Path], world_size: int | None) -> list[str]:
    seen = collections.Counter(file.resolve() for file in files)
    lines = [f"{file}: given {count} times" for file, count in seen.items() if count > 1]
    if world_size is not None and len(files) > world_size:
        lines.append(f"{len(files)} files of a run of {world_size} ranks")
    return lines


def _differences(lead: Checkpoint, first: Checkpoint, part: Checkpoint) -> list[str]:
    if len(part.powersgd) != 1 or not lead.powersgd:
        return [f"{len(part.powersgd)} hook states where one per rank was expected"]
    lines = []
    shapes = {name: array.shape for name, array in first.model.items()}
    if part.model and {name: array.shape for name, array in part.model.items()} != shapes:
        lines.append("another model")
    one, other = lead.powersgd[0], part.powersgd[0]
    if _sizes(one) != _sizes(other):
        lines.append("errors of other buckets")
    if one.iter != other.iter:
        lines.append(f"iteration {other.iter}, not {one.iter}")
    lines += [
        f"{name} {value}, not {one.hyperparameters[name]}"
        for name, value in other.hyperparameters.items()
        if value != one.hyperparameters[name]
    ]
    if one.q_memory_dict.keys() != other.q_memory_dict.keys() or any(
        one.q_memory_dict[bucket].tobytes() != q.tobytes()
        for bucket, q in other.q_memory_dict.items()
    ):
        lines.append("other Q factors, which all ranks of a run share")
    return lines
