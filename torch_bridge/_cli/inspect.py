"""Shows the contents of a checkpoint, as JSON and as text for a terminal."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from torch_bridge._base.errors import CheckpointMismatch, Problems
from torch_bridge._base.schema import PowerSGDRecord, is_optimizer
from torch_bridge._base.tensors import trainable
from torch_bridge._base.terminal import printable, some
from torch_bridge._convert.optimizer_groups import doubts_of_schedulers
from torch_bridge._convert.review import doubts_of_file, reviewed_layout
from torch_bridge._hook.buckets import BucketLayout
from torch_bridge._hook.checkpoint import Checkpoint, loss_scale_of
from torch_bridge._hook.load import load

_ROWS = 50  # the most parameters in the table
_LONG = 200  # the most characters of a name in the table
_FACT = "{:<{}}  {}"
_LINE = "{:>16}  {:>12}  {:>14}  {:>6}  {:>9}  {:>9}  {}"
_HEADER = ("shape", "matrix", "rank", "bucket", "|q|", "|error|", "parameter")
# Parts that a conversion can do without -> how to save them.
_DISPENSABLE = {
    "PowerSGDState": "the PowerSGD state: save it as 'comm_hook_state', or with save_checkpoint. "
    "Without it gradients are averaged exactly",
    "optimizer": "the optimizer: save it as 'optimizer', or load its own file together with this "
    "one",
    "example": "an example: save_checkpoint(..., example=inputs), or pass apply= and "
    "example=torch_bridge.run_example(module, inputs). Without it names and shapes decide, and the "
    "rest is asked",
}


def inspect(options: argparse.Namespace) -> None:
    """Prints the contents of files (``inspect``), as a table or as JSON."""
    summary = _summary(load(options.files, max_bytes=options.max_bytes), options.layout)
    print(json.dumps(summary, indent=2, allow_nan=False) if options.json else _text(summary))


def _summary(checkpoint: Checkpoint, layout: BucketLayout | None) -> dict[str, Any]:
    """Collects the contents of a checkpoint, as values for JSON.

    Args:
      checkpoint: The checkpoint that `load` returned.
      layout: The bucket layout of ``--layout``, or None.

    Returns:
      ``facts``: title -> value. ``parameters``: one dictionary for each, with None for an unknown
      value. ``missing``: one text for each part that a complete conversion needs and the files do
      not have, with what to write. ``notes``: the warnings that a conversion will give.
    """
    record = next(iter(checkpoint.powersgd), None)
    facts = _facts(checkpoint, record)
    present = {
        "PowerSGDState": record,
        "optimizer": checkpoint.optimizer,
        "example": checkpoint.example,
    }
    missing = []
    unread = checkpoint.unread()
    for kind, sentence in _DISPENSABLE.items():
        places = unread.get(kind)
        if places:
            sentence += f". {some(list(places))} may be it"
        if present[kind] is None:
            missing.append(sentence)
    problems = Problems()
    known = reviewed_layout(checkpoint, layout, "error", None, problems)
    for kind, error in problems.errors:
        missing.append(f"{kind}: {error}")
    parts = {}
    if record is not None:
        facts["layout"] = "unknown"
    if record is not None and record.buckets and known is not None:
        source = "in the file" if checkpoint.layout else "inferred"
        facts["layout"] = f"{'given' if layout else source}, {len(known.buckets)} bucket(s)"
        if not known.misfits(record):
            parts = known.parts(checkpoint.mean)
    parameters = []
    wild = {}
    # Without a layout the parameters' shapes show which ones torch compresses.
    for entry in known or BucketLayout.from_order([trainable(checkpoint.model)], checkpoint.model):
        part = parts.get(entry.name)
        row: dict[str, Any] = {
            "name": entry.name,
            "shape": entry.shape,
            "matrix": entry.matrix,
            "rank": 0 if record is None else entry.factor_rank(record),
            "bucket": part and part.bucket,
            "q_norm": part and _norm(part.q),
            "error_norm": part and _norm(part.error),
        }
        for key in ("q_norm", "error_norm"):
            if row[key] is not None and not math.isfinite(row[key]):
                wild[entry.name] = key
                row[key] = None  # JSON has no NaN
        parameters.append(row)
    if wild:
        reason = "(never used, or the run diverged); it starts with a new Q and no residual"
        missing.append(f"a finite state of {some(list(wild))} {reason}")
    notes = list(doubts_of_file(checkpoint, unread, False))
    readable = "the optimizer" not in dict(problems.errors)
    if checkpoint.optimizer is not None and checkpoint.model and readable:
        notes += doubts_of_schedulers(checkpoint.optimizer["param_groups"], scheduled=False)
    return {"facts": facts, "parameters": parameters, "missing": missing, "notes": notes}


def _norm(array: np.ndarray | None) -> float | None:
    """Returns the Euclidean norm of an array, summed in float64 without a copy."""
    if array is None:
        return None
    flat = array.ravel(order="K")
    return math.sqrt(np.einsum("i,i->", flat, flat, dtype=np.float64, casting="unsafe"))


def _facts(checkpoint: Checkpoint, record: PowerSGDRecord | None) -> dict[str, str]:
    """Returns the table's heading lines, title -> value."""
    values = sum(map(np.size, checkpoint.model.values()))
    facts = {"model": f"{len(checkpoint.model)} tensors, {values:,} values"}
    if record is not None:
        world = checkpoint.world_size or "unknown"
        facts["ranks"] = f"{len(checkpoint.powersgd)} here, world size {world}"
        facts["iteration"] = f"{record.iter:,}"
        compressing = record.iter > record.start_powerSGD_iter
        facts["phase"] = "compressing" if compressing else "not compressing yet"
        facts.update(jax.tree.map(str, record.hyperparameters))
        try:
            scale = loss_scale_of(checkpoint)
            if scale != 1:
                facts["loss scale"] = f"{scale:g}, which a conversion takes out"
        except CheckpointMismatch as error:
            facts["loss scale"] = f"one of {', '.join(error.ambiguous)}"
    optimizer: Any = checkpoint.optimizer
    if is_optimizer(optimizer):
        groups = len(optimizer["param_groups"])
        states = len(optimizer["state"])
        facts["optimizer"] = f"{groups} group(s), state of {states} parameters"
    elif optimizer is not None:
        facts["optimizer"] = "not as an optimizer's state_dict() has it"
    if checkpoint.example is not None:
        shapes = [_times(array.shape) for array in checkpoint.example[0]]
        facts["example"] = f"inputs of {', '.join(shapes)}"
    if checkpoint.extra:
        facts["beside it"] = some(list(checkpoint.extra))
    return facts


