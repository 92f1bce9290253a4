"""PowerSGD as an Optax transformation: local gradients in, one low-rank mean out.

`powersgd` checks the arguments and holds the equations. `powersgd_step` is one update of one
replica on trees, and `_step_of_groups` its arithmetic on arrays; `low_rank.py` beside it has the
two averages, exact and low-rank. The arithmetic never looks at single leaves: small leaves of equal
shape are first stacked to one array, a group, and the results are taken apart at the end.

The reason is the number of operations. For each array there are dozens, which XLA compiles and a
GPU launches one by one: 300 layers of width 64 take half a minute to compile. A group costs as much
as one leaf, plus one copy in and one copy out.
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
    check_dims,
    check_flag,
    check_int,
    check_number,
    check_rank,
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
from jaxcomp._mesh.collectives import (
    axis_size,
    branch_at_step,
    local_if_bound,
    owner_id,
    unmapped_axes,
)
from jaxcomp._mesh.per_replica import no_owner
from jaxcomp._reducers.low_rank import (
    Average,
    PowerSGDOptions,
    compressed_views,
    count_bytes,
    low_rank_average,
    uncompressed_average,
)
from jaxcomp._reducers.reducer import Reducer, Reduction
from jaxcomp._reducers.transformation import shows_its_call

# Up to this number of values, copying a leaf is faster than launching operations for it alone.
_SMALL = 1 << 16
# Limit for all groups together: their copies of gradients, residuals and outputs take 16 MB each.
_MOST_VALUES = 1 << 22
# XLA copies 32 leaves out of a group in one kernel. A longer group takes one kernel for each leaf
# on a GPU, and twice as much temporary memory (200 layers, rank 4, jaxlib 0.10.2).
_MOST_LEAVES = 32


class PowerSGDState(NamedTuple):
    """Holds the state of `powersgd`; consolidated in a checkpoint, for any number of replicas."""

    # int32 scalar: finite updates seen; replicated
    count: Array  # pyright: ignore[reportIncompatibleMethodOverride]
    residual: PyTree  # compressed leaf: the part not sent yet, shape of the leaf; per replica
    q: PyTree  # compressed leaf: (*batch, cols, r) mean right factor, float32 or wider; replicated
    # float32 scalar: id of the replica that owns the residual, 0 if all share it; per replica
    # A NumPy scalar, because a JAX array would start JAX's backends at import.
    owner: Any = np.zeros((), np.float32)

    # Read only by `_mesh/per_replica.py`. It is not a field, because it has no annotation.
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
    r"""Averages gradients at low rank with error feedback; the first link of an `optax.chain`.

    For a leaf seen as a ``(rows, cols)`` matrix, with local gradient :math:`G_w`, residual
    :math:`E_w` and warm-started right factor :math:`Q` on each of :math:`W` replicas:

    .. math::
        M_w &= G_w + E_w \\
        P &= \mathrm{orthogonalize}\Big(\sum_w M_w\, \mathrm{orthogonalize}(Q)\Big)
            && \text{(first all-reduce)} \\
        Q_w &= M_w^\top P, \qquad Q = \tfrac{1}{W} \sum_w Q_w && \text{(second all-reduce)} \\
        \text{output} &= P Q^\top, \qquad E_w = M_w - P Q_w^\top

    These are Algorithms 1 and 2 of Vogels et al. (2019), as in torch's hook, which first
    orthogonalises :math:`Q`. There is one change: the residual subtracts :math:`P Q_w^\top` with
    the replica's *own* factor as sent, where torch's hook subtracts the mean. The mean of the
    residuals is the same, and outputs depend on that mean only, so they equal torch's. But torch's
    residual grows like the square root of the step count, and this residual stays bounded.

    Uncompressed leaves are sent in the first all-reduce too, so a step takes two all-reduces,
    whatever the number of leaves. With integers on the wire each all-reduce becomes an all-to-all
    and an all-gather, as in `quantized_allreduce`. The factors' columns are then sent in blocks of
    at most 128 integers with one scale, uncompressed leaves are not rounded, and sums are in
    float32.

    If a gradient is not finite on any replica, all outputs are NaN on every replica and the state
    stays as it was, bit for bit. Put `optax.apply_if_finite` around the transformations *after*
    this one. Around this one, replicas would disagree on whether to communicate.

    Args:
      rank: Number of columns of the factors, or a function of (key path, leaf) that returns it. If
        the function returns None, the leaf is not compressed.
      axis_name: The mapped axis (or axes) along which the replicas lie.
      start_step: Number of finite updates that are first averaged exactly, in an all-reduce. 0
        compresses from the first step on, which sends the fewest bytes; the default is torch's.
      min_compression_rate: A leaf is compressed iff
        ``(rows + cols) * r * min_compression_rate < rows * cols``, ``r = min(rows, cols, rank)``.
      error_feedback: Keep a residual, the part that was not sent, and add it to the next gradient.
      warm_start: Start each power iteration from the last right factor. If False, a random factor
        is drawn in every step, equal on every replica.
      eps: torch's ``orthogonalization_epsilon``, used as in torch, in Gram-Schmidt (ranks 1 and 2).
        It is not needed here: with 0, zero columns are safe too.
      seed: Seed of the first right factor (with ``warm_start=False``, of every right factor).
      comm_dtype: The dtype on the wire: bfloat16, float16 or float32; None for float32 (or wider,
        if a gradient is wider). int8 and ``"int6"`` (four integers in three bytes) apply to factors
        only. Uncompressed leaves have no residual to keep a rounding, so they are then sent in
        their dtypes; the all-reduces before `start_step` are as with None. The state does not
        depend on this argument.
      residual_dtype: The dtype of the residual: bfloat16 halves its memory; None for float32 or
        wider.
      matrix_dims: A function of (key path, leaf) that returns `MatrixDims`, or None for a leaf that
        shall not be compressed. By default the axes are split into a leading and a trailing block
        with the fewest rows + columns; ``jaxcomp.extend.default_matrix_dims(path, leaf)`` returns
        this default. `stacked` makes a function for scanned layers, which compresses each layer
        separately.

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
    # `optax.inject_hyperparams` passes arguments that it may change, `eps` and `seed`, as arrays.
    in_array = isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jnp.integer)
    if not in_array or np.ndim(seed):
        seed = check_int("seed", seed, 0, 2**63)
    options = PowerSGDOptions(
        rank=check_rank(rank),
        axis_name=axis_name,
        start_step=check_int("start_step", start_step, 0),
        min_compression_rate=check_static_number("min_compression_rate", min_compression_rate, 0),
        error_feedback=check_flag("error_feedback", error_feedback),
        warm_start=check_flag("warm_start", warm_start),
        eps=check_number("eps", eps, 0),
        seed=seed,
        comm_dtype=checked_dtype("comm_dtype", comm_dtype, FACTOR_DTYPES),
        residual_dtype=checked_dtype("residual_dtype", residual_dtype, RESIDUAL_DTYPES),
        matrix_dims=check_dims(matrix_dims),
    )

    def init(params: PyTree) -> PowerSGDState:
        leaves, treedef = jax.tree.flatten(params)
        plans = options.plan(params)
        residual: list[Any] = [optax.MaskedNode()] * len(plans)
        for i, plan in enumerate(plans):
            if plan.view is not None and options.error_feedback:
                dtype = options.residual_dtype or compute_dtype(plan.dtype)
                # Not jnp.zeros: a residual is sharded over other mesh axes as its leaf is.
                residual[i] = jnp.zeros_like(leaves[i], dtype=dtype)
        # Without a warm start no factor outlives its step, so the state holds none.
        q = [optax.MaskedNode()] * len(plans)
        if options.warm_start:
            q = options.random_factors(plans, 0)
        return PowerSGDState(
            count=jnp.zeros([], jnp.int32),
            residual=local_if_bound(treedef.unflatten(residual), axis_name),
            q=treedef.unflatten(q),
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
    options: PowerSGDOptions,
    updates: PyTree,
    state: PowerSGDState,
    params: PyTree | None = None,
    *,
    like: PyTree | None = None,
    **extra_args: Any,
) -> Reduction:
    """Makes one update: stacks leaves to groups, takes the step, and unstacks the results.

    Args:
      options: The reducer's arguments.
      updates: This replica's gradients.
      state: This replica's state.
      params: Not used.
      like: A tree with the dtypes of the outputs; None for the dtypes of the gradients.
      **extra_args: Not used.
    """
    del params, extra_args
    leaves, treedef = jax.tree.flatten(updates)
    residual = treedef.flatten_up_to(state.residual)
    q = treedef.flatten_up_to(state.q)
    # Weighted gradients are float32, and the dtype of a plan is that of the output.
    plans = options.plan(updates if like is None else like)
    starts = q
    if not options.warm_start:
        starts = options.random_factors(plans, state.count)
    groups = Groups.of(plans)
    step = _step_of_groups(
        options,
        groups.plans,
        groups.stack(leaves),
        groups.stack(residual),
        groups.stack(starts),
        state.count,
    )
    average = step.average
    new_q = state.q  # without a warm start the state does not keep the factors
    if options.warm_start:
        new_q = treedef.unflatten(groups.unstack(step.q, q))
    new = PowerSGDState(
        count=jnp.where(average.finite, optax.safe_increment(state.count), state.count),
        residual=treedef.unflatten(groups.unstack(step.residual, residual)),
        q=optax.tree.cast_like(new_q, state.q),
        owner=jnp.where(step.commit, owner_id(options.axis_name), state.owner),
    )
    means = treedef.unflatten(groups.unstack(average.means, leaves))
    sent = treedef.unflatten(groups.unstack(average.sent, leaves))
    return Reduction(means, new, sent, average.finite)


