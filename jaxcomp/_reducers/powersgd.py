"""PowerSGD as an Optax transformation: local gradients in, one low-rank mean out.

Small equal leaves become one array first, with an axis in front that counts them. Each array costs
some dozens of operations, which XLA compiles one by one and a GPU launches one by one: 300 layers
of width 64 compile for half a minute. A group costs what one leaf does, but for a copy into it and
one out of it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcomp._base.checks import (
    check_axis_name,
    check_flag,
    check_function,
    check_int,
    check_number,
    check_static_number,
)
from jaxcomp._base.leaves import (
    FACTOR_DTYPES,
    RESIDUAL_DTYPES,
    alike,
    checked_dtype,
    compute_dtype,
    is_floating,
    is_masked,
)
from jaxcomp._base.typing import Array, AxisName, DType, MatrixDimsFn, PyTree, RankFn
from jaxcomp._lowrank.matrices import LeafPlan, MatrixView, unsent
from jaxcomp._mesh.collectives import from_step, other_axes, owner_id
from jaxcomp._mesh.per_replica import no_owner
from jaxcomp._reducers.low_rank import (
    LowRank,
    compressed_views,
    count_bytes,
    exact_average,
    low_rank_average,
)
from jaxcomp._reducers.reducer import Reducer, Reduction
from jaxcomp._reducers.transformation import shows_its_call

# A leaf of at most so many values is copied faster than the operations that it saves are launched.
_SMALL = 1 << 16
# Of all groups together: their copies of gradients, residuals and outputs are 16 MB each.
_MOST_VALUES = 1 << 22
# XLA takes 32 leaves at once out of a group. From a longer one each is a kernel of its own on a
# GPU, and temporary memory is twice as much (200 layers, rank 4, jaxlib 0.10.2).
_MOST_LEAVES = 32


class PowerSGDState(NamedTuple):
    """State of `powersgd`; a checkpoint holds one, consolidated, for any number of replicas."""

    # int32 scalar: finite updates seen; replicated
    count: Array  # pyright: ignore[reportIncompatibleMethodOverride]
    residual: PyTree  # compressed leaf: what was not sent yet, shape of the leaf; per replica
    q: PyTree  # compressed leaf: (*batch, cols, r) mean right factor, float32 or wider; replicated
    # float32 scalar: whose the residual is, 0 for everybody's; per replica
    owner: Any = np.zeros((), np.float32)

    # Read by `_mesh/per_replica.py` alone. Not a field: it has no annotation.
    per_replica = ("residual", "owner")


@shows_its_call
def powersgd(
    rank: int | RankFn = 1,
    *,
    axis_name: AxisName,
    start_step: int = 1_000,
    min_compression_rate: float = 2.0,
    error_feedback: bool = True,
    warm_start: bool = True,
    eps: float = 0.0,
    seed: int = 0,
    comm_dtype: DType | None = None,
    residual_dtype: DType | None = None,
    matrix_dims: MatrixDimsFn | None = None,
) -> Reducer:
    r"""Low-rank gradient averaging with error feedback; the first link of an `optax.chain`.

    For a leaf seen as a ``(rows, cols)`` matrix, with local gradient :math:`G_w`, residual
    :math:`E_w` and warm-started right factor :math:`Q` on each of :math:`W` replicas:

    .. math::
        M_w &= G_w + E_w \\
        P &= \mathrm{orthogonalize}\Big(\sum_w M_w\, \mathrm{orthogonalize}(Q)\Big)
            && \text{(first all-reduce)} \\
        Q_w &= M_w^\top P, \qquad Q = \tfrac{1}{W} \sum_w Q_w && \text{(second all-reduce)} \\
        \text{output} &= P Q^\top, \qquad E_w = M_w - P Q_w^\top

    These are Algorithms 1 and 2 of Vogels et al. (2019) as torch's hook runs them, with an
    orthonormal :math:`Q` first, and with one change: the residual subtracts the replica's *own*
    factor :math:`Q_w`, as it was sent, where torch's hook subtracts the mean. Outputs depend on the
    residuals through their mean only, so they equal torch's; but torch's residual grows like the
    square root of the step count, and this one stays bounded.

    Leaves that are not compressed ride along in the first all-reduce, so a step takes two
    all-reduces, whatever the number of leaves. With integers on the wire each of the two becomes an
    all-to-all and an all-gather, as in `quantized_allreduce`: columns of the factors in blocks of
    at most 128 integers with a scale, the other leaves unrounded, sums in float32.

    If a gradient is not finite on one replica or more, all outputs are NaN on every replica and the
    state stays as it was, bit for bit. Wrap what comes *after* this transformation in
    `optax.apply_if_finite`; around it, replicas would disagree on whether to communicate.

    Args:
      rank: Columns of the factors, or a function of (key path, leaf) that returns them; None from
        the function leaves that leaf uncompressed.
      axis_name: The mapped axis (or axes) along which the replicas lie.
      start_step: So many finite updates are plain all-reduces first. Begin with 10% of the steps.
      min_compression_rate: A leaf is compressed iff
        ``(rows + cols) * r * min_compression_rate < rows * cols``, ``r = min(rows, cols, rank)``.
      error_feedback: Keep what was not sent and add it to the next gradient.
      warm_start: Start each power iteration from the last right factor. If False, a fresh one is
        drawn every step, the same on every replica.
      eps: torch's ``orthogonalization_epsilon``, in Gram-Schmidt (ranks 1 and 2) as in torch. Not
        needed here: zero columns are safe with 0.
      seed: Seeds the first (or with ``warm_start=False`` every) right factor.
      comm_dtype: What goes on the wire: bfloat16, float16 or float32; None for float32 (or wider,
        where a gradient is). int8 and ``"int6"`` (four integers in three bytes) are for the
        factors only: leaves that are not compressed, which have no residual to keep a rounding, go
        in their own dtype, and the all-reduces before `start_step` as with None. The state is the
        same for all of them.
      residual_dtype: How the residual is stored; bfloat16 halves its memory. None for float32.
      matrix_dims: A function of (key path, leaf) that returns `MatrixDims`, or None for a leaf that
        shall not be compressed; by default the axes are split into a leading and a trailing block
        with the fewest rows + columns. `stacked` makes such a function for scanned layers: each
        of them is compressed by itself. Return
        ``jaxcomp.extend.default_matrix_dims(path, leaf)`` for every leaf that shall be split as by
        default.

    Returns:
      A transformation from local gradients to outputs in the gradients' dtypes, equal on every
      replica. Its state is a `PowerSGDState`.

    Raises:
      ValueError: If an argument is unusable; at tracing time, if the axis is not bound, a gradient
        is not floating or was already reduced, or the state belongs to other leaves or ranks.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomp, optax
      >>> tx = optax.chain(jaxcomp.powersgd(rank=2, axis_name="data", start_step=0), optax.sgd(0.1))
      >>> params = {"w": jnp.zeros((32, 16))}
      >>> grads = {"w": jax.random.normal(jax.random.key(0), (4, 32, 16))}  # four replicas
      >>> updates, _ = jax.vmap(tx.update, in_axes=(0, None), axis_name="data")(
      ...     grads, tx.init(params))
      >>> updates["w"].shape, int(jnp.linalg.matrix_rank(updates["w"][0]))
      ((4, 32, 16), 2)

    References:
      Vogels, Karimireddy, Jaggi: PowerSGD: Practical Low-Rank Gradient Compression for Distributed
      Optimization. NeurIPS 2019.
    """
    options = LowRank(
        rank=rank if callable(rank) else check_int("rank", rank, 1),
        axis_name=check_axis_name(axis_name),
        start_step=check_int("start_step", start_step, 0),
        min_compression_rate=check_static_number("min_compression_rate", min_compression_rate, 0),
        error_feedback=check_flag("error_feedback", error_feedback),
        warm_start=check_flag("warm_start", warm_start),
        eps=check_number("eps", eps, 0),
        seed=seed if hasattr(seed, "aval") else check_int("seed", seed, 0),
        comm_dtype=checked_dtype("comm_dtype", comm_dtype, FACTOR_DTYPES),
        residual_dtype=checked_dtype("residual_dtype", residual_dtype, RESIDUAL_DTYPES),
        matrix_dims=check_function("matrix_dims", matrix_dims),
    )

    def init(params: PyTree) -> PowerSGDState:
        q = [optax.MaskedNode()] * len(jax.tree.leaves(params))
        if options.warm_start:
            q = options.random_factors(options.plan(params), 0)
        return PowerSGDState(
            count=jnp.zeros([], jnp.int32),
            residual=options.first_residual(params),
            q=jax.tree.structure(params).unflatten(q),
            owner=no_owner(axis_name),
        )

    return Reducer(
        init,
        functools.partial(powersgd_step, options),
        axis_name,
        count_bytes=functools.partial(count_bytes, options),
        keeps_residual=options.error_feedback,
    )


def powersgd_step(
    options: LowRank,
    updates: PyTree,
    state: PowerSGDState,
    params: PyTree | None = None,
    *,
    like: PyTree | None = None,
    **extra_args: Any,
) -> Reduction:
    """Makes one update, of which the docstring of `powersgd` has the equations.

    Trees are taken apart into groups of leaves, and put together again. Whatever comes out of a
    conditional is copied: so only factors and outputs do; the sums of gradient and residual go into
    it, and the residual stays outside and is updated in place.

    Args:
      options: The reducer's arguments.
      updates: This replica's gradients.
      state: This replica's state.
      params: Not used, as of other Optax transformations.
      like: What has the dtypes that outputs take; None for those of the gradients.
      **extra_args: Not used either.
    """
    del params, extra_args
    leaves, treedef = jax.tree.flatten(updates)
    old_residual = treedef.flatten_up_to(state.residual)
    old_q = treedef.flatten_up_to(state.q)
    of_leaves = options.plan(updates if like is None else like)
    q = old_q
    if not options.warm_start:
        q = options.random_factors(of_leaves, state.count)
    groups = grouped(of_leaves)
    plans = groups.plans
    gradients = together(groups, leaves)
    residual = together(groups, old_residual)
    starts = together(groups, q)

    started = state.count >= options.start_step
    totals = []
    for i, start in enumerate(starts):
        dtype = compute_dtype(gradients[i].dtype)
        totals.append(gradients[i].astype(dtype))
        starts[i] = start.astype(dtype)
    for i, old in enumerate(residual):
        old = old.astype(totals[i].dtype)
        if options.start_step:
            old = jnp.where(started, old, 0)
        totals[i] += old
    arguments = (options, plans, gradients, totals, starts)
    average = from_step(
        state.count,
        options.start_step,
        functools.partial(exact_average, *arguments),
        functools.partial(low_rank_average, *arguments),
    )
    commit = average.finite
    if options.start_step:
        # With `started` in it XLA keeps a copy of the gradients: not where every step compresses.
        commit = average.finite & started
    q = jax.tree.map(functools.partial(jnp.where, commit), average.q, starts)
    views = compressed_views(plans)
    for i, old in enumerate(residual):
        factors = average.p[i], average.q[i], average.q_sent[i]
        residual[i] = unsent(views[i], plans[i].dtype, *factors, totals[i], old, commit)

    new_q = treedef.unflatten(apart(groups, q, old_q))
    new = PowerSGDState(
        count=jnp.where(average.finite, optax.safe_increment(state.count), state.count),
        residual=treedef.unflatten(apart(groups, residual, old_residual)),
        q=optax.tree.cast_like(new_q, state.q),
        owner=jnp.where(commit, owner_id(options.axis_name), state.owner),
    )
    means = treedef.unflatten(apart(groups, average.means, leaves))
    sent = treedef.unflatten(apart(groups, average.sent, leaves))
    return Reduction(means, new, sent, average.finite)


class Groups(NamedTuple):
    """Leaves as arrays: first those that are compressed, then those that are not."""

    positions: list[tuple[int, ...]]  # of the leaves in each array
    plans: list[LeafPlan]  # of each array


def grouped(plans: Sequence[LeafPlan]) -> Groups:
    """Groups floating leaves: small equal ones that are compressed, up to `_MOST_VALUES`."""
    # A leaf may be sharded along an axis that is left to the compiler: a group would gather it.
    largest = _SMALL
    if other_axes():
        largest = -1
    kinds: list[Any] = []
    for i, plan in enumerate(plans):
        kind = None
        if plan.view is not None and plan.size <= largest:
            kind = dataclasses.replace(plan, path="")
        elif is_floating(plan):
            kind = i
        kinds.append(kind)
    groups = []
    values = 0
    for equal in sorted(alike(kinds), key=lambda equal: plans[equal[0]].size):
        if len(equal) > 1:
            values += len(equal) * plans[equal[0]].size
        most = _MOST_LEAVES
        if values > _MOST_VALUES:
            most = 1
        for start in range(0, len(equal), most):
            groups.append(tuple(equal[start : start + most]))
    groups.sort(key=lambda group: (plans[group[0]].view is None, group))
    return Groups(groups, [_of_group(plans[group[0]], len(group)) for group in groups])


def _of_group(plan: LeafPlan, number: int) -> LeafPlan:
    """Returns the plan of so many leaves as one array, each of which has this plan."""
    if number == 1 or plan.view is None:
        return plan
    shape = (number, *plan.shape)
    view = MatrixView(shape, plan.view.dims.behind_an_axis(), is_group=True)
    return dataclasses.replace(plan, shape=shape, view=view)


def together(groups: Groups, leaves: Sequence[Any]) -> list[Array]:
    """Makes the array of each group of all leaves; none of leaves that a state does not have."""
    arrays = []
    for positions in _present(groups, leaves):
        array = leaves[positions[0]]
        if len(positions) > 1:
            array = jnp.stack([leaves[i] for i in positions])
        arrays.append(array)
    return arrays


def apart(groups: Groups, arrays: Sequence[Array], leaves: Sequence[Any]) -> list[Any]:
    """Returns all leaves, those of the groups out of their arrays and the others as they are."""
    result = list(leaves)
    for positions, array in zip(_present(groups, leaves), arrays, strict=False):
        if len(positions) == 1:
            result[positions[0]] = array
            continue
        for place, i in enumerate(positions):
            result[i] = array[place]
    return result


def _present(groups: Groups, leaves: Sequence[Any]) -> list[tuple[int, ...]]:
    """Returns the positions of the groups that there are leaves of."""
    return [x for x in groups.positions if not is_masked(leaves[x[0]])]
