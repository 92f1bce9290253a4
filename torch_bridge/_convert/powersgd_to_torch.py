"""`jaxcomp.PowerSGDState` -> torch: the inverse of `powersgd_from_torch`."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import optax

from jaxcomp import PowerSGDState
from jaxcomp.extend import LeafPlan
from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._base.schema import HYPERPARAMETERS, PowerSGDRecord
from torch_bridge._base.tensors import to_numpy
from torch_bridge._base.terminal import printable
from torch_bridge._convert.powersgd_from_torch import SAME_CUT, pairs_for_trained, planned
from torch_bridge._convert.source import Source, disagreements
from torch_bridge._hook.buckets import BucketLayout, pack
from torch_bridge._hook.checkpoint import Checkpoint
from torch_bridge._hook.entries import FactorSlot
from torch_bridge._pairing.leaves import flatten, plain_path
from torch_bridge._pairing.matrix_dims import MatrixDimsFn
from torch_bridge._pairing.pair import Pairs

if TYPE_CHECKING:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
        PowerSGDState as TorchPowerSGDState,
    )


def powersgd_to_torch(
    state: PowerSGDState,
    params: Any,
    *,
    layout: BucketLayout,
    like: Checkpoint | None = None,
    matrix_dims: MatrixDimsFn | None = None,
    process_group: Any = None,
    hyperparameters: dict[str, Any] | None = None,
    pairs: Pairs | None = None,
) -> TorchPowerSGDState:
    """A consolidated `jaxcomp.PowerSGDState` as a real ``PowerSGDState`` of torch.

    Every rank gets the same error, the mean; segments of uncompressed parameters are zero. The
    state is safe to resume: DDP rebuilds its buckets during its first two iterations, so
    ``start_powerSGD_iter`` is at least ``iter + 2`` and two steps run uncompressed, with the state
    waiting. `resume_powersgd` avoids even these.

    Args:
      state: Consolidated (`jaxcomp.consolidate`), on the host or on devices.
      params: The Flax parameters (arrays or shapes) that the state belongs to, or a tree that
        contains them: Linen variables, or parameters of which some are frozen.
      layout: The bucket layout of the torch job, from `record_layout`.
      like: The checkpoint that the run came from: its rng, counters, hyperparameters, P factors and
        dtypes are kept.
      matrix_dims: As passed to `jaxcomp.powersgd`.
      process_group: The torch group, or None for the default group.
      hyperparameters: Torch's arguments by name, where `like` is None or shall be overruled.
        Without either, the rank is the largest in `state` and the rest are torch's defaults.
      pairs: As for `powersgd_from_torch`.

    Returns:
      A state for ``ddp_model.register_comm_hook(state, powerSGD_hook)``.

    Raises:
      CheckpointMismatch: A leaf is compressed on one side only or as another matrix, or the state
        is not consolidated; all such leaves are listed.

    Warns:
      UserWarning: The parts of a packed tensor have different Q; torch gets their common subspace.

    Example:
      >>> import jax.numpy as jnp, jaxcomp
      >>> params = {"fc": {"kernel": jnp.zeros((12, 8))}}
      >>> state = jaxcomp.powersgd(1, axis_name="data").init(params)._replace(count=7)
      >>> layout = BucketLayout.from_manifest([[("fc.weight", (8, 12))]])
      >>> back = powersgd_to_torch(state, params, layout=layout)
      >>> back.iter, back.start_powerSGD_iter, back.q_memory_dict[0].shape
      (7, 9, torch.Size([12]))
    """
    from torch_bridge._job.resume import state_from_record

    trained = params_of(state, params)
    model = like.model if like is not None and like.model else layout.shapes()
    found = pairs_for_trained(model, trained, pairs, layout)
    record = export_record(state, trained, layout, like, matrix_dims, hyperparameters or {}, found)
    return state_from_record(record, process_group)


def params_of(state: PowerSGDState, params: Any) -> Any:
    """The part of `params` that a reducer's state is of, by its paths.

    Raises:
      CheckpointMismatch: The state has leaves that `params` has not; they are listed.
    """
    tree = flatten(params)
    leaves = dict(zip(tree.paths, tree.values, strict=True))
    flat, treedef = jax.tree_util.tree_flatten_with_path(
        state.q, is_leaf=lambda leaf: isinstance(leaf, optax.MaskedNode)
    )
    paths = [plain_path(path) for path, _ in flat]
    found = [leaves.get(path, leaves.get(("params", *path))) for path in paths]
    lost = ["/".join(path) for path, leaf in zip(paths, found, strict=True) if leaf is None]
    if lost:
        raise CheckpointMismatch(
            "The PowerSGD state is not one of these parameters. Pass the tree that it was made "
            "for, or linen variables that contain it.",
            missing=lost,
        )
    return treedef.unflatten(found)


def export_record(
    state: PowerSGDState,
    params: Any,
    layout: BucketLayout,
    like: Checkpoint | None,
    matrix_dims: MatrixDimsFn | None,
    hyperparameters: Mapping[str, Any],
    pairs: Pairs,
) -> PowerSGDRecord:
    """What `powersgd_to_torch` puts into torch's object, as arrays."""
    base = _base_record(state, like, hyperparameters)
    if not _begun(base, like):  # nothing but counters and hyperparameters
        return base
    planned_leaves, treedef = planned(params, base, matrix_dims, pairs)
    residuals, qs = (treedef.flatten_up_to(tree) for tree in (state.residual, state.q))
    slots = layout.factor_slots(base.matrix_approximation_rank, base.min_compression_rate)
    source = Source(layout, {}, {slot.entry.name: slot for slot in slots}, {})
    source = source.named(pairs, like.aliases if like else {})
    leaves = [
        (*leaf, residual, q)
        for leaf, residual, q in zip(planned_leaves, residuals, qs, strict=True)
    ]
    problems = [
        line
        for plan, terms, residual, q in leaves
        for line in (*disagreements(plan, terms, source), *_shape_problems(plan, residual, q))
    ]
    if problems:
        raise CheckpointMismatch(
            f"jaxcomp's state does not fit torch's matrices. {SAME_CUT}",
            mis_shaped=problems,
            parameters=("matrix_dims",),
        )
    flats: dict[int, np.ndarray] = {}
    errors: dict[str, np.ndarray] = {}
    if base.use_error_feedback:
        # Written through views of the buckets: a second copy would double the memory.
        flats = {bucket: np.zeros(size, np.float32) for bucket, size in enumerate(layout.sizes)}
        for bucket, flat in flats.items():
            errors |= layout.split(bucket, flat)
    parts: dict[str, list[np.ndarray]] = {}
    for plan, terms, residual, q in leaves:
        _collect(plan, terms, residual, q, source, errors, parts)
    return _with_buffers(base, like, layout, source, flats, parts)