class _Step(NamedTuple):
    """Holds the results of a step, in lists of groups."""

    average: Average
    residual: list[Array]
    q: list[Array]  # right factors for the next step
    commit: Array  # bool scalar: True if residual and factors are new


def _step_of_groups(
    options: PowerSGDOptions,
    plans: list[LeafPlan],
    gradients: list[Array],
    residual: list[Array],
    starts: list[Array],
    count: Array,
) -> _Step:
    """Takes the step of which the docstring of `powersgd` has the equations.

    With ``start_step > 0`` the average is a conditional. XLA copies each result of a conditional,
    so it does not return the residual, which is updated in place after it.

    Args:
      options: The reducer's arguments.
      plans: The plan of each gradient. Compressed gradients come first, so a position is the same
        in all lists.
      gradients: This replica's gradients.
      residual: What was not sent yet of the compressed gradients; empty without error feedback.
      starts: The right factors that the power iteration starts from.
      count: The number of earlier updates.
    """
    started = count >= options.start_step
    totals = []
    factors = []
    for gradient, start in zip(gradients, starts, strict=False):  # uncompressed gradients follow
        dtype = compute_dtype(gradient.dtype)
        totals.append(gradient.astype(dtype))
        factors.append(start.astype(dtype))
    for i, old in enumerate(residual):
        old = old.astype(totals[i].dtype)
        if options.start_step:
            # Exact steps keep the residual, so they must not send it. It is zero then, except one
            # that `adapt_state` has brought from an earlier run.
            old = jnp.where(started, old, 0)
        totals[i] += old
    arguments = (options, plans, gradients, totals, factors)
    average = branch_at_step(
        count,
        options.start_step,
        functools.partial(uncompressed_average, *arguments),
        functools.partial(low_rank_average, *arguments),
    )
    commit = average.finite
    if options.start_step:
        # `started` makes XLA keep a copy of the gradients, so leave it out if every step
        # compresses.
        commit = average.finite & started
    views = compressed_views(plans)
    replicas = axis_size(options.axis_name)
    unsent_parts = []
    for i, old in enumerate(residual):
        new = unsent(
            views[i],
            plans[i].dtype,
            p=average.p[i],
            q=average.q[i],
            q_sent=average.q_sent[i],
            total=totals[i],
            old=old,
            commit=commit,
            replicas=replicas,
        )
        unsent_parts.append(new)
    q = jax.tree.map(functools.partial(jnp.where, commit), average.q, factors)
    return _Step(average, unsent_parts, q, commit)