def _text(summary: Mapping[str, Any]) -> str:
    """Returns a summary as text: the facts, a table of parameters, and the missing parts."""
    facts = summary["facts"]
    parameters = summary["parameters"]
    width = max(map(len, facts))
    lines = [_FACT.format(title, width, printable(value)) for title, value in facts.items()]
    lines += ["", _LINE.format(*_HEADER)]
    dense = 0
    sent = 0
    for number, row in enumerate(parameters):
        size = math.prod(row["shape"])
        dense += size
        sent += row["rank"] * sum(row["matrix"]) or size
        cells = [_times(row["shape"]) or "scalar", "", "not compressed"]
        if row["rank"]:
            cells[1:] = [_times(row["matrix"]), row["rank"]]
        for key in ("bucket", "q_norm", "error_norm"):
            cells.append("" if row[key] is None else f"{row[key]:.4g}")
        name = row["name"]
        cells.append(printable(name if len(name) <= _LONG else f"{name[:_LONG]}..."))
        if number < _ROWS:
            lines.append(_LINE.format(*cells))
    if len(parameters) > _ROWS:
        lines.append(f"{len(parameters) - _ROWS:,} more parameters; --json has all.")
    if sent:
        lines.append(f"{dense:,} values, {sent:,} sent per step: {dense / sent:.1f} times fewer.")
    for title in ("missing", "notes"):
        for line in summary[title]:
            lines.append(f"{title}: {printable(line, keep=chr(10))}")
    return "\n".join(lines)


def _times(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))
