"""PowerSGD of one square matrix made of all gradients: fewer bytes, less faithful."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomp._base.checks import check_int
from jaxcomp._base.leaves import checked_dtype, leaf_dtype, widest
from jaxcomp._base.stats import CompressionStats
from jaxcomp._base.typing import Array, AxisName, DType, KeyPath, MatrixDims, PyTree, Schedule
from jaxcomp._reducers.contract import (
    Reducer,
    Reduction,
    call_text,
)
from jaxcomp._reducers.opening import check_reduce_first, open_step
from jaxcomp._reducers.powersgd import powersgd

_ALL = "(all leaves)"


def batched_powersgd(
    rank: int = 1,
    *,
    axis_name: AxisName,
    start_step: int = 1_000,
    error_feedback: bool = True,
    warm_start: bool = True,
    eps: float = 0.0,
    seed: int = 0,
    comm_dtype: DType | None = None,
    residual_dtype: DType | None = None,
    error_decay: float | Schedule = 1.0,
    feedback_every: int = 1,
    reduce_first: AxisName | None = None,
) -> Reducer:
    r"""PowerSGD of one square matrix of all gradients, as torch's ``batched_powerSGD_hook``.

    The gradients are laid one after the other in a vector of :math:`N` values, padded with zeros,
    and viewed as a matrix :math:`M` of :math:`n \times n`, :math:`n = \lceil\sqrt N\rceil`. Then
    the steps of `powersgd`:

    .. math::
        P = \mathrm{orthogonalize}\Big(\sum_w M_w\, \mathrm{orthogonalize}(Q)\Big), \qquad
        Q = \frac{1}{W} \sum_w M_w^\top P, \qquad \text{output} = P Q^\top

    and the first :math:`N` values go back to the leaves. A step sends :math:`2 n r` values, biases
    and all, whatever the shapes; but rows and columns mean nothing to the model, and low rank loses
    more than it does leaf by leaf. torch's documentation warns of it; prefer `powersgd`, or a
    higher rank here.

    All gradients are copied into one array. Do not use it where weights are sharded over other mesh
    axes: the compiler would gather them.

    Args:
      rank: Columns of the two factors.
      axis_name: The mapped axis (or axes) along which the replicas lie.
      start_step: As for `powersgd`, and so are the others.
      error_feedback: Keep what was not sent and add it to the next gradient.
      warm_start: Start each power iteration from the last right factor.
      eps: torch's ``orthogonalization_epsilon``.
      seed: Seeds the first (or with ``warm_start=False`` every) right factor.
      comm_dtype: What goes on the wire.
      residual_dtype: How the residual is stored.
      error_decay: Scales the residual as it is added back.
      feedback_every: Add the residual back every so many updates only.
      reduce_first: A fast axis (or axes) over which gradients are averaged exactly beforehand.

    Returns:
      A transformation from local gradients to outputs in the gradients' dtypes, equal on every
      replica. Its state is a `PowerSGDState` whose residual is the one ``(n, n)`` matrix.

    Raises:
      ValueError: As `powersgd`; `rank` must be an int here.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomp
      >>> tx = jaxcomp.batched_powersgd(rank=2, axis_name="data", start_step=0)
      >>> grads = {"b": jnp.ones((4, 30)), "w": jnp.ones((4, 7, 10))}  # four replicas
      >>> state = tx.init({"b": jnp.zeros(30), "w": jnp.zeros((7, 10))})
      >>> state.residual.shape, state.q.shape
      ((10, 10), (10, 2))
      >>> means, state = jax.vmap(tx.update, in_axes=(0, None), axis_name="data")(grads, state)
      >>> bool(jnp.allclose(means["w"], 1, atol=1e-5))  # ones everywhere: rank 1
      True
    """
    made_by = call_text("batched_powersgd", locals())
    check_reduce_first(reduce_first, axis_name)
    square = powersgd(
        check_int("rank", rank, 1),
        axis_name=axis_name,
        start_step=start_step,
        min_compression_rate=0.0,  # compress whatever the size, as torch does
        error_feedback=error_feedback,
        warm_start=warm_start,
        eps=eps,
        seed=seed,
        comm_dtype=checked_dtype("comm_dtype", comm_dtype),
        residual_dtype=residual_dtype,
        matrix_dims=_rows_first,
        error_decay=error_decay,
        feedback_every=feedback_every,
    )

    def init(params: PyTree) -> PyTree:
        leaves = [x for x in jax.tree.leaves(params) if _is_floating(x)]
        side = square_side(leaves)
        return square.init(jnp.zeros((side, side), _common_dtype(leaves)))

    def update(
        updates: PyTree,
        state: PyTree,
        params: PyTree | None = None,
        *,
        weight: Any = None,
        **extra_args: Any,
    ) -> tuple[PyTree, PyTree]:
        del params, extra_args
        step = open_step(updates, axis_name, reduce_first, weight)
        mean, state = square.update(_to_square(step.arrays), state, weight=step.weight)
        return step.tree(_from_square(jnp.asarray(mean), step.arrays)), state

    def reduce(
        updates: PyTree,
        state: PyTree,
        params: PyTree | None = None,
        *,
        weight: Any = None,
        **extra_args: Any,
    ) -> Reduction:
        del params, extra_args
        step = open_step(updates, axis_name, reduce_first, weight)
        result = square.reduce(_to_square(step.arrays), state, weight=step.weight)
        means, sent = (_from_square(x, step.arrays) for x in (result.updates, result.sent))
        return step.close(means, result.state, result.finite, sent=sent)

    def count_bytes(params: PyTree, replicas: int | None, step: int | None) -> CompressionStats:
        leaves = [x for x in jax.tree.leaves(params) if _is_floating(x)]
        side = square_side(leaves)
        matrix = jax.ShapeDtypeStruct((side, side), _common_dtype(leaves))
        (leaf,) = square.bytes(matrix, replicas=replicas, step=step).leaves
        return CompressionStats.of([dataclasses.replace(leaf, path=_ALL)]).instead_of(params)

    return Reducer(init, reduce, axis_name, update=update, made_by=made_by, count_bytes=count_bytes)


def square_side(leaves: list[Any]) -> int:
    """Side of the smallest square that holds all values."""
    size = sum(math.prod(jnp.shape(leaf)) for leaf in leaves)
    return math.isqrt(size - 1) + 1 if size else 0


def _is_floating(leaf: Any) -> bool:
    return jnp.issubdtype(leaf_dtype(leaf), jnp.floating)


def _common_dtype(leaves: list[Any]) -> Any:
    return widest(leaf_dtype(leaf) for leaf in leaves)


def _rows_first(path: KeyPath, leaf: Any) -> MatrixDims:
    del path, leaf
    return MatrixDims(rows=(0,), cols=(1,))


def _to_square(leaves: list[Array]) -> Array:
    side, dtype = square_side(leaves), _common_dtype(leaves)
    parts = [leaf.reshape(-1).astype(dtype) for leaf in leaves]
    flat = jnp.concatenate([*parts, jnp.zeros(side * side - sum(x.size for x in parts), dtype)])
    return flat.reshape(side, side)


def _from_square(matrix: Array, like: list[Array]) -> list[Array]:
    flat, parts, start = matrix.reshape(-1), [], 0
    for leaf in like:
        parts.append(flat[start : start + leaf.size].reshape(leaf.shape).astype(leaf.dtype))
        start += leaf.size
    return parts
