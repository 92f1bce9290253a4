"""Converts PowerSGD's state between torch's buckets and `jaxcomp.PowerSGDState`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxcomp
from jaxcomp import PowerSGDState
from jaxcomp.extend import plan_leaves
from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._base.schema import BUFFERS, PowerSGDRecord
from torch_bridge._base.tensors import to_numpy
from torch_bridge._base.terminal import some, warn
from torch_bridge._hook.arguments import powersgd_kwargs_from_torch
from torch_bridge._hook.buckets import BucketLayout, BucketPart
from torch_bridge._hook.checkpoint import Checkpoint, loss_scale_of, mean_of_ranks
from torch_bridge._hook.infer import layout_of, named_layout
from torch_bridge._job.resume import state_from_record
from torch_bridge._pairing.leaves import MatrixDimsFn, leaves_by_path, trained, with_values
from torch_bridge._pairing.pair import Pairs, pairs_of
from torch_bridge._pairing.pairs import Pair, names_in

if TYPE_CHECKING:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
        PowerSGDState as TorchPowerSGDState,
    )


class CommonMatrix(NamedTuple):
    """A matrix that both sides compress: a Flax leaf, and a torch tensor or rows of a tensor."""

    pair: Pair
    part: BucketPart  # views of torch's error and factors for the tensor
    q_rows: np.ndarray  # int, shape (cols,): ``q = torch_q[q_rows]``


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

    PowerSGD's outputs depend only on the mean of the replicas' errors. So a run with the mean over
    all ranks continues on the same trajectory, on any number of replicas.

    Args:
      checkpoint: The checkpoint that `load` returned, if possible with the errors of all ranks.
      params: The Flax parameters (arrays or shapes) that the optimizer will get.
      pairs: The pairs that `pair` returned, also for a tree that contains `params`; None if `pair`
        needs no options.
      layout: The bucket layout. None means the checkpoint's layout or, if it has none, the only one
        of torch's orders that fits (`infer_layout`).
      missing_ranks: What to do if the errors of some ranks are missing. ``"error"`` refuses.
        ``"zero"`` starts with errors of zero, so the gradients that were not sent yet are lost
        once. ``"replicate"`` uses the mean of the present ranks. Its deviation from the true mean
        enters the weights once, as a wrong gradient that grows with the square root of the number
        of steps.
      matrix_dims: The `matrix_dims` that `jaxcomp.powersgd` will get. None means jaxcomp's default
        rule, unlike in `to_flax`.

    Returns:
      A state with the tree structure of ``jaxcomp.powersgd(...).init(params)``.

    Raises:
      ValueError: `missing_ranks` is not ``"error"``, ``"zero"`` or ``"replicate"``.
      CheckpointMismatch: Ranks are missing. Or the layout is unknown or does not fit. Or leaves are
        compressed on one side only, or as another matrix; the error lists all.

    Warns:
      UserWarning: A packed tensor (attention's ``in_proj``) has one Q for several leaves. Each leaf
        gets this Q, and the next steps differ from torch's. Or a leaf's state is not finite,
        because the layer was never used or the run diverged; it starts with a new Q and no
        residual.

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
            "with the state of jaxcomp.powersgd(...).init(params)."
        )
    layout = layout_of(checkpoint, layout, pairs)
    if not checkpoint.model and layout is None:
        raise CheckpointMismatch(
            "The file holds neither a model nor a layout, so its parameters have no names. "
            "Load it together with the model's file, or pass layout=.",
            parameters=("layout",),
        )
    model = checkpoint.model or (layout.entries if layout else {})
    pairs = pairs_of(model, params, pairs)
    record = mean_of_ranks(checkpoint, missing_ranks)
    return filled_state(record, params, pairs, layout, matrix_dims)


def filled_state(
    record: PowerSGDRecord,
    params: Any,
    pairs: Pairs,
    layout: BucketLayout | None,
    matrix_dims: MatrixDimsFn | None,
) -> PowerSGDState:
    """Makes a state of `jaxcomp.powersgd` with the errors and factors of a record.

    Args:
      record: A record with the mean error of all ranks, without a loss scale.
      params: The Flax parameters, arrays or shapes.
      pairs: The pairs of `params`.
      layout: The layout of the record's buffers.
      matrix_dims: The `matrix_dims` that `jaxcomp.powersgd` will get.
    """
    residuals = {}
    factors = {}
    renewed = []
    packed = []
    if not record.buckets:  # compression has not begun, so nothing has to fit
        layout = None
    matrices, exact = _common_matrices(params, pairs, record, layout, matrix_dims)
    for pair, part, q_rows in matrices:
        if not (_is_finite(part.error) and _is_finite(part.q)):
            renewed.append("/".join(pair.path))
            continue
        if part.error is not None:
            residuals[pair.path] = pair.to_flax(part.error)
        if part.q is not None:
            factors[pair.path] = part.q[q_rows]
            if pair.rows and pair.torch_name not in packed:
                packed.append(pair.torch_name)
    if renewed:
        warn(
            f"The state of {some(renewed)} in the file is not finite: the layer was never used, or "
            "the run diverged. It starts with a new Q and no residual."
        )
    if not record.warm_start:
        warn(
            "The hook has warm_start=False: each step draws a new Q, and JAX draws others than "
            "torch, so the next steps differ from torch's."
        )
    if packed:
        warn(
            f"{some(packed)}: torch has one Q for all parts of a packed matrix. Each Flax kernel "
            "gets this Q and its part of the error, so the next steps differ from torch's. A Flax "
            "model with one packed kernel continues exactly."
        )
    if exact:
        warn(
            f"{some(exact)}: torch compresses these parts as one packed matrix. Each alone is too "
            "small for min_compression_rate, so jaxcomp averages them exactly. Their error, the "
            "gradients that were not sent yet, is lost, once."
        )
    # Leaves whose compression has not begun, or that are frozen in torch, can start with any Q that
    # is equal on all replicas.
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


def _is_finite(array: np.ndarray | None) -> bool:
    """Returns whether all values are finite, or there is no array."""
    return array is None or bool(np.isfinite(array).all())


# --- both directions ----------------------------------------------------------------------------


def _common_matrices(
    params: Any,
    pairs: Pairs,
    record: PowerSGDRecord,
    layout: BucketLayout | None,
    matrix_dims: MatrixDimsFn | None,
) -> tuple[list[CommonMatrix], list[str]]:
    """Lists the matrices that both sides compress, with the rank and the rate of `record`.

    Args:
      params: The Flax parameters.
      pairs: The pairs of `params`.
      record: The record that holds torch's buffers; the matrices are views of them.
      layout: The layout of the buffers; None if the record has no buffers yet.
      matrix_dims: The `matrix_dims` of `jaxcomp.powersgd`.

    Returns:
      The matrices, and the paths of leaves that jaxcomp does not compress, because each is only a
      part of torch's packed matrix and too small alone.

    Raises:
      CheckpointMismatch: Only one side compresses a matrix, or the sides compress different
        matrices; the error lists all.
    """
    rank = record.matrix_approximation_rank
    rate = record.min_compression_rate
    plans = dict(
        zip(leaves_by_path(params), plan_leaves(params, rank, rate, matrix_dims), strict=True)
    )
    parts = layout.parts(record) if layout else {}
    names = names_in(pairs, parts)
    matrices = []
    exact = []
    problems = []
    for pair in pairs:
        if pair.torch_name not in names:
            continue  # frozen in torch
        plan = plans[pair.path]
        part = parts[names[pair.torch_name]]
        rows, cols = part.entry.matrix
        columns = None
        if part.rank:
            columns = part.entry.columns()
        try:
            if not plan.view:
                if part.rank and pair.rows:
                    exact.append("/".join(pair.path))
                elif 0 < part.rank < min(rows, cols):  # at full rank torch's compression is exact
                    raise CheckpointMismatch(f"compressed by torch only ({rows} x {cols})")
            elif not part.rank:
                raise CheckpointMismatch("compressed by jaxcomp only")
            elif plan.view.batch:
                raise CheckpointMismatch("several matrices in one leaf, which have several Q")
            elif columns is None:
                raise CheckpointMismatch(
                    f"its strides {part.entry.strides} mix torch's rows and columns"
                )
            elif plan.rank != part.rank:
                raise CheckpointMismatch(f"rank {plan.rank}, torch has {part.rank}")
            else:
                q_rows = columns[pair.column_order(plan.view.dims.cols)]
                matrices.append(CommonMatrix(pair, part, q_rows))
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
    return matrices, exact


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

    Every rank gets the same error, the mean; the errors of uncompressed parameters are zero. The
    state is safe to resume from. DDP rebuilds its buckets in its first two iterations, so
    ``start_powerSGD_iter`` is at least ``iter + 2``: two steps are not compressed, and leave errors
    and factors as they are. With `resume_powersgd` these two steps are compressed, too.

    Args:
      state: The consolidated state (`jaxcomp.consolidate`), on the host or on devices.
      params: The Flax parameters (arrays or shapes) that the state belongs to, or a tree that
        contains them: linen variables, or parameters of which some are frozen.
      layout: The bucket layout of the torch job, from `record_layout`.
      like: The checkpoint that the run came from. Its rng, counters, hyperparameters, P factors and
        dtypes are kept. Without `like` the rank is the largest in `state`, and all other attributes
        have torch's defaults; set them on the returned state.
      matrix_dims: The `matrix_dims` of `jaxcomp.powersgd`.
      process_group: The torch process group, or None for the default group.
      pairs: As for `powersgd_from_torch`.

    Returns:
      A state for ``ddp_model.register_comm_hook(state, powerSGD_hook)``.

    Raises:
      CheckpointMismatch: Leaves are compressed on one side only, or as another matrix, or the state
        is not consolidated; the error lists all such leaves.

    Warns:
      UserWarning: The parts of a packed tensor have different Q factors; torch gets one Q, their
        leading common subspace.

    Example:
      >>> import jaxcomp
      >>> params = {"fc": {"kernel": jnp.zeros((12, 8))}}
      >>> state = jaxcomp.powersgd(1, axis_name="data").init(params)._replace(count=7)
      >>> layout = BucketLayout.from_order([["fc.weight"]], {"fc.weight": np.zeros((8, 12))})
      >>> back = powersgd_to_torch(state, params, layout=layout)
      >>> back.iter, back.start_powerSGD_iter, back.q_memory_dict[0].shape
      (7, 9, torch.Size([12]))
    """
    like = like or Checkpoint({})
    params = trained(params)
    layout = named_layout(layout, like.model)
    pairs = pairs_of(like.model or layout.entries, params, pairs)
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
    """Makes the record from which `powersgd_to_torch` makes torch's object, with fresh arrays.

    Raises:
      CheckpointMismatch: As in `powersgd_to_torch`.
    """
    count = int(np.asarray(state.count))
    if like.powersgd:
        old = like.powersgd[0]
    else:  # the run began in JAX; torch's defaults
        factors = jax.tree.leaves(state.q)
        old = PowerSGDRecord(
            max((q.shape[-1] for q in factors), default=1),
            0,
            error_dict={},
            p_memory_dict={},
            q_memory_dict={},
            start_powerSGD_iter=max(2, count),
            use_error_feedback=bool(jax.tree.leaves(state.residual)),
            warm_start=bool(factors),
        )
    record = dataclasses.replace(old, iter=count, error_dict={}, p_memory_dict={}, q_memory_dict={})
    if not old.buckets and count == old.iter:  # only counters and hyperparameters
        return record
    if layout is None:
        raise CheckpointMismatch(
            "The torch file was saved before compression began, so it has no bucket layout, and "
            "JAX has gone on since. Call torch_bridge.record_layout in a torch run of the same "
            "model, and pass layout=.",
            parameters=("layout",),
        )
    # `_fill` writes through views of these buffers; a second copy would double the memory.
    for name, sizes in layout.buffer_sizes(record).items():
        if record.use_error_feedback if name == "error_dict" else record.warm_start:
            buffers = jax.tree.map(lambda size: np.zeros(size, np.float32), sizes)
            getattr(record, name).update(buffers)
    matrices, _ = _common_matrices(params, pairs, record, layout, matrix_dims)
    _check_state(state, params, record, matrices, matrix_dims)
    _fill(record, layout, state, matrices)
    _as_before(record, old, loss_scale_of(like))
    return record


