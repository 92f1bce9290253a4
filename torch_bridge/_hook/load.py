"""`load`: reads files that torch wrote as one `Checkpoint` of NumPy arrays.

torch has no one form for a checkpoint. A file may hold a state_dict, an optimizer, the hook's
state, or a dictionary of these under names that the user chose. `load` finds out from keys and
values what it has, joins one file per rank into one checkpoint, and leaves what it does not know in
`extra`.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from torch_bridge._base.errors import CheckpointMismatch, UnsafeCheckpoint
from torch_bridge._base.files import no_file
from torch_bridge._base.schema import is_optimizer, is_state, record_from_slots
from torch_bridge._base.tensors import in_model, unwrapped
from torch_bridge._base.terminal import some
from torch_bridge._hook.buckets import PARSED_BYTES, BucketLayout
from torch_bridge._hook.checkpoint import Checkpoint
from torch_bridge._hook.document import FORMAT, MAX_RANKS, read_document
from torch_bridge._read.archive import read_archive
from torch_bridge._read.globals import way_out
from torch_bridge._read.values import Forbidden, Global, Malformed, expect

MODEL_KEYS = ("state_dict", "model_state_dict", "model")
_OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict", "optim", "optimizer_states")
# Field of a `Checkpoint` -> the names of its entry in files, and its type. Tensors are not taken,
# because a flat state_dict may have parameters with these names.
_ENTRIES: dict[str, tuple[tuple[str, ...], Any]] = {
    "model": (MODEL_KEYS, dict),
    "powersgd": (("comm_hook_state", "powersgd_state", "hook_state"), dict | list | tuple),
    "optimizer": (_OPTIMIZER_KEYS, dict),
    "layout": (("layout",), str),
    "hook": (("comm_hook",), Global),
}
# Errors of Python or NumPy for a value that no check has refused; the file is wrong.
_UNFORESEEN = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError)
_EXPECTED = (
    "a torch.save file with {'state_dict', 'comm_hook_state'}, a PowerSGDState, its "
    "__getstate__() dictionary, a state_dict, or a file of torch_bridge.save_checkpoint"
)
_DISTRIBUTED = (
    "a distributed checkpoint (torch.distributed.checkpoint); convert its directory first with "
    "python -m torch.distributed.checkpoint.format_utils dcp_to_torch"
)
_PAIR_OF_FILES = (
    "a directory of accelerate or of a Trainer; load two of its files together: "
    'load(["pytorch_model.bin", "optimizer.bin"]). Save the model without safetensors, or read '
    "model.safetensors with the package safetensors and save the dictionary by torch.save"
)
_OF_A_JOB = {"model.safetensors", "pytorch_model.bin", "optimizer.bin", "optimizer.pt"}
# Files without a model that stand beside one: their kind, and what a message calls it.
_BESIDE_A_MODEL = {
    "random numbers": "the states of random number generators",
    "scheduler": "the state of a learning rate scheduler",
    "GradScaler": "the state of a GradScaler; give its scale to the model's checkpoint with "
    "dataclasses.replace(checkpoint, loss_scale=...)",
    "DeepSpeed": "a part of a checkpoint of DeepSpeed; make one file of it first, with its "
    "zero_to_fp32.py",
}


def load(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    max_bytes: int | None = None,
) -> Checkpoint:
    """Reads a PyTorch checkpoint without executing anything from it and without importing torch.

    The files are zip archives, as ``torch.save`` writes them since 1.6. They may hold the
    documented ``{'state_dict', 'comm_hook', 'comm_hook_state'}``, the ``PowerSGDState`` itself, its
    ``__getstate__()`` dictionary, a bare ``state_dict``, an optimizer's ``state_dict()`` alone
    (``optimizer.bin`` of accelerate), or a document of `save_checkpoint`. Files with CUDA tensors
    need no GPU, and no file needs a process group.

    Args:
      paths: One file, or one file per rank. Several files must be equal except for their errors,
        and count as all ranks of the run. A file with nothing but the optimizer may stand beside
        them (``optimizer.bin`` of accelerate, ``optimizer.pt`` of a Trainer). Or each has other
        tensors of one model (``pytorch_model-00001-of-00002.bin``).
      max_bytes: The most bytes that reading one file may take. None means three times the size of
        the file and 64 MiB more. torch does not compress its files, so only a decompression bomb
        (or an archive that was compressed again) needs more.

    Returns:
      The checkpoint. Tensors that shared memory in torch share memory here.

    Raises:
      CheckpointMismatch: A file is damaged, cut short or of another kind, or files disagree.
      UnsafeCheckpoint: A file asks for a global that is not on the allow-list; the message names
        it.
      OSError: A file cannot be opened.
      TypeError: `paths` or `max_bytes` has another type.
      ValueError: `max_bytes` is not positive.

    Example:
      >>> import tempfile, torch
      >>> path = tempfile.mkdtemp() + "/checkpoint.pt"
      >>> torch.save({"state_dict": {"fc.weight": torch.ones(3, 2)}, "epoch": 7}, path)
      >>> checkpoint = load(path)
      >>> checkpoint.model["fc.weight"].shape, checkpoint.extra
      ((3, 2), {'epoch': 7})
    """
    if isinstance(paths, str | os.PathLike):
        paths = [paths]
    if max_bytes is not None and type(max_bytes) is not int:
        raise TypeError(f"`max_bytes` must be a number of bytes, an integer, got {max_bytes!r}.")
    if max_bytes is not None and max_bytes < 1:
        raise ValueError(
            f"`max_bytes` must be a positive number of bytes, got {max_bytes}. Leave it out for "
            "three times the size of the file and 64 MiB more."
        )
    try:
        if isinstance(paths, Mapping):
            raise TypeError
        files = list(map(pathlib.Path, paths))
    except TypeError as error:
        raise TypeError(
            f"`paths` must be one path, or a list of one for each rank, got a "
            f"{type(paths).__name__}. Pass the file's name, not what torch.load made of it."
        ) from error
    if not files:
        raise CheckpointMismatch("`paths` must name at least one file, got an empty list.")
    for file in files:
        kind = no_file(file)
        if kind is not None:
            if (file / ".metadata").exists():
                kind = _DISTRIBUTED
            elif file.is_dir() and _OF_A_JOB.intersection(os.listdir(file)):
                kind = _PAIR_OF_FILES
        elif file.name == ".metadata" or file.suffix == ".distcp":
            kind = f"a part of {_DISTRIBUTED}"
        if kind is not None:
            raise CheckpointMismatch(f"{file} is {kind}. Expected {_EXPECTED}.")
    parts = []
    for file in files:
        parts.append((file, _read(file, max_bytes)))
    return _merge(parts)


def _read(file: pathlib.Path, max_bytes: int | None) -> Checkpoint:
    try:
        value, budget = read_archive(file, max_bytes)
        fields = _fields(expect(value, dict, "at its root"))
        fields["model"] = _model(fields["model"])
        fields["calls"] = in_model(fields.get("calls", {}), fields["model"])
        text = fields.get("layout")
        if text is not None:
            budget.claim(PARSED_BYTES * len(text))
            fields["layout"] = BucketLayout.from_json(text).named_as(fields["model"])
        extra = fields.setdefault("extra", {})
        if not isinstance(extra, dict):
            extra = {}
        fields["extra"] = _text_keys(extra, "the file")
        size = fields.get("world_size")
        if type(size) is not int or not 0 < size <= MAX_RANKS:
            fields["world_size"] = None
        return Checkpoint(**fields)
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
        # The messages of NumPy and Python say nothing about the file.
        cause = "an entry of another kind than torch writes"
        if isinstance(error, CheckpointMismatch):
            cause = f"{error!s:.400}"
        raise CheckpointMismatch(
            f"{file} cannot be read: found {cause}. Expected {_EXPECTED}, complete and undamaged.",
            parameters=getattr(error, "parameters", ()),
        ) from error


def _fields(value: dict[Any, Any]) -> dict[str, Any]:
    """Returns the fields of a `Checkpoint`, from the entries at the root of a file.

    Raises:
      Malformed: The file is of another kind, which the message names.
    """
    kind = value.get("format")  # may be a tensor, since a parameter may have this name
    if isinstance(kind, str) and kind == FORMAT:
        return read_document(value)
    if is_optimizer(value):  # accelerate's optimizer.bin, optimizer.pt of a Trainer
        return {"model": {}, "optimizer": value}
    rest = dict(value)
    if is_state(value, "PowerSGDState"):
        rest = {"comm_hook_state": value}
    for name in _OPTIMIZER_KEYS:
        match rest.get(name):
            case [entry] if is_optimizer(entry):  # Lightning's list; of several the user chooses
                rest[name] = entry
    fields: dict[str, Any] = dict.fromkeys(_ENTRIES)
    for field, (names, kind) in _ENTRIES.items():
        for name in names:
            if fields[field] is None and isinstance(rest.get(name), kind):
                fields[field] = rest.pop(name)
    hook = fields["hook"]
    state = fields.pop("powersgd")
    if hook is not None:
        fields["hook"] = hook.name.rpartition(".")[2]
    if is_state(state, "PostLocalSGDState"):
        rest["comm_hook_state"] = dict(state)
        fields["hook"] = fields["hook"] or "post_localSGD_hook"
    elif is_state(state, "PowerSGDState"):
        fields["powersgd"] = (record_from_slots(state),)
    elif state is not None:
        raise Malformed("a `comm_hook_state` that is not a PowerSGDState")
    elif fields["model"] is None:  # a flat state_dict, to which some loops add such as the epoch
        tensors, others = _divided(rest)
        if tensors or not fields["optimizer"]:
            _refuse_files_beside_a_model(rest, tensors, others)
            fields["model"] = rest
        rest = others
    fields["model"] = fields["model"] or {}
    return fields | {"extra": rest, "world_size": rest.get("world_size")}


def _refuse_files_beside_a_model(
    entries: Mapping[Any, Any], tensors: Mapping[Any, Any], others: Mapping[Any, Any]
) -> None:
    """Refuses files that hold no model, and says what they hold.

    Args:
      entries: The entries at the root of the file.
      tensors: The tensors among them.
      others: All other entries.

    Raises:
      Malformed: The file is of a known other kind. Or its model has an unknown name.
    """
    for kind, name in _BESIDE_A_MODEL.items():
        if is_state(entries, kind):
            raise Malformed(f"no model, but {name}")
    like_models = []
    for name, entry in others.items():
        if isinstance(name, str) and isinstance(entry, dict) and _divided(entry)[0]:
            like_models.append(name)
    if like_models and not tensors:
        raise Malformed(
            f"no model under its usual names ({', '.join(MODEL_KEYS)}). Tensors are in "
            f"{some(like_models)}: save the right entry again as 'state_dict', and an optimizer as "
            "'optimizer'"
        )


def _model(model: Any) -> dict[str, np.ndarray]:
    """Returns the tensors of a state_dict, by names without the prefixes of wrappers."""
    tensors = {}
    if isinstance(model, dict):
        tensors, _ = _divided(model)  # get_extra_state() may add values that are not tensors
    if model != {} and not tensors:
        raise Malformed("no state_dict (name -> tensor) and no `comm_hook_state`")
    arrays = _text_keys(tensors, "the state_dict")
    named = dict(zip(unwrapped(list(arrays)), arrays.values(), strict=True))
    if len(named) < len(arrays):
        raise Malformed("two tensors whose names differ only in a wrapper's prefix")
    return named


def _divided(entries: Mapping[Any, Any]) -> tuple[dict[Any, np.ndarray], dict[Any, Any]]:
    """Divides the entries of a dictionary into arrays and others."""
    arrays = {}
    others = {}
    for key, entry in entries.items():
        if isinstance(entry, np.ndarray):
            arrays[key] = entry
        else:
            others[key] = entry
    return arrays, others


def _text_keys(mapping: Mapping[Any, Any], what: str) -> dict[str, Any]:
    """Converts integer keys to text; refuses other keys, and keys that become equal."""
    plain = {str(key): entry for key, entry in mapping.items() if isinstance(key, str | int)}
    if len(plain) < len(mapping):
        raise Malformed(f"keys of {what} that are not text, or that are equal as text (1 and '1')")
    return plain


def _merge(parts: Sequence[tuple[pathlib.Path, Checkpoint]]) -> Checkpoint:
    """Merges the checkpoints of several files: one per rank, and perhaps an optimizer alone.

    Raises:
      CheckpointMismatch: The files do not belong together.
    """
    optimizers = []
    ranks = []
    for file, part in parts:
        if part.model or part.powersgd or part.optimizer is None:
            ranks.append((file, part))
        else:
            optimizers.append(part.optimizer)
    if not ranks:
        ranks = parts[:1]
        optimizers = optimizers[1:]
    whole = _of_shards(ranks) or _merge_ranks(ranks)
    if whole.optimizer is not None:
        optimizers.append(whole.optimizer)
    if len(optimizers) > 1:
        raise CheckpointMismatch(
            f"The files hold {len(optimizers)} optimizers. Pass the file of one, or convert "
            "dataclasses.replace(checkpoint, optimizer=...)."
        )
    return dataclasses.replace(whole, optimizer=next(iter(optimizers), None))


def _of_shards(parts: Sequence[tuple[pathlib.Path, Checkpoint]]) -> Checkpoint | None:
    """Merges files that hold nothing but different tensors of one model, as large models have.

    Returns:
      The whole model; None if the files are something else.
    """
    model = {}
    for _, part in parts:
        alone = part.powersgd == () and part.optimizer is None and not part.extra
        if not part.model or not alone or model.keys() & part.model.keys():
            return None
        model |= part.model
    return dataclasses.replace(parts[0][1], model=model)


def _merge_ranks(parts: Sequence[tuple[pathlib.Path, Checkpoint]]) -> Checkpoint:
    """Merges one checkpoint per rank into one; refuses files that do not belong together."""
    first = next((part for _, part in parts if part.model), parts[0][1])
    if len(parts) == 1:
        return first
    records = []
    layouts = []
    wrong = []
    known = {}
    files = collections.Counter()
    for file, part in parts:
        files[file.resolve()] += 1
        records += part.powersgd
        layouts.append(part.layout)
        for name, value in _shared(part).items():
            expected = known.setdefault(name, value)
            line = f"other {name}"
            if isinstance(value, int | float):
                line = f"{name} {value}, not {expected}"
            if value != expected:
                wrong.append(f"{file}: {line}")
        if len(part.powersgd) != 1:
            wrong.append(f"{file}: {len(part.powersgd)} hook states where one was expected")
            for place in part.unread()["PowerSGDState"]:
                wrong.append(f"{place} looks like one: save it as 'comm_hook_state'")
    for file, count in files.items():
        if count > 1:
            wrong.append(f"{file}: given {count} times")
    if first.world_size is not None and len(parts) > first.world_size:
        wrong.append(f"{len(parts)} files of a run of {first.world_size} ranks")
    if wrong:
        raise CheckpointMismatch(
            "The files are not the ranks of one run at one step. Pass the files that all ranks "
            "wrote at the same iteration.",
            mis_shaped=wrong,
        )
    return dataclasses.replace(
        first,
        powersgd=tuple(records),
        layout=next(filter(None, layouts), None),
        world_size=first.world_size or len(parts),
    )


def _shared(part: Checkpoint) -> dict[str, Any]:
    """Returns the values that must be equal in the files of all ranks, by a name for messages."""
    shared = {}
    if part.model:
        shared["model"] = jax.tree.map(np.shape, part.model)
    for record in part.powersgd:
        shared["iteration"] = record.iter
        shared.update(record.hyperparameters)
        shared["buckets of errors"] = record.error_sizes
        shared["Q factors"] = jax.tree.map(np.ndarray.tobytes, record.q_memory_dict)
    return shared