def _base_record(
    state: PowerSGDState, like: Checkpoint | None, overrides: Mapping[str, Any]
) -> PowerSGDRecord:
    """Hyperparameters, counters and rng, without buffers."""
    unknown = sorted(set(overrides) - set(HYPERPARAMETERS))
    if unknown:
        raise ValueError(
            f"`hyperparameters` must be among {', '.join(HYPERPARAMETERS)}, got "
            f"{', '.join(unknown)}."
        )
    count = int(np.asarray(state.count))
    empty: dict[str, Any] = {"error_dict": {}, "p_memory_dict": {}, "q_memory_dict": {}}
    if like is not None and like.powersgd:
        return dataclasses.replace(like.powersgd[0], iter=count, **overrides, **empty)
    qs = jax.tree.leaves(state.q)
    values = {
        "matrix_approximation_rank": max((q.shape[-1] for q in qs), default=1),
        "use_error_feedback": bool(jax.tree.leaves(state.residual)),
        "warm_start": bool(qs),
        "start_powerSGD_iter": max(2, count),
        **overrides,
    }
    return PowerSGDRecord(iter=count, **empty, **values)


def _begun(base: PowerSGDRecord, like: Checkpoint | None) -> bool:
    """Whether there is anything to hand over: torch had buffers, or JAX made a step."""
    old = like.powersgd[0] if like is not None and like.powersgd else None
    return base.iter > 0 if old is None else bool(old.buckets) or base.iter != old.iter