def _fill(
    record: PowerSGDRecord,
    layout: BucketLayout,
    state: PowerSGDState,
    matrices: Sequence[CommonMatrix],
) -> None:
    """Writes residuals and factors into the buffers of a record."""
    residuals = leaves_by_path(state.residual)
    factors = leaves_by_path(state.q)
    seen = {}  # torch name -> one Q for each leaf of the tensor
    for pair, part, q_rows in matrices:
        if part.error is not None:
            part.error[pair.row_range] = pair.to_torch(residuals[pair.path])
        if part.q is not None:
            torch_q = np.empty_like(part.q)
            torch_q[q_rows] = to_numpy(factors[pair.path]).reshape(torch_q.shape)
            seen.setdefault(part.entry.name, []).append(torch_q)
    apart = []
    for name, part in layout.parts(record).items():
        if part.q is None:
            continue
        qs = seen.get(name, [])
        if qs and all(np.array_equal(q, qs[0]) for q in qs[1:]):
            part.q[...] = qs[0]
            continue
        part.q[...] = _common_q(part, qs)
        if qs:
            apart.append(name)
    if apart:
        warn(
            f"The parts of {some(apart)} have different Q factors, and torch has one Q for all "
            "parts of a tensor. It gets their leading common subspace, so its next steps differ "
            "from those in JAX."
        )


