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

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._base.tensors import trainable
from torch_bridge._hook.buckets import BucketLayout
from torch_bridge._hook.checkpoint import Checkpoint
from torch_bridge._pairing.pairs import Pair, unpaired

_HOW_TO = (
    "Record it in the torch run with torch_bridge.record_layout(ddp_model, state), or pass "
    "layout=BucketLayout.from_order(...)."
)


def infer_layout(checkpoint: Checkpoint, *, frozen: Collection[str] = ()) -> BucketLayout:
    """The only bucket layout, of those torch produces, that fits the hook state.

    Parameters of equal shape that became ready in an unusual order cannot be told apart; if the
    model has parallel branches, record the layout instead.

    Args:
      checkpoint: With a model and the hook state; all ranks' files decide more than one.
      frozen: Names of parameters that perhaps were not trained, and of buffers other than running
        statistics; the file does not mark them.

    Returns:
      The layout.

    Raises:
      CheckpointMismatch: None or several candidates fit; they are listed.

    Example:
      >>> p = np.full(16, 0.25, np.float32)
      >>> from torch_bridge import PowerSGDRecord
      >>> record = PowerSGDRecord(1, 20, {0: np.zeros(128, "f4")}, {0: p}, {0: np.ones(8, "f4")})
      >>> model = {"fc.weight": np.zeros((16, 8), "f4")}
      >>> infer_layout(Checkpoint(model, (record,), world_size=2)).names
      ('fc.weight',)
    """
    if not checkpoint.powersgd or not checkpoint.model:
        raise CheckpointMismatch(f"The layout cannot be inferred without a model. {_HOW_TO}")
    record, model = checkpoint.powersgd[0], checkpoint.model
    several = len(checkpoint.powersgd) > 1
    mean = None if checkpoint.missing_ranks else checkpoint.mean
    fitting: dict[Any, tuple[str, BucketLayout]] = {}
    reasons: list[str] = []
    for label, order in _candidates(model, frozen, record.error_sizes):
        layout = BucketLayout.from_order(order, model)
        if wrong := layout.misfits(record):
            reasons.append(f"{label}: {wrong[0]}")
            continue
        parts, means = layout.parts(record), layout.parts(mean) if mean else {}
        flaws = (
            part.flaw(means[name].error if mean else None, several) for name, part in parts.items()
        )
        if flaw := next(filter(None, flaws), None):
            reasons.append(f"{label}: {flaw}")
            continue
        # Without errors nothing but the places of the factors makes a difference.
        places = tuple((name, part.bucket) for name, part in parts.items() if part.rank)
        fitting.setdefault(layout if record.error_dict else places, (label, layout))
    if len(fitting) == 1:
        return next(iter(fitting.values()))[1]
    if fitting:
        orders = {label: layout.names for label, layout in fitting.values()}
        columns = enumerate(zip(*orders.values(), strict=False))
        same = next((place for place, names in columns if len({*names}) > 1), 0)
        raise CheckpointMismatch(
            f"The file does not record the bucket layout, and several orders fit it. {_HOW_TO}",
            ambiguous=[
                f"{label}: after {same} of {len(names)} parameters {', '.join(names[same:][:3])}"
                for label, names in orders.items()
            ],
        )
    have = sum(model[name].size for name in trainable(model))
    raise CheckpointMismatch(
        f"The file does not record the bucket layout, and no order that torch produces fits. "
        f"{_HOW_TO}",
        mis_shaped=reasons
        or [
            f"the model's parameters have {have} values, the error buffers "
            f"{dict(sorted(record.error_sizes.items()))}; frozen parameters and buffers of the "
            f"model, which the file does not mark, have none (name them in infer_layout(..., "
            f"frozen=[...]))"
        ],
    )


def layout_of(
    checkpoint: Checkpoint, layout: BucketLayout | None, pairs: Sequence[Pair] | None
) -> BucketLayout | None:
    """The layout of a checkpoint: as given, in the file, or inferred from its hook state.

    Args:
      checkpoint: With or without hook state.
      layout: None for that of the checkpoint.
      pairs: Of the model, if they are known: what goes to no Flax leaf may be a buffer.

    Returns:
      The layout; None where there is none and compression has not begun.

    Raises:
      CheckpointMismatch: The layout is unknown or does not fit.
    """
    layout = layout or checkpoint.layout
    if not any(record.buckets for record in checkpoint.powersgd[:1]):
        return layout
    if layout is None:
        return infer_layout(checkpoint, frozen=unpaired(checkpoint.model, pairs) if pairs else ())
    if wrong := layout.misfits(checkpoint.powersgd[0]):
        raise CheckpointMismatch(
            f"The layout does not fit the hook state: {wrong[0]}. Record it in the same run with "
            f"torch_bridge.record_layout.",
            parameters=("layout",),
        )
    unknown = sorted(set(layout.names) - checkpoint.model.keys()) if checkpoint.model else []
    if unknown:  # taken for frozen, their state would be lost without a word
        raise CheckpointMismatch(
            "The layout names parameters that the model does not have. Record it from this "
            "model with torch_bridge.record_layout.",
            unexpected=unknown,
        )
    return layout


def _candidates(
    model: Mapping[str, np.ndarray], frozen: Collection[str], sizes: Mapping[int, int]
) -> Iterator[tuple[str, list[Sequence[str]]]]:
    """Label and parameter names per bucket of every order that can be cut at the right lengths."""

    def ready(members: list[str]) -> list[str]:
        # autograd hands over a Linear's bias before its weight, but a convolution's or a
        # normalisation's weight first.
        linear = any(name.endswith("weight") and model[name].ndim == 2 for name in members)
        return members[::-1] if linear else members

    lengths = [sizes[bucket] for bucket in sorted(sizes)]
    every = trainable(model)
    trained = [name for name in every if name not in frozen]
    for names in [trained, every] if frozen else [every]:
        modules: dict[str, list[str]] = {}
        for name in names:
            modules.setdefault(name.rpartition(".")[0], []).append(name)
        last_first = list(modules.values())[::-1]
        flat = {
            "gradient-ready order": [name for part in last_first for name in ready(part)],
            "reversed definition order": names[::-1],
            "reversed modules": [name for part in last_first for name in part],
            "definition order": names,  # of which DDP makes the last bucket first
        }
        for label, order in flat.items():
            step = -1 if order is names else 1
            if buckets := _cut(order, lengths[::step], model):
                yield label, buckets[::step]


def _cut(
    order: Sequence[str], lengths: Sequence[int], model: Mapping[str, np.ndarray]
) -> list[Sequence[str]] | None:
    """`order` in pieces of exactly `lengths` elements; one piece if no length is known."""
    if not lengths:
        return [order]
    ends = itertools.accumulate((model[name].size for name in order), initial=0)
    places = {end: place for place, end in enumerate(ends)}
    cuts = [0, *(places.get(end, -1) for end in itertools.accumulate(lengths))]
    pieces = [order[start:end] for start, end in itertools.pairwise(cuts)]
    return pieces if cuts[-1] == len(order) and cuts == sorted(cuts) else None
