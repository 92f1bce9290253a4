"""What an update of low rank puts on the wire, leaf by leaf."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from jaxcomp._base.leaves import Integers, wire_dtype
from jaxcomp._base.stats import CompressionStats, dense_leaves, needed_replicas
from jaxcomp._base.typing import PyTree
from jaxcomp._lowrank.matrices import LeafPlan
from jaxcomp._mesh.shares import ExactLayout
from jaxcomp._reducers.integer_factors import factor_layout
from jaxcomp._reducers.options import LowRank


def count_bytes(
    options: LowRank,
    params: PyTree,
    replicas: int | None,
    step: int | None,
) -> CompressionStats:
    """The answer of `Reducer.bytes`.

    Args:
      options: The reducer's arguments.
      params: Parameters or gradients.
      replicas: How many there are, or None.
      step: Which update, or None for a compressed one.
    """
    plans = [plan for plan in options.plan(params) if jnp.issubdtype(plan.dtype, jnp.floating)]
    wire = wire_dtype(options.comm_dtype, (plan.dtype for plan in plans))
    if step is not None and step < options.start_step:
        return CompressionStats.of(dense_leaves(params, wire))
    if isinstance(options.comm_dtype, Integers):
        wire, replicas = options.comm_dtype, needed_replicas(replicas)
    leaves = []
    for plan, leaf in zip(plans, dense_leaves(params), strict=True):
        after = leaf_bytes(plan, wire, replicas)
        leaves.append(dataclasses.replace(leaf, rank=plan.rank, bytes_after=after))
    return CompressionStats.of(leaves)


def leaf_bytes(plan: LeafPlan, wire: Any, replicas: int | None) -> int:
    """Of both factors, or of a leaf that is not compressed."""
    if plan.view is None:
        if isinstance(wire, Integers):
            return ExactLayout(plan.size, replicas or 1, plan.dtype).wire_bytes
        return plan.size * wire.itemsize
    return sum(
        factor_layout(shape, replicas or 1, wire.bits).wire_bytes
        if isinstance(wire, Integers)
        else math.prod(shape) * wire.itemsize
        for shape in (plan.p_shape, plan.q_shape)
    )
