"""What a checkpoint holds, as plain data and as tables for a terminal."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxcomp.extend import is_compressed
from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._base.schema import PowerSGDRecord
from torch_bridge._base.terminal import plain, printable
from torch_bridge._convert.optimizer_groups import is_optimizer
from torch_bridge._hook.buckets import BucketLayout
from torch_bridge._hook.checkpoint import Checkpoint
from torch_bridge._hook.entries import matrix_shape
from torch_bridge._hook.infer import infer_layout, length_misfit, trainable

if TYPE_CHECKING:
    from rich.console import Console


@dataclasses.dataclass(frozen=True)
class ParameterSummary:
    """One row of the table.

    Attributes:
      name: Parameter name.
      shape: Its shape.
      matrix: Rows and columns as the hook sees them.
      rank: Columns of its factors; 0 if it is not compressed.
      bucket: Index of its bucket, or None if that is unknown.
      q_norm: Frobenius norm of Q, or None.
      error_norm: Norm of the mean error over the ranks at hand, or None.
    """

    name: str
    shape: tuple[int, ...]
    matrix: tuple[int, int]
    rank: int
    bucket: int | None = None
    q_norm: float | None = None
    error_norm: float | None = None


@dataclasses.dataclass(frozen=True)
class Summary:
    """What `summarize` found.

    Attributes:
      facts: Title -> value, in order.
      parameters: One entry per parameter.
      missing: What a complete conversion needs and the files lack, each as one sentence.
    """

    facts: dict[str, str]
    parameters: tuple[ParameterSummary, ...]
    missing: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values, for JSON, which has no NaN: such a norm is None."""
        plain_values = dataclasses.asdict(self)
        for row in plain_values["parameters"]:
            for key in ("q_norm", "error_norm"):
                if row[key] is not None and not math.isfinite(row[key]):
                    row[key] = None
        return plain_values


def summarize(checkpoint: Checkpoint, layout: BucketLayout | None = None) -> Summary:
    """Describe a checkpoint.

    Args:
      checkpoint: What `load` read.
      layout: The bucket layout, if it is known from elsewhere.
    """
    record = checkpoint.powersgd[0] if checkpoint.powersgd else None
    source, problem = "given", None
    if layout is None:
        layout, source, problem = _find_layout(checkpoint, record)
    if layout is not None and record is not None:
        problem = length_misfit(layout, record)
        layout = None if problem else layout
    facts = _facts(checkpoint, record)
    if record is not None:
        buckets = len(layout.buckets) if layout else len(record.buckets)
        facts["layout"] = f"{source}, {buckets} bucket(s)" if layout else "unknown"
    missing = _missing(checkpoint, record)
    parameters = tuple(_parameters(checkpoint, record, layout))
    for row in parameters:
        if not all(norm is None or math.isfinite(norm) for norm in (row.q_norm, row.error_norm)):
            missing.append(
                f"a finite state of {row.name} (never used, or the run diverged); it starts afresh"
            )
    if problem is not None:
        missing.append(f"the bucket layout: {problem}")
    return Summary(facts, parameters, tuple(missing))


def _find_layout(
    checkpoint: Checkpoint, record: PowerSGDRecord | None
) -> tuple[BucketLayout | None, str, str | None]:
    if checkpoint.layout is not None:
        return checkpoint.layout, "in the file", None
    if record is None or not record.buckets:
        return None, "", None
    try:
        return infer_layout(checkpoint), "inferred", None
    except CheckpointMismatch as error:
        return None, "", error.message


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
    if checkpoint.optimizer is not None:
        facts["optimizer"] = _optimizer(checkpoint.optimizer)
    if checkpoint.extra:
        facts["beside it"] = ", ".join(checkpoint.extra)
    return facts


def _optimizer(optimizer: dict[str, Any]) -> str:
    if not is_optimizer(optimizer):
        return "not as an optimizer's state_dict() has it"
    groups, states = optimizer["param_groups"], optimizer["state"]
    return f"{len(groups)} group(s), state of {len(states)} parameters"


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


def _parameters(
    checkpoint: Checkpoint, record: PowerSGDRecord | None, layout: BucketLayout | None
) -> list[ParameterSummary]:
    if record is None or layout is None:
        return [_row(name, checkpoint.model[name].shape, record) for name in trainable(checkpoint)]
    rank, rate = record.matrix_approximation_rank, record.min_compression_rate
    slots = {slot.entry.name: slot for slot in layout.factor_slots(rank, rate)}
    norms = {name: _norm(part) for name, part in checkpoint.mean_errors(layout).items()}
    rows = []
    for index, bucket in enumerate(layout.buckets):
        for entry in bucket:
            row = _row(entry.name, entry.shape, record)
            slot, q = slots.get(entry.name), record.q_memory_dict.get(index)
            rows.append(
                dataclasses.replace(
                    row,
                    bucket=index,
                    rank=slot.rank if slot else 0,
                    q_norm=_norm(slot.q(q)) if slot is not None and q is not None else None,
                    error_norm=norms.get(entry.name),
                )
            )
    return rows


def _row(name: str, shape: tuple[int, ...], record: PowerSGDRecord | None) -> ParameterSummary:
    rows, cols = matrix_shape(shape)
    rank = min(rows, cols, record.matrix_approximation_rank) if record is not None else 0
    if record is None or not is_compressed(rows, cols, rank, record.min_compression_rate):
        rank = 0
    return ParameterSummary(name, tuple(shape), (rows, cols), rank)


def _norm(array: np.ndarray) -> float:
    return float(np.linalg.norm(array.astype(np.float64)))


def render(summary: Summary, console: Console) -> None:
    """Print the tables."""
    from rich.table import Table
    from rich.text import Text

    facts = Table.grid(padding=(0, 2))
    for title, value in summary.facts.items():
        facts.add_row(f"[bold]{title}[/bold]", plain(value))
    console.print(facts)
    table = Table(title="Parameters", title_justify="left")
    for title in ("name", "shape", "matrix", "rank", "bucket", "|q|", "|error|"):
        table.add_column(
            title,
            justify="left" if title in ("name", "shape") else "right",
            no_wrap=title != "name",
            overflow="fold",
        )
    for row in summary.parameters:
        table.add_row(
            plain(row.name),
            "x".join(map(str, row.shape)) or "scalar",
            "x".join(map(str, row.matrix)) if row.rank else "",
            str(row.rank) if row.rank else "not compressed",
            "" if row.bucket is None else str(row.bucket),
            "" if row.q_norm is None else f"{row.q_norm:.4g}",
            "" if row.error_norm is None else f"{row.error_norm:.4g}",
        )
    console.print(table)
    dense = sum(math.prod(row.shape) for row in summary.parameters)
    sent = sum(
        row.rank * sum(row.matrix) if row.rank else math.prod(row.shape)
        for row in summary.parameters
    )
    if sent:
        console.print(f"{dense:,} values, {sent:,} sent per step: {dense / sent:.1f} times fewer.")
    for line in summary.missing:
        console.print(Text.assemble(("missing:", "yellow"), " ", printable(line)))
