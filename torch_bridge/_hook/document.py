"""The files of `save_checkpoint`: dictionaries of tensors and plain values, written and read."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch_bridge._base.schema import (
    COUNTERS,
    HYPERPARAMETERS,
    PowerSGDRecord,
    RandomStateRecord,
    SchemaError,
    bucket_arrays,
    record_from_slots,
)
from torch_bridge._base.tensors import to_tensor
from torch_bridge._hook.buckets import BucketLayout
from torch_bridge._read.values import brief

FORMAT = "torch_bridge.checkpoint"
_VERSION = 1
_MAX_BUFFERS = 1 << 20
MAX_RANKS = 1 << 14


def make_document(
    *,
    model: Mapping[str, Any],
    record: PowerSGDRecord | None,
    errors: Iterable[Mapping[int, Any]],
    optimizer: Mapping[str, Any] | None = None,
    layout: BucketLayout | None = None,
    world_size: int | None = None,
    hook: str | None = None,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What a file of `save_checkpoint` holds.

    Args:
      model: The state dict, of tensors.
      record: What all ranks share of the hook state; its errors are not looked at.
      errors: Per rank its error, bucket index -> tensor.
      optimizer: The optimizer's state dict, of tensors.
      layout: The bucket layout.
      world_size: Ranks of the run.
      hook: What was registered, as `powersgd_kwargs_from_torch` understands it.
      extra: Further plain values.
    """
    return {
        "format": FORMAT,
        "version": _VERSION,
        "world_size": world_size,
        "state_dict": dict(model),
        "optimizer": optimizer,
        "powersgd": None if record is None else _plain(record),
        "errors": list(errors),
        "layout": None if layout is None else layout.to_json(),
        "hook": hook,
        "extra": dict(extra or {}),
    }


def _plain(record: PowerSGDRecord) -> dict[str, Any]:
    slots: dict[str, Any] = {name: getattr(record, name) for name in (*HYPERPARAMETERS, *COUNTERS)}
    for name in ("p_memory_dict", "q_memory_dict"):
        slots[name] = {bucket: to_tensor(flat) for bucket, flat in getattr(record, name).items()}
    plain = None if record.rng is None else record.rng.plain()
    slots["rng"] = plain and plain | {"key": to_tensor(plain["key"])}
    return slots


def read_document(value: Mapping[str, Any]) -> tuple[dict[str, Any], list[PowerSGDRecord]]:
    """The entries of such a file, checked as far as it says what they are, and the records.

    Raises:
      SchemaError: An entry is missing, or of another kind.
    """
    if value.get("version") != _VERSION:
        raise SchemaError(
            f"format version {brief(value.get('version'))}, this release reads {_VERSION}"
        )
    hook, errors = value.get("powersgd"), value.get("errors")
    for name, kinds in (("powersgd", dict), ("optimizer", dict), ("layout", str), ("hook", str)):
        if not isinstance(value.get(name), kinds | None):
            raise SchemaError(f"`{name}` must be a {kinds.__name__}")
    if not isinstance(errors, list | tuple):
        raise SchemaError("`errors` must be a list with a dictionary for each rank")
    return dict(value), [] if hook is None else _records(hook, errors)


def _records(hook: dict[str, Any], errors: Sequence[Any]) -> list[PowerSGDRecord]:
    """One record per rank: what all ranks share, and each one's error."""
    if not 1 <= len(errors) <= MAX_RANKS or not all(isinstance(e, dict) for e in errors):
        raise SchemaError(f"`errors` must have a dictionary for each of 1 to {MAX_RANKS} ranks")
    # `to_torch` writes one dictionary for all ranks.
    distinct = {id(error): error for error in errors}
    if any(error.keys() != errors[0].keys() for error in distinct.values()):
        raise SchemaError("`errors` of the ranks have different buckets")
    if len(errors) * len(errors[0]) > _MAX_BUFFERS:
        raise SchemaError(f"`errors` hold more than {_MAX_BUFFERS} tensors")
    rng = hook.get("rng")
    rng = None if rng is None else RandomStateRecord.from_plain(rng)
    first = record_from_slots({**hook, "rng": rng, "error_dict": errors[0]})
    records = {
        key: dataclasses.replace(first, error_dict=bucket_arrays("error_dict", error))
        for key, error in distinct.items()
    }
    if any(record.error_sizes != first.error_sizes for record in records.values()):
        raise SchemaError("`errors` of the ranks have different sizes")
    return [records[id(error)] for error in errors]
