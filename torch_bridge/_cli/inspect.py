"""What a checkpoint holds, as plain data and as tables for a terminal."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxcomp.extend import is_compressed
from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._base.schema import PowerSGDRecord
from torch_bridge._base.terminal import printable
from torch_bridge._cli import arguments
from torch_bridge._convert.optimizer_groups import is_optimizer
from torch_bridge._convert.powersgd import layout_of
from torch_bridge._hook.buckets import BucketLayout, matrix_shape
from torch_bridge._hook.checkpoint import Checkpoint
from torch_bridge._hook.infer import trainable
from torch_bridge._hook.load import load

_ROWS, _NAMES, _LONG = 50, 8, 200
_BLOCK = 1 << 16  # values
_NUMBERS = ("bucket", "q_norm", "error_norm")

if TYPE_CHECKING:
    from rich.console import Console


def inspect(options: argparse.Namespace) -> None:
    """``inspect``: tables, or JSON."""
    from rich.console import Console

    layout = arguments.layout(options)
    arguments.notify(options, "reading")
    summary = summarize(load(options.files, max_bytes=options.max_bytes), layout)
    if options.json:
        print(json.dumps(summary, indent=2, allow_nan=False))
        return
    console = Console()
    # A pipe has no width: whole lines are easier to search there than folded ones.
    render(summary, console if console.is_terminal else Console(width=200))


def summarize(checkpoint: Checkpoint, layout: BucketLayout | None = None) -> dict[str, Any]:
    """What a checkpoint holds, as values for JSON.

    Args:
      checkpoint: What `load` read.
      layout: The bucket layout, if it is known from elsewhere.

    Returns:
      ``facts``, title -> value; ``parameters``, a dictionary each; ``missing``, what a complete
      conversion needs and the files lack, each as one sentence.
    """
    record = checkpoint.powersgd[0] if checkpoint.powersgd else None
    facts, missing = _facts(checkpoint, record), _missing(checkpoint, record)
    source = "inferred" if checkpoint.layout is None else "in the file"
    source = source if layout is None else "given"
    try:
        layout = layout_of(checkpoint, layout, ()) if record is not None else None
    except CheckpointMismatch as error:
        layout = None
        missing.append(f"the bucket layout: {error.message}")
    shapes = {name: checkpoint.model[name].shape for name in trainable(checkpoint)}
    if layout is not None:
        shapes = {name: entry.shape for name, entry in layout.entries.items()}
    rows = {name: _row(name, shape, record) for name, shape in shapes.items()}
    if record is not None:
        facts["layout"] = f"{source}, {len(layout.buckets)} bucket(s)" if layout else "unknown"
        if layout is not None:
            wild = _measure(rows, checkpoint, record, layout)
            afresh = "(never used, or the run diverged); it starts afresh"
            missing += [f"a finite state of {_some(wild)} {afresh}"] if wild else []
    return {"facts": facts, "parameters": list(rows.values()), "missing": missing}


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


def _row(name: str, shape: tuple[int, ...], record: PowerSGDRecord | None) -> dict[str, Any]:
    rows, cols = matrix_shape(shape)
    rank = min(rows, cols, record.matrix_approximation_rank) if record is not None else 0
    if record is None or not is_compressed(rows, cols, rank, record.min_compression_rate):
        rank = 0
    row = {"name": name, "shape": shape, "matrix": (rows, cols), "rank": rank}
    return row | dict.fromkeys(_NUMBERS)


def _measure(
    rows: dict[str, dict[str, Any]],
    checkpoint: Checkpoint,
    record: PowerSGDRecord,
    layout: BucketLayout,
) -> list[str]:
    """Fill in the buckets, and the norms of Q and of the mean error; names of those not finite."""
    wild: dict[str, None] = {}

    def put(name: str, key: str, array: np.ndarray) -> None:
        norm = _norm(array)
        if math.isfinite(norm):
            rows[name][key] = norm
        else:  # JSON has no NaN
            wild[name] = None

    slots = layout.factor_slots(record.matrix_approximation_rank, record.min_compression_rate)
    for slot in slots:
        if (q := record.q_memory_dict.get(slot.bucket)) is not None:
            put(slot.entry.name, "q_norm", slot.q(q))
    for index, bucket in enumerate(layout.buckets):
        for entry in bucket:
            rows[entry.name]["bucket"] = index
        if index in record.error_dict:  # one bucket after the other, as each is a copy
            for name, error in layout.split(index, checkpoint.mean_error(index)).items():
                put(name, "error_norm", error)
    return list(wild)


def _norm(array: np.ndarray) -> float:
    """The Frobenius norm, in float64, without a copy of all of `array`."""
    array = np.atleast_2d(array)
    step = max(_BLOCK // max(array[0].size, 1), 1) if len(array) else 1
    blocks = (array[k : k + step].astype(np.float64) for k in range(0, len(array), step))
    return math.sqrt(sum(float(np.vdot(block, block)) for block in blocks))


def _some(names: Sequence[str]) -> str:
    more = len(names) - _NAMES
    return ", ".join(names[:_NAMES]) + (f" and {more:,} more" if more > 0 else "")


def render(summary: Mapping[str, Any], console: Console) -> None:
    """Print the tables."""
    from rich.table import Table
    from rich.text import Text

    facts = Table.grid(padding=(0, 2))
    for title, value in summary["facts"].items():
        facts.add_row(f"[bold]{title}[/bold]", Text(printable(value)))
    console.print(facts)
    table = Table(title="Parameters", title_justify="left")
    for title in ("name", "shape"):
        table.add_column(title, no_wrap=title == "shape", overflow="fold")
    for title in ("matrix", "rank", "bucket", "|q|", "|error|"):
        table.add_column(title, justify="right", no_wrap=True)
    parameters = summary["parameters"]
    for row in parameters[:_ROWS]:
        name, rank = row["name"], row["rank"]
        table.add_row(
            Text(printable(name if len(name) <= _LONG else f"{name[:_LONG]}...")),
            "x".join(map(str, row["shape"])) or "scalar",
            "x".join(map(str, row["matrix"])) if rank else "",
            str(rank) if rank else "not compressed",
            *("" if row[key] is None else f"{row[key]:.4g}" for key in _NUMBERS),
        )
    console.print(table)
    if (more := len(parameters) - _ROWS) > 0:
        console.print(f"{more:,} more parameters; --json has all.")
    sizes = [(math.prod(row["shape"]), row["rank"] * sum(row["matrix"])) for row in parameters]
    dense, sent = sum(size for size, _ in sizes), sum(factors or size for size, factors in sizes)
    if sent:
        console.print(f"{dense:,} values, {sent:,} sent per step: {dense / sent:.1f} times fewer.")
    for line in summary["missing"]:
        console.print(Text.assemble(("missing:", "yellow"), " ", printable(line)))
