"""`load`: files that torch wrote, as one `Checkpoint` of NumPy arrays."""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from torch_bridge._base.errors import CheckpointMismatch, UnsafeCheckpoint
from torch_bridge._base.files import no_file
from torch_bridge._base.schema import (
    PowerSGDRecord,
    is_optimizer,
    is_post_local,
    is_slots,
    record_from_slots,
)
from torch_bridge._base.tensors import unwrapped
from torch_bridge._hook.buckets import PARSED_BYTES, BucketLayout
from torch_bridge._hook.checkpoint import Checkpoint
from torch_bridge._hook.document import (
    FORMAT,
    MAX_RANKS,
    read_example,
    read_loss_scale,
    read_records,
)
from torch_bridge._read.archive import read_archive
from torch_bridge._read.globals import way_out
from torch_bridge._read.values import Forbidden, Global, Malformed, expect

_MODEL_KEYS = ("state_dict", "model_state_dict", "model")
_HOOK_KEYS = ("comm_hook_state", "powersgd_state", "hook_state")
_OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict", "optim")
# Should a value slip through that is not checked, the file is at fault.
_UNFORESEEN = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError)
_EXPECTED = (
    "a torch.save file with {'state_dict', 'comm_hook_state'}, a PowerSGDState, its "
    "__getstate__() dictionary, a state_dict, or what torch_bridge.save_checkpoint writes"
)
_DISTRIBUTED = (
    "a distributed checkpoint (torch.distributed.checkpoint); convert it first with python -m "
    "torch.distributed.checkpoint.format_utils dcp_to_torch"
)


def load(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    max_bytes: int | None = None,
) -> Checkpoint:
    """Reads a PyTorch checkpoint without executing anything from it and without importing torch.

    Reads the zip files that ``torch.save`` writes since 1.6: the documented
    ``{'state_dict', 'comm_hook', 'comm_hook_state'}``, the ``PowerSGDState`` itself, its
    ``__getstate__()`` dictionary, a bare ``state_dict``, an optimizer's alone (``optimizer.bin`` of
    accelerate), and files of `save_checkpoint`. CUDA tensors need no GPU; no process group is
    needed.

    Args:
      paths: One file, or one per rank. Several files must agree in everything but their errors,
        and are taken for all ranks of the run.
      max_bytes: The most bytes that the tensors of one file may unpack to; None for three times the
        size of the file and 64 MiB more. torch does not compress, so that only a decompression
        bomb (or an archive that was compressed again) needs more.

    Returns:
      The checkpoint; tensors that shared memory in torch still do.

    Raises:
      CheckpointMismatch: A file is damaged, cut short or of another kind, or files disagree.
      UnsafeCheckpoint: A file asks for a global that is not on the allow-list; it is named.
      OSError: A file cannot be opened.
      TypeError: `paths` is something else.

    Example:
      >>> import tempfile, torch
      >>> path = tempfile.mkdtemp() + "/checkpoint.pt"
      >>> torch.save({"state_dict": {"fc.weight": torch.ones(3, 2)}, "epoch": 7}, path)
      >>> checkpoint = load(path)
      >>> checkpoint.model["fc.weight"].shape, checkpoint.extra
      ((3, 2), {'epoch': 7})
    """
    files = _listed(paths)
    for file in files:
        kind = no_file(file)
        if kind is not None:
            if (file / ".metadata").exists():
                kind = _DISTRIBUTED
            raise CheckpointMismatch(f"{file} is {kind}. Expected {_EXPECTED}.")
    parts = [_read(file, max_bytes) for file in files]
    return parts[0] if len(parts) == 1 else _merge(files, parts)


def _listed(paths: Any) -> list[pathlib.Path]:
    """Checks what a user gives as paths."""
    if isinstance(paths, str | os.PathLike):
        return [pathlib.Path(paths)]
    files = list(paths) if isinstance(paths, Iterable) else [paths]
    if not files:
        raise CheckpointMismatch("`paths` must name at least one file, got an empty list.")
    if not all(isinstance(file, str | os.PathLike) for file in files):
        raise TypeError(f"`paths` must be one path, or a list of one for each rank, got {paths!r}.")
    return [pathlib.Path(file) for file in files]


def _read(file: pathlib.Path, max_bytes: int | None) -> Checkpoint:
    try:
        value, budget = read_archive(file, max_bytes)
        entries, records = _interpreted(expect(value, dict, "at its root"))
        text = entries.get("layout")
        budget.claim(PARSED_BYTES * len(text or ""))
        extra = entries.get("extra")
        size = entries.get("world_size")
        return Checkpoint(
            model=_model(entries.get("state_dict")),
            powersgd=tuple(records),
            optimizer=entries.get("optimizer"),
            layout=None if text is None else BucketLayout.from_json(text),
            extra=_text_keys(extra, "the file") if isinstance(extra, dict) else {},
            world_size=size if type(size) is int and 0 < size <= MAX_RANKS else None,
            hook=entries.get("hook"),
            example=entries.get("example"),
            loss_scale=entries.get("loss_scale"),
        )
    except Forbidden as error:
        raise UnsafeCheckpoint(
            f"{file} asks for {error!s:.200}, which is not on the allow-list; nothing was "
            f"executed. {way_out(str(error))}."
        ) from error
    except MemoryError as error:
        raise CheckpointMismatch(
            f"{file} takes more memory than there is ({error!s:.100}). Read it on a larger machine."
        ) from error
    except (CheckpointMismatch, *_UNFORESEEN) as error:
        # NumPy and Python say what they could not do, which says nothing about the file.
        ours = isinstance(error, CheckpointMismatch)
        found = f"{error!s:.400}" if ours else "an entry of another kind than torch writes"
        raise CheckpointMismatch(
            f"{file} cannot be read: found {found}. Expected {_EXPECTED}, complete and undamaged.",
            parameters=getattr(error, "parameters", ()),
        ) from error


