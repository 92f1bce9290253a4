"""PowerSGD as an Optax transformation: local gradients in, one low-rank mean out.

The step reads from top to bottom in `_compressed_step`: add the residual, left factors, one
all-reduce, orthogonalise, right factors, one all-reduce, rebuild, keep what was not sent.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomp._checks import (
    check_axis_name,
    check_flag,
    check_function,
    check_int,
    check_number,
    check_static_number,
)
from jaxcomp._collectives import as_local, axis_size, is_bound, reduce_mean
from jaxcomp._dtypes import checked_dtype, checked_residual_dtype, compute_dtype, widest
from jaxcomp._factors import outer, times_q, transposed_times_p
from jaxcomp._fit import Field, fitted
from jaxcomp._gradients import reducible, replaced
from jaxcomp._matricize import LeafPlan, MatrixView, plan_leaves
from jaxcomp._orthogonalize import map_by_shape, orthogonalize
from jaxcomp._reducers import hand_over
from jaxcomp._reduction import (
    Reducer,
    Reduction,
    all_finite,
    averaged_first,
    check_reduce_first,
)
from jaxcomp._typing import Array, AxisName, DType, MatrixDimsFn, PyTree, RankFn, Schedule


class PowerSGDState(NamedTuple):
    """State of `powersgd`; a checkpoint holds one, consolidated, for any number of replicas."""

    # int32 scalar: finite updates seen; replicated
    count: Array  # pyright: ignore[reportIncompatibleMethodOverride]
    residual: PyTree  # compressed leaf: what was not sent yet, shape of the leaf; per replica
    q: PyTree  # compressed leaf: (*batch, cols, r) mean right factor, float32; replicated

    # Read by consolidate, state_specs and shard_state. Not a field: it has no annotation.
    per_replica = ("residual",)


@dataclasses.dataclass(frozen=True)
class _Options:
    """Checked arguments of `powersgd`."""

    rank: int | RankFn
    axis_name: AxisName
    start_step: int
    min_compression_rate: float
    error_feedback: bool
    warm_start: bool
    eps: Any
    seed: Any
    comm_dtype: Any
    residual_dtype: Any
    matrix_dims: MatrixDimsFn | None
    error_decay: Any
    feedback_every: int
    reduce_first: AxisName | None

    def plan(self, tree: PyTree) -> list[LeafPlan]:
        return plan_leaves(tree, self.rank, self.min_compression_rate, self.matrix_dims)

    def wire_dtype(self, leaves: list[Array]) -> Any:
        if self.comm_dtype is not None:
            return self.comm_dtype
        return widest(leaf.dtype for leaf in leaves)


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
    error_decay: float | Schedule = 1.0,
    feedback_every: int = 1,
    reduce_first: AxisName | None = None,
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

    These are Algorithms 1 and 2 of Vogels et al. (2019), with one change: the residual subtracts
    the replica's *own* factor :math:`Q_w`, as it was sent, where torch's hook subtracts the mean.
    Outputs depend on the residuals through their mean only, so they equal torch's; but torch's
    residual grows like the square root of the step count, and this one stays bounded.

    Leaves that are not compressed ride along in the first all-reduce, so a step takes two
    all-reduces, whatever the number of leaves.

    If a gradient is not finite on any replica, all outputs are NaN on every replica and the state
    stays as it was, bit for bit. Wrap what comes *after* this transformation in
    `optax.apply_if_finite`; around it, replicas would disagree on whether to communicate.

    Args:
      rank: Columns of the factors, or a function of (key path, leaf) that returns them; None from
        the function leaves that leaf uncompressed.
      axis_name: The mapped axis (or axes) along which the replicas lie.
      start_step: Updates before this one are plain all-reduces. Begin with 10% of the steps.
      min_compression_rate: A leaf is compressed iff
        ``(rows + cols) * r * min_compression_rate < rows * cols``, ``r = min(rows, cols, rank)``.
      error_feedback: Keep what was not sent and add it to the next gradient.
      warm_start: Start each power iteration from the last right factor. If False, a fresh one is
        drawn every step, the same on every replica.
      eps: torch's ``orthogonalization_epsilon``, in Gram-Schmidt (ranks 1 and 2) as in torch. Not
        needed here: zero columns are safe with 0.
      seed: Seeds the first (or with ``warm_start=False`` every) right factor.
      comm_dtype: What goes on the wire: bfloat16, float16 or float32; None for float32 (or wider,
        where a gradient is).
      residual_dtype: How the residual is stored; bfloat16 halves its memory. None for float32.
      matrix_dims: A function of (key path, leaf) that returns `MatrixDims`, or None for a leaf that
        shall not be compressed; by default the axes are split into a leading and a trailing block
        with the fewest rows + columns. Give batch axes to compress stacked layers one by one.
      error_decay: Scales the residual as it is added back: a number in [0, 1] or an Optax schedule
        of the update count.
      feedback_every: Add the residual back every so many updates only; it accumulates in between.
      reduce_first: A fast axis (or axes) over which gradients are averaged exactly beforehand, so
        that only the slow `axis_name` carries compressed traffic. Residuals are then equal along
        the fast axis; give only the slow one to `state_specs`, `shard_state` and `consolidate`.

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
    check_axis_name(axis_name)
    check_reduce_first(reduce_first, axis_name)
    options = _Options(
        rank=rank if callable(rank) else check_int("rank", rank, 1),
        axis_name=axis_name,
        start_step=check_int("start_step", start_step, 0),
        min_compression_rate=check_static_number("min_compression_rate", min_compression_rate, 0),
        error_feedback=check_flag("error_feedback", error_feedback),
        warm_start=check_flag("warm_start", warm_start),
        eps=check_number("eps", eps, 0),
        seed=seed if hasattr(seed, "aval") else check_int("seed", seed, 0),
        comm_dtype=checked_dtype("comm_dtype", comm_dtype),
        residual_dtype=checked_residual_dtype(residual_dtype),
        matrix_dims=check_function("matrix_dims", matrix_dims),
        error_decay=error_decay
        if callable(error_decay)
        else check_number("error_decay", error_decay, 0, 1),
        feedback_every=check_int("feedback_every", feedback_every, 1),
        reduce_first=reduce_first,
    )

    def init(params: PyTree) -> PowerSGDState:
        return _init(options, params)

    def update(
        updates: PyTree, state: PowerSGDState, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, PowerSGDState]:
        del params, extra_args
        result = _reduce(options, updates, state, want_sent=False)
        return result.updates, result.state

    def reduce(
        updates: PyTree, state: PowerSGDState, params: PyTree | None = None, **extra_args: Any
    ) -> Reduction:
        del params, extra_args
        return _reduce(options, updates, state, want_sent=True)

    return Reducer(init, reduce, axis_name, update=update)


def _init(options: _Options, params: PyTree) -> PowerSGDState:
    leaves, treedef = jax.tree.flatten(params)
    residual: list[Any] = [optax.MaskedNode()] * len(leaves)
    q: list[Any] = [optax.MaskedNode()] * len(leaves)
    for i, (leaf, plan) in enumerate(zip(leaves, options.plan(params), strict=True)):
        if plan.view is None:
            continue
        if options.error_feedback:
            dtype = options.residual_dtype or compute_dtype(plan.dtype)
            residual[i] = jnp.zeros_like(leaf, dtype=dtype)
        if options.warm_start:
            q[i] = _random_q(options, plan, i, 0)
    state = PowerSGDState(
        jnp.zeros([], jnp.int32), treedef.unflatten(residual), treedef.unflatten(q)
    )
    if is_bound(options.axis_name):
        # init() called inside the mapped function: under check_vma a scan can then carry the state.
        state = state._replace(residual=as_local(state.residual, options.axis_name))
    return state


def _random_q(options: _Options, plan: LeafPlan, index: int, count: Array | int) -> Array:
    # Threefry whatever jax_default_prng_impl says: others differ between the lanes of a vmap.
    key = jax.random.key(options.seed, impl="threefry2x32")
    key = jax.random.fold_in(jax.random.fold_in(key, index), count)
    return jax.random.normal(key, plan.q_shape, compute_dtype(plan.dtype))


def _reduce(options: _Options, updates: PyTree, state: PowerSGDState, want_sent: bool) -> Reduction:
    updates = averaged_first(updates, options.reduce_first)
    leaves, treedef = jax.tree.flatten(updates)
    positions = reducible(updates, options.axis_name)
    plans = options.plan(updates)
    residual, q = _fitted_state(options, plans, updates, state)
    step = _Step(
        options,
        [i for i in positions if plans[i].view is not None],
        [i for i in positions if plans[i].view is None],
        plans,
        options.wire_dtype([leaves[i] for i in positions]),
        want_sent,
    )
    result = hand_over(
        state.count,
        options.start_step,
        lambda: step.plain(leaves, residual, q),
        lambda: step.compressed(leaves, residual, q, state.count),
    )
    count = jnp.where(result.finite, optax.safe_increment(state.count), state.count)
    outputs = replaced(leaves, step.chosen + step.dense, result.outputs)
    sent = replaced(leaves, step.chosen + step.dense, result.sent) if want_sent else leaves
    return Reduction(
        treedef.unflatten(outputs),
        PowerSGDState(count, treedef.unflatten(result.residual), treedef.unflatten(result.q)),
        treedef.unflatten(sent),
        result.finite,
    )


class _Result(NamedTuple):
    outputs: list[Array]  # of the compressed leaves, then of the others
    residual: list[Any]  # of every leaf
    q: list[Any]  # of every leaf
    finite: Array  # bool scalar
    sent: list[Array]  # like outputs: this replica's own part of them; empty unless wanted


@dataclasses.dataclass(frozen=True)
class _Step:
    """One update of a given tree: which leaves take which way."""

    options: _Options
    chosen: list[int]  # positions of the compressed leaves
    dense: list[int]  # positions of the leaves that are averaged as they are
    plans: list[LeafPlan]
    wire: Any
    want_sent: bool

    def plain(self, leaves: list[Array], residual: list[Any], q: list[Any]) -> _Result:
        """The update before `start_step`: one all-reduce, no state touched."""
        parts = [leaves[i] for i in self.chosen + self.dense]
        reduced = reduce_mean(parts, self.options.axis_name, self.wire)
        sent = reduced.sent if self.want_sent else []
        means = [jnp.where(reduced.finite, x, jnp.nan) for x in reduced.means]
        return _Result(means, residual, q, reduced.finite, sent)

    def compressed(
        self, leaves: list[Array], residual: list[Any], q: list[Any], count: Array
    ) -> _Result:
        """The update from `start_step` on: two all-reduces."""
        axis_name, eps = self.options.axis_name, self.options.eps
        views = [_view(self.plans[i]) for i in self.chosen]
        added, kept = self._feedback(count)
        matrices = [self._matrix(i, leaves[i], residual[i], added) for i in self.chosen]

        starts = [
            q[i] if self.options.warm_start else _random_q(self.options, self.plans[i], i, count)
            for i in self.chosen
        ]
        bases = map_by_shape(lambda x: orthogonalize(x, eps), starts)
        left = [times_q(v, m, b) for v, m, b in zip(views, matrices, bases, strict=True)]
        first = reduce_mean([*left, *(leaves[i] for i in self.dense)], axis_name, self.wire)

        # The mean stands in for torch's sum; dividing eps too leaves the quotient unchanged. Zeros
        # for what is not finite: no decomposition need be trusted with NaN.
        mean_left = [jnp.where(first.finite, x, 0) for x in first.means[: len(left)]]
        mean_eps = eps / axis_size(axis_name)
        p = map_by_shape(lambda x: orthogonalize(x, mean_eps), mean_left)
        right = [transposed_times_p(v, m, x) for v, m, x in zip(views, matrices, p, strict=True)]
        second = reduce_mean(right, axis_name, self.wire)

        outputs = [
            view.unmatricize(outer(view, x, mean)).astype(self.plans[i].dtype)
            for view, x, mean, i in zip(views, p, second.means, self.chosen, strict=True)
        ]
        # A float16 output can overflow where its factors did not.
        narrow = [x for x in outputs if x.dtype == jnp.float16]
        finite = first.finite & second.finite & all_finite(narrow)
        new_residual, new_q = list(residual), list(q)
        for k, i in enumerate(self.chosen):
            if self.options.warm_start:
                new_q[i] = jnp.where(finite, second.means[k], q[i])
            if self.options.error_feedback:
                lost = matrices[k] - outer(views[k], p[k], second.sent[k])
                lost = views[k].unmatricize(lost)
                if kept is not None:
                    lost = lost + kept.astype(lost.dtype) * residual[i].astype(lost.dtype)
                new_residual[i] = jnp.where(finite, lost.astype(residual[i].dtype), residual[i])
        outputs = [jnp.where(finite, x, jnp.nan) for x in [*outputs, *first.means[len(left) :]]]
        sent = []
        if self.want_sent:
            for k, i in enumerate(self.chosen):
                own = outer(views[k], p[k], second.sent[k])
                sent.append(views[k].unmatricize(own).astype(self.plans[i].dtype))
            sent += first.sent[len(left) :]
        return _Result(outputs, new_residual, new_q, finite, sent)

    def _matrix(self, i: int, gradient: Array, residual: Any, added: Any) -> Array:
        """Gradient plus what the residual adds, matricized, in the compute dtype."""
        value = gradient.astype(compute_dtype(gradient.dtype))
        if self.options.error_feedback:
            extra = residual.astype(value.dtype)
            value = value + (extra if added is None else jnp.asarray(added, value.dtype) * extra)
        return _view(self.plans[i]).matricize(value)

    def _feedback(self, count: Array) -> tuple[Any, Any]:
        """By what the residual is multiplied as it is added, and as it is kept; None: 1 and 0."""
        decay, every = self.options.error_decay, self.options.feedback_every
        added: Any = decay(count) if callable(decay) else decay
        if every > 1:
            due = (count + 1) % every == 0
            return jnp.where(due, added, 0.0), jnp.where(due, 0.0, 1.0)
        return (None if isinstance(added, (int, float)) and added == 1 else added), None


def _view(plan: LeafPlan) -> MatrixView:
    assert plan.view is not None
    return plan.view


def _fitted_state(
    options: _Options, plans: list[LeafPlan], updates: PyTree, state: PowerSGDState
) -> tuple[list[Any], list[Any]]:
    """The leaves of residual and q beside those of the gradients, residuals marked as local.

    Raises:
      ValueError: Listing every leaf whose state does not fit, with the fix.
    """
    if not (hasattr(state, "residual") and hasattr(state, "q")):
        raise ValueError(
            f"powersgd's update needs its own PowerSGDState, got {type(state).__name__}. Inside an "
            "optax.chain the chain's update takes the chain's state."
        )
    kept = [plan.shape if plan.view and options.error_feedback else None for plan in plans]
    factors = [plan.q_shape if plan.view and options.warm_start else None for plan in plans]
    residual, q = fitted(
        "PowerSGDState",
        updates,
        [Field("residual", state.residual, kept), Field("q", state.q, factors)],
        "Otherwise use the rank, matrix_dims and switches that the state was made with, or "
        "jaxcomp.adapt_state.",
    )
    return as_local(residual, options.axis_name), q
