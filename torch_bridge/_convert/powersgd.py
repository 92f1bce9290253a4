"""PowerSGD's state between torch's buckets and `jaxcomp.PowerSGDState`."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcomp import PowerSGDState
from jaxcomp.extend import LeafPlan, plan_leaves, unboxed
from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._base.schema import BUFFERS, PowerSGDRecord
from torch_bridge._base.tensors import to_numpy
from torch_bridge._base.terminal import printable
from torch_bridge._hook.buckets import BucketLayout, FactorSlot
from torch_bridge._hook.checkpoint import Checkpoint
from torch_bridge._hook.infer import layout_of
from torch_bridge._job.resume import state_from_record
from torch_bridge._pairing.leaves import flatten, plain_path
from torch_bridge._pairing.matrix_dims import MatrixDimsFn
from torch_bridge._pairing.pair import Pairs, pairs_for
from torch_bridge._pairing.pairs import Pair, names_in

if TYPE_CHECKING:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
        PowerSGDState as TorchPowerSGDState,
    )

_MISSING_RANKS = ("error", "zero", "replicate")


class Term(NamedTuple):
    """A torch tensor of which a leaf is made, as the hook has it."""

    pair: Pair
    name: str | None  # in the layout; None where the tensor is frozen
    slot: FactorSlot | None  # of its factors; None where it is not compressed
    q_rows: np.ndarray | None  # ``q = torch_q[q_rows]``; None where one side compresses nothing


Leaf: TypeAlias = tuple[LeafPlan, list[Term]]


def powersgd_from_torch(
    checkpoint: Checkpoint,
    params: Any,
    *,
    pairs: Pairs | None = None,
    layout: BucketLayout | None = None,
    missing_ranks: str = "error",
    matrix_dims: MatrixDimsFn | None = None,
) -> PowerSGDState:
    """Torch's hook state as a consolidated `jaxcomp.PowerSGDState`.

    The outputs of PowerSGD depend on the replicas' errors through their mean only, so the mean over
    all ranks goes on with the same trajectory, on any number of replicas.

    Args:
      checkpoint: What `load` read, best with the errors of all ranks.
      params: The Flax parameters (arrays or shapes) that the optimizer will get.
      pairs: What `pair` gave, also for a tree that contains `params`; None where it needs no
        options.
      layout: The bucket layout; None for the checkpoint's own, and without one the only order of
        torch's that fits (`infer_layout`).
      missing_ranks: What to do when not every rank's error is there. ``"error"`` refuses.
        ``"zero"`` starts with no error: what was not sent yet is lost once. ``"replicate"`` takes
        the mean of the ranks that are there: Their deviation from the true mean enters the weights
        once, as a spurious gradient that grows with the square root of the steps trained.
      matrix_dims: As it will be passed to `jaxcomp.powersgd`.

    Returns:
      A state with the tree structure of ``jaxcomp.powersgd(...).init(params)``.

    Raises:
      ValueError: `missing_ranks` is none of the three.
      CheckpointMismatch: Ranks are missing, the layout is unknown or does not fit, a leaf is
        compressed on one side only or as another matrix; all such leaves are listed.

    Warns:
      UserWarning: A packed tensor (attention's ``in_proj``) has one Q for several leaves; each gets
        it, and the next steps are equivalent in kind, not equal. Or a leaf is not finite, as that
        of a layer that was never used, or of a run that diverged; it starts afresh.

    Example:
      >>> record = PowerSGDRecord(1, 20, {0: np.ones(96, "f4")}, {0: np.ones(8)}, {0: np.ones(12)})
      >>> layout = BucketLayout.from_order([["fc.weight"]], {"fc.weight": np.zeros((8, 12))})
      >>> checkpoint = Checkpoint({}, (record,), layout=layout, world_size=1)
      >>> state = powersgd_from_torch(checkpoint, {"fc": {"kernel": jnp.zeros((12, 8))}})
      >>> int(state.count), state.q["fc"]["kernel"].shape
      (20, (12, 1))
    """
    if not checkpoint.powersgd:
        raise CheckpointMismatch(
            "The checkpoint has no PowerSGD state. Pass a file with `comm_hook_state`, or start "
            "afresh with jaxcomp.powersgd(...).init(params)."
        )
    layout = layout_of(checkpoint, layout, pairs)
    pairs = _pairs_for_trained(checkpoint.model, params, pairs, layout)
    return filled_state(checkpoint, params, pairs, layout, missing_ranks, matrix_dims)


def filled_state(
    checkpoint: Checkpoint,
    params: Any,
    pairs: Pairs,
    layout: BucketLayout | None,
    missing_ranks: str,
    matrix_dims: MatrixDimsFn | None,
) -> PowerSGDState:
    """`powersgd_from_torch` where the pairs of `params` and the layout are known."""
    record = checkpoint.powersgd[0]
    known = layout if record.buckets else None
    leaves, treedef, problems = _aligned(params, record, known, pairs, checkpoint, matrix_dims)
    _refuse(problems)
    errors = _mean_errors(checkpoint, layout, missing_ranks)
    residuals: list[Any] = [optax.MaskedNode()] * len(leaves)
    factors, afresh = list(residuals), list[str]()
    for index, (plan, terms) in enumerate(leaves):
        if plan.view is None:
            continue
        # Not begun, or frozen in torch: any Q will do, as long as it is the same everywhere.
        residual = np.zeros(plan.shape, np.float32)
        q = fresh = np.random.default_rng(index).standard_normal(plan.q_shape, np.float32)
        for term in terms[:1]:
            if term.name in errors and len(terms) == 1:
                residual = term.pair.to_flax(errors[term.name])
            if term.slot is not None and term.slot.bucket in record.q_memory_dict:
                torch_q = term.slot.q(record.q_memory_dict[term.slot.bucket])
                q = torch_q.astype(np.float32)[term.q_rows]
            if not (np.isfinite(residual).all() and np.isfinite(q).all()):
                afresh.append("/".join(term.pair.path))
                residual, q = np.zeros(plan.shape, np.float32), fresh
        if record.use_error_feedback:
            residuals[index] = jnp.array(residual)
        if record.warm_start:
            factors[index] = jnp.array(q)
    if afresh:
        warnings.warn(
            f"The state of {printable(', '.join(afresh))} in the file is not finite: the layer was "
            "never used, or the run diverged. It starts afresh, with a new Q and no residual.",
            stacklevel=3,
        )
    terms = [term for _, own in leaves for term in own if term.slot is not None]
    if packed := sorted({term.pair.torch_name for term in terms if term.pair.rows is not None}):
        warnings.warn(
            f"{printable(', '.join(packed))}: torch has one Q for all parts of a packed matrix. "
            f"Each Flax kernel gets this Q and its part of the error, so the next steps are "
            f"equivalent in kind, not equal. A Flax model with one packed kernel continues "
            f"exactly.",
            stacklevel=3,
        )
    return PowerSGDState(
        jnp.asarray(record.iter, jnp.int32),
        treedef.unflatten(residuals),
        treedef.unflatten(factors),
        owner=jnp.zeros([], jnp.float32),
    )


def _mean_errors(
    checkpoint: Checkpoint, layout: BucketLayout | None, missing_ranks: str
) -> dict[str, np.ndarray]:
    """Parameter -> mean error; empty before the start and without error feedback."""
    if missing_ranks not in _MISSING_RANKS:
        raise ValueError(f"`missing_ranks` must be one of {_MISSING_RANKS}, got {missing_ranks!r}.")
    if layout is None or not checkpoint.powersgd[0].error_dict:
        return {}
    if checkpoint.missing_ranks and missing_ranks == "error":
        size = f" of {checkpoint.world_size}" if checkpoint.world_size else ""
        raise CheckpointMismatch(
            f"The errors of {len(checkpoint.powersgd)} rank(s){size} are here, and the mean over "
            f"all ranks is needed. Load one file per rank, or save with "
            f'torch_bridge.save_checkpoint; else choose: missing_ranks="zero" forgets what was not '
            f'sent yet (one small step back, once), missing_ranks="replicate" takes these ranks '
            f"for all (keeps it, and adds their deviation from the mean as a spurious gradient, "
            f"once).",
            parameters=("missing_ranks",),
        )
    dropped = checkpoint.missing_ranks and missing_ranks == "zero"
    return {} if dropped else checkpoint.mean_errors(layout)


# --- both ways ----------------------------------------------------------------------------------


def _aligned(
    params: Any,
    record: PowerSGDRecord,
    layout: BucketLayout | None,
    pairs: Pairs,
    like: Checkpoint | None,
    matrix_dims: MatrixDimsFn | None,
) -> tuple[list[Leaf], Any, list[str]]:
    """Jaxcomp's decision for every leaf beside torch's, with torch's rank and rate.

    Args:
      params: The Flax parameters.
      record: For rank and rate.
      layout: Where torch has the state; None before it has any.
      pairs: Of `params`.
      like: The checkpoint, for the names of tied tensors.
      matrix_dims: As passed to `jaxcomp.powersgd`.

    Returns:
      The leaves, the structure of the state's trees, and a line for each matrix of the one side
      that the other does not have.
    """
    rank, rate = record.matrix_approximation_rank, record.min_compression_rate
    plans = plan_leaves(params, rank, rate, matrix_dims)
    entries = layout.entries if layout else {}
    slots = layout.slots_of(record) if layout else {}
    orders = {name: slot.entry.column_order() for name, slot in slots.items()}
    names = names_in(pairs, entries, like.aliases if like else {})
    paths = [plain_path(path) for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]]
    leaves = [(plan, list[Term]()) for plan in plans]
    by_path = dict(zip(paths, leaves, strict=True))
    problems: list[str] = []
    for pair in pairs:
        plan, terms = by_path[pair.path]
        name, q_rows = names.get(pair.torch_name), None
        slot = slots.get(name or "")
        try:
            if slot is not None:
                q_rows = _rows_of_q(plan, pair, slot, orders[slot.entry.name])
            elif slots and name is not None and plan.view is not None:
                raise CheckpointMismatch("compressed by jaxcomp only")
        except CheckpointMismatch as error:
            line = f"{plan.path} {plan.shape} <- {pair.torch_name} {pair.torch_shape}"
            problems.append(f"{line}: {error.message}")
        terms.append(Term(pair, name, slot, q_rows))
    return leaves, jax.tree.structure(unboxed(params)), problems


def _rows_of_q(
    plan: LeafPlan, pair: Pair, slot: FactorSlot, order: np.ndarray | None
) -> np.ndarray | None:
    """Where the rows of a leaf's Q stand in torch's: ``q = torch_q[rows]``.

    Args:
      plan: Of the leaf.
      pair: Of the leaf and the tensor.
      slot: Of the tensor's factors.
      order: Of the tensor's columns in memory; None where these are mixed with rows.

    Returns:
      Positions, shape (cols,); None where a full-rank Q of torch's is not needed.

    Raises:
      CheckpointMismatch: The state of the tensor cannot be that of the leaf.
    """
    if plan.view is None:
        if slot.rank == min(slot.rows, slot.cols):
            return None
        raise CheckpointMismatch(f"compressed by torch only ({slot.rows} x {slot.cols})")
    if plan.view.batch or pair.terms > 1:
        raise CheckpointMismatch("several torch matrices in one leaf, which have several Q")
    if order is None:
        raise CheckpointMismatch(f"its strides {slot.entry.strides} mix torch's rows and columns")
    _, cols = pair.matrix_order(plan.view.dims.rows, plan.view.dims.cols)
    if plan.rank != slot.rank:
        raise CheckpointMismatch(f"rank {plan.rank}, torch has {slot.rank}")
    return np.argsort(order)[cols]


def _refuse(problems: list[str]) -> None:
    if problems:
        raise CheckpointMismatch(
            "torch and jaxcomp do not compress the same matrices. If torch's view(shape[0], -1) "
            "cuts a kernel elsewhere, pass matrix_dims=torch_bridge.torch_matrix_dims here and to "
            "jaxcomp.powersgd.",
            mis_shaped=problems,
            parameters=("matrix_dims",),
        )


def _pairs_for_trained(
    model: Mapping[str, Any], params: Any, pairs: Pairs | None, layout: BucketLayout | None
) -> tuple[Pair, ...]:
    """`pairs_for` parameters of which those may be missing that a layout does not know.

    Raises:
      CheckpointMismatch: As for `pair`, or there is neither a model nor a layout.
    """
    if not model and layout is None:
        raise CheckpointMismatch(
            "The file holds neither a model nor a layout, so its parameters have no names. "
            "Load it together with the model's file, or pass layout=.",
            parameters=("layout",),
        )
    known = layout.shapes() if layout else {}
    model = model or known
    try:
        return pairs_for(model, params, pairs)
    except CheckpointMismatch:
        kept = {name: value for name, value in model.items() if name in known}
        if pairs is not None or not kept:
            raise
    return pairs_for(kept, params, None)


# --- to torch -----------------------------------------------------------------------------------


def powersgd_to_torch(
    state: PowerSGDState,
    params: Any,
    *,
    layout: BucketLayout,
    like: Checkpoint | None = None,
    matrix_dims: MatrixDimsFn | None = None,
    process_group: Any = None,
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
        dtypes are kept. Without it the rank is the largest in `state`, and the rest is as torch has
        it by default; set it on what is returned.
      matrix_dims: As passed to `jaxcomp.powersgd`.
      process_group: The torch group, or None for the default group.
      pairs: As for `powersgd_from_torch`.

    Returns:
      A state for ``ddp_model.register_comm_hook(state, powerSGD_hook)``.

    Raises:
      CheckpointMismatch: A leaf is compressed on one side only or as another matrix, or the state
        is not consolidated; all such leaves are listed.

    Warns:
      UserWarning: The parts of a packed tensor have different Q; torch gets their common subspace.

    Example:
      >>> import jaxcomp
      >>> params = {"fc": {"kernel": jnp.zeros((12, 8))}}
      >>> state = jaxcomp.powersgd(1, axis_name="data").init(params)._replace(count=7)
      >>> layout = BucketLayout.from_order([["fc.weight"]], {"fc.weight": np.zeros((8, 12))})
      >>> back = powersgd_to_torch(state, params, layout=layout)
      >>> back.iter, back.start_powerSGD_iter, back.q_memory_dict[0].shape
      (7, 9, torch.Size([12]))
    """
    trained = params_of(state, params)
    model = like.model if like is not None and like.model else layout.shapes()
    found = _pairs_for_trained(model, trained, pairs, layout)
    record = export_record(state, trained, layout, like, matrix_dims, found)
    return state_from_record(record, process_group)


def params_of(state: PowerSGDState, params: Any) -> Any:
    """The part of `params` that a reducer's state is of, by its paths.

    Raises:
      CheckpointMismatch: The state has leaves that `params` has not; they are listed.
    """
    leaves = flatten(params).leaves
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
    pairs: Pairs,
) -> PowerSGDRecord:
    """What `powersgd_to_torch` puts into torch's object, as arrays."""
    count = int(np.asarray(state.count))
    records = like.powersgd if like is not None else ()
    old = (
        records[0]
        if records
        else PowerSGDRecord(
            max((q.shape[-1] for q in jax.tree.leaves(state.q)), default=1),
            0,
            *({}, {}, {}),
            start_powerSGD_iter=max(2, count),
            use_error_feedback=bool(jax.tree.leaves(state.residual)),
            warm_start=bool(jax.tree.leaves(state.q)),
        )
    )
    base = dataclasses.replace(old, iter=count, error_dict={}, p_memory_dict={}, q_memory_dict={})
    if not old.buckets and count == old.iter:  # nothing but counters and hyperparameters
        return base
    aligned, treedef, problems = _aligned(params, base, layout, pairs, like, matrix_dims)
    trees = (treedef.flatten_up_to(tree) for tree in (state.residual, state.q))
    leaves = list(zip(aligned, *trees, strict=True))
    for (plan, _), residual, q in leaves:
        problems += _shape_problems(plan, residual, q)
    _refuse(problems)
    kept = base.use_error_feedback, base.warm_start, base.warm_start
    # Written through views of the buckets: a second copy would double the memory.
    flats, ps, q_memory = (
        {bucket: np.zeros(size, np.float32) for bucket, size in sizes.items() if keeps}
        for sizes, keeps in zip(layout.buffer_sizes(base), kept, strict=True)
    )
    errors: dict[str, np.ndarray] = {}
    for bucket, flat in flats.items():
        errors |= layout.split(bucket, flat)
    qs: dict[str, list[np.ndarray]] = {}
    for (_, terms), residual, q in leaves:
        for term in terms:
            if term.slot is None or term.q_rows is None:
                continue
            name = term.slot.entry.name
            if errors and not isinstance(residual, optax.MaskedNode):
                values = to_numpy(residual).astype(np.float32)
                errors[name][slice(*term.pair.row_range)] = term.pair.to_torch(values)
            if not isinstance(q, optax.MaskedNode):
                torch_q = np.empty((term.slot.cols, term.slot.rank), np.float32)
                torch_q[term.q_rows] = to_numpy(q)
                qs.setdefault(name, []).append(torch_q)
    for name, slot in layout.slots_of(base).items() if base.warm_start else ():
        slot.q(q_memory[slot.bucket])[...] = _common(slot, qs.get(name, []))
    # Of P only its presence matters to torch; with the old one nothing at all changes.
    for bucket, p in ps.items():
        before = old.p_memory_dict.get(bucket)
        if before is not None and before.size == p.size and np.isfinite(before).all():
            ps[bucket] = before
    for name, buffers in zip(BUFFERS, (flats, ps, q_memory), strict=True):
        for bucket, before in getattr(old, name).items():
            if bucket in buffers:
                buffers[bucket] = buffers[bucket].astype(before.dtype, copy=False)
    return dataclasses.replace(base, error_dict=flats, p_memory_dict=ps, q_memory_dict=q_memory)


def _shape_problems(plan: LeafPlan, residual: Any, q: Any) -> list[str]:
    """What of a leaf's state does not fit its plan, a line each."""
    lines = []
    q_shape = plan.q_shape if plan.view is not None else ()
    for what, leaf, shape in (("residual", residual, plan.shape), ("q", q, q_shape)):
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


def _common(slot: FactorSlot, qs: list[np.ndarray]) -> np.ndarray:
    """One Q of shape (cols, rank) for a torch matrix, from the Qs of its parts."""
    if not qs:
        # Compressed by torch only, at full rank: any basis reproduces it.
        return np.eye(slot.cols, slot.rank, dtype=np.float32)
    if all(np.array_equal(q, qs[0]) for q in qs[1:]):
        return qs[0]
    warnings.warn(
        f"The parts of {printable(slot.entry.name)} have different Q factors; torch has one for "
        f"all and gets their leading common subspace, so its next steps are equivalent in kind, "
        f"not equal.",
        stacklevel=4,
    )
    left, values, _ = np.linalg.svd(np.concatenate(qs, axis=1), full_matrices=False)
    return (left * values)[:, : slot.rank].astype(np.float32)
