"""PowerSGD's state between torch's buckets and `jaxcomp.PowerSGDState`."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxcomp
from jaxcomp import PowerSGDState
from jaxcomp.extend import LeafPlan, plan_leaves
from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._base.schema import BUFFERS, PowerSGDRecord
from torch_bridge._base.tensors import to_numpy
from torch_bridge._base.terminal import printable, some
from torch_bridge._hook.arguments import powersgd_kwargs_from_torch
from torch_bridge._hook.buckets import BucketLayout, BucketPart
from torch_bridge._hook.checkpoint import Checkpoint, loss_scale_of, mean_of_ranks
from torch_bridge._hook.infer import layout_of
from torch_bridge._job.resume import state_from_record
from torch_bridge._pairing.leaves import MatrixDimsFn, leaves_by_path, trained, with_values
from torch_bridge._pairing.pair import Pairs, paired_for
from torch_bridge._pairing.pairs import Pair, names_in

if TYPE_CHECKING:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
        PowerSGDState as TorchPowerSGDState,
    )


class CommonMatrix(NamedTuple):
    """A matrix that both sides compress: a Flax leaf, and a torch tensor or rows of one."""

    pair: Pair
    part: BucketPart  # what torch keeps for it
    q_rows: np.ndarray  # ``q = torch_q[q_rows]``


def powersgd_from_torch(
    checkpoint: Checkpoint,
    params: Any,
    *,
    pairs: Pairs | None = None,
    layout: BucketLayout | None = None,
    missing_ranks: str = "error",
    matrix_dims: MatrixDimsFn | None = None,
) -> PowerSGDState:
    """Makes a consolidated `jaxcomp.PowerSGDState` of torch's hook state.

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
      matrix_dims: As it will be passed to `jaxcomp.powersgd`, whose own rule None is, unlike in
        `to_flax`.

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
    if not checkpoint.model and layout is None:
        raise CheckpointMismatch(
            "The file holds neither a model nor a layout, so its parameters have no names. "
            "Load it together with the model's file, or pass layout=.",
            parameters=("layout",),
        )
    model = checkpoint.model or (layout.entries if layout else {})
    pairs = paired_for(model, params, pairs).pairs
    record = mean_of_ranks(checkpoint, missing_ranks)
    return filled_state(record, params, pairs, layout, matrix_dims)


def filled_state(
    record: PowerSGDRecord,
    params: Any,
    pairs: Pairs,
    layout: BucketLayout | None,
    matrix_dims: MatrixDimsFn | None,
) -> PowerSGDState:
    """Fills a state of `jaxcomp.powersgd` with what a record holds.

    Args:
      record: With the mean error, in units of the loss.
      params: As for `powersgd_from_torch`, like the others.
      pairs: The pairs of `params`.
      layout: The layout of the buffers of `record`.
      matrix_dims: As passed to `jaxcomp.powersgd`.
    """
    residuals = {}
    factors = {}
    afresh = []
    packed = []
    for pair, part, q_rows in _common_matrices(params, pairs, record, layout, matrix_dims):
        kept = [array for array in (part.error, part.q) if array is not None]
        if not all(np.isfinite(array).all() for array in kept):
            afresh.append("/".join(pair.path))
            continue
        if part.error is not None:
            residuals[pair.path] = pair.to_flax(part.error)
        if part.q is not None:
            factors[pair.path] = part.q[q_rows]
            if pair.rows and pair.torch_name not in packed:
                packed.append(pair.torch_name)
    if afresh:
        warnings.warn(
            f"The state of {some(afresh)} in the file is not finite: the layer was never used, or "
            "the run diverged. It starts afresh, with a new Q and no residual.",
            stacklevel=3,
        )
    if record.buckets and not record.warm_start:
        warnings.warn(
            "The hook has warm_start=False: each step draws a new Q, and JAX draws others than "
            "torch, so the next steps are equivalent in kind, not equal.",
            stacklevel=3,
        )
    if packed:
        warnings.warn(
            f"{some(packed)}: torch has one Q for all parts of a packed matrix. Each Flax kernel "
            "gets this Q and its part of the error, so the next steps are equivalent in kind, not "
            "equal. A Flax model with one packed kernel continues exactly.",
            stacklevel=3,
        )
    # Not begun, or frozen in torch: any Q will do, as long as it is the same everywhere.
    draw = np.random.default_rng(0).standard_normal
    shapes = _shapes(params, record, matrix_dims)
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes.residual)
    fresh = jax.tree.map(lambda leaf: draw(leaf.shape, leaf.dtype), shapes.q)
    return PowerSGDState(
        jnp.asarray(record.iter, jnp.int32),
        with_values(zeros, residuals),
        with_values(fresh, factors),
        owner=jnp.zeros([], jnp.float32),
    )


# --- both ways ----------------------------------------------------------------------------------


