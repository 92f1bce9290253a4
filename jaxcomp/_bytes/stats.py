"""What a step puts on the wire, without making a reducer first: faces of `Reducer.bytes`."""

from __future__ import annotations

from jaxcomp._base.stats import CompressionStats
from jaxcomp._base.typing import DType, MatrixDimsFn, PyTree, RankFn
from jaxcomp._reducers.batched import batched_powersgd
from jaxcomp._reducers.powersgd import powersgd
from jaxcomp._reducers.quantized import quantized_allreduce

_AXIS = "replicas"  # bytes are counted without any


def compression_stats(
    params: PyTree,
    *,
    rank: int | RankFn = 1,
    min_compression_rate: float = 2.0,
    comm_dtype: DType | None = None,
    matrix_dims: MatrixDimsFn | None = None,
    alternating: bool = False,
    replicas: int | None = None,
) -> CompressionStats:
    """Counts the bytes of one compressed step of `powersgd`; exact, no device needed.

    Args:
      params: Parameters or gradients: arrays, or anything with ``shape`` and ``dtype``.
      rank: As for `powersgd`.
      min_compression_rate: As for `powersgd`.
      comm_dtype: As for `powersgd`. XLA's CPU backend sends bfloat16 as float32; the figure is the
        one of backends that have the dtype on the wire. With integers the figures are the bytes
        that each replica hands to the all-to-alls, scales and padding included, which are also
        those that it gets from the all-gathers: they compare with those of an all-reduce.
      matrix_dims: As for `powersgd`.
      alternating: As for `powersgd`; the figures are then the mean of two steps that follow each
        other, one with the left factors and one with the right.
      replicas: Number of replicas. Needed for integers, where arrays are cut into as many shares.

    Returns:
      The payload per replica in bytes, per leaf and in total. A ring all-reduce over ``n`` replicas
      sends ``2 (n - 1) / n`` times as much.

    Raises:
      ValueError: If an argument is unusable.

    Example:
      >>> import jax.numpy as jnp, jaxcomp
      >>> params = {"w": jnp.zeros((512, 256)), "b": jnp.zeros(256)}
      >>> stats = jaxcomp.compression_stats(params, rank=4)
      >>> stats.bytes_before, stats.bytes_after
      (525312, 13312)
      >>> int8 = jaxcomp.compression_stats(params, rank=4, comm_dtype=jnp.int8, replicas=8)
      >>> int8.bytes_after
      4192
    """
    reducer = powersgd(
        rank,
        axis_name=_AXIS,
        min_compression_rate=min_compression_rate,
        comm_dtype=comm_dtype,
        matrix_dims=matrix_dims,
        alternating=alternating,
    )
    return reducer.bytes(params, replicas=replicas)


def quantized_stats(
    params: PyTree, *, replicas: int, block_size: int | None = 256
) -> CompressionStats:
    """Counts the bytes of one step of `quantized_allreduce`, scales and padding included; exact.

    Args:
      params: Parameters or gradients: arrays, or anything with ``shape`` and ``dtype``.
      replicas: Number of replicas; leaves are cut into as many shares.
      block_size: As for `quantized_allreduce`.

    Returns:
      Per leaf and in total, the bytes that each replica hands to the all-to-all, which are also
      those that it gets from the all-gather. Each of the two sends ``(n - 1) / n`` of them, so that
      the figures compare with those of an all-reduce. ``rank`` is 0 throughout.

    Raises:
      ValueError: If an argument is unusable.

    Example:
      >>> import jax.numpy as jnp, jaxcomp
      >>> stats = jaxcomp.quantized_stats({"w": jnp.zeros((512, 256))}, replicas=8)
      >>> stats.bytes_before, stats.bytes_after
      (524288, 133120)
    """
    reducer = quantized_allreduce(axis_name=_AXIS, block_size=block_size)
    return reducer.bytes(params, replicas=replicas)


def batched_stats(
    params: PyTree, *, rank: int = 1, comm_dtype: DType | None = None
) -> CompressionStats:
    """Counts the bytes of one compressed step of `batched_powersgd`; exact, no device needed.

    Args:
      params: Parameters or gradients: arrays, or anything with ``shape`` and ``dtype``.
      rank: As for `batched_powersgd`.
      comm_dtype: As for `batched_powersgd`.

    Returns:
      One entry, for the square matrix that holds all leaves.

    Raises:
      ValueError: If an argument is unusable.

    Example:
      >>> import jax.numpy as jnp, jaxcomp
      >>> stats = jaxcomp.batched_stats({"w": jnp.zeros((500, 20)), "b": jnp.zeros(20)}, rank=4)
      >>> stats.leaves[0].shape, stats.bytes_before, stats.bytes_after
      ((101, 101), 40080, 3232)
    """
    return batched_powersgd(rank, axis_name=_AXIS, comm_dtype=comm_dtype).bytes(params)
