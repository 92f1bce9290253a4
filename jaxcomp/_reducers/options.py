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

    def zero_residual(self, params: PyTree) -> PyTree:
        """Makes the residual before the first step: zeros for every leaf that is compressed."""
        leaves, treedef = jax.tree.flatten(params)

        def zeros(leaf: Any, plan: LeafPlan) -> Any:
            if plan.view is None or not self.error_feedback:
                return optax.MaskedNode()
            dtype = self.residual_dtype or compute_dtype(plan.dtype)
            return jnp.zeros_like(leaf, dtype=dtype)

        residual = treedef.unflatten(map(zeros, leaves, self.plan(params)))
        return local_if_bound(residual, self.axis_name)

    def random_factor(self, shape: tuple[int, ...], dtype: Any, *path: Any) -> Array:
        """Draws a factor to start from: the same on every replica, another for every path."""
        # Threefry whatever jax_default_prng_impl says: others differ between the lanes of a vmap.
        key = jax.random.key(self.seed, impl="threefry2x32")
        for number in path:
            key = jax.random.fold_in(key, number)
        return jax.random.normal(key, shape, compute_dtype(dtype))

    def first_factors(self, params: PyTree) -> PyTree:
        """Draws a right factor for every leaf that is compressed, to warm-start from."""
        factors = []
        for i, plan in enumerate(self.plan(params)):
            if plan.view is None or not self.warm_start:
                factors.append(optax.MaskedNode())
            else:
                factors.append(self.random_factor(plan.q_shape, plan.dtype, i, 0))
        return jax.tree.structure(params).unflatten(factors)
