"""Arguments of `powersgd`, and what its first state is made of."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxcomp._base.leaves import compute_dtype
from jaxcomp._base.typing import AxisName, MatrixDimsFn, PyTree, RankFn
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

    def first_residual(self, params: PyTree) -> PyTree:
        """Makes residuals of zeros for every leaf that is compressed."""
        leaves, treedef = jax.tree.flatten(params)
        residual: list[Any] = [optax.MaskedNode()] * len(leaves)
        for i, plan in enumerate(self.plan(params)):
            if plan.view is not None and self.error_feedback:
                dtype = self.residual_dtype or compute_dtype(plan.dtype)
                residual[i] = jnp.zeros_like(leaves[i], dtype=dtype)
        return local_if_bound(treedef.unflatten(residual), self.axis_name)

    def random_factors(self, plans: list[LeafPlan], count: Any) -> list[Any]:
        """Draws right factors to start from: the same on every replica, others for every leaf."""
        # Threefry whatever jax_default_prng_impl says: others differ between the lanes of a vmap.
        key = jax.random.key(self.seed, impl="threefry2x32")
        factors: list[Any] = [optax.MaskedNode()] * len(plans)
        for i, plan in enumerate(plans):
            if plan.view is not None:
                leaf_key = jax.random.fold_in(jax.random.fold_in(key, i), count)
                factors[i] = jax.random.normal(leaf_key, plan.q_shape, compute_dtype(plan.dtype))
        return factors
