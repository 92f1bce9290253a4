"""Find the bucket layout of a checkpoint that does not record it.

torch produces few orders: definition order (before the first rebuild, or always with
``find_unused_parameters``), and the order in which gradients became ready. Each candidate is tested
against what the state itself implies, and a layout is accepted only if it is the one that fits:

- buckets and factor buffers have exactly the lengths that the candidate gives them;
- every block of P is orthonormal, because the hook stores it so;
- with all ranks at hand, the mean error of a compressed parameter is orthogonal to its P (it is
  ``M - P P^T M``) and that of an uncompressed parameter cancels.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence

import numpy as np

from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._base.schema import PowerSGDRecord
from torch_bridge._hook.buckets import BucketLayout
from torch_bridge._hook.checkpoint import Checkpoint

# torch keeps running statistics in buffers, which have no gradient; nothing else marks them.
_BUFFER_NAMES = ("running_mean", "running_var", "num_batches_tracked")
_COLUMNS = 128
_HOW_TO = (
    "Record it in the torch run with torch_bridge.record_layout(ddp_model, state), or pass "
    "layout=BucketLayout.from_order(...)."
)


def infer_layout(
    checkpoint: Checkpoint,
    *,
    orders: Mapping[str, Sequence[str]] | None = None,
    frozen: Collection[str] = (),
) -> BucketLayout:
    """The only bucket layout, of those torch produces, that fits the hook state.

    Parameters of equal shape that became ready in an unusual order cannot be told apart; if the
    model has parallel branches, record the layout instead.

    Args:
      checkpoint: With a model and the hook state; all ranks' files decide more than one.
      orders: Further candidates: label -> all trainable parameters in one order, for example from
        `gradient_order`.
      frozen: Names of parameters that were not trained, and of buffers other than running
        statistics; the file does not mark them.

    Returns:
      The layout.

    Raises:
      CheckpointMismatch: None or several candidates fit; they are listed.

    Example:
      >>> p = np.full(16, 0.25, np.float32)
      >>> record = PowerSGDRecord(1, 20, {0: np.zeros(128, "f4")}, {0: p}, {0: np.ones(8, "f4")})
      >>> model = {"fc.weight": np.zeros((16, 8), "f4")}
      >>> infer_layout(Checkpoint(model, (record,), world_size=2)).names
      ('fc.weight',)
    """
    if not checkpoint.powersgd or not checkpoint.model:
        raise CheckpointMismatch(f"The layout cannot be inferred without a model. {_HOW_TO}")
    record = checkpoint.powersgd[0]
    fitting: dict[Hashable, tuple[BucketLayout, str]] = {}
    reasons = []
    for label, order in candidates(checkpoint, record, orders or {}, frozen):
        layout = BucketLayout.from_order(order, checkpoint.model)
        reason = _misfit(layout, checkpoint)
        if reason is None:
            fitting.setdefault(_meaning(layout, record), (layout, label))
        else:
            reasons.append(f"{label}: {reason}")
    if len(fitting) == 1:
        return next(iter(fitting.values()))[0]
    if fitting:
        raise CheckpointMismatch(
            f"The file does not record the bucket layout, and several orders fit it. {_HOW_TO}",
            ambiguous=[f"{label}: {_brief(layout)}" for layout, label in fitting.values()],
        )
    raise CheckpointMismatch(
        f"The file does not record the bucket layout, and no order that torch produces fits. "
        f"{_HOW_TO}",
        mis_shaped=reasons or [_length_problem(checkpoint, record)],
    )


def infer_without(checkpoint: Checkpoint, leftover: Collection[str]) -> BucketLayout:
    """`infer_layout`, where tensors that go to no Flax leaf may be buffers without a gradient."""
    try:
        return infer_layout(checkpoint)
    except CheckpointMismatch:
        if not leftover:
            raise
    return infer_layout(checkpoint, frozen=leftover)


def _meaning(layout: BucketLayout, record: PowerSGDRecord) -> Hashable:
    """What of a layout makes a difference: without errors, the places of the factors only."""
    if record.error_dict:
        return layout
    slots = layout.factor_slots(record.matrix_approximation_rank, record.min_compression_rate)
    return tuple((slot.entry.name, slot.bucket, slot.p_start, slot.q_start) for slot in slots)


def candidates(
    checkpoint: Checkpoint,
    record: PowerSGDRecord,
    orders: Mapping[str, Sequence[str]],
    frozen: Collection[str] = (),
) -> Iterator[tuple[str, list[list[str]]]]:
    """Label and parameter names per bucket of every order that can be cut at the right lengths."""
    names = [name for name in trainable(checkpoint) if name not in frozen]
    modules: dict[str, list[str]] = {}
    for name in names:
        modules.setdefault(name.rpartition(".")[0], []).append(name)
    backwards = list(reversed(modules.values()))

    def ready(members: list[str]) -> list[str]:
        # autograd hands over a Linear's bias before its weight, but a convolution's or a
        # normalisation's weight first.
        linear = any(
            name.endswith("weight") and checkpoint.model[name].ndim == 2 for name in members
        )
        return members[::-1] if linear else members

    lengths = [record.error_dict[bucket].size for bucket in sorted(record.error_dict)]
    flat = {
        "gradient-ready order": [name for members in backwards for name in ready(members)],
        "reversed definition order": names[::-1],
        "reversed modules": [name for members in backwards for name in members],
        **orders,
    }
    for label, order in flat.items():
        buckets = _cut(order, lengths, checkpoint)
        if buckets is not None:
            yield label, buckets
    buckets = _cut(names, lengths[::-1], checkpoint)
    if buckets is not None:
        yield "definition order", buckets[::-1]


def trainable(checkpoint: Checkpoint) -> list[str]:
    """Names of the model's parameters, in definition order, tied ones once, buffers left out."""
    aliases = checkpoint.aliases
    return [
        name
        for name, array in checkpoint.model.items()
        if name not in aliases
        and name.rpartition(".")[2] not in _BUFFER_NAMES
        and (array.dtype.kind in "fc" or array.dtype.name == "bfloat16")
    ]


