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
from torch_bridge._hook.buckets import BucketEntry, BucketLayout, BucketPart
from torch_bridge._hook.checkpoint import Checkpoint, loss_scale_of
from torch_bridge._hook.infer import layout_of
from torch_bridge._hook.load import load

_ROWS, _NAMES = 50, 8  # that are shown
_LONG = 200  # characters of a name
_NUMBERS = ("bucket", "q_norm", "error_norm")


def inspect(options: argparse.Namespace) -> None:
    """Prints what files hold (``inspect``): a table, or JSON."""
    summary = _summary(load(options.files, max_bytes=options.max_bytes), options.layout)
    print(json.dumps(summary, indent=2, allow_nan=False) if options.json else _text(summary))


def _summary(checkpoint: Checkpoint, layout: BucketLayout | None) -> dict[str, Any]:
    """Collects what a checkpoint holds, as values for JSON.

    Args:
      checkpoint: What `load` read.
      layout: The bucket layout, if it is known from elsewhere.

    Returns:
      ``facts``, title -> value; ``parameters``, a dictionary each; ``missing``, what a complete
      conversion needs and the files lack, each as one sentence.
    """
    record = checkpoint.powersgd[0] if checkpoint.powersgd else None
    facts = _facts(checkpoint, record)
    missing = _missing(checkpoint, record)
    known = None
    if record is not None:
        facts["layout"] = "unknown"
        try:
            known = layout_of(checkpoint, layout, None)
        except CheckpointMismatch as error:
            missing.append(f"the bucket layout: {error.message}")
    parts: dict[str, BucketPart] = {}
    if known is not None:
        source = "in the file" if checkpoint.layout else "inferred"
        facts["layout"] = f"{'given' if layout else source}, {len(known.buckets)} bucket(s)"
        parts = known.parts(checkpoint.mean)
    # Without a layout the shapes alone say what is compressed.
    known = known or BucketLayout.from_order([trainable(checkpoint.model)], checkpoint.model)
    parameters = [_row(entry, record, parts.get(entry.name)) for entry in known]
    wild = [row["name"] for row in parameters if row.pop("wild")]
    if wild:
        afresh = "(never used, or the run diverged); it starts afresh"
        missing.append(f"a finite state of {_some(wild)} {afresh}")
    return {"facts": facts, "parameters": parameters, "missing": missing}


def _row(entry: BucketEntry, record: PowerSGDRecord | None, part: BucketPart | None) -> Any:
    """Collects what is known of one parameter; ``wild`` where its state is not finite."""
    row: dict[str, Any] = {"name": entry.name, "shape": entry.shape, "matrix": entry.matrix}
    row["rank"] = 0 if record is None else entry.factor_rank(record)
    row.update(dict.fromkeys(_NUMBERS))
    row["wild"] = False
    if part is None:
        return row
    for name, number in _numbers(part).items():
        if math.isfinite(number):
            row[name] = number
        else:  # JSON has no NaN
            row["wild"] = True
    return row


def _facts(checkpoint: Checkpoint, record: PowerSGDRecord | None) -> dict[str, str]:
    """Says what a checkpoint is of, title -> value."""
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
        facts.update(_scale(checkpoint))
    if checkpoint.optimizer is not None:
        facts["optimizer"] = _optimizer(checkpoint.optimizer)
    if checkpoint.example is not None:
        shapes = [_times(array.shape) for array in checkpoint.example[0]]
        facts["example"] = f"inputs of {', '.join(shapes)}"
    if checkpoint.extra:
        facts["beside it"] = _some(list(checkpoint.extra))
    return facts


def _scale(checkpoint: Checkpoint) -> dict[str, str]:
    """Says the loss scale, if there is one."""
    try:
        scale = loss_scale_of(checkpoint)
    except CheckpointMismatch as error:
        return {"loss scale": f"one of {', '.join(error.ambiguous)}"}
    return {} if scale == 1 else {"loss scale": f"{scale:g}, which a conversion takes out"}


def _optimizer(optimizer: Any) -> str:
    if not is_optimizer(optimizer):
        return "not as an optimizer's state_dict() has it"
    groups, states = len(optimizer["param_groups"]), len(optimizer["state"])
    return f"{groups} group(s), state of {states} parameters"


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
    """Returns its bucket, and the norms of Q and of the error where it has them."""
    numbers: dict[str, float] = {"bucket": part.bucket}
    if part.rank and part.q is not None:
        numbers["q_norm"] = _norm(part.q.reshape(-1))
    if part.error is not None:
        numbers["error_norm"] = _norm(part.entry.to_memory(part.error))
    return numbers


def _norm(flat: np.ndarray) -> float:
    """Computes a norm in float64, without a copy of `flat`."""
    return math.sqrt(np.einsum("i,i->", flat, flat, dtype=np.float64, casting="unsafe"))


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMES])
    more = len(names) - _NAMES
    return f"{shown} and {more:,} more" if more > 0 else shown


def _text(summary: Mapping[str, Any]) -> str:
    """Lays a summary out for a terminal: the facts, a table, and what is missing."""
    parameters = summary["parameters"]
    table: list[Sequence[str]] = []
    table.append(("shape", "matrix", "rank", "bucket", "|q|", "|error|", "parameter"))
    table.extend(map(_cells, parameters[:_ROWS]))
    facts = [(title, printable(value)) for title, value in summary["facts"].items()]
    lines = _aligned(facts, "<<")
    lines.append("")
    lines.extend(_aligned(table, ">>>>>><"))
    more = len(parameters) - _ROWS
    if more > 0:
        lines.append(f"{more:,} more parameters; --json has all.")
    dense = sent = 0
    for row in parameters:
        size = math.prod(row["shape"])
        dense += size
        sent += row["rank"] * sum(row["matrix"]) or size
    if sent:
        lines.append(f"{dense:,} values, {sent:,} sent per step: {dense / sent:.1f} times fewer.")
    lines.extend(f"missing: {printable(line)}" for line in summary["missing"])
    return "\n".join(lines)


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    name = row["name"]
    cells = [_times(row["shape"]) or "scalar"]
    if row["rank"]:
        cells += [_times(row["matrix"]), str(row["rank"])]
    else:
        cells += ["", "not compressed"]
    for key in _NUMBERS:
        cells.append("" if row[key] is None else f"{row[key]:.4g}")
    cells.append(printable(name if len(name) <= _LONG else f"{name[:_LONG]}..."))
    return tuple(cells)


def _times(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _aligned(rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    """Aligns columns to the left (<) or right (>); what is of any length stands last."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths[-1] = 0
    lines = []
    for row in rows:
        columns = zip(row, sides, widths, strict=True)
        lines.append("  ".join(f"{cell:{side}{width}}" for cell, side, width in columns))
    return lines
