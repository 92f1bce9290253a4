"""The hook state cut into named parameters, and whether it fits the leaves of a Flax tree."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from jaxcomp.extend import LeafPlan
from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._hook.buckets import BucketLayout
from torch_bridge._hook.checkpoint import Checkpoint
from torch_bridge._hook.entries import FactorSlot
from torch_bridge._hook.infer import infer_without, length_misfit
from torch_bridge._pairing.pair import Pairs
from torch_bridge._pairing.pairs import Pair, names_in

_MISSING_RANKS = ("error", "zero", "replicate")


@dataclasses.dataclass(frozen=True)
class Source:
    """The hook state cut into named parameters.

    Attributes:
      layout: The bucket layout; None where there is none before compression begins.
      errors: Parameter name -> mean error; empty before the start and without error feedback.
      slots: Name of a compressed parameter -> where its factors lie.
      q_memory: Bucket index -> flat Q.
      names: What is trained, by its name in the pairs -> by its name in the layout.
    """

    layout: BucketLayout | None
    errors: Mapping[str, np.ndarray]
    slots: Mapping[str, FactorSlot]
    q_memory: Mapping[int, np.ndarray]
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        layout: BucketLayout | None,
        missing_ranks: str,
        leftover: Collection[str],
    ) -> Source:
        """Of a checkpoint with hook state, of which the tensors `leftover` go to no Flax leaf.

        Raises:
          ValueError: `missing_ranks` is none of the three.
          CheckpointMismatch: The layout is unknown or does not fit, or ranks are missing.
        """
        if missing_ranks not in _MISSING_RANKS:
            raise ValueError(
                f"`missing_ranks` must be one of {_MISSING_RANKS}, got {missing_ranks!r}."
            )
        record, layout = checkpoint.powersgd[0], layout or checkpoint.layout
        if not record.buckets:  # before the start
            return cls(layout, {}, {}, {})
        layout = layout or infer_without(checkpoint, leftover)
        reason = length_misfit(layout, record)
        if reason is not None:
            raise CheckpointMismatch(
                f"The layout does not fit the hook state: {reason}. Record it in the same run with "
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
        slots = layout.factor_slots(record.matrix_approximation_rank, record.min_compression_rate)
        return cls(
            layout,
            _mean_errors(checkpoint, layout, missing_ranks),
            {slot.entry.name: slot for slot in slots},
            record.q_memory_dict,
        )

    def named(self, pairs: Pairs, aliases: Mapping[str, str]) -> Source:
        """The same for the parameters of some pairs; `aliases` are those of tied tensors."""
        known = self.layout.entries if self.layout else {}
        return dataclasses.replace(self, names=names_in(pairs, known, aliases))

    def slot(self, pair: Pair) -> FactorSlot | None:
        """Where the factors of a tensor lie; None if it is not compressed, or frozen."""
        return self.slots.get(self.names.get(pair.torch_name, ""))


def _mean_errors(
    checkpoint: Checkpoint, layout: BucketLayout, missing_ranks: str
) -> dict[str, np.ndarray]:
    here = len(checkpoint.powersgd)
    if not checkpoint.powersgd[0].error_dict or not checkpoint.missing_ranks:
        return checkpoint.mean_errors(layout)
    if missing_ranks == "error":
        size = f" of {checkpoint.world_size}" if checkpoint.world_size else ""
        raise CheckpointMismatch(
            f"The errors of {here} rank(s){size} are here, and the mean over all ranks is needed. "
            f"Load one file per rank, or save with torch_bridge.save_checkpoint; else choose: "
            f'missing_ranks="zero" forgets what was not sent yet (one small step back, once), '
            f'missing_ranks="replicate" takes these ranks for all (keeps it, and adds their '
            f"deviation from the mean as a spurious gradient, once).",
            parameters=("missing_ranks",),
        )
    return {} if missing_ranks == "zero" else checkpoint.mean_errors(layout)


def disagreements(plan: LeafPlan, terms: Sequence[Pair], source: Source) -> list[str]:
    """Why this leaf's state cannot be taken over; empty if it can."""
    if not source.slots:
        return []
    lines = []
    for term in terms:
        slot, trained = source.slot(term), term.torch_name in source.names
        where = f"{plan.path} {plan.shape} <- {term.torch_name} {term.torch_shape}"
        if plan.view is None:
            if slot is not None and slot.rank < min(slot.rows, slot.cols):
                lines.append(f"{where}: compressed by torch only ({slot.rows} x {slot.cols})")
        elif slot is None:
            if trained:
                lines.append(f"{where}: compressed by jaxcomp only")
        else:
            lines += _matrix_problem(plan, term, slot, where)
    return lines


def _matrix_problem(plan: LeafPlan, term: Pair, slot: FactorSlot, where: str) -> list[str]:
    assert plan.view is not None
    if plan.view.batch or term.terms > 1:
        return [f"{where}: several torch matrices in one leaf, which have several Q"]
    if slot.entry.column_order() is None:
        return [f"{where}: its strides {slot.entry.strides} mix torch's rows and columns"]
    try:
        term.matrix_order(plan.view.dims.rows, plan.view.dims.cols)
    except CheckpointMismatch as error:
        return [f"{where}: {error.message}"]
    if plan.rank != slot.rank:
        return [f"{where}: rank {plan.rank}, torch has {slot.rank}"]
    return []
