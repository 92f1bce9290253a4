"""PowerSGD's state across the frameworks: torch's buckets <-> `jaxcomp.PowerSGDState`."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcomp import PowerSGDState
from jaxcomp._base.typing import MatrixDimsFn, PyTree
from jaxcomp._lowrank.matricize import LeafPlan, plan_leaves
from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._base.schema import PowerSGDRecord
from torch_bridge._hook.buckets import BucketLayout
from torch_bridge._hook.checkpoint import Checkpoint
from torch_bridge._hook.entries import FactorSlot
from torch_bridge._hook.infer import infer_layout, length_misfit
from torch_bridge._pairing.leaves import plain_path
from torch_bridge._pairing.pair import pair
from torch_bridge._pairing.pairing import Pairing

_MISSING_RANKS = ("error", "zero", "replicate")
SAME_CUT = (
    "If torch's view(shape[0], -1) cuts a kernel elsewhere, pass "
    "matrix_dims=torch_bridge.torch_matrix_dims here and to jaxcomp.powersgd."
)


def powersgd_from_torch(
    checkpoint: Checkpoint,
    params: PyTree,
    *,
    layout: BucketLayout | None = None,
    missing_ranks: str = "error",
    matrix_dims: MatrixDimsFn | None = None,
    **pairing: Any,
) -> PowerSGDState:
    """Torch's hook state as a consolidated `jaxcomp.PowerSGDState`.

    The outputs of PowerSGD depend on the replicas' errors through their mean only, so the mean over
    all ranks goes on with the same trajectory, on any number of replicas.

    Args:
      checkpoint: what `load` read, best with the errors of all ranks.
      params: the Flax parameters (arrays or shapes) that the optimizer will get.
      layout: the bucket layout; None for the checkpoint's own, and without one the only order of
        torch's that fits (`infer_layout`).
      missing_ranks: what to do when not every rank's error is there. ``"error"`` refuses.
        ``"zero"`` starts with no error: what was not sent yet is lost once. ``"replicate"`` takes
        the mean of the ranks that are there: their deviation from the true mean enters the weights
        once, as a spurious gradient that grows with the square root of the steps trained.
      matrix_dims: as it will be passed to `jaxcomp.powersgd`.
      **pairing: options of `params_from_torch` that say which tensor is which leaf: ``rules``,
        ``flatten``, ``conv_transpose``, ``ignore``.

    Returns:
      A state with the tree structure of ``jaxcomp.powersgd(...).init(params)``.

    Raises:
      CheckpointMismatch: ranks are missing, the layout is unknown or does not fit, or a leaf is
        compressed on one side only or as another matrix; all such leaves are listed.

    Warns:
      UserWarning: a packed tensor (attention's ``in_proj``) has one Q for several leaves; each gets
        it, and the next steps are equivalent in kind, not equal.
    """
    record = record_of(checkpoint)
    if missing_ranks not in _MISSING_RANKS:
        raise ValueError(f"`missing_ranks` must be one of {_MISSING_RANKS}, got {missing_ranks!r}.")
    leaf_plans, paths, treedef = plans(params, record, matrix_dims)
    residuals: list[Any] = [optax.MaskedNode()] * len(leaf_plans)
    factors: list[Any] = [optax.MaskedNode()] * len(leaf_plans)
    source = Source.of(checkpoint, record, layout, missing_ranks)
    by_path = pairings(source.shapes(checkpoint), params, pairing)
    problems: list[str] = []
    for index, plan in enumerate(leaf_plans):
        terms = by_path.get(paths[index], ())
        problems += disagreements(plan, terms, source)
        if plan.view is None or problems:
            continue
        if record.use_error_feedback:
            residuals[index] = jnp.array(_residual(plan, terms, source))
        if record.warm_start:
            factors[index] = jnp.array(_q(plan, terms, source, index))
    if problems:
        raise CheckpointMismatch(
            f"torch and jaxcomp do not compress the same matrices. {SAME_CUT}", mis_shaped=problems
        )
    _warn_packed([pairing for terms in by_path.values() for pairing in terms], source)
    return PowerSGDState(
        jnp.asarray(record.iter, jnp.int32),
        jax.tree.unflatten(treedef, residuals),
        jax.tree.unflatten(treedef, factors),
    )


def record_of(checkpoint: Checkpoint) -> PowerSGDRecord:
    if not checkpoint.powersgd:
        raise CheckpointMismatch(
            "The checkpoint has no PowerSGD state. Pass a file with `comm_hook_state`, or start "
            "afresh with jaxcomp.powersgd(...).init(params)."
        )
    return checkpoint.powersgd[0]


def plans(
    params: PyTree, record: PowerSGDRecord, matrix_dims: MatrixDimsFn | None
) -> tuple[list[LeafPlan], list[tuple[str, ...]], Any]:
    """Jaxcomp's own decision for every leaf, with torch's rank and compression rate."""
    decided = plan_leaves(
        params, record.matrix_approximation_rank, record.min_compression_rate, matrix_dims
    )
    leaves, treedef = jax.tree_util.tree_flatten_with_path(params)
    return decided, [plain_path(path) for path, _ in leaves], treedef


def pairings(
    model: Mapping[str, Any], params: PyTree, options: Mapping[str, Any]
) -> dict[tuple[str, ...], list[Pairing]]:
    by_path: dict[tuple[str, ...], list[Pairing]] = {}
    for pairing in pair(model, params, **options):
        by_path.setdefault(pairing.path, []).append(pairing)
    return by_path


@dataclasses.dataclass(frozen=True)
class Source:
    """The hook state cut into named parameters.

    Attributes:
      layout: the bucket layout, None when the state is still empty.
      errors: parameter name -> mean error; empty before the start and without error feedback.
      slots: name of a compressed parameter -> where its factors lie.
      q_memory: bucket index -> flat Q.
      aliases: name of a tied tensor -> the name that the layout knows.
    """

    layout: BucketLayout | None
    errors: Mapping[str, np.ndarray]
    slots: Mapping[str, FactorSlot]
    q_memory: Mapping[int, np.ndarray]
    aliases: Mapping[str, str]

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        record: PowerSGDRecord,
        layout: BucketLayout | None,
        missing_ranks: str,
    ) -> Source:
        if not record.buckets:  # before the start
            return cls(layout or checkpoint.layout, {}, {}, {}, checkpoint.aliases)
        layout = layout or checkpoint.layout or infer_layout(checkpoint)
        reason = length_misfit(layout, record)
        if reason is not None:
            raise CheckpointMismatch(
                f"The layout does not fit the hook state: {reason}. Record it in the same run with "
                f"torch_bridge.record_layout."
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
            checkpoint.aliases,
        )

    def shapes(self, checkpoint: Checkpoint) -> Mapping[str, Any]:
        """What the pairing needs: the model, or the layout's shapes if the file has none."""
        if checkpoint.model:
            return checkpoint.model
        if self.layout is None:
            raise CheckpointMismatch(
                "The file holds neither a model nor a layout, so its parameters have no names. "
                "Load it together with the model's file, or pass layout=."
            )
        return self.layout.shapes()

    def key(self, pairing: Pairing) -> str | None:
        """The layout's name of a tensor; None if it has no gradient (frozen)."""
        known = self.layout.entries if self.layout is not None else {}
        names = (pairing.torch_name, *pairing.aliases, self.aliases.get(pairing.torch_name))
        return next((name for name in names if name in known), None)

    def slot(self, pairing: Pairing) -> FactorSlot | None:
        return self.slots.get(self.key(pairing) or "")


def _mean_errors(
    checkpoint: Checkpoint, layout: BucketLayout, missing_ranks: str
) -> dict[str, np.ndarray]:
    records = list(checkpoint.powersgd)
    if not records[0].error_dict:
        return {}
    if checkpoint.missing_ranks:
        if missing_ranks == "zero":
            return {}
        if missing_ranks == "error":
            size = f" of {checkpoint.world_size}" if checkpoint.world_size else ""
            raise CheckpointMismatch(
                f"The errors of {len(records)} rank(s){size} are here, and the mean over all ranks "
                f"is needed. Load one file per rank, or save with torch_bridge.save_checkpoint; "
                f'else choose: missing_ranks="zero" forgets what was not sent yet (one small step '
                f'back, once), missing_ranks="replicate" takes these ranks for all (keeps it, and '
                f"adds their deviation from the mean as a spurious gradient, once)."
            )
    named: dict[str, np.ndarray] = {}
    for bucket in records[0].error_dict:
        # One rank's buffer is only read, so it needs no copy.
        mean = records[0].error_dict[bucket].astype(np.float32, copy=len(records) > 1)
        for record in records[1:]:
            mean += record.error_dict[bucket].astype(np.float32, copy=False)
        if len(records) > 1:
            mean /= len(records)
        named |= layout.split(bucket, mean)
    return named


def disagreements(plan: LeafPlan, terms: Sequence[Pairing], source: Source) -> list[str]:
    """Why this leaf's state cannot be taken over; empty if it can."""
    if not source.slots:
        return []
    lines = []
    for term in terms:
        slot, trained = source.slot(term), source.key(term) is not None
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


def _matrix_problem(plan: LeafPlan, term: Pairing, slot: FactorSlot, where: str) -> list[str]:
    assert plan.view is not None
    if plan.view.batch or term.slot is not None or term.terms > 1:
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


def _residual(plan: LeafPlan, terms: Sequence[Pairing], source: Source) -> np.ndarray:
    known = [(term, source.errors.get(source.key(term) or "")) for term in terms]
    if len(known) == 1 and known[0][1] is not None and known[0][0].slot is None:
        return known[0][0].to_flax(known[0][1])
    return np.zeros(plan.shape, np.float32)


def _q(plan: LeafPlan, terms: Sequence[Pairing], source: Source, index: int) -> np.ndarray:
    assert plan.view is not None
    slot = source.slot(terms[0]) if terms else None
    if slot is None or slot.bucket not in source.q_memory:
        # Not begun, or frozen in torch: any start will do, as long as it is the same everywhere.
        return np.random.default_rng(index).standard_normal(plan.q_shape, np.float32)
    q = slot.q(source.q_memory[slot.bucket]).astype(np.float32)
    logical = np.empty_like(q)
    logical[slot.entry.column_order()] = q
    _, cols = terms[0].matrix_order(plan.view.dims.rows, plan.view.dims.cols)
    return logical[cols]


def _warn_packed(pairings: Sequence[Pairing], source: Source) -> None:
    packed = sorted({p.torch_name for p in pairings if p.rows is not None and source.slot(p)})
    if packed:
        warnings.warn(
            f"{', '.join(packed)}: torch has one Q for all parts of a packed matrix. Each Flax "
            f"kernel gets this Q and its part of the error, so the next steps are equivalent in "
            f"kind, not equal. A Flax model with one packed kernel continues exactly.",
            stacklevel=3,
        )