def _common_matrices(
    params: Any,
    pairs: Pairs,
    record: PowerSGDRecord,
    layout: BucketLayout | None,
    matrix_dims: MatrixDimsFn | None,
) -> list[CommonMatrix]:
    """Lists what both sides compress, with the rank and the rate of `record`.

    Args:
      params: The Flax parameters.
      pairs: The pairs of `params`.
      record: Whose buffers the matrices are views of.
      layout: The layout of the buffers; None where it is not known, as there are none yet.
      matrix_dims: As passed to `jaxcomp.powersgd`.

    Raises:
      CheckpointMismatch: One side has a matrix that the other does not have; all are listed.
    """
    rank, rate = record.matrix_approximation_rank, record.min_compression_rate
    plans = dict(
        zip(leaves_by_path(params), plan_leaves(params, rank, rate, matrix_dims), strict=True)
    )
    parts = layout.parts(record) if layout else {}
    names = names_in(pairs, parts)
    matrices = []
    problems = []
    for pair in pairs:
        if pair.torch_name not in names:
            continue  # frozen in torch
        plan, part = plans[pair.path], parts[names[pair.torch_name]]
        rows, cols = part.entry.matrix
        try:
            if part.rank and plan.view:
                matrices.append(CommonMatrix(pair, part, _rows_of_q(plan, pair, part)))
            elif plan.view:
                raise CheckpointMismatch("compressed by jaxcomp only")
            elif 0 < part.rank < min(rows, cols):  # by which something is lost
                raise CheckpointMismatch(f"compressed by torch only ({rows} x {cols})")
        except CheckpointMismatch as error:
            line = f"{plan.path} {plan.shape} <- {pair.torch_name} {pair.torch_shape}"
            problems.append(f"{line}: {error.message}")
    if problems:
        raise CheckpointMismatch(
            "torch and jaxcomp do not compress the same matrices. If torch's view(shape[0], -1) "
            "cuts a kernel elsewhere, pass matrix_dims=torch_bridge.torch_matrix_dims here and to "
            "jaxcomp.powersgd.",
            mis_shaped=problems,
            parameters=("matrix_dims",),
        )
    return matrices


