"""Arguments of `powersgd`, and what its first state is made of."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxcomp._base.leaves import compute_dtype
from jaxcomp._base.typing import Array, AxisName, MatrixDimsFn, PyTree, RankFn
from jaxcomp._lowrank.matrices import LeafPlan, plan_leaves
from jaxcomp._mesh.collectives import local_if_bound


@dataclasses.dataclass(frozen=True)
class LowRank:
    """Arguments of `powersgd`, which documents and checks them."""

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

    def plan(self, tree: PyTree) -> list[LeafPlan]:
        """Plans what happens to each leaf of `tree`."""
        return plan_leaves(tree, self.rank, self.min_compression_rate, self.matrix_dims)

    def first_leaves(self, params: PyTree) -> tuple[PyTree, PyTree]:
        """Makes residuals of zeros and random right factors for every leaf that is compressed."""
        leaves, treedef = jax.tree.flatten(params)
        residual: list[Any] = [optax.MaskedNode()] * len(leaves)
        q = list(residual)
        for i, plan in enumerate(self.plan(params)):
            if plan.view is not None and self.error_feedback:
                dtype = self.residual_dtype or compute_dtype(plan.dtype)
                residual[i] = jnp.zeros_like(leaves[i], dtype=dtype)
            if plan.view is not None and self.warm_start:
                q[i] = self.random_factor(plan.q_shape, plan.dtype, i, 0)
        local = local_if_bound(treedef.unflatten(residual), self.axis_name)
        return local, treedef.unflatten(q)

    def random_factor(self, shape: tuple[int, ...], dtype: Any, *path: Any) -> Array:
        """Draws a factor to start from: the same on every replica, another for every path."""
        # Threefry whatever jax_default_prng_impl says: others differ between the lanes of a vmap.
        key = jax.random.key(self.seed, impl="threefry2x32")
        for number in path:
            key = jax.random.fold_in(key, number)
        return jax.random.normal(key, shape, compute_dtype(dtype))
