"""What a PowerSGD update puts on the wire, as both `powersgd` and `batched_powersgd` count it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from jaxcomp._base.leaves import Integers
from jaxcomp._base.stats import CompressionStats, dense_leaves, needed_replicas
from jaxcomp._base.typing import PyTree
from jaxcomp._lowrank.matricize import LeafPlan
from jaxcomp._mesh.shares import ExactLayout
from jaxcomp._reducers.integer_factors import factor_layout
from jaxcomp._reducers.powersgd_state import Options


def count_bytes(
    options: Options, params: PyTree, replicas: int | None, step: int | None
) -> CompressionStats:
    """The answer of `Reducer.bytes` for a PowerSGD of these options."""
    plans = [plan for plan in options.plan(params) if jnp.issubdtype(plan.dtype, jnp.floating)]
    wire = options.wire_dtype(plan.dtype for plan in plans)
    if step is not None and step < options.start_step:
        return CompressionStats.of(dense_leaves(params, wire))
    if options.integers is not None:
        wire, replicas = options.integers, needed_replicas(replicas)
    leaves = []
    for plan, leaf in zip(plans, dense_leaves(params), strict=True):
        p, q = leaf_bytes(plan, wire, replicas)
        if options.alternating and plan.view is not None:
            left = step is not None and (step - options.start_step) % 2 == 0
            after = (p + q) // 2 if step is None else p if left else q
        else:
            after = p + q
        leaves.append(dataclasses.replace(leaf, rank=plan.rank, bytes_after=after))
    return CompressionStats.of(leaves)


def leaf_bytes(plan: LeafPlan, wire: Any, replicas: int | None) -> tuple[int, int]:
    """Of the left and the right factor; of a leaf that is not compressed all, and 0."""
    if plan.view is None:
        if isinstance(wire, Integers):
            return ExactLayout(plan.size, replicas or 1, plan.dtype).wire_bytes, 0
        return plan.size * wire.itemsize, 0
    p, q = (
        factor_layout(shape, replicas or 1, wire.bits).wire_bytes
        if isinstance(wire, Integers)
        else math.prod(shape) * wire.itemsize
        for shape in (plan.p_shape, plan.q_shape)
    )
    return p, q