def _rows_of_q(plan: LeafPlan, pair: Pair, part: BucketPart) -> np.ndarray:
    """Finds where the rows of a leaf's Q stand in torch's: ``q = torch_q[rows]``, shape (cols,).

    Raises:
      CheckpointMismatch: Torch's matrix is another than the leaf's.
    """
    assert plan.view is not None
    if plan.view.batch:
        raise CheckpointMismatch("several matrices in one leaf, which have several Q")
    columns = part.entry.columns()
    if columns is None:
        raise CheckpointMismatch(f"its strides {part.entry.strides} mix torch's rows and columns")
    if plan.rank != part.rank:
        raise CheckpointMismatch(f"rank {plan.rank}, torch has {part.rank}")
    return columns[pair.column_order(plan.view.dims.cols)]


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
    """Makes a real ``PowerSGDState`` of torch from a consolidated `jaxcomp.PowerSGDState`.

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
    like, params = like or Checkpoint({}), trained(params)
    pairs = paired_for(like.model or layout.entries, params, pairs).pairs
    record = record_of_state(state, params, layout, like, matrix_dims, pairs)
    return state_from_record(record, process_group)


def record_of_state(
    state: PowerSGDState,
    params: Any,
    layout: BucketLayout | None,
    like: Checkpoint,
    matrix_dims: MatrixDimsFn | None,
    pairs: Pairs,
) -> PowerSGDRecord:
    """Makes what `powersgd_to_torch` puts into torch's object, as arrays of its own.

    Raises:
      CheckpointMismatch: As `powersgd_to_torch`.
    """
    count = int(np.asarray(state.count))
    old = like.powersgd[0] if like.powersgd else _born_in_jax(state, count)
    record = dataclasses.replace(old, iter=count, error_dict={}, p_memory_dict={}, q_memory_dict={})
    if not old.buckets and count == old.iter:  # nothing but counters and hyperparameters
        return record
    if layout is None:
        raise CheckpointMismatch(
            "The torch file was saved before compression began, so it has no bucket layout, and "
            "JAX has gone on since. Call torch_bridge.record_layout in a torch run of the same "
            "model, and pass layout=.",
            parameters=("layout",),
        )
    # Buffers are written through views: a second copy would double the memory.
    for name, sizes in layout.buffer_sizes(record).items():
        keeps = record.use_error_feedback if name == "error_dict" else record.warm_start
        for bucket, size in sizes.items():
            if keeps:
                getattr(record, name)[bucket] = np.zeros(size, np.float32)
    matrices = _common_matrices(params, pairs, record, layout, matrix_dims)
    _check_state(state, params, record, matrices, matrix_dims)
    _fill(record, layout, state, matrices)
    _as_before(record, old, loss_scale_of(like))
    return record


def _born_in_jax(state: PowerSGDState, count: int) -> PowerSGDRecord:
    """Makes a record as of a run that torch has never seen."""
    factors = jax.tree.leaves(state.q)
    return PowerSGDRecord(
        max((q.shape[-1] for q in factors), default=1),
        0,
        error_dict={},
        p_memory_dict={},
        q_memory_dict={},
        start_powerSGD_iter=max(2, count),
        use_error_feedback=bool(jax.tree.leaves(state.residual)),
        warm_start=bool(factors),
    )


def _fill(
    record: PowerSGDRecord,
    layout: BucketLayout,
    state: PowerSGDState,
    matrices: Sequence[CommonMatrix],
) -> None:
    """Writes residuals and factors into the buffers of a record."""
    residuals = leaves_by_path(state.residual)
    factors = leaves_by_path(state.q)
    seen = {}  # a packed tensor has a Q for each of its leaves
    for pair, part, q_rows in matrices:
        if part.error is not None and pair.path in residuals:
            part.error[slice(*pair.row_range)] = pair.to_torch(residuals[pair.path])
        if part.q is not None and pair.path in factors:
            torch_q = np.empty_like(part.q)
            torch_q[q_rows] = to_numpy(factors[pair.path]).reshape(torch_q.shape)
            seen.setdefault(part.entry.name, []).append(torch_q)
    for name, part in layout.parts(record).items():
        if part.rank and part.q is not None:
            part.q[...] = _common_q(part, seen.get(name, []))


def _as_before(record: PowerSGDRecord, old: PowerSGDRecord, scale: float) -> None:
    """Brings buffers into the units of torch's scaled loss, and the dtypes that they had, in place.

    Raises:
      CheckpointMismatch: A buffer does not fit the dtype that it had.
    """
    overflown = []
    for name in BUFFERS:
        buffers, before = getattr(record, name), getattr(old, name)
        for bucket, buffer in buffers.items():
            known = before.get(bucket, buffer)
            if name == "p_memory_dict":
                # Only its presence matters to torch; with the old one nothing at all changes.
                buffers[bucket] = known if known.size == buffer.size else buffer
                continue
            if scale != 1:
                buffer *= np.float32(scale)
            with np.errstate(over="ignore"):
                buffers[bucket] = buffer.astype(known.dtype, copy=False)
            if np.isfinite(buffer).all() and not np.isfinite(buffers[bucket]).all():
                overflown.append(f"{name} of bucket {bucket}: {known.dtype}")
    if overflown:
        raise CheckpointMismatch(
            "The state does not fit the dtype that it had in torch, in units of the loss scale of "
            "the file. Go on from dataclasses.replace(checkpoint, loss_scale=...) with a smaller "
            "one, and begin the GradScaler in torch with it.",
            mis_shaped=overflown,
        )


def _shapes(params: Any, record: PowerSGDRecord, matrix_dims: MatrixDimsFn | None) -> Any:
    """Returns the state of `jaxcomp.powersgd` with the arguments of `record`, without values."""
    kwargs = powersgd_kwargs_from_torch(record)
    reducer = jaxcomp.powersgd(axis_name="data", matrix_dims=matrix_dims, **kwargs)
    return jax.eval_shape(reducer.init, params)


def _check_state(
    state: PowerSGDState,
    params: Any,
    record: PowerSGDRecord,
    matrices: Sequence[CommonMatrix],
    matrix_dims: MatrixDimsFn | None,
) -> None:
    """Refuses a state of other shapes, or without a residual or Q where torch has one.

    Raises:
      CheckpointMismatch: With all of these.
    """
    fresh = _shapes(params, record, matrix_dims)
    common = {matrix.pair.path for matrix in matrices}  # a leaf that is frozen may lack a state
    wrong = []
    for field in ("residual", "q"):
        shapes, expected = (
            jax.tree.map(np.shape, leaves_by_path(getattr(one, field))) for one in (state, fresh)
        )
        for path in shapes.keys() | common:
            shape = shapes.get(path)
            expected_shape = expected.get(path)
            if shape != expected_shape:
                wrong.append(
                    f"{'/'.join(path)}: {field} of shape {shape}, expected {expected_shape}"
                )
    if wrong:
        raise CheckpointMismatch(
            "The PowerSGD state is of other matrices, another rank or several replicas. Pass it "
            "consolidated (jaxcomp.consolidate), with the matrix_dims= that it was made with and "
            "like= of the same rank, warm_start and error_feedback.",
            mis_shaped=sorted(wrong),
            parameters=("matrix_dims", "like"),
        )


def _common_q(part: BucketPart, qs: list[np.ndarray]) -> np.ndarray:
    """Returns one Q of shape (cols, rank) for a torch matrix, from the Qs of its parts."""
    if not qs:
        # Compressed by torch only, at full rank: any basis reproduces it.
        return np.eye(part.entry.matrix[1], part.rank, dtype=np.float32)
    if all(np.array_equal(q, qs[0]) for q in qs[1:]):
        return qs[0]
    warnings.warn(
        f"The parts of {printable(part.entry.name)} have different Q factors; torch has one for "
        f"all and gets their leading common subspace, so its next steps are equivalent in kind, "
        f"not equal.",
        stacklevel=5,
    )
    left, values, _ = np.linalg.svd(np.concatenate(qs, axis=1), full_matrices=False)
    return (left * values)[:, : part.rank].astype(np.float32)