def _shape_problems(plan: LeafPlan, residual: Any, q: Any) -> list[str]:
    lines = []
    for what, leaf, shape in (
        ("residual", residual, plan.shape),
        ("q", q, plan.q_shape if plan.view is not None else ()),
    ):
        if isinstance(leaf, optax.MaskedNode):
            continue
        if plan.view is None:
            lines.append(
                f"{plan.path}: has a {what}, but is not compressed with this rank and rate"
            )
        elif tuple(leaf.shape) != tuple(shape):
            lines.append(
                f"{plan.path}: {what} of shape {tuple(leaf.shape)}, expected {tuple(shape)} (is "
                f"the state consolidated?)"
            )
    return lines


def _collect(
    plan: LeafPlan,
    terms: Pairs,
    residual: Any,
    q: Any,
    source: Source,
    errors: dict[str, np.ndarray],
    parts: dict[str, list[np.ndarray]],
) -> None:
    """Put one leaf's residual and Q where torch has them."""
    if plan.view is None:
        return
    for term in terms:
        slot = source.slot(term)
        if slot is None:
            continue
        if errors and not isinstance(residual, optax.MaskedNode):
            start, stop = term.row_range
            values = to_numpy(residual).astype(np.float32)
            errors[slot.entry.name][start:stop] = term.to_torch(values)
        if not isinstance(q, optax.MaskedNode):
            _, cols = term.matrix_order(plan.view.dims.rows, plan.view.dims.cols)
            logical = np.empty((slot.cols, slot.rank), np.float32)
            logical[cols] = to_numpy(q)
            parts.setdefault(slot.entry.name, []).append(logical[slot.entry.column_order()])


def _with_buffers(
    base: PowerSGDRecord,
    like: Checkpoint | None,
    layout: BucketLayout,
    source: Source,
    error_dict: dict[int, np.ndarray],
    parts: dict[str, list[np.ndarray]],
) -> PowerSGDRecord:
    old = like.powersgd[0] if like is not None and like.powersgd else None
    factors = {}
    if base.warm_start:
        for name, slot in source.slots.items():
            factors[name] = (np.zeros((slot.rows, slot.rank), np.float32), _common(slot, parts))
    rank, rate = base.matrix_approximation_rank, base.min_compression_rate
    _, p_memory, q_memory = pack(layout, rank, rate, {}, factors)
    if old is not None:
        for bucket, p in p_memory.items():
            kept = old.p_memory_dict.get(bucket)
            # Only its presence matters to torch; with the old one nothing at all changes.
            if kept is not None and kept.size == p.size and np.isfinite(kept).all():
                p_memory[bucket] = kept
        error_dict = _like_dtype(error_dict, old.error_dict)
        p_memory = _like_dtype(p_memory, old.p_memory_dict)
        q_memory = _like_dtype(q_memory, old.q_memory_dict)
    return dataclasses.replace(
        base, error_dict=error_dict, p_memory_dict=p_memory, q_memory_dict=q_memory
    )


def _like_dtype(
    buffers: dict[int, np.ndarray], old: dict[int, np.ndarray]
) -> dict[int, np.ndarray]:
    return {
        bucket: flat.astype(old[bucket].dtype, copy=False) if bucket in old else flat
        for bucket, flat in buffers.items()
    }


def _common(slot: FactorSlot, parts: dict[str, list[np.ndarray]]) -> np.ndarray:
    """One Q of shape (cols, rank) for a torch matrix, from the Qs of its parts."""
    qs = parts.get(slot.entry.name)
    if not qs:
        # Compressed by torch only, at full rank: any basis reproduces it.
        return np.eye(slot.cols, slot.rank, dtype=np.float32)
    if all(np.array_equal(q, qs[0]) for q in qs[1:]):
        return qs[0]
    warnings.warn(
        f"The parts of {printable(slot.entry.name)} have different Q factors; torch has one for "
        f"all and gets their leading common subspace, so its next steps are equivalent in kind, "
        f"not equal.",
        stacklevel=5,
    )
    left, values, _ = np.linalg.svd(np.concatenate(qs, axis=1), full_matrices=False)
    return (left * values)[:, : slot.rank].astype(np.float32)
