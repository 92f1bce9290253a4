"""What a checkpoint holds, as plain data and as text for a terminal."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._base.schema import PowerSGDRecord, is_optimizer
from torch_bridge._base.tensors import trainable
from torch_bridge._base.terminal import printable
from torch_bridge._hook.buckets import BucketLayout, BucketPart
from torch_bridge._hook.checkpoint import Checkpoint
from torch_bridge._hook.infer import layout_of
from torch_bridge._hook.load import load

_ROWS, _NAMES, _LONG = 50, 8, 200
_NUMBERS = ("bucket", "q_norm", "error_norm")


def inspect(options: argparse.Namespace) -> None:
    """``inspect``: a table, or JSON."""
    summary = _summary(load(options.files, max_bytes=options.max_bytes), options.layout)
    print(json.dumps(summary, indent=2, allow_nan=False) if options.json else _text(summary))


def _summary(checkpoint: Checkpoint, layout: BucketLayout | None) -> dict[str, Any]:
    """What a checkpoint holds, as values for JSON.

    Args:
      checkpoint: What `load` read.
      layout: The bucket layout, if it is known from elsewhere.

    Returns:
      ``facts``, title -> value; ``parameters``, a dictionary each; ``missing``, what a complete
      conversion needs and the files lack, each as one sentence.
    """
    record = checkpoint.powersgd[0] if checkpoint.powersgd else None
    facts, missing, known = _facts(checkpoint, record), _missing(checkpoint, record), None
    if record is not None:
        facts["layout"] = "unknown"
        try:
            if known := layout_of(checkpoint, layout, None):
                source = "given" if layout else "in the file" if checkpoint.layout else "inferred"
                facts["layout"] = f"{source}, {len(known.buckets)} bucket(s)"
        except CheckpointMismatch as error:
            missing.append(f"the bucket layout: {error.message}")
    parts = known.parts(checkpoint.mean) if known is not None else {}
    # The shapes alone say what is compressed.
    known = known or BucketLayout.from_order([trainable(checkpoint.model)], checkpoint.model)
    parameters, wild = [], list[str]()
    for name, entry in known.entries.items():
        rank = 0 if record is None else entry.factor_rank(record)
        row = {"name": name, "shape": entry.shape, "matrix": entry.matrix, "rank": rank}
        numbers = _numbers(parts[name]) if parts else {}
        finite = {key: value for key, value in numbers.items() if math.isfinite(value)}
        if len(finite) < len(numbers):  # JSON has no NaN
            wild.append(name)
        parameters.append({**row, **dict.fromkeys(_NUMBERS), **finite})
    if wild:
        afresh = "(never used, or the run diverged); it starts afresh"
        missing.append(f"a finite state of {_some(wild)} {afresh}")
    return {"facts": facts, "parameters": parameters, "missing": missing}


def _facts(checkpoint: Checkpoint, record: PowerSGDRecord | None) -> dict[str, str]:
    values = sum(array.size for array in checkpoint.model.values())
    facts = {"model": f"{len(checkpoint.model)} tensors, {values:,} values"}
    if record is not None:
        world = checkpoint.world_size or "unknown"
        facts["ranks"] = f"{len(checkpoint.powersgd)} here, world size {world}"
        facts["iteration"] = f"{record.iter:,}"
        began = "compressing" if record.iter > record.start_powerSGD_iter else "not compressing yet"
        facts["phase"] = f"{began} (start_powerSGD_iter = {record.start_powerSGD_iter:,})"
        for name, value in record.hyperparameters.items():
            if name != "start_powerSGD_iter":
                facts[name] = f"{value:g}" if isinstance(value, float) else str(value)
    if (optimizer := checkpoint.optimizer) is not None:
        facts["optimizer"] = "not as an optimizer's state_dict() has it"
        if is_optimizer(optimizer):
            groups, states = len(optimizer["param_groups"]), len(optimizer["state"])
            facts["optimizer"] = f"{groups} group(s), state of {states} parameters"
    if checkpoint.extra:
        facts["beside it"] = _some(list(checkpoint.extra))
    return facts


def _missing(checkpoint: Checkpoint, record: PowerSGDRecord | None) -> list[str]:
    missing = []
    if not checkpoint.model:
        missing.append("the model (state_dict)")
    if checkpoint.optimizer is None:
        missing.append("the optimizer")
    if record is None:
        missing.append("the PowerSGD state (comm_hook_state)")
    elif record.error_dict and checkpoint.missing_ranks:
        missing.append("the errors of the other ranks (missing_ranks decides what to do about it)")
    return missing


def _numbers(part: BucketPart) -> dict[str, float]:
    """Its bucket, and the norms of Q and of the error where it has them."""
    found: dict[str, float] = {"bucket": part.bucket}
    if part.rank and part.q is not None:
        found["q_norm"] = _norm(part.q.reshape(-1))
    if part.error is not None:
        found["error_norm"] = _norm(part.entry.to_memory(part.error))
    return found


def _norm(flat: np.ndarray) -> float:
    """In float64, without a copy of `flat`."""
    return math.sqrt(np.einsum("i,i->", flat, flat, dtype=np.float64, casting="unsafe"))


def _some(names: Sequence[str]) -> str:
    more = len(names) - _NAMES
    return ", ".join(names[:_NAMES]) + (f" and {more:,} more" if more > 0 else "")


def _text(summary: Mapping[str, Any]) -> str:
    """The same for a terminal: the facts, a table, and what is missing."""
    parameters = summary["parameters"]
    titles = ("shape", "matrix", "rank", "bucket", "|q|", "|error|", "parameter")
    table = [titles, *map(_cells, parameters[:_ROWS])]
    facts = [(title, printable(value)) for title, value in summary["facts"].items()]
    lines = [*_aligned(facts, "<<"), "", *_aligned(table, ">>>>>><")]
    if (more := len(parameters) - _ROWS) > 0:
        lines.append(f"{more:,} more parameters; --json has all.")
    sizes = [(math.prod(row["shape"]), row["rank"] * sum(row["matrix"])) for row in parameters]
    dense, sent = sum(size for size, _ in sizes), sum(factors or size for size, factors in sizes)
    if sent:
        lines.append(f"{dense:,} values, {sent:,} sent per step: {dense / sent:.1f} times fewer.")
    return "\n".join([*lines, *(f"missing: {printable(line)}" for line in summary["missing"])])


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    name, rank = row["name"], row["rank"]
    return (
        "x".join(map(str, row["shape"])) or "scalar",
        "x".join(map(str, row["matrix"])) if rank else "",
        str(rank) if rank else "not compressed",
        *("" if row[key] is None else f"{row[key]:.4g}" for key in _NUMBERS),
        printable(name if len(name) <= _LONG else f"{name[:_LONG]}..."),
    )


def _aligned(rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    """A line for each row; what is of any length stands last."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    return [
        "  ".join(f"{c:{side}{w}}" for c, side, w in zip(row, sides, [*widths, 0], strict=True))
        for row in rows
    ]
