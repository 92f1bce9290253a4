"""What a step puts on the wire: bytes before and after compression, leaf by leaf."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomp._base.checks import check_flag, check_function, check_int, check_static_number
from jaxcomp._base.dtypes import checked_dtype, checked_factor_dtype, widest
from jaxcomp._base.typing import DType, MatrixDimsFn, PyTree, RankFn
from jaxcomp._lowrank.matricize import LeafPlan, plan_leaves
from jaxcomp._mesh.shares import BlockLayout, ExactLayout
from jaxcomp._reducers.batched import square_side
from jaxcomp._reducers.int8_factors import factor_layout


@dataclasses.dataclass(frozen=True)
class LeafStats:
    """Bytes of one leaf in one step."""

    path: str
    shape: tuple[int, ...]
    rank: int  # 0 for a leaf that is not compressed
    bytes_before: int  # plain all-reduce in the leaf's own dtype
    bytes_after: int  # payload of the all-reduces after compression

    @property
    def compressed(self) -> bool:
        """Whether the leaf is sent as two factors."""
        return self.rank > 0

    @property
    def ratio(self) -> float:
        """How many times fewer bytes; 1.0 for an empty leaf."""
        return _ratio(self.bytes_before, self.bytes_after)


@dataclasses.dataclass(frozen=True)
class CompressionStats:
    """Payload of the all-reduces of one step, as each replica passes it to the collective."""

    leaves: tuple[LeafStats, ...]
    bytes_before: int
    bytes_after: int

    @property
    def ratio(self) -> float:
        """How many times fewer bytes in total."""
        return _ratio(self.bytes_before, self.bytes_after)

    def __str__(self) -> str:
        width = max([len(leaf.path) for leaf in self.leaves] + [5])
        lines = [f"{'leaf':<{width}}  {'shape':>18}  rank  {'before':>13}  {'after':>13}   ratio"]
        lines += [
            f"{leaf.path:<{width}}  {leaf.shape!s:>18}  {leaf.rank or '-':>4}  "
            f"{leaf.bytes_before:>13,}  {leaf.bytes_after:>13,}  {leaf.ratio:>6.1f}"
            for leaf in self.leaves
        ]
        total = f"{self.bytes_before:>13,}  {self.bytes_after:>13,}  {self.ratio:>6.1f}"
        return "\n".join([*lines, f"{'total':<{width}}  {'':>18}        {total}"])


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
        one of backends that have the dtype on the wire. With int8 the figures are the bytes that
        each replica hands to the all-to-alls, scales and padding included, which are also those
        that it gets from the all-gathers: they compare with those of an all-reduce.
      matrix_dims: As for `powersgd`.
      alternating: As for `powersgd`; the figures are then the mean of two steps that follow each
        other, one with the left factors and one with the right.
      replicas: Number of replicas. Needed for int8, where arrays are cut into as many shares.

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
    if not callable(rank):
        check_int("rank", rank, 1)
    check_static_number("min_compression_rate", min_compression_rate, 0)
    check_function("matrix_dims", matrix_dims)
    wire = checked_factor_dtype("comm_dtype", comm_dtype)
    if replicas is not None:
        replicas = check_int("replicas", replicas, 1)
    plans = plan_leaves(params, rank, min_compression_rate, matrix_dims)
    plans = [plan for plan in plans if jnp.issubdtype(plan.dtype, jnp.floating)]
    factors = 1 if check_flag("alternating", alternating) else 2
    if wire is None:
        wire = widest(plan.dtype for plan in plans)
    if wire == jnp.int8 and replicas is None:
        raise ValueError(
            "`replicas` is missing: with int8 on the wire arrays are cut into one share for each "
            "replica. Pass how many there are."
        )
    leaves = [_leaf_stats(plan, wire_bytes(plan, wire, replicas or 1), factors) for plan in plans]
    before = sum(leaf.bytes_before for leaf in leaves)
    return CompressionStats(tuple(leaves), before, sum(leaf.bytes_after for leaf in leaves))


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
    replicas = check_int("replicas", replicas, 1)
    if block_size is not None:
        block_size = check_int("block_size", block_size, 1)
    plans = [p for p in plan_leaves(params, 1, 0) if jnp.issubdtype(p.dtype, jnp.floating)]
    leaves = []
    for plan in plans:
        before = plan.size * jnp.dtype(plan.dtype).itemsize
        after = BlockLayout.of(plan.size, replicas, block_size).wire_bytes
        leaves.append(LeafStats(plan.path, plan.shape, 0, before, after))
    before = sum(leaf.bytes_before for leaf in leaves)
    return CompressionStats(tuple(leaves), before, sum(leaf.bytes_after for leaf in leaves))


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
    rank = check_int("rank", rank, 1)
    plans = [p for p in plan_leaves(params, 1, 0) if jnp.issubdtype(p.dtype, jnp.floating)]
    wire = checked_dtype("comm_dtype", comm_dtype) or widest(plan.dtype for plan in plans)
    before = sum(plan.size * jnp.dtype(plan.dtype).itemsize for plan in plans)
    side = square_side([jax.ShapeDtypeStruct(plan.shape, plan.dtype) for plan in plans])
    rank = min(rank, side)
    after = 2 * side * rank * wire.itemsize
    leaf = LeafStats("(all leaves)", (side, side), rank, before, after)
    return CompressionStats((leaf,), before, after)


def wire_bytes(plan: LeafPlan, wire: Any, replicas: int) -> int:
    """Bytes of both factors of a leaf, or of one that is sent as it is."""
    if wire != jnp.int8:
        return plan.wire_size * wire.itemsize
    if plan.view is None:
        return ExactLayout(plan.size, replicas, plan.dtype).wire_bytes
    return sum(factor_layout(x, replicas).wire_bytes for x in (plan.p_shape, plan.q_shape))


def _leaf_stats(plan: LeafPlan, after: int, factors: int) -> LeafStats:
    """From the bytes of both factors, of which a step sends so many."""
    before = plan.size * jnp.dtype(plan.dtype).itemsize
    if plan.view is not None:
        after = after * factors // 2  # both are an even number of bytes
    return LeafStats(plan.path, plan.shape, plan.rank, before, after)


def _ratio(before: int, after: int) -> float:
    return before / after if after else 1.0