class Groups(NamedTuple):
    """Groups of leaves, each stacked to one array; compressed leaves come first."""

    positions: list[tuple[int, ...]]  # positions of the leaves of each group
    plans: list[LeafPlan]  # plan of each group

    @classmethod
    def of(cls, plans: Sequence[LeafPlan]) -> Groups:
        """Groups floating leaves: small compressed leaves of equal shape together, others alone."""
        # No groups on a mesh with unmapped axes: stacking would gather a leaf that is sharded over
        # them.
        largest = _SMALL
        if unmapped_axes():
            largest = 0
        kinds: list[Any] = []
        for i, plan in enumerate(plans):
            kind = None
            if plan.view is not None and plan.size <= largest:
                kind = dataclasses.replace(plan, path="")  # equal but for the name
            elif is_floating(plan):
                kind = i
            kinds.append(kind)
        groups = []
        values = 0
        # The smallest leaves first, because they gain most from a group; those that come after the
        # limit is passed stay alone.
        for equal in sorted(alike(kinds), key=lambda equal: plans[equal[0]].size):
            if len(equal) > 1:
                values += len(equal) * plans[equal[0]].size
            most = _MOST_LEAVES
            if values > _MOST_VALUES:
                most = 1
            for start in range(0, len(equal), most):
                groups.append(tuple(equal[start : start + most]))
        # Compressed gradients first, as the averages expect them.
        groups.sort(key=lambda group: (plans[group[0]].view is None, group))
        of_groups = []
        for group in groups:
            plan = plans[group[0]]
            if len(group) > 1 and plan.view is not None:
                shape = (len(group), *plan.shape)
                view = MatrixView(shape, plan.view.dims.behind_an_axis(), is_group=True)
                plan = dataclasses.replace(plan, shape=shape, view=view)
            of_groups.append(plan)
        return cls(groups, of_groups)

    def stack(self, leaves: Sequence[Any]) -> list[Array]:
        """Returns the array of each group of leaves, except groups whose leaves are masked."""
        arrays = []
        for positions in self.positions:
            array = leaves[positions[0]]
            if is_masked(array):
                continue
            if len(positions) > 1:
                array = jnp.stack([leaves[i] for i in positions])
            arrays.append(array)
        return arrays

    def unstack(self, arrays: Sequence[Array], leaves: Sequence[Any]) -> list[Any]:
        """Returns `leaves` with the leaves of the first groups taken from `arrays`; others stay."""
        result = list(leaves)
        # Residuals and factors have an array for each compressed group, and these come first.
        for positions, array in zip(self.positions, arrays, strict=False):
            if len(positions) == 1:
                result[positions[0]] = array
                continue
            for place, i in enumerate(positions):
                result[i] = array[place]
        return result
