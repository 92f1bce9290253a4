"""What a checkpoint holds, as plain data and as tables for a terminal."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
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

_ROWS, _NAMES, _LONG = 50, 8, 200
_BLOCK = 1 << 16  # values

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
    norms = ((row.name, row.q_norm, row.error_norm) for row in parameters)
    if wild := [name for name, *pair in norms if any(n is not None and n - n != 0 for n in pair)]:
        missing.append(
            f"a finite state of {_some(wild)} (never used, or the run diverged); it starts afresh"
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
        facts["beside it"] = _some(list(checkpoint.extra))
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
    rows = []
    for index, bucket in enumerate(layout.buckets):
        q, errors = record.q_memory_dict.get(index), {}
        if index in record.error_dict:  # one bucket after the other, as each is a copy
            errors = layout.split(index, checkpoint.mean_error(index))
        for entry in bucket:
            slot = slots.get(entry.name)
            rows.append(
                ParameterSummary(
                    entry.name,
                    entry.shape,
                    matrix_shape(entry.shape),
                    slot.rank if slot else 0,
                    bucket=index,
                    q_norm=_norm(slot.q(q)) if slot is not None and q is not None else None,
                    error_norm=_norm(errors[entry.name]) if entry.name in errors else None,
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
    """The Frobenius norm, in float64, without a copy of all of `array`."""
    array = np.atleast_2d(array)
    step = max(_BLOCK // max(array[0].size, 1), 1) if len(array) else 1
    blocks = (array[k : k + step].astype(np.float64) for k in range(0, len(array), step))
    return math.sqrt(sum(float(np.vdot(block, block)) for block in blocks))


def _some(names: Sequence[str]) -> str:
    more = len(names) - _NAMES
    return ", ".join(names[:_NAMES]) + (f" and {more:,} more" if more > 0 else "")


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
    for row in summary.parameters[:_ROWS]:
        table.add_row(
            plain(row.name if len(row.name) <= _LONG else f"{row.name[:_LONG]}..."),
            "x".join(map(str, row.shape)) or "scalar",
            "x".join(map(str, row.matrix)) if row.rank else "",
            str(row.rank) if row.rank else "not compressed",
            "" if row.bucket is None else str(row.bucket),
            "" if row.q_norm is None else f"{row.q_norm:.4g}",
            "" if row.error_norm is None else f"{row.error_norm:.4g}",
        )
    console.print(table)
    if (more := len(summary.parameters) - _ROWS) > 0:
        console.print(f"{more:,} more parameters; --json has all.")
    dense = sum(math.prod(row.shape) for row in summary.parameters)
    sent = sum(
        row.rank * sum(row.matrix) if row.rank else math.prod(row.shape)
        for row in summary.parameters
    )
    if sent:
        console.print(f"{dense:,} values, {sent:,} sent per step: {dense / sent:.1f} times fewer.")
    for line in summary.missing:
        console.print(Text.assemble(("missing:", "yellow"), " ", printable(line)))