def _cut(
    order: Sequence[str], lengths: Sequence[int], checkpoint: Checkpoint
) -> list[list[str]] | None:
    """`order` in pieces of exactly `lengths` elements; one piece if no length is known."""
    if not lengths:
        return [list(order)]
    pieces: list[list[str]] = [[]]
    left, rest = lengths[0], list(lengths[1:])
    for name in order:
        if name not in checkpoint.model:
            return None
        while left == 0 and rest:
            pieces.append([])
            left = rest.pop(0)
        left -= checkpoint.model[name].size
        if left < 0:
            return None
        pieces[-1].append(name)
    return pieces if left == 0 and not rest else None


def _misfit(layout: BucketLayout, checkpoint: Checkpoint) -> str | None:
    """Why `layout` contradicts the hook state; None if it does not."""
    record = checkpoint.powersgd[0]
    reason = length_misfit(layout, record)
    if reason is not None:
        return reason
    mean = None if checkpoint.missing_ranks else checkpoint.mean_errors(layout) or None
    compressed = set()
    for slot in layout.factor_slots(record.matrix_approximation_rank, record.min_compression_rate):
        compressed.add(slot.entry.name)
        if slot.bucket not in record.p_memory_dict:
            continue
        # Some columns show it; all of a full rank would take gigabytes and minutes.
        p = slot.p(record.p_memory_dict[slot.bucket])[:, :_COLUMNS].astype(np.float64)
        if not np.isfinite(p).all():
            continue
        tolerance = 64 * np.sqrt(slot.rows) * _eps(record.p_memory_dict[slot.bucket])
        if np.abs(p.T @ p - np.eye(p.shape[1])).max() > max(tolerance, 1e-3):
            return f"the factors of {slot.entry.name} would not be orthonormal"
        if mean is not None:
            error = slot.entry.flatten(mean[slot.entry.name]).reshape(slot.rows, slot.cols)
            if np.linalg.norm(p.T @ error) > 1e-2 * np.linalg.norm(error) + 1e-12:
                return f"the error of {slot.entry.name} would not be what its factors left over"
    if mean is not None and len(checkpoint.powersgd) > 1:
        return _uncancelled(layout, checkpoint.powersgd, mean, compressed)
    return None


def length_misfit(layout: BucketLayout, record: PowerSGDRecord) -> str | None:
    """The first buffer whose length is not the one that `layout` gives it; None if all fit."""
    p_size, q_size = dict.fromkeys(range(len(layout.buckets)), 0), {}
    q_size |= p_size
    for slot in layout.factor_slots(record.matrix_approximation_rank, record.min_compression_rate):
        p_size[slot.bucket] += slot.rows * slot.rank
        q_size[slot.bucket] += slot.cols * slot.rank
    for kind, buffers, sizes in (
        ("error", record.error_dict, dict(enumerate(layout.sizes))),
        ("P", record.p_memory_dict, p_size),
        ("Q", record.q_memory_dict, q_size),
    ):
        for bucket, buffer in buffers.items():
            if sizes.get(bucket) != buffer.size:
                return (
                    f"{kind} of bucket {bucket} has {buffer.size} values, the layout gives it "
                    f"{sizes.get(bucket, 'no such bucket')}"
                )
    return None


def _uncancelled(
    layout: BucketLayout,
    records: Sequence[PowerSGDRecord],
    mean: Mapping[str, np.ndarray],
    compressed: set[str],
) -> str | None:
    for bucket, flat in records[0].error_dict.items():
        for name, own in layout.split(bucket, flat.astype(np.float64)).items():
            if name not in compressed and np.linalg.norm(mean[name]) > 1e-2 * np.linalg.norm(own):
                return f"the errors of {name} would not cancel over the ranks"
    return None


def _eps(array: np.ndarray) -> float:
    return {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10}.get(
        array.dtype.name, 2.0**-7
    )


def _length_problem(checkpoint: Checkpoint, record: PowerSGDRecord) -> str:
    have = sum(checkpoint.model[name].size for name in trainable(checkpoint))
    held = {bucket: error.size for bucket, error in sorted(record.error_dict.items())}
    return (
        f"the model's parameters have {have} values, the error buffers {held}; frozen parameters "
        f"and buffers of the model, which the file does not mark, have none (name them in "
        f"infer_layout(..., frozen=[...]))"
    )


def _brief(layout: BucketLayout) -> str:
    names = layout.names
    shown = ", ".join(names[:3])
    return f"{shown}, ... ({len(names)} parameters)" if len(names) > 3 else shown