def _interpreted(value: dict[Any, Any]) -> tuple[dict[Any, Any], list[PowerSGDRecord]]:
    """Names the entries at the root of a file as our own format does, and reads the hook states."""
    kind = value.get("format")  # a parameter may have this name
    if isinstance(kind, str) and kind == FORMAT:
        entries = dict(value)
        entries["example"] = read_example(value)
        entries["loss_scale"] = read_loss_scale(value)
        return entries, read_records(value)
    if is_optimizer(value):  # accelerate's optimizer.bin, optimizer.pt of a Trainer
        return {"state_dict": {}, "optimizer": value}, []
    rest = {"comm_hook_state": value} if is_slots(value) else dict(value)
    hook = _take(rest, ("comm_hook",), Global)
    # No tensors: a flat state_dict may have parameters of these names.
    model = _take(rest, _MODEL_KEYS, dict)
    state = _take(rest, _HOOK_KEYS, dict | list | tuple)
    entries = {
        "optimizer": _take(rest, _OPTIMIZER_KEYS, dict),  # a list of them stays in `extra`
        "layout": _take(rest, ("layout",), str),
        "hook": None if hook is None else hook.name.rpartition(".")[2],
    }
    records = []
    if is_post_local(state):
        rest["comm_hook_state"] = dict(state)
        entries["hook"] = entries["hook"] or "post_localSGD_hook"
    elif is_slots(state):
        records.append(record_from_slots(state))
    elif state is not None:
        raise Malformed("a `comm_hook_state` that is no PowerSGDState")
    elif model is None:
        model = rest
        rest = {}
    entries.update(state_dict=model or {}, extra=rest, world_size=rest.get("world_size"))
    return entries, records


def _take(mapping: dict[Any, Any], names: Sequence[str], kind: Any) -> Any:
    """Takes out the first of these entries that is of that kind; None where none is."""
    for name in names:
        if isinstance(mapping.get(name), kind):
            return mapping.pop(name)
    return None


def _model(model: Any) -> dict[str, np.ndarray]:
    """Takes the tensors of a state_dict, by names without the prefixes of wrappers."""
    tensors = {}
    if isinstance(model, dict):
        # get_extra_state() may put anything beside the tensors.
        tensors = {key: entry for key, entry in model.items() if isinstance(entry, np.ndarray)}
    if model != {} and not tensors:
        raise Malformed("no state_dict (name -> tensor) and no `comm_hook_state`")
    arrays = _text_keys(tensors, "the state_dict")
    named = dict(zip(unwrapped(list(arrays)), arrays.values(), strict=True))
    if len(named) < len(arrays):
        raise Malformed("tensors with one name, once with a wrapper's words in it and once without")
    return named


def _text_keys(mapping: Mapping[Any, Any], what: str) -> dict[str, Any]:
    """Makes numbers as keys into text, as long as that loses nothing."""
    plain = {str(key): entry for key, entry in mapping.items() if isinstance(key, str | int)}
    if len(plain) < len(mapping):
        raise Malformed(f"keys of {what} that are no text, or equal as text (1 and '1')")
    return plain


def _merge(files: Sequence[pathlib.Path], parts: Sequence[Checkpoint]) -> Checkpoint:
    """Makes one checkpoint out of one file per rank, after checking that they belong together."""
    first = next((part for part in parts if part.model), parts[0])
    wrong = []
    for file, count in collections.Counter(file.resolve() for file in files).items():
        if count > 1:
            wrong.append(f"{file}: given {count} times")
    for file, part in zip(files, parts, strict=True):
        wrong.extend(f"{file}: {line}" for line in _differences(parts[0], first, part))
    if first.world_size is not None and len(files) > first.world_size:
        wrong.append(f"{len(files)} files of a run of {first.world_size} ranks")
    if wrong:
        raise CheckpointMismatch(
            "The files are not the ranks of one run at one step. Pass the files that all ranks "
            "wrote at the same iteration.",
            mis_shaped=wrong,
        )
    return dataclasses.replace(
        first,
        powersgd=tuple(part.powersgd[0] for part in parts),
        layout=next((part.layout for part in parts if part.layout), None),
        world_size=first.world_size or len(parts),
    )


def _differences(lead: Checkpoint, first: Checkpoint, part: Checkpoint) -> list[str]:
    """Lists what shows that a file is of another run than the others.

    Args:
      lead: The content of the first file.
      first: The content of the first file with a model.
      part: The content of the file in question.
    """
    if len(part.powersgd) != 1 or len(lead.powersgd) != 1:
        lines = [f"{len(part.powersgd)} hook states where one per rank was expected"]
        for name in part.unread_states:
            lines.append(f"extra[{name!r}] looks like one: save it as 'comm_hook_state'")
        return lines
    known, record = lead.powersgd[0], part.powersgd[0]
    lines = []
    if record.iter != known.iter:
        lines.append(f"iteration {record.iter}, not {known.iter}")
    for name, value in known.hyperparameters.items():
        if record.hyperparameters[name] != value:
            lines.append(f"{name} {record.hyperparameters[name]}, not {value}")
    if part.model and jax.tree.map(np.shape, part.model) != jax.tree.map(np.shape, first.model):
        lines.append("another model")
    if record.error_sizes != known.error_sizes:
        lines.append("errors of other buckets")
    as_bytes = functools.partial(jax.tree.map, np.ndarray.tobytes)
    if as_bytes(record.q_memory_dict) != as_bytes(known.q_memory_dict):
        lines.append("other Q factors, which all ranks of a run share")
    return lines
