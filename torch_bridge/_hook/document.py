"""Writes and reads the documents of `save_checkpoint`: dictionaries of tensors, plain values.

A document has no class of this package in it, so ``torch.load(weights_only=True)`` reads it, too. A
torch job writes it, and the bridge reads it without torch. Every entry is checked when it is read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._base.schema import EXTREMES, PowerSGDRecord, random_state, record_from_slots
from torch_bridge._base.tensors import to_tensor
from torch_bridge._hook.checkpoint import Checkpoint
from torch_bridge._read.values import brief

FORMAT = "torch_bridge.checkpoint"
_VERSION = 1
_MAX_BUFFERS = 1 << 20
_RNG_FIELDS = ("key", "pos", "has_gauss", "cached_gaussian")  # of RandomState.get_state()
MAX_RANKS = 1 << 14
# Entries that are fields of a `Checkpoint`; each may be None.
_KINDS: dict[str, type] = {
    "powersgd": dict,
    "optimizer": dict,
    "layout": str,
    "hook": str,
    "example": dict,
    "loss_scale": object,
    "world_size": object,
    "extra": object,
}


def make_document(checkpoint: Checkpoint) -> dict[str, Any]:
    """Makes the contents of a file of `save_checkpoint`.

    Args:
      checkpoint: A checkpoint whose model, optimizer and errors are tensors. All ranks must have
        the same hook state except for the errors.
    """
    ranks = checkpoint.powersgd
    layout = checkpoint.layout
    example = None
    if checkpoint.example is not None:
        inputs, outputs = checkpoint.example
        example = {"inputs": list(inputs), "outputs": outputs}
        if checkpoint.calls:
            extremes = to_tensor(np.stack(list(checkpoint.calls.values())))
            example["calls"] = {"names": list(checkpoint.calls), "extremes": extremes}
    return {
        "format": FORMAT,
        "version": _VERSION,
        "world_size": checkpoint.world_size,
        "state_dict": checkpoint.model,
        "optimizer": checkpoint.optimizer,
        "powersgd": _plain(ranks[0]) if ranks else None,
        "errors": [record.error_dict for record in ranks],
        "layout": layout and layout.to_json(),
        "hook": checkpoint.hook,
        "example": example,
        "loss_scale": checkpoint.loss_scale,
        "extra": checkpoint.extra,
    }


def _plain(record: PowerSGDRecord) -> dict[str, Any]:
    """Returns the slots of a record that all ranks share, as tensors and plain values."""
    slots = dict(vars(record))
    del slots["error_dict"]  # each rank has another error
    for name in ("p_memory_dict", "q_memory_dict"):
        slots[name] = jax.tree.map(to_tensor, slots[name])
    if record.rng is not None:
        state: Any = record.rng.get_state()
        # int64, because torch.load(weights_only=True) of older releases has no uint32.
        key = to_tensor(state[1].astype(np.int64))
        slots["rng"] = dict(zip(_RNG_FIELDS, (key, *state[2:]), strict=True))
    return slots


def read_document(value: Mapping[str, Any]) -> dict[str, Any]:
    """Reads a document of `make_document` as the fields of a `Checkpoint`.

    The model and the layout stay as they are in the file.

    Raises:
      CheckpointMismatch: An entry is missing, or has another type.
    """
    if value.get("version") != _VERSION:
        raise CheckpointMismatch(
            f"format version {brief(value.get('version'))}, this release reads {_VERSION}"
        )
    fields = {"model": value.get("state_dict")}
    for name, kind in _KINDS.items():
        fields[name] = value.get(name)
        if not isinstance(fields[name], kind | None):
            raise CheckpointMismatch(f"`{name}` must be a {kind.__name__}")
    scale = fields["loss_scale"]
    if scale is not None and not (isinstance(scale, int | float) and 0 < scale < math.inf):
        raise CheckpointMismatch("`loss_scale` must be a positive number")
    example = fields["example"]
    if example is not None:
        inputs = example.get("inputs")
        kinds = set(map(type, inputs)) if isinstance(inputs, list) else set()
        if kinds != {np.ndarray} or "outputs" not in example:
            raise CheckpointMismatch("`example` must have tensors as `inputs`, and `outputs`")
        fields["example"] = (tuple(inputs), example["outputs"])
        fields["calls"] = _calls(example.get("calls"))
    slots = fields["powersgd"]
    fields["powersgd"] = () if slots is None else _records(slots, value.get("errors"))
    return fields


def _calls(calls: Any) -> dict[str, np.ndarray]:
    """Reads the calls of an example; there are none in files of earlier releases.

    Raises:
      CheckpointMismatch: They have another form.
    """
    if calls is None:
        return {}
    if isinstance(calls, dict):
        names: Any = calls.get("names")
        extremes: Any = calls.get("extremes")
        are_names = isinstance(names, list) and set(map(type, names)) == {str}
        if are_names and isinstance(extremes, np.ndarray) and extremes.dtype == np.float32:
            is_one_each = len(set(names)) == len(names)
            if is_one_each and extremes.shape == (len(names), 2 * EXTREMES):
                return dict(zip(names, extremes, strict=True))
    raise CheckpointMismatch(
        "`calls` of the example must have `names`, each once, and their `extremes`"
    )


def _records(slots: Mapping[str, Any], errors: Any) -> tuple[PowerSGDRecord, ...]:
    """Makes one record per rank, from the slots that all ranks share and each rank's errors.

    Raises:
      CheckpointMismatch: An entry has another type, or the ranks' errors have different sizes.
    """
    slots = dict(slots)
    if slots.get("rng") is not None:
        rng = slots["rng"]
        if not isinstance(rng, Mapping) or not rng.keys() >= set(_RNG_FIELDS):
            raise CheckpointMismatch(f"`rng` must hold {', '.join(_RNG_FIELDS)}")
        slots["rng"] = random_state(*map(rng.__getitem__, _RNG_FIELDS))
    many = not isinstance(errors, list) or len(errors) > MAX_RANKS
    if many or set(map(type, errors)) != {dict}:
        raise CheckpointMismatch(f"`errors` must have a dictionary for each of 1 to {MAX_RANKS}")
    if sum(map(len, errors)) > _MAX_BUFFERS:
        raise CheckpointMismatch(f"`errors` hold more than {_MAX_BUFFERS} tensors")
    records = {}  # by id of the errors, because `to_torch` writes one dictionary for all ranks
    for error in errors:
        if id(error) not in records:
            records[id(error)] = record_from_slots(dict(slots, error_dict=error))
    first = records[id(errors[0])].error_sizes
    for record in records.values():
        if record.error_sizes != first:
            raise CheckpointMismatch(
                "`errors` of the ranks have different buckets or different sizes"
            )
    return tuple(records[id(error)] for error in errors)
