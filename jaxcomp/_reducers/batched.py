"""PowerSGD of one square matrix made of all gradients: fewer bytes, less faithful."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from jaxcomp._base.checks import check_int, names_checked
from jaxcomp._base.leaves import checked_dtype, floating_leaves, leaf_dtype, widest, with_leaves
from jaxcomp._base.stats import CompressionStats
from jaxcomp._base.typing import AxisName, DType, MatrixDims, PyTree
from jaxcomp._reducers.powersgd import powersgd
from jaxcomp._reducers.reducer import Reducer, Reduction
from jaxcomp._reducers.transformation import call_text

_ALL = "(all leaves)"


@functools.partial(names_checked, options=powersgd, but=("min_compression_rate", "matrix_dims"))
def batched_powersgd(
    rank: int = 1, *, axis_name: AxisName, comm_dtype: DType | None = None, **options: Any
) -> Reducer:
    r"""PowerSGD of one square matrix of all gradients, as torch's ``batched_powerSGD_hook``.

    The gradients are laid one after the other in a vector of :math:`N` values, padded with zeros,
    and viewed as a matrix of :math:`n \times n`, :math:`n = \lceil\sqrt N\rceil`, which `powersgd`
    compresses. A step sends :math:`2 n r` values, biases and all, whatever the shapes; but rows and
    columns mean nothing to the model, and low rank loses more than it does leaf by leaf. It is here
    for what was trained with torch's; take `powersgd` for what is new.

    All gradients are copied into one array. Do not use it where weights are sharded over other mesh
    axes: the compiler would gather them.

    Args:
      rank: Columns of the two factors.
      axis_name: The mapped axis (or axes) along which the replicas lie.
      comm_dtype: What goes on the wire: bfloat16, float16, float32 or None.
      **options: Of `powersgd`: start_step, error_feedback, warm_start, eps, seed, residual_dtype.

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
    given = {"rank": rank, "axis_name": axis_name, "comm_dtype": comm_dtype, **options}
    made_by = call_text("batched_powersgd", given)
    square = powersgd(
        check_int("rank", rank, 1),
        axis_name=axis_name,
        comm_dtype=checked_dtype("comm_dtype", comm_dtype),
        min_compression_rate=0.0,  # compress whatever the size, as torch does
        matrix_dims=lambda path, leaf: MatrixDims(rows=(0,), cols=(1,)),
        **options,
    )

    def matrix_of(params: PyTree) -> jax.ShapeDtypeStruct:
        """The smallest square that holds all floating values, in the widest of their dtypes."""
        leaves = [x for x in jax.tree.leaves(params) if jnp.issubdtype(leaf_dtype(x), jnp.floating)]
        size = sum(math.prod(jnp.shape(x)) for x in leaves)
        side = math.isqrt(size - 1) + 1 if size else 0
        return jax.ShapeDtypeStruct((side, side), widest(map(leaf_dtype, leaves)))

    def init(params: PyTree) -> PyTree:
        matrix = matrix_of(params)
        return square.init(jnp.zeros(matrix.shape, matrix.dtype))

    def reduce(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra_args: Any
    ) -> Reduction:
        del params, extra_args
        matrix = matrix_of(updates)
        flat, parts = ravel_pytree([x.astype(matrix.dtype) for x in floating_leaves(updates)])
        padded = jnp.pad(flat, (0, math.prod(matrix.shape) - flat.size)).reshape(matrix.shape)
        result = square.reduce(padded, state)
        means, sent = (
            with_leaves(updates, parts(x.reshape(-1)[: flat.size]))
            for x in (result.updates, result.sent)
        )
        return result._replace(updates=means, sent=sent)

    def count_bytes(params: PyTree, replicas: int | None, step: int | None) -> CompressionStats:
        (leaf,) = square.bytes(matrix_of(params), replicas=replicas, step=step).leaves
        return CompressionStats.of([dataclasses.replace(leaf, path=_ALL)]).instead_of(params)

    return Reducer(init, reduce, axis_name, made_by=made_by, count_bytes=count_bytes)
