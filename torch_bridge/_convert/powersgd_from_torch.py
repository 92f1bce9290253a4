"""PowerSGD's state from torch's buckets to `jaxcomp.PowerSGDState`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcomp
from jaxcomp import PowerSGDState
from jaxcomp.extend import LeafPlan, plan_leaves, unboxed
from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._base.schema import PowerSGDRecord
from torch_bridge._base.terminal import printable
from torch_bridge._convert.arguments import powersgd_kwargs_from_torch
from torch_bridge._convert.source import Source, disagreements
from torch_bridge._hook.buckets import BucketLayout
from torch_bridge._hook.checkpoint import Checkpoint
from torch_bridge._pairing.leaves import plain_path
from torch_bridge._pairing.matrix_dims import MatrixDimsFn, matrix_dims_of
from torch_bridge._pairing.pair import Pairs, pairs_for
from torch_bridge._pairing.pairs import Pair, unpaired

SAME_CUT = (
    "If torch's view(shape[0], -1) cuts a kernel elsewhere, pass "
    "matrix_dims=torch_bridge.torch_matrix_dims here and to jaxcomp.powersgd."
)


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
      >>> layout = BucketLayout.from_manifest([[("fc.weight", (8, 12))]])
      >>> checkpoint = Checkpoint({}, (record,), layout=layout, world_size=1)
      >>> state = powersgd_from_torch(checkpoint, {"fc": {"kernel": jnp.zeros((12, 8))}})
      >>> int(state.count), state.q["fc"]["kernel"].shape
      (20, (12, 1))
    """
    record = record_of(checkpoint)
    leftover = [] if pairs is None else unpaired(checkpoint.model, pairs)
    source = Source.of(checkpoint, layout, missing_ranks, leftover)
    pairs = pairs_for_trained(checkpoint.model, params, pairs, source.layout)
    source = source.named(pairs, checkpoint.aliases)
    return filled_state(record, params, pairs, source, matrix_dims)


def filled_state(
    record: PowerSGDRecord,
    params: Any,
    pairs: Pairs,
    source: Source,
    matrix_dims: MatrixDimsFn | None,
) -> PowerSGDState:
    """`powersgd_from_torch` where the pairs of `params` and the source are known."""
    leaves, treedef = planned(params, record, matrix_dims, pairs)
    problems = [line for plan, terms in leaves for line in disagreements(plan, terms, source)]
    if problems:
        raise CheckpointMismatch(
            f"torch and jaxcomp do not compress the same matrices. {SAME_CUT}",
            mis_shaped=problems,
            parameters=("matrix_dims",),
        )
    residuals: list[Any] = [optax.MaskedNode()] * len(leaves)
    factors, afresh = list(residuals), list[str]()
    for index, (plan, terms) in enumerate(leaves):
        if plan.view is not None:
            residual, q = _leaf(plan, terms, source, index, afresh)
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
    packed = sorted({p.torch_name for p in pairs if p.rows is not None and source.slot(p)})
    if packed:
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


def pairs_for_trained(
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


def record_of(checkpoint: Checkpoint) -> PowerSGDRecord:
    """The first rank's record, which has what all ranks share."""
    if not checkpoint.powersgd:
        raise CheckpointMismatch(
            "The checkpoint has no PowerSGD state. Pass a file with `comm_hook_state`, or start "
            "afresh with jaxcomp.powersgd(...).init(params)."
        )
    return checkpoint.powersgd[0]


def planned(
    params: Any, record: PowerSGDRecord, matrix_dims: MatrixDimsFn | None, pairs: Pairs
) -> tuple[list[tuple[LeafPlan, list[Pair]]], Any]:
    """Jaxcomp's decision for every leaf, with torch's rank and rate; its pairs; the structure."""
    by_path: dict[tuple[str, ...], list[Pair]] = {}
    for pair in pairs:
        by_path.setdefault(pair.path, []).append(pair)
    plans = plan_leaves(
        params, record.matrix_approximation_rank, record.min_compression_rate, matrix_dims
    )
    paths = [plain_path(path) for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]]
    leaves = [(plan, by_path.get(path, [])) for plan, path in zip(plans, paths, strict=True)]
    return leaves, jax.tree.structure(unboxed(params))


def _leaf(
    plan: LeafPlan, terms: Pairs, source: Source, index: int, afresh: list[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Residual and Q of one compressed leaf, which is added to `afresh` if they are not finite."""
    # Not begun, or frozen in torch: any Q will do, as long as it is the same everywhere.
    residual = np.zeros(plan.shape, np.float32)
    q = fresh = np.random.default_rng(index).standard_normal(plan.q_shape, np.float32)
    if not terms:
        return residual, q
    error = source.errors.get(source.names.get(terms[0].torch_name, ""))
    slot = source.slot(terms[0])
    if error is not None and len(terms) == 1:
        residual = terms[0].to_flax(error)
    if slot is not None and slot.bucket in source.q_memory:
        assert plan.view is not None
        torch_q = slot.q(source.q_memory[slot.bucket]).astype(np.float32)
        logical = np.empty_like(torch_q)
        logical[slot.entry.column_order()] = torch_q
        _, cols = terms[0].matrix_order(plan.view.dims.rows, plan.view.dims.cols)
        q = logical[cols]
    if np.isfinite(residual).all() and np.isfinite(q).all():
        return residual, q
    afresh.append("/".join(terms[0].path))
    return np.zeros(plan.shape, np.float32), fresh


def powersgd_of(
    record: PowerSGDRecord,
    hook: str | None,
    params: Any,
    pairs: Pairs,
    axis_name: str | tuple[str, ...],
    matrix_dims: MatrixDimsFn | None,
) -> tuple[optax.GradientTransformation, MatrixDimsFn | None]:
    """The reducer with the arguments of a file, and the matrices that it sees."""
    matrix_dims = matrix_dims or cut_of_torch(params, pairs, record)
    kwargs = powersgd_kwargs_from_torch(record, hook=hook)
    return jaxcomp.powersgd(axis_name=axis_name, matrix_dims=matrix_dims, **kwargs), matrix_dims


def cut_of_torch(params: Any, pairs: Pairs, record: PowerSGDRecord) -> MatrixDimsFn | None:
    """Torch's matrices, where jaxcomp's default rule makes others of a leaf; else None."""
    wanted = matrix_dims_of(pairs)
    arguments = (params, record.matrix_approximation_rank, record.min_compression_rate)
    for ours, theirs in zip(plan_leaves(*arguments), plan_leaves(*arguments, wanted), strict=True):
        one, other = ours.view, theirs.view
        if (one is None) != (other is None):
            return wanted
        if one is not None and other is not None:
            wide = {axis for axis, size in enumerate(ours.shape) if size > 1}
            if wide & set(one.dims.rows) != wide & set(other.dims.rows):
                return wanted
    return None
