"""Reducers of the convergence study that are not in the library: what was tried beside it.

Each is a `jaxcomp.Reducer` and composes with `jaxcomp.error_feedback`. `low_rank` is PowerSGD
without a residual, with two things that `jaxcomp.powersgd` does not have: factors as 4-bit integers
on the wire, and several power iterations in a step. `difference` and `whitened` change what such a
reducer is given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import jaxcomp
from benchmarks.convergence.int4 import Int4Layout
from jaxcomp.extend import (
    LeafPlan,
    MatrixView,
    axis_size,
    map_by_shape,
    mean_by_shares,
    open_step,
    orthogonalize,
    plan_leaves,
    reduce_mean,
)

Tree = Any
Array = jax.Array

_MIN_COMPRESSION_RATE = 2.0  # the library's default


class LowRankState(NamedTuple):
    """State of `low_rank`."""

    q: Tree  # compressed leaf: (*batch, cols, r) mean right factor, float32; replicated

    per_replica = ()


def low_rank(
    rank: Any, *, axis_name: str, wire: str = "float32", iterations: int = 1
) -> jaxcomp.Reducer:
    """The warm-started power iteration of `jaxcomp.powersgd`, without a residual.

    Args:
      rank: An int, or a function of (path, leaf), as for `jaxcomp.powersgd`.
      axis_name: The mapped axis of the replicas.
      wire: "float32" or "int4": how the factors and the uncompressed leaves travel.
      iterations: Power iterations in a step; each sends both factors.

    Returns:
      A reducer. Its state is a `LowRankState`.
    """

    def plans_of(tree: Tree) -> list[LeafPlan]:
        return plan_leaves(tree, rank, _MIN_COMPRESSION_RATE)

    def init(params: Tree) -> LowRankState:
        leaves, treedef = jax.tree.flatten(params)
        q: list[Any] = [optax.MaskedNode()] * len(leaves)
        for i, plan in enumerate(plans_of(params)):
            if plan.view is not None:
                q[i] = jax.random.normal(jax.random.key(i), plan.q_shape)
        return LowRankState(treedef.unflatten(q))

    def reduce(
        updates: Tree, state: LowRankState, params: Tree | None = None, **extra_args: Any
    ) -> jaxcomp.Reduction:
        del params, extra_args
        step = open_step(updates, axis_name)
        plans = plans_of(updates)
        leaves, plans = step.arrays, [plans[i] for i in step.positions]
        q = step.beside(state.q)
        chosen = [i for i, plan in enumerate(plans) if plan.view is not None]
        dense = [i for i, plan in enumerate(plans) if plan.view is None]
        matrices = [_matrix(plans[i], leaves[i]) for i in chosen]

        factors = own = p = [q[i] for i in chosen]
        flags, plain_means, plain_sent = [], [], []
        for k in range(iterations):
            bases = map_by_shape(orthogonalize, factors)
            left = [jnp.einsum("...ij,...jr->...ir", *x) for x in zip(matrices, bases, strict=True)]
            riding = [leaves[i] for i in dense] if k == 0 else []  # sent once, with the first
            means, sent, finite = _average([*left, *riding], len(left), axis_name, wire)
            plain_means += means[len(left) :]
            plain_sent += sent[len(left) :]
            flags.append(finite)
            p = map_by_shape(
                orthogonalize, [jnp.where(jnp.isfinite(x), x, 0) for x in means[: len(left)]]
            )
            right = [jnp.einsum("...ij,...ir->...jr", *x) for x in zip(matrices, p, strict=True)]
            factors, own, finite = _average(right, len(right), axis_name, wire)
            flags.append(finite)

        outputs, contributions = list(leaves), list(leaves)
        for k, i in enumerate(chosen):
            outputs[i] = _leaf(plans[i], p[k], factors[k])
            contributions[i] = _leaf(plans[i], p[k], own[k])
            q[i] = factors[k]
        for i, mean, sent in zip(dense, plain_means, plain_sent, strict=True):
            outputs[i], contributions[i] = mean, sent
        new, finite = LowRankState(step.tree(q)), jnp.stack(flags).all()
        return step.close(outputs, new, finite, sent=contributions, old=state)

    def count_bytes(
        params: Tree, replicas: int | None, step: int | None
    ) -> jaxcomp.CompressionStats:
        del step
        counted = []
        paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]]
        for path, plan in zip(paths, plans_of(params), strict=True):
            shapes = [plan.shape]
            if plan.view is not None:
                shapes = [plan.p_shape, plan.q_shape] * iterations
            sent = sum(_wire_bytes(math.prod(shape), wire, replicas) for shape in shapes)
            name = jax.tree_util.keystr(path)
            whole = 4 * math.prod(plan.shape)
            counted.append(jaxcomp.LeafStats(name, plan.shape, plan.rank, whole, sent))
        return jaxcomp.CompressionStats.of(counted)

    return jaxcomp.Reducer(init, reduce, axis_name, count_bytes=count_bytes)


def _wire_bytes(size: int, wire: str, replicas: int | None) -> int:
    if wire != "int4":
        return 4 * size
    if replicas is None:
        raise ValueError("`replicas` is needed: 4-bit integers are cut into as many shares.")
    return Int4Layout.of(size, replicas).wire_bytes


def _average(
    parts: Sequence[Array], factors: int, axis_name: str, wire: str
) -> tuple[list[Array], list[Array], Array]:
    """Means, this replica's contributions as sent, and whether all of it is finite.

    The first `factors` parts go column by column, because the columns of a factor differ in scale
    by orders of magnitude and the integers of a block share theirs.
    """
    turned = [x.mT if i < factors else x for i, x in enumerate(parts)]
    if wire == "int4":
        layouts = [Int4Layout.of(x.size, axis_size(axis_name)) for x in turned]
        means, sent, finite = mean_by_shares(
            jaxcomp.as_local(turned, axis_name), layouts, axis_name
        )
    else:
        means, sent, finite = reduce_mean(turned, axis_name, jnp.float32)
    back = lambda xs: [x.mT if i < factors else x for i, x in enumerate(xs)]  # noqa: E731
    return back(means), back(sent), finite


def _matrix(plan: LeafPlan, leaf: Array) -> Array:
    """The leaf as ``(*batch, rows, cols)``."""
    view = _view(plan)
    matrix = view.matricize(leaf)
    return matrix.mT if view.cols_first else matrix


def _leaf(plan: LeafPlan, p: Array, q: Array) -> Array:
    """``P Q^T`` in the shape of the leaf."""
    view = _view(plan)
    first, second = (q, p) if view.cols_first else (p, q)
    return view.unmatricize(jnp.einsum("...ir,...jr->...ij", first, second))


def _view(plan: LeafPlan) -> MatrixView:
    assert plan.view is not None
    return plan.view


class DifferenceState(NamedTuple):
    """State of `difference`."""

    residual: Tree  # what was not sent yet; per replica
    estimate: Tree  # running mean of the outputs, which every replica knows; replicated
    inner: Tree  # the reducer's own state

    per_replica = ("residual",)


def difference(
    reducer: jaxcomp.Reducer, *, eta: float = 0.1, decay: float | None = None, momentum: bool = True
) -> jaxcomp.Reducer:
    r"""Difference compression with momentum (EF21-SGDM): what is sent is what changed.

    Each replica keeps the momentum :math:`m_w` of its own gradient and sends
    :math:`\mathcal{C}(m_w - h_w)`; :math:`h_w` sums up what it sent. Written with the residual
    :math:`e_w = (m_w - h_w) / \eta` and the mean :math:`\bar h`, which is all that outputs depend
    on where the reducer is linear in the mean, as a power iteration is:

    .. math::
        d_w = g_w - \bar h + (1 - \eta)\, e_w, \qquad \bar c = \mathcal{C}(d), \qquad
        e_w = d_w - c_w, \qquad \bar h \leftarrow \bar h + \eta\, \bar c

    Args:
      reducer: A reducer without a residual of its own.
      eta: 1 minus the momentum.
      decay: What becomes of the residual from step to step; :math:`1 - \eta` if None. With 1 it is
        error feedback with :math:`\bar h` as a prediction.
      momentum: Return the momentum :math:`\bar h`, for an optimizer without one. If False, the
        gradient :math:`\bar h + \bar c` (with :math:`\bar h` before the step), of which an
        optimizer with momentum :math:`1 - \eta` makes :math:`\bar h` itself.

    Returns:
      A reducer. Its state is a `DifferenceState`.
    """
    kept = 1 - eta if decay is None else decay

    def init(params: Tree) -> DifferenceState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return DifferenceState(zeros, zeros, reducer.init(params))

    def reduce(
        updates: Tree, state: DifferenceState, params: Tree | None = None, **extra_args: Any
    ) -> jaxcomp.Reduction:
        step = open_step(updates, reducer.axis_name)
        delta = jax.tree.map(
            lambda g, e, h: g - h + kept * e, updates, state.residual, state.estimate
        )
        result = reducer.reduce(delta, state.inner, params, **extra_args)
        residual = jax.tree.map(jnp.subtract, delta, result.sent)
        gradient = jax.tree.map(jnp.add, state.estimate, result.updates)
        estimate = jax.tree.map(lambda h, c: h + eta * c, state.estimate, result.updates)
        outputs = step.beside(estimate if momentum else gradient)
        new = DifferenceState(residual, estimate, result.state)
        return step.close(outputs, new, result.finite, sent=step.beside(result.sent), old=state)

    return jaxcomp.Reducer(init, reduce, reducer.axis_name, count_bytes=reducer.count_bytes)


class WhitenedState(NamedTuple):
    """State of `whitened`."""

    rows: Tree  # matrix: (n, 1) running mean square of the outputs' rows; else a scalar; replicated
    cols: Tree  # matrix: (1, m) the same of the columns; else a scalar; replicated
    inner: Tree  # the reducer's own state

    per_replica = ()


def whitened(
    reducer: jaxcomp.Reducer, *, power: float = 0.25, decay: float = 0.95
) -> jaxcomp.Reducer:
    """Gives a reducer gradients whose rows and columns are scaled to what Adam makes of them.

    A low-rank approximation is best in the sum of squares. Adam divides by the square root of the
    second moment v, so that the loss falls by the sum of g^2 / sqrt(v): what is best for *it* is
    the approximation of g / v^(1/4). Here v is the outer product of the outputs' mean squares by
    row and by column, as in Adafactor, which every replica knows: nothing more is sent.

    Args:
      reducer: What averages the scaled gradients.
      power: Of v; 0.25 as above, 0 for no scaling.
      decay: Of the running mean squares, in each update.

    Returns:
      A reducer. Its state is a `WhitenedState`.
    """

    def init(params: Tree) -> WhitenedState:
        def ones(axis: int) -> Tree:
            return jax.tree.map(
                lambda x: jnp.ones_like(x.mean(axis, keepdims=True) if x.ndim == 2 else x.sum()),
                params,
            )

        return WhitenedState(ones(1), ones(0), reducer.init(params))

    def reduce(
        updates: Tree, state: WhitenedState, params: Tree | None = None, **extra_args: Any
    ) -> jaxcomp.Reduction:
        step = open_step(updates, reducer.axis_name)
        scales = jax.tree.map(lambda row, col: _scale(row * col, power), state.rows, state.cols)
        scaled = jax.tree.map(jnp.divide, updates, scales)
        result = reducer.reduce(scaled, state.inner, params, **extra_args)
        outputs, sent = (
            jax.tree.map(jnp.multiply, x, scales) for x in (result.updates, result.sent)
        )

        def moved(old: Tree, axis: int) -> Tree:
            def move(mean: Array, x: Array) -> Array:
                if x.ndim != 2:
                    return mean
                return decay * mean + (1 - decay) * jnp.square(x).mean(axis, keepdims=True)

            return jax.tree.map(move, old, outputs)

        new = WhitenedState(moved(state.rows, 1), moved(state.cols, 0), result.state)
        means, sent = step.beside(outputs), step.beside(sent)
        return step.close(means, new, result.finite, sent=sent, old=state)

    return jaxcomp.Reducer(init, reduce, reducer.axis_name, count_bytes=reducer.count_bytes)


def _scale(v: Array, power: float) -> Array:
    """``v^power`` with a largest value of 1; rows and columns that saw nothing keep 1e-6 of v."""
    largest = jnp.maximum(v.max(), jnp.finfo(v.dtype).tiny)
    return jnp.maximum(v / largest, 1e-6) ** power
