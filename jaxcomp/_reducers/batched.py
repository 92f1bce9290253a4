"""PowerSGD on one square matrix of all gradients: fewer bytes, larger error.

It continues runs of torch's ``batched_powerSGD_hook``. The reducer holds a `powersgd` for a tree of
a single leaf, the square, and only converts: gradients to the square, the square to outputs.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from jaxcomp._base.checks import check_int
from jaxcomp._base.leaves import (
    checked_dtype,
    clipped,
    floating_leaves,
    is_narrow,
    leaf_dtype,
    limited,
    widest,
    with_leaves,
)
from jaxcomp._base.stats import CompressionStats
from jaxcomp._base.typing import Array, AxisName, DType, MatrixDims, PyTree
from jaxcomp._mesh.collectives import axis_size
from jaxcomp._reducers.powersgd import powersgd
from jaxcomp._reducers.reducer import Reducer, Reduction
from jaxcomp._reducers.transformation import shows_its_call

_ALL = "(all leaves)"  # the only line of its bytes; not a name that a leaf can have


@shows_its_call
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
) -> Reducer:
    r"""Applies PowerSGD to a square matrix of all gradients, as torch's ``batched_powerSGD_hook``.

    The gradients are concatenated to a vector of :math:`N` values, padded with zeros, and viewed as
    a matrix of :math:`n \times n`, :math:`n = \lceil\sqrt N\rceil`, which `powersgd` compresses. A
    step sends :math:`2 n r` values for all leaves together, whatever their shapes. But rows and
    columns of this matrix have no meaning for the model, so it loses more than `powersgd` of the
    same rank. Use it to continue a run that used torch's hook; for a new run use `powersgd`.

    All gradients are copied into one array. Do not use it where weights are sharded over other mesh
    axes: the compiler would gather them.

    Args:
      rank: Number of columns of the two factors.
      axis_name: The mapped axis (or axes) along which the replicas lie.
      start_step: Number of finite updates that are plain all-reduces first.
      error_feedback: Keep a residual, the part that was not sent, and add it to the next gradient.
      warm_start: Start each power iteration from the last right factor.
      eps: torch's ``orthogonalization_epsilon``, as for `powersgd`.
      seed: Seed of the first right factor.
      comm_dtype: The dtype on the wire: bfloat16, float16 or float32; None for float32 or wider.
      residual_dtype: The dtype of the residual: bfloat16 or float32; None for float32 or wider.

    Returns:
      A transformation from local gradients to outputs in the gradients' dtypes, equal on every
      replica. Its state is a `PowerSGDState` whose residual is the one ``(n, n)`` matrix.

    Raises:
      ValueError: As for `powersgd`, and if `rank` is not an integer.

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
        matrix_dims=lambda path, leaf: MatrixDims(rows=(0,), cols=(1,)),  # the square, as in torch
    )

    def init(params: PyTree) -> PyTree:
        return square.init(optax.tree.zeros_like(_square_of(params)))

    def reduce(
        updates: PyTree,
        state: PyTree,
        params: PyTree | None = None,
        *,
        like: PyTree | None = None,
        **extra_args: Any,
    ) -> Reduction:
        del params, extra_args
        arrays = floating_leaves(updates)
        shape = _square_of(updates)
        flat, leaves_of = ravel_pytree([x.astype(shape.dtype) for x in arrays])

        def square_of(flat: Array) -> Array:
            return jnp.pad(flat, (0, shape.size - flat.size)).reshape(shape.shape)

        # Without `like`: the square has one dtype, and the leaves get theirs afterwards.
        result = square.reduce(square_of(flat), state)
        means = leaves_of(result.updates.reshape(-1)[: flat.size])
        sent = leaves_of(result.sent.reshape(-1)[: flat.size])
        state = result.state
        dtypes = [x.dtype for x in floating_leaves(updates if like is None else like)]
        if error_feedback and any(map(is_narrow, dtypes)):
            # The part of a mean that float16 cannot hold was sent but does not reach the update. It
            # goes into the residual, leaf by leaf, because the matrix also holds leaves of other
            # dtypes.
            excess = []
            for mean, dtype in zip(means, dtypes, strict=True):
                excess.append(mean - clipped(mean, dtype))
            unsent = jnp.where(result.finite, square_of(ravel_pytree(excess)[0]), 0)
            residual = state.residual.astype(unsent.dtype) + unsent
            residual = limited(residual, shape.size, axis_size(axis_name))
            state = state._replace(residual=residual.astype(state.residual.dtype))
        return Reduction(
            with_leaves(updates, means), state, with_leaves(updates, sent), result.finite
        )

    def count_bytes(params: PyTree, replicas: int | None, step: int | None) -> CompressionStats:
        (leaf,) = square.bytes(_square_of(params), replicas=replicas, step=step).leaves
        return CompressionStats((dataclasses.replace(leaf, path=_ALL),)).instead_of(params)

    return Reducer(
        init,
        reduce,
        axis_name,
        count_bytes=count_bytes,
        keeps_residual=square.keeps_residual,
    )


def _square_of(params: PyTree) -> jax.ShapeDtypeStruct:
    """Returns the shape of the smallest square that holds all floating values, float32 or wider."""
    leaves = floating_leaves(params)
    size = sum(map(np.size, leaves))
    side = math.isqrt(size)
    if side**2 < size:
        side += 1
    return jax.ShapeDtypeStruct((side, side), widest(map(leaf_dtype, leaves)))