def _as_before(record: PowerSGDRecord, old: PowerSGDRecord, scale: float) -> None:
    """Multiplies the buffers by the loss scale and casts them to the dtypes of `old`, in place.

    Raises:
      CheckpointMismatch: A buffer overflows its dtype in `old`.
    """
    overflown = []
    for name in BUFFERS:
        buffers = getattr(record, name)
        before = getattr(old, name)
        for bucket, buffer in buffers.items():
            known = before.get(bucket, buffer)
            if name == "p_memory_dict":
                # torch only needs a P of this size, and overwrites it. Keep the old one if it fits.
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
            "The state, multiplied by the loss scale of the file, overflows the dtype that it had "
            "in torch. Continue from dataclasses.replace(checkpoint, loss_scale=...) with a "
            "smaller scale, and start the GradScaler in torch with that scale.",
            mis_shaped=overflown,
        )


def _shapes(params: Any, record: PowerSGDRecord, matrix_dims: MatrixDimsFn | None) -> Any:
    """Returns the shapes of the state of `jaxcomp.powersgd` with the arguments of `record`."""
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
    """Refuses a state of other shapes, or one that lacks a residual or Q that torch has.

    Raises:
      CheckpointMismatch: Leaves of the state do not fit; the error lists all.
    """
    fresh = _shapes(params, record, matrix_dims)
    common = {matrix.pair.path for matrix in matrices}  # a frozen leaf may have no state
    wrong = []
    for field in ("residual", "q"):
        shapes = jax.tree.map(np.shape, leaves_by_path(getattr(state, field)))
        expected = jax.tree.map(np.shape, leaves_by_path(getattr(fresh, field)))
        for path in shapes.keys() | common:
            shape = shapes.get(path)
            expected_shape = expected.get(path)
            if shape != expected_shape:
                wrong.append(
                    f"{'/'.join(path)}: {field} of shape {shape}, expected {expected_shape}"
                )
    if wrong:
        raise CheckpointMismatch(
            "The PowerSGD state has other matrices, another rank, or an axis of replicas. Pass it "
            "consolidated (jaxcomp.consolidate), with the matrix_dims= that it was made with and "
            "like= of the same rank, warm_start and error_feedback.",
            mis_shaped=sorted(wrong),
            parameters=("matrix_dims", "like"),
        )


def _common_q(part: BucketPart, qs: list[np.ndarray]) -> np.ndarray:
    """Returns one Q of shape (cols, rank) for a torch matrix whose parts have several, or none."""
    if not qs:
        # Only torch compresses the matrix, so it starts with a new Q.
        draw = np.random.default_rng(0).standard_normal
        return draw((part.entry.matrix[1], part.rank), np.float32)
    left, values, _ = np.linalg.svd(np.concatenate(qs, axis=1), full_matrices=False)
    return (left * values)[:, : part.rank].astype(np.float32)
